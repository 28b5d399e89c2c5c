// Attention of one query a sequence over pages of keys and values: the decode step of the engine. Its own small dispatch.
#include "system.h"

#include "attention_jobs.h"
#include "pool.h"

enum { PTQ_PAGES_FLOAT = 0, PTQ_PAGES_CODES = 1, PTQ_PAGES_BF16 = 2 };

#define ATTEND static inline __attribute__((always_inline))

namespace baseline {
enum { LANES = 4 };
#define madd(a, b, c) ((a) * (b) + (c))
#include "attention.h"
#undef madd
}  // namespace baseline

#if defined(__x86_64__)

namespace avx2 {
enum { LANES = 8 };
#define madd(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#include "attention.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include "attention.h"
#pragma GCC pop_options
#endif
#undef madd
}  // namespace avx2
namespace avx512 {
enum { LANES = 16 };
#define madd(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))), apply_to = function)
#include "attention.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#include "attention.h"
#pragma GCC pop_options
#endif
#undef madd
}  // namespace avx512
#elif defined(__aarch64__)

namespace neon {
enum { LANES = 4 };
#define madd(a, b, c) ((vf)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#include "attention.h"
#undef madd
}  // namespace neon
#endif

extern "C" __attribute__((visibility("default"))) int32_t ptq_paged_attention(const char *name, struct ptq_attention *job) {
    if (job->key_dim > baseline::MOST_DIM || job->value_dim > baseline::MOST_DIM || job->kv_heads < 1 ||
        job->heads % job->kv_heads || job->heads / job->kv_heads > baseline::MOST_GROUP)
        return PTQ_UNSUPPORTED;
    part_fn run = nullptr;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512")) run = avx512::part;
    if (!strcmp(name, "avx2")) run = __builtin_cpu_supports("fma") ? avx2::part : baseline::part;
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) run = neon::part;
#endif
    if (!strcmp(name, "baseline")) run = baseline::part;
    if (!run) return PTQ_UNSUPPORTED;
    in_parallel(run, job, job->spans * job->kv_heads, job->threads);
    return PTQ_OK;
}
