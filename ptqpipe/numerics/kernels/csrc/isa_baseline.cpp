// The kernels for any CPU but those of isa_neon.cpp: 4 lanes, which the compiler maps to SSE2 or scalars.
#include "system.h"
#if !defined(__aarch64__)
#if !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif
#define PTQ_NAME "baseline"
#define PTQ_OPS ptq_ops_baseline
#define PTQ_COLLECTIVE ptq_collective_baseline
#include "body.h"
#endif
