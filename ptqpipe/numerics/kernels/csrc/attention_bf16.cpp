// Causal attention over pages of bfloat16 numbers or E4M3 codes, on AVX-512 with BF16: of many queries a sequence here, the
// prefill step of the engine; of one in attention_one.h.
//
// The queries of all heads that share keys are rows, 16 to a vector, so that a softmax needs no sum over lanes. Keys come
// in tiles of TILE tokens that begin at multiples of TILE in their sequence: VDPBF16PS makes their scores from pairs of
// dimensions, and the output from pairs of keys, with weights rounded to bfloat16 below a running maximum. The sum of the
// weights is that of the rounded ones. The order of a query's sums depends on its place in its sequence alone.
#include "system.h"

#include "attention_jobs.h"
#include "pool.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

namespace {

#include "attention_parts.h"
#include "attention_tiles.h"
#include "attention_one.h"

// Parts of a call: some queries of a sequence with one key-value head, the ones that see most first; or the one query of a
// sequence with some heads.
struct Parts {
    const ptq_prefill *job;
    int64_t queries, heads;  // of a part

    bool single(int64_t span) const {
        return job->starts[span + 1] - job->starts[span] == 1 && job->heads / job->kv_heads <= MOST_GROUP;
    }

    int64_t of(int64_t span) const {
        if (single(span)) return (job->kv_heads + heads - 1) / heads;
        return (job->starts[span + 1] - job->starts[span] + queries - 1) / queries * job->kv_heads;
    }

    int64_t all() const {
        int64_t sum = 0;
        for (int64_t span = 0; span < job->spans; ++span) sum += of(span);
        return sum;
    }

    static void run(void *argument, int64_t at) {
        const Parts *parts = (const Parts *)argument;
        const ptq_prefill *j = parts->job;
        int64_t span = 0;
        for (; at >= parts->of(span); ++span) at -= parts->of(span);
        if (parts->single(span)) {
            const Part part(j, span, at * parts->heads, 0, 1);
            const int64_t heads = at_most(parts->heads, j->kv_heads - part.head);
            return j->key_table ? attend_one<true>(part, heads) : attend_one<false>(part, heads);
        }
        const int64_t place = (parts->of(span) - 1 - at) / j->kv_heads;
        const Part part(j, span, at % j->kv_heads, place * parts->queries, parts->queries);
        return j->key_table ? attend<true>(part) : attend<false>(part);
    }
};

int32_t prefill(const ptq_prefill *job) {
    const int64_t group = job->heads / job->kv_heads, row = (job->key_dim + job->value_dim) * (job->key_table ? 1 : 2);
    const int64_t fit = TILE_BYTES / (TILE * row);
    Parts parts = {job, 1, at_most(at_most(MOST_HEADS, job->kv_heads), fit > 1 ? fit : 1)};
    while (parts.heads > 1 && job->threads > 1 && parts.all() < 4 * job->threads) parts.heads = (parts.heads + 1) / 2;
    for (int64_t rows = MOST_ROWS; rows >= LEAST_ROWS; rows /= 2) {  // as many as threads need to end together
        parts.queries = rows / group > 1 ? rows / group : 1;
        if (job->threads < 2 || parts.all() >= 8 * job->threads) break;
    }
    in_parallel(Parts::run, &parts, parts.all(), job->threads);
    return PTQ_OK;
}

}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

extern "C" __attribute__((visibility("default"))) int32_t ptq_paged_prefill(const char *name, const struct ptq_prefill *job) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && job->key_dim <= MOST_DIM &&
        job->value_dim <= MOST_DIM && job->kv_heads > 0 && job->heads % job->kv_heads == 0 &&
        job->heads / job->kv_heads <= MOST_ROWS)
        return prefill(job);
#endif
    return name && job ? PTQ_UNSUPPORTED : PTQ_OK;
}
