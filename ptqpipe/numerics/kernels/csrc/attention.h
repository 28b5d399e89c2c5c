// Attention of single queries over pages, for one instruction set: attention.cpp sets the target, LANES and madd, then
// includes this.
//
// The queries that share keys are the lanes of the scores, so that a softmax needs no sum over lanes; the dimensions are
// those of the outputs. Few queries a key would leave lanes empty: their scores are dot products. Sums are float32; their
// order depends on the widths and on nothing else of the call.

enum { MOST_DIM = 1024, MOST_GROUP = 32, STRETCH = 32, TOKENS = 8, FEW = 4 };

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

ATTEND vf all(float a) { return a - (vf){}; }
ATTEND vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

struct row_reader {
    const struct ptq_attention *job;
    const char *pages;
    const float *table;
    int64_t dim, head;

    // Where the elements of token `at` of a sequence begin, in elements.
    inline __attribute__((always_inline)) int64_t place(const int64_t *blocks, int64_t at) const {
        const int64_t slot = blocks[at / job->block_size] * job->block_size + at % job->block_size;
        return (slot * job->kv_heads + head) * dim;
    }

    // Asks for tokens that are read soon: the rows of one head lie too far apart for the hardware to see a stream.
    inline __attribute__((always_inline)) void fetch(const int64_t *blocks, int64_t first, int64_t last) const {
        const int64_t size = job->kind == PTQ_PAGES_BF16 ? 2 : job->kind == PTQ_PAGES_FLOAT ? 4 : 1;
        for (int64_t at = first; at < last; ++at) {
            const char *p = pages + place(blocks, at) * size;
            for (int64_t i = 0; i < dim * size; i += 64) __builtin_prefetch(p + i);
        }
    }

    // Elements of token `at`, as float32.
    inline __attribute__((always_inline)) void read(const int64_t *blocks, int64_t at, float *out) const {
        const int64_t first = place(blocks, at);
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
ATTEND vf exp_below(vf x) {
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: a sum with it is rounded to a whole number, its lowest bits
    const vi tiny = x < -87.0f;
    const vf limited = select(tiny, all(-87.0f), x);
    const vf shifted = madd(limited, all(1.44269504f), magic), n = shifted - magic;
    vf r = madd(n, all(-0.693359375f), limited);
    r = madd(n, all(2.12194440e-4f), r);
    vf p = all(1.9875691500e-4f);
    p = madd(p, r, all(1.3981999507e-3f));
    p = madd(p, r, all(8.3334519073e-3f));
    p = madd(p, r, all(4.1665795894e-2f));
    p = madd(p, r, all(1.6666665459e-1f));
    p = madd(p, r, all(5.0000001201e-1f));
    p = madd(p, r * r, r + 1.0f);
    const vi two_n = ((vi)shifted - (vi)magic + 127) << 23;
    return select(tiny, (vf){}, p * (vf)two_n);
}

ATTEND float sum_of(vf v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// A stretch of tokens for the queries of a key-value head. `wide` vectors hold a number of each query.
struct stretch {
    alignas(64) float rows[STRETCH * MOST_DIM];  // of keys, then of values
    vf scores[STRETCH][MOST_GROUP / LANES];      // then weights
};

// scores[t][v] = sum over i of rows[t][i] * q[i][v], for T tokens.
template <int T> ATTEND void scores_of(const float *rows, int64_t width, const vf *q, int64_t dim, int64_t wide, int64_t v, vf (*scores)[MOST_GROUP / LANES]) {
    vf sums[T];
    for (int t = 0; t < T; ++t) sums[t] = (vf){};
    for (int64_t i = 0; i < dim; ++i)
        for (int t = 0; t < T; ++t) sums[t] = madd(all(rows[t * width + i]), q[i * wide + v], sums[t]);
    for (int t = 0; t < T; ++t) scores[t][v] = sums[t];
}

// The same by dot products, for `group` queries [group][width].
static void dots_of(const float *rows, int64_t width, const float *q, int64_t group, int64_t count, vf (*scores)[MOST_GROUP / LANES]) {
    for (int64_t t = 0; t < count; ++t) {
        scores[t][0] = (vf){};
        for (int64_t g = 0; g < group; ++g) {
            vf sum = {};
            for (int64_t i = 0; i < width; i += LANES) {
                vf a, b;
                memcpy(&a, q + g * width + i, sizeof a);
                memcpy(&b, rows + t * width + i, sizeof b);
                sum = madd(a, b, sum);
            }
            ((float *)&scores[t][0])[g] = sum_of(sum);
        }
    }
}

// out[g][..] += sum over t of weights[t][g] * rows[t][..], for G queries from `first` on and N vectors from column c on.
template <int G, int N>
ATTEND void add_values(const stretch *s, int64_t width, int64_t count, int64_t first, int64_t c, float *out) {
    vf sums[G][N];
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < N; ++n) memcpy(&sums[g][n], out + (first + g) * width + c + n * LANES, sizeof(vf));
    for (int64_t t = 0; t < count; ++t) {
        const float *weights = (const float *)s->scores[t] + first;
        vf v[N];
        for (int n = 0; n < N; ++n) memcpy(&v[n], s->rows + t * width + c + n * LANES, sizeof(vf));
        for (int g = 0; g < G; ++g)
            for (int n = 0; n < N; ++n) sums[g][n] = madd(all(weights[g]), v[n], sums[g][n]);
    }
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < N; ++n) memcpy(out + (first + g) * width + c + n * LANES, &sums[g][n], sizeof(vf));
}

template <int G> ATTEND void add_all_values(const stretch *s, int64_t width, int64_t count, int64_t first, float *out) {
    int64_t c = 0;
    for (; c + 2 * LANES <= width; c += 2 * LANES) add_values<G, 2>(s, width, count, first, c, out);
    if (c < width) add_values<G, 1>(s, width, count, first, c, out);
}

// What each query has so far: the largest score and the sum of the weights beside it.
struct running {
    vf best[MOST_GROUP / LANES], sum[MOST_GROUP / LANES];
};

// Scores to weights. The factors by which earlier outputs shrink, one a query; true if there are any but one.
static bool weigh(stretch *s, running *r, int64_t count, int64_t v, float softcap, float *shrink) {
    vf top = r->best[v];
    vi damaged = {};  // a NaN must not be lost in the comparison
    for (int64_t t = 0; t < count; ++t) {
        if (softcap > 0)
            for (int j = 0; j < LANES; ++j) s->scores[t][v][j] = tanhf(s->scores[t][v][j] / softcap) * softcap;
        const vf score = s->scores[t][v];
        top = select(score > top, score, top);
        damaged |= score != score;
    }
    top = select(damaged, all(NAN), top);
    const vf less = select(r->best[v] == -INFINITY, (vf){}, exp_below(r->best[v] - top));
    const vi same = r->best[v] == top;
    const vf factor = select(same, all(1.0f), less);
    vf sum = r->sum[v] * factor;
    for (int64_t t = 0; t < count; ++t) {
        s->scores[t][v] = exp_below(s->scores[t][v] - top);
        sum += s->scores[t][v];
    }
    r->sum[v] = sum;
    r->best[v] = top;
    memcpy(shrink + v * LANES, &factor, sizeof factor);
    bool any = false;
    for (int j = 0; j < LANES; ++j) any |= !same[j];
    return any;
}

// One key-value head of one sequence: all queries of its group, a stretch of tokens at a time, with a running maximum.
static void attend_one(const struct ptq_attention *job, int64_t span, int64_t head) {
    const int64_t group = job->heads / job->kv_heads, dk = job->key_dim, dv = job->value_dim;
    const int64_t pk = (dk + LANES - 1) / LANES * LANES, pv = (dv + LANES - 1) / LANES * LANES;
    const int64_t wide = (group + LANES - 1) / LANES;
    const int64_t total = job->totals[span], *blocks = job->tables + span * job->table_stride;
    const int64_t start = job->window && job->window < total ? total - job->window : 0;
    const int64_t tables = job->table_heads > 1 ? head : 0;
    const row_reader keys = {job, (const char *)job->keys, job->key_table ? job->key_table + tables * 256 : 0, dk, head};
    const row_reader values = {job, (const char *)job->values, job->value_table ? job->value_table + tables * 256 : 0, dv, head};
    alignas(64) float q[MOST_GROUP * MOST_DIM], out[MOST_GROUP * MOST_DIM], shrink[MOST_GROUP];
    stretch s;
    running r;
    for (int64_t v = 0; v < wide; ++v) r.best[v] = all(-INFINITY), r.sum[v] = (vf){};
    memset(out, 0, (size_t)(group * pv) * sizeof(float));
    memset(q, 0, (size_t)(group < FEW ? group * pk : dk * wide * LANES) * sizeof(float));
    for (int64_t g = 0; g < group; ++g) {
        const float *from = job->q + ((span * job->heads) + head * group + g) * dk;
        for (int64_t i = 0; i < dk; ++i) q[group < FEW ? g * pk + i : i * wide * LANES + g] = from[i] * job->scaling;
        if (job->sinks) {
            ((float *)r.best)[g] = job->sinks[head * group + g];
            ((float *)r.sum)[g] = 1.0f;
        }
    }
    for (int64_t first = start; first < total; first += STRETCH) {
        const int64_t left = total - first, count = left < STRETCH ? left : (int64_t)STRETCH;
        const int64_t next = first + count, end = left < 2 * STRETCH ? total : next + STRETCH;
        values.fetch(blocks, first, next);
        for (int64_t t = 0; t < count; ++t) {
            for (int64_t i = dk; i < pk; ++i) s.rows[t * pk + i] = 0.0f;
            keys.read(blocks, first + t, s.rows + t * pk);
        }
        keys.fetch(blocks, next, end);
        if (group < FEW) {
            dots_of(s.rows, pk, q, group, count, s.scores);
        } else {
            for (int64_t v = 0; v < wide; ++v) {
                int64_t t = 0;
                for (; t + TOKENS <= count; t += TOKENS)
                    scores_of<TOKENS>(s.rows + t * pk, pk, (const vf *)q, dk, wide, v, s.scores + t);
                for (; t < count; ++t) scores_of<1>(s.rows + t * pk, pk, (const vf *)q, dk, wide, v, s.scores + t);
            }
        }
        bool shrinks = false;
        for (int64_t v = 0; v < wide; ++v) shrinks |= weigh(&s, &r, count, v, job->softcap, shrink);
        if (shrinks && first > start)
            for (int64_t g = 0; g < group; ++g)
                for (int64_t i = 0; i < pv; ++i) out[g * pv + i] *= shrink[g];
        for (int64_t t = 0; t < count; ++t) {
            for (int64_t i = dv; i < pv; ++i) s.rows[t * pv + i] = 0.0f;
            values.read(blocks, first + t, s.rows + t * pv);
        }
        int64_t g = 0;
        for (; g + 8 <= group; g += 8) add_all_values<8>(&s, pv, count, g, out);
        if (g + 4 <= group) add_all_values<4>(&s, pv, count, g, out), g += 4;
        for (; g < group; ++g) add_all_values<1>(&s, pv, count, g, out);
    }
    for (int64_t g = 0; g < group; ++g) {
        float *to = job->out + ((span * job->heads) + head * group + g) * dv;
        for (int64_t i = 0; i < dv; ++i) to[i] = out[g * pv + i] / ((const float *)r.sum)[g];
    }
}

static void part(void *argument, int64_t at) {
    const struct ptq_attention *job = (const struct ptq_attention *)argument;
    attend_one(job, at / job->kv_heads, at % job->kv_heads);
}
