// One query of each head of a key-value head: a decode step. Of attention_bf16.cpp.
//
// Keys are the lanes of scores here, and dimensions those of outputs, since there are few rows. Every sum has the order that
// tiles of many rows give it, so a token's bits do not tell whether it was alone: the transposed weights are there for the
// order of their sum.

enum { MOST_GROUP = 32, SOME = 8, GROUPS = TILE / LANES };  // queries; of them at a time; of keys in a tile

struct OneRoom {
    alignas(64) uint32_t q[MOST_GROUP][MOST_DIM / 2];     // pairs of dimensions, zeros behind the last
    __m512 out[MOST_GROUP][MOST_DIM / LANES];             // of 32 dimensions two vectors, as `pairs_of_keys` gives them
    __m512 scores[MOST_GROUP][GROUPS];                    // 16 keys each
    __m512i weights[MOST_GROUP][GROUPS / 2];              // pairs of keys
    alignas(64) float best[MOST_GROUP], sum[MOST_GROUP], shift[MOST_GROUP], factor[MOST_GROUP];
    int64_t rows[2][2][TILE];                             // of the tile's tokens and of the next's: their first elements
    const int64_t *keys, *values;                         // ... in the pages, -1 where none is seen
    Codes key_codes, value_codes;
};

// Two rows of 32 numbers as pairs: of dimensions 8 b .. 8 b + 3 and 8 b + 4 .. 8 b + 7.
INLINE void pairs_of_keys(__m512i a, __m512i b, __m512i *low, __m512i *high) {
    *low = _mm512_unpacklo_epi16(a, b);
    *high = _mm512_unpackhi_epi16(a, b);
}

// Asks for the rows of the tile at `first` that the query sees.
template <bool CODES> void find_rows(const Part &p, int64_t (*rows)[TILE], int64_t first) {
    enum { SIZE = CODES ? 1 : 2 };
    const ptq_prefill *j = p.job;
    const int64_t seen = p.place - p.window() + 1, count = at_most(p.end - first, TILE);
    int64_t block = first / j->block_size, at = first % j->block_size, t = 0;
    while (t < count) {
        const int64_t slot = (p.blocks[block++] * j->block_size + at) * j->kv_heads + p.head, run = t - at;
        int64_t key = slot * j->key_dim, value = slot * j->value_dim;
        const int64_t key_row = j->kv_heads * j->key_dim, value_row = j->kv_heads * j->value_dim;
        for (at = 0; t < at_most(count, run + j->block_size); ++t, key += key_row, value += value_row) {
            const bool is_seen = first + t >= seen;
            rows[0][t] = is_seen ? key : -1;
            rows[1][t] = is_seen ? value : -1;
            for (int64_t i = 0; i < j->key_dim * SIZE; i += 64) _mm_prefetch((const char *)j->keys + key * SIZE + i, _MM_HINT_T0);
            for (int64_t i = 0; i < j->value_dim * SIZE; i += 64)
                _mm_prefetch((const char *)j->values + value * SIZE + i, _MM_HINT_T0);
        }
    }
    for (; t < TILE; ++t) rows[0][t] = rows[1][t] = -1;
}

template <bool CODES> INLINE __m512i some_of(const void *pages, int64_t row, int64_t c, int64_t dim, const Codes &codes) {
    return row < 0 ? _mm512_setzero_si512() : numbers_at<CODES>(pages, row + c, first_of_32(dim - c), codes);
}

// Products of 16 pairs of dimensions of 16 keys with G queries, added to their scores.
template <int G> void add_products(const __m512i *keys, const uint32_t *q, __m512 (*scores)[GROUPS]) {
    __m512 sums[G];
    UNROLL for (int g = 0; g < G; ++g) sums[g] = scores[g][0];
    UNROLL for (int i = 0; i < LANES; ++i)
        UNROLL for (int g = 0; g < G; ++g)
            sums[g] = _mm512_dpbf16_ps(sums[g], (__m512bh)keys[i], (__m512bh)_mm512_set1_epi32((int32_t)q[g * (MOST_DIM / 2) + i]));
    UNROLL for (int g = 0; g < G; ++g) scores[g][0] = sums[g];
}

template <bool CODES> void all_scores(const Part &p, OneRoom *room) {
    const int64_t dim = p.job->key_dim;
    for (int64_t n = 0; n < GROUPS; ++n) {
        for (int64_t g = 0; g < p.group; ++g) room->scores[g][n] = _mm512_setzero_ps();
        for (int64_t c = 0; c < p.pairs; c += LANES) {
            __m512i m[LANES];
            UNROLL for (int i = 0; i < LANES; ++i)
                m[i] = some_of<CODES>(p.job->keys, room->keys[n * LANES + i], 2 * c, dim, room->key_codes);
            transpose(m);
            int64_t g = 0;
            for (; g + SOME <= p.group; g += SOME) add_products<SOME>(m, room->q[g] + c, (__m512(*)[GROUPS]) & room->scores[g][n]);
            if (p.group - g >= 4) add_products<4>(m, room->q[g] + c, (__m512(*)[GROUPS]) & room->scores[g][n]), g += 4;
            for (; g < p.group; ++g) add_products<1>(m, room->q[g] + c, (__m512(*)[GROUPS]) & room->scores[g][n]);
        }
    }
}

// Products to scores, in powers of two; the largest so far, and the factors by which earlier sums shrink.
void all_best(const Part &p, OneRoom *room) {
    const float cap = p.job->softcap;
    const __m512 scale = _mm512_set1_ps(cap > 0 ? p.job->scaling : p.job->scaling * LOG2_E), none = _mm512_set1_ps(-INFINITY);
    for (int64_t n = 0; n < GROUPS; ++n) {
        __mmask16 seen = 0;
        for (int i = 0; i < LANES; ++i) seen |= (__mmask16)((room->keys[n * LANES + i] >= 0) << i);
        for (int64_t g = 0; g < p.group; ++g) {
            __m512 s = _mm512_mul_ps(room->scores[g][n], scale);
            if (cap > 0) s = _mm512_mul_ps(capped(s, cap), _mm512_set1_ps(LOG2_E));
            room->scores[g][n] = _mm512_mask_mov_ps(none, seen, s);
        }
    }
    for (int64_t g = 0; g < p.group; ++g) {
        __m512 top = none;
        for (int n = 0; n < GROUPS; ++n) top = _mm512_max_ps(room->scores[g][n], top);  // the second if one is a NaN
        const float largest = _mm512_reduce_max_ps(top), old = room->best[g], now = largest > old ? largest : old;
        room->factor[g] = old;
        room->best[g] = now;
        room->shift[g] = now == -INFINITY ? 0.0f : now;
    }
    for (int64_t g = 0; g < p.group; g += LANES) {
        const __m512 factor = exp2_of(_mm512_sub_ps(_mm512_load_ps(room->factor + g), _mm512_load_ps(room->shift + g)));
        _mm512_store_ps(room->factor + g, factor);
        _mm512_store_ps(room->sum + g, _mm512_mul_ps(_mm512_load_ps(room->sum + g), factor));
    }
}

// Scores to weights; their sums, a pair of keys after the other.
void all_weights(const Part &p, OneRoom *room, int64_t count) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
    for (int64_t g0 = 0; g0 < p.group; g0 += LANES) {
        __m512 sum = _mm512_load_ps(room->sum + g0);
        for (int64_t n = 0; n < GROUPS && n * LANES < count; n += 2) {
            __m512i m[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const int64_t g = g0 + i;
                m[i] = _mm512_setzero_si512();
                if (g >= p.group) continue;
                const __m512 shift = _mm512_set1_ps(room->shift[g]);
                const __m512 a = exp2_of(_mm512_sub_ps(room->scores[g][n], shift));
                const __m512 b = exp2_of(_mm512_sub_ps(room->scores[g][n + 1], shift));
                room->weights[g][n / 2] = m[i] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
            }
            transpose(m);
            UNROLL for (int i = 0; i < LANES; ++i) sum = _mm512_dpbf16_ps(sum, (__m512bh)m[i], ones);
        }
        _mm512_store_ps(room->sum + g0, sum);
    }
}

// Weights of G queries times 32 dimensions of the values of all keys.
template <bool CODES, int G>
void add_outputs(const Part &p, const OneRoom *room, int64_t c, int64_t g0, int64_t count, __m512 (*out)[MOST_DIM / LANES]) {
    const void *values = p.job->values;
    const int64_t dim = p.job->value_dim;
    const Codes codes = room->value_codes;
    __m512 sums[G][2];
    UNROLL for (int g = 0; g < G; ++g)
        UNROLL for (int n = 0; n < 2; ++n) sums[g][n] = _mm512_mul_ps(out[g][n], _mm512_set1_ps(room->factor[g0 + g]));
    for (int64_t t = 0; t < count; t += 2) {
        __m512i low, high;
        pairs_of_keys(some_of<CODES>(values, room->values[t], c, dim, codes),
                      some_of<CODES>(values, room->values[t + 1], c, dim, codes), &low, &high);
        UNROLL for (int g = 0; g < G; ++g) {
            const uint32_t *w = (const uint32_t *)room->weights[g0 + g] + t / 2;
            sums[g][0] = _mm512_dpbf16_ps(sums[g][0], (__m512bh)_mm512_set1_epi32((int32_t)*w), (__m512bh)low);
            sums[g][1] = _mm512_dpbf16_ps(sums[g][1], (__m512bh)_mm512_set1_epi32((int32_t)*w), (__m512bh)high);
        }
    }
    UNROLL for (int g = 0; g < G; ++g) UNROLL for (int n = 0; n < 2; ++n) out[g][n] = sums[g][n];
}

template <bool CODES> void all_outputs(const Part &p, OneRoom *room, int64_t count) {
    for (int64_t c = 0; c < p.job->value_dim; c += 32) {
        int64_t g = 0;
        __m512(*out)[MOST_DIM / LANES] = (__m512(*)[MOST_DIM / LANES]) & room->out[0][c / LANES];
        for (; g + SOME <= p.group; g += SOME) add_outputs<CODES, SOME>(p, room, c, g, count, out + g);
        if (p.group - g >= 4) add_outputs<CODES, 4>(p, room, c, g, count, out + g), g += 4;
        for (; g < p.group; ++g) add_outputs<CODES, 1>(p, room, c, g, count, out + g);
    }
}

template <bool CODES> void begin_one(const Part &p, OneRoom *room) {
    const ptq_prefill *j = p.job;
    if (CODES) read_codes(j, j->key_table, p.head, &room->key_codes), read_codes(j, j->value_table, p.head, &room->value_codes);
    for (int64_t g = 0; g < MOST_GROUP; ++g) {
        const int64_t head = p.head * p.group + at_most(g, p.group - 1);
        room->best[g] = j->sinks ? j->sinks[head] * LOG2_E : -INFINITY;
        room->sum[g] = j->sinks ? 1.0f : 0.0f;
        room->shift[g] = 0.0f;
        if (g >= p.group) continue;
        for (int64_t c = 0; c < p.key_step; c += LANES)
            _mm512_store_si512(room->q[g] + c, _mm512_maskz_loadu_epi16(first_of_32(j->key_dim - 2 * c),
                                                                        j->q + p.row * j->q_token + head * j->q_head + 2 * c));
        for (int64_t c = 0; c < j->value_dim; c += LANES) room->out[g][c / LANES] = _mm512_setzero_ps();
        room->out[g][(j->value_dim + LANES - 1) / LANES] = _mm512_setzero_ps();
    }
}

void finish_one(const Part &p, const OneRoom *room) {
    const ptq_prefill *j = p.job;
    alignas(64) uint16_t places[32];  // of dimensions among low and high
    for (int d = 0; d < 32; ++d) places[d] = (uint16_t)(d / 8 * 4 + d % 4 + d % 8 / 4 * 16);
    const __m512i order = _mm512_load_si512(places);
    for (int64_t g = 0; g < p.group; ++g) {
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(room->sum[g]));
        uint16_t *to = j->out + (p.row * j->heads + p.head * p.group + g) * j->value_dim;
        for (int64_t c = 0; c < j->value_dim; c += 32) {
            const __m512 low = _mm512_mul_ps(room->out[g][c / LANES], share), high = _mm512_mul_ps(room->out[g][c / LANES + 1], share);
            const __m512i y = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            _mm512_mask_storeu_epi16(to + c, first_of_32(j->value_dim - c), y);
        }
    }
}

template <bool CODES> void attend_one(const Part &p) {
    OneRoom *room = of_thread<OneRoom>();
    begin_one<CODES>(p, room);
    const int64_t seen = p.place - p.window() + 1, start = seen > 0 ? seen / TILE * TILE : 0;
    find_rows<CODES>(p, room->rows[0], start);
    for (int64_t first = start, turn = 0; first < p.end; first += TILE, turn = 1 - turn) {
        if (first + TILE < p.end) find_rows<CODES>(p, room->rows[1 - turn], first + TILE);
        room->keys = room->rows[turn][0];
        room->values = room->rows[turn][1];
        all_scores<CODES>(p, room);
        all_best(p, room);
        const int64_t count = at_most((p.end - first + STEP - 1) / STEP * STEP, TILE);
        all_weights(p, room, count);
        all_outputs<CODES>(p, room, count);
    }
    finish_one(p, room);
}
