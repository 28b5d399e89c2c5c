// Attention of single queries over pages, for one instruction set: attention.cpp sets the target and MADD, then includes this.
//
// Plain loops over WIDE lanes, which the compiler makes vectors of. A key is read once for all queries that share it.
// Sums are float32, over lanes first; their order depends on the widths and on nothing else of the call.

enum { WIDE = 16, MOST_DIM = 1024, MOST_GROUP = 32, STRETCH = 64 };

struct row_reader {
    const struct ptq_attention *job;
    const char *pages;
    const float *table;
    int64_t dim, head;

    // Elements of token `at` of a sequence, as float32 padded with zeros to whole lanes.
    inline __attribute__((always_inline)) void read(const int64_t *blocks, int64_t at, float *out) const {
        const int64_t slot = blocks[at / job->block_size] * job->block_size + at % job->block_size;
        const int64_t first = (slot * job->kv_heads + head) * dim;
        if (job->kind == PTQ_PAGES_BF16) {
            const uint16_t *x = (const uint16_t *)pages + first;
            uint32_t *bits = (uint32_t *)out;
            for (int64_t i = 0; i < dim; ++i) bits[i] = (uint32_t)x[i] << 16;
        } else if (job->kind == PTQ_PAGES_FLOAT) {
            memcpy(out, (const float *)pages + first, (size_t)dim * sizeof(float));
        } else {
            const uint8_t *x = (const uint8_t *)pages + first;
            for (int64_t i = 0; i < dim; ++i) out[i] = table[x[i]];
        }
    }
};

// e^x for x <= 0, within 3 units in the last place down to e^-87, then 0: 2^n times Taylor's polynomial of the rest.
static inline __attribute__((always_inline)) float exp_below(float x) {
    const float limited = x < -87.0f ? -87.0f : x;
    const float n = __builtin_floorf(MADD(limited, 1.44269504f, 0.5f));
    float r = MADD(n, -0.693359375f, limited);
    r = MADD(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = MADD(p, r, 1.3981999507e-3f);
    p = MADD(p, r, 8.3334519073e-3f);
    p = MADD(p, r, 4.1665795894e-2f);
    p = MADD(p, r, 1.6666665459e-1f);
    p = MADD(p, r, 5.0000001201e-1f);
    p = MADD(p, r * r, r + 1.0f);
    const int32_t bits = ((int32_t)n + 127) << 23;
    float two_n;
    memcpy(&two_n, &bits, sizeof two_n);
    return x < -87.0f ? 0.0f : p * two_n;
}

static inline __attribute__((always_inline)) float dot(const float *a, const float *b, int64_t padded) {
    float lanes[WIDE] = {0};
    for (int64_t i = 0; i < padded; i += WIDE)
        for (int j = 0; j < WIDE; ++j) lanes[j] = MADD(a[i + j], b[i + j], lanes[j]);
    for (int half = WIDE / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// One key-value head of one sequence: all queries of its group, a stretch of tokens at a time, with a running maximum.
static void attend_one(const struct ptq_attention *job, int64_t span, int64_t head) {
    const int64_t group = job->heads / job->kv_heads, dk = job->key_dim, dv = job->value_dim;
    const int64_t pk = (dk + WIDE - 1) / WIDE * WIDE, pv = (dv + WIDE - 1) / WIDE * WIDE;
    const int64_t total = job->totals[span], *blocks = job->tables + span * job->table_stride;
    const int64_t start = job->window && job->window < total ? total - job->window : 0;
    const int64_t tables = job->table_heads > 1 ? head : 0;
    const row_reader keys = {job, (const char *)job->keys, job->key_table ? job->key_table + tables * 256 : 0, dk, head};
    const row_reader values = {job, (const char *)job->values, job->value_table ? job->value_table + tables * 256 : 0, dv, head};
    alignas(64) float q[MOST_GROUP * MOST_DIM], out[MOST_GROUP * MOST_DIM], row[MOST_DIM], scores[MOST_GROUP][STRETCH];
    float best[MOST_GROUP], sum[MOST_GROUP];
    memset(row, 0, sizeof row);
    for (int64_t g = 0; g < group; ++g) {
        const float *from = job->q + ((span * job->heads) + head * group + g) * dk;
        for (int64_t i = 0; i < pk; ++i) q[g * pk + i] = i < dk ? from[i] * job->scaling : 0.0f;
        memset(out + g * pv, 0, (size_t)pv * sizeof(float));
        best[g] = job->sinks ? job->sinks[head * group + g] : -INFINITY;
        sum[g] = job->sinks ? 1.0f : 0.0f;
    }
    for (int64_t first = start; first < total; first += STRETCH) {
        const int64_t count = total - first < STRETCH ? total - first : STRETCH;
        for (int64_t t = 0; t < count; ++t) {
            for (int64_t i = dk; i < pk; ++i) row[i] = 0.0f;
            keys.read(blocks, first + t, row);
            for (int64_t g = 0; g < group; ++g) scores[g][t] = dot(q + g * pk, row, pk);
        }
        for (int64_t g = 0; g < group; ++g) {
            float top = best[g];
            if (job->softcap > 0)
                for (int64_t t = 0; t < count; ++t) scores[g][t] = tanhf(scores[g][t] / job->softcap) * job->softcap;
            int damaged = 0;  // a NaN must not be lost in the comparison
            for (int64_t t = 0; t < count; ++t) {
                top = scores[g][t] > top ? scores[g][t] : top;
                damaged |= scores[g][t] != scores[g][t];
            }
            if (damaged) top = NAN;
            if (top != best[g]) {
                const float shrink = best[g] == -INFINITY ? 0.0f : top != top ? NAN : exp_below(best[g] - top);
                sum[g] *= shrink;
                for (int64_t i = 0; i < pv; ++i) out[g * pv + i] *= shrink;
                best[g] = top;
            }
            float lanes[WIDE] = {0};
            for (int64_t t = count; t < (count + WIDE - 1) / WIDE * WIDE; ++t) scores[g][t] = -INFINITY;
            for (int64_t t = 0; t < count; t += WIDE)
                for (int j = 0; j < WIDE; ++j) {
                    scores[g][t + j] = exp_below(scores[g][t + j] - top);
                    lanes[j] += scores[g][t + j];
                }
            for (int j = 0; j < WIDE; ++j) sum[g] += lanes[j];
            if (damaged) sum[g] = NAN;
        }
        for (int64_t t = 0; t < count; ++t) {
            for (int64_t i = dv; i < pv; ++i) row[i] = 0.0f;
            values.read(blocks, first + t, row);
            for (int64_t g = 0; g < group; ++g) {
                const float weight = scores[g][t];
                float *to = out + g * pv;
                for (int64_t i = 0; i < pv; i += WIDE)
                    for (int j = 0; j < WIDE; ++j) to[i + j] = MADD(weight, row[i + j], to[i + j]);
            }
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        float *to = job->out + ((span * job->heads) + head * group + g) * dv;
        for (int64_t i = 0; i < dv; ++i) to[i] = out[g * pv + i] / sum[g];
    }
}

static void part(void *argument, int64_t at) {
    const struct ptq_attention *job = (const struct ptq_attention *)argument;
    attend_one(job, at / job->kv_heads, at % job->kv_heads);
}
