// The kernels of one instruction set. isa_*.cpp set the target, PTQ_NAME, PTQ_OPS and PTQ_COLLECTIVE, then include this;
// the all-reduce is compiled where wire_*.cpp include those, the rest where it is not.
#if defined(__clang__)
#pragma clang fp contract(off)
#endif

namespace {
#include "simd.h"
#include "tile.h"
#include "codecs.h"
#include "search.h"
#include "filter.h"
#include "encode.h"
#include "rules.h"
#include "blocks.h"
#include "stream.h"
#include "carry.h"
#include "long_floor.h"
#include "integers.h"
#include "long.h"
#include "columns.h"
#include "passes.h"
#include "linear.h"
#include "collective.h"
#include "norm.h"
}  // namespace

#ifdef PTQ_WIRE_ALONE
extern "C" int32_t PTQ_COLLECTIVE(const struct ptq_collective *job) { return collective(job); }
#else
extern "C" int32_t PTQ_COLLECTIVE(const struct ptq_collective *job);
extern "C" const struct ptq_ops PTQ_OPS = {PTQ_NAME, quantize_blocks, amax, decode, carry, encode, quantize_long,
                                        columns,  pass, &linear_ops, PTQ_COLLECTIVE, rms_norm};
#endif
