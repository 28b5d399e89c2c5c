// The kernels of one instruction set. isa_*.cpp set the target, PTQ_NAME and PTQ_OPS, then include this.
#if defined(__clang__)
#pragma clang fp contract(off)
#endif

namespace {
#include "simd.h"
#include "tile.h"
#include "codecs.h"
#include "search.h"
#include "encode.h"
#include "rules.h"
#include "blocks.h"
#include "stream.h"
#include "long_floor.h"
#include "long.h"
#include "columns.h"
#include "linear.h"
#include "collective.h"
#include "norm.h"
}  // namespace

extern "C" const struct ptq_ops PTQ_OPS = {PTQ_NAME, quantize_blocks, amax, decode, encode, quantize_long, columns,
                                        &linear_ops,     collective, rms_norm};
