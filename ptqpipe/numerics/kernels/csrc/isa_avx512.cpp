// The kernels for AVX-512 (F, BW, DQ, VL).
#include "system.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#pragma GCC optimize("fp-contract=off")
#endif
#define PTQ_AVX512 1
#define PTQ_NAME "avx512"
#define PTQ_OPS ptq_ops_avx512
#define PTQ_COLLECTIVE ptq_collective_avx512
#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
