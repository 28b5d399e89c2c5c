// The kernels for NEON, which every aarch64 CPU has.
#include "system.h"
#if defined(__aarch64__)
#if !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif
#define PTQ_NEON 1
#define PTQ_NAME "neon"
#define PTQ_OPS ptq_ops_neon
#define PTQ_COLLECTIVE ptq_collective_neon
#include "body.h"
#endif
