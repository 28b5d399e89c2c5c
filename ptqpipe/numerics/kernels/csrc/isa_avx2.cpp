// The kernels for AVX2.
#include "system.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#pragma GCC optimize("fp-contract=off")
#endif
#define PTQ_AVX2 1
#define PTQ_NAME "avx2"
#define PTQ_OPS ptq_ops_avx2
#define PTQ_COLLECTIVE ptq_collective_avx2
#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
