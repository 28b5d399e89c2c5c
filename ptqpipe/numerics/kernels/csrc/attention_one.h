// One query of each head of a key-value head: a decode step. Of attention_bf16.cpp.
//
// Keys are the lanes of scores here, and dimensions those of outputs, since there are few rows. Every sum has the order that
// tiles of many rows give it, so a token's bits do not tell whether it was alone: the transposed weights are there for the
// order of their sum.
//
// A few key-value heads go through the tokens together: the rows of all heads of a token lie side by side, and memory is read
// several times as fast in that order as in that of one head, whose rows lie apart.

enum { MOST_GROUP = 32, MOST_HEADS = 8, SOME = 8, GROUPS = TILE / LANES };  // queries; heads; queries at a time; of keys in a tile
enum { TILE_BYTES = 1 << 17 };  // of all heads' keys and values of a tile: two of them are in the second cache

// What the queries of one key-value head have so far. Rows of `q` are key_step dwords apart, those of `out` out_step vectors.
struct State {
    alignas(64) uint32_t q[MOST_GROUP * MOST_DIM / 2];  // pairs of dimensions, zeros behind the last
    __m512 out[MOST_GROUP * MOST_DIM / LANES];          // of 32 dimensions two vectors, as `pairs_of_keys` gives them
    alignas(64) float best[MOST_GROUP], sum[MOST_GROUP];
    Codes key_codes, value_codes;
};

// The tokens of a tile: where their rows begin in the pages, those of the first head; -1 where none is seen.
struct Rows {
    int64_t keys[TILE], values[TILE];
    __mmask64 seen;
};

struct OneRoom {
    State states[MOST_HEADS];
    __m512 scores[MOST_GROUP][GROUPS];        // 16 keys each
    __m512i weights[MOST_GROUP][GROUPS / 2];  // pairs of keys
    alignas(64) float shift[MOST_GROUP], factor[MOST_GROUP];
    Rows rows[2];                             // of the tile and of the next
};

INLINE int64_t out_step(const Part &p) { return (p.job->value_dim + 31) / 32 * 2; }

// Two rows of 32 numbers as pairs: of dimensions 8 b .. 8 b + 3 and 8 b + 4 .. 8 b + 7.
INLINE void pairs_of_keys(__m512i a, __m512i b, __m512i *low, __m512i *high) {
    *low = _mm512_unpacklo_epi16(a, b);
    *high = _mm512_unpackhi_epi16(a, b);
}

void find_rows(const Part &p, Rows *rows, int64_t first) {
    const ptq_prefill *j = p.job;
    const int64_t unseen = p.place - p.window() + 1 - first, count = at_most(p.end - first, TILE);
    int64_t block = first / j->block_size, at = first % j->block_size;
    for (int64_t t = 0; t < TILE; ++t) {
        rows->keys[t] = rows->values[t] = -1;
        if (t >= count) continue;
        if (t >= unseen) {
            const int64_t slot = (p.blocks[block] * j->block_size + at) * j->kv_heads + p.head;
            rows->keys[t] = slot * j->key_dim;
            rows->values[t] = slot * j->value_dim;
        }
        if (++at == j->block_size) at = 0, ++block;
    }
    const int64_t skipped = unseen > 0 ? at_most(unseen, TILE) : 0;
    const __mmask64 below = count >= TILE ? ~(__mmask64)0 : ((__mmask64)1 << (count > 0 ? count : 0)) - 1;
    rows->seen = skipped >= TILE ? 0 : below >> skipped << skipped;
}

// Reads `bytes` of each token's row, for the caches: the hardware follows loads that are in order, and gets more lines at a
// time than a core asks for by itself.
INLINE void pull(const void *pages, const int64_t *rows, int64_t size, int64_t bytes) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t t = 0; t < TILE; ++t) {
        if (rows[t] < 0) continue;
        const char *row = (const char *)pages + rows[t] * size;
        for (int64_t i = 0; i + 64 <= bytes; i += 64) sum = _mm512_or_si512(sum, _mm512_loadu_si512(row + i));
        if (bytes % 64) sum = _mm512_or_si512(sum, _mm512_set1_epi8(row[bytes - 1]));
    }
    __asm__ volatile("" ::"v"(sum));
}

// Asks for a line of every page of memory that the rows of some tokens are in: translations take longest, and go on side by
// side that way.
INLINE void touch(const void *pages, const int64_t *rows, int64_t size, int64_t row) {
    const int64_t step = row < 4096 ? 4096 / row : 1;
    for (int64_t t = 0; t < TILE; t += step)
        if (rows[t] >= 0) _mm_prefetch((const char *)pages + rows[t] * size, _MM_HINT_T0);
}

// 32 dimensions of a token.
template <bool CODES>
INLINE __m512i some_of(const void *pages, int64_t row, int64_t head, int64_t c, int64_t dim, const Codes &codes) {
    return row < 0 ? _mm512_setzero_si512() : numbers_at<CODES>(pages, row + head * dim + c, first_of_32(dim - c), codes);
}

// Products of 16 pairs of dimensions of 16 keys with G queries, whose rows lie `step` apart, added to their scores.
template <int G> void add_products(const __m512i *keys, const uint32_t *q, int64_t step, __m512 (*scores)[GROUPS]) {
    __m512 sums[G];
    UNROLL for (int g = 0; g < G; ++g) sums[g] = scores[g][0];
    UNROLL for (int i = 0; i < LANES; ++i)
        UNROLL for (int g = 0; g < G; ++g)
            sums[g] = _mm512_dpbf16_ps(sums[g], (__m512bh)keys[i], (__m512bh)_mm512_set1_epi32((int32_t)q[g * step + i]));
    UNROLL for (int g = 0; g < G; ++g) scores[g][0] = sums[g];
}

// `head` of the part's heads.
template <bool CODES> void all_scores(const Part &p, OneRoom *room, const Rows &rows, int64_t head) {
    const State &state = room->states[head];
    const int64_t dim = p.job->key_dim, step = p.key_step;
    for (int64_t n = 0; n < GROUPS; ++n) {
        __m512(*scores)[GROUPS] = (__m512(*)[GROUPS]) & room->scores[0][n];
        for (int64_t g = 0; g < p.group; ++g) scores[g][0] = _mm512_setzero_ps();
        for (int64_t c = 0; c < p.pairs; c += LANES) {
            __m512i m[LANES];
            UNROLL for (int i = 0; i < LANES; ++i)
                m[i] = some_of<CODES>(p.job->keys, rows.keys[n * LANES + i], head, 2 * c, dim, state.key_codes);
            transpose(m);
            int64_t g = 0;
            for (; g + SOME <= p.group; g += SOME) add_products<SOME>(m, state.q + g * step + c, step, scores + g);
            if (p.group - g >= 4) add_products<4>(m, state.q + g * step + c, step, scores + g), g += 4;
            for (; g < p.group; ++g) add_products<1>(m, state.q + g * step + c, step, scores + g);
        }
    }
}

// Products to scores, in powers of two; the largest so far, and the factors by which earlier sums shrink.
void all_best(const Part &p, OneRoom *room, const Rows &rows, State *state) {
    const float cap = p.job->softcap;
    const __m512 scale = _mm512_set1_ps(cap > 0 ? p.job->scaling : p.job->scaling * LOG2_E), none = _mm512_set1_ps(-INFINITY);
    for (int64_t n = 0; n < GROUPS; ++n) {
        const __mmask16 seen = (__mmask16)(rows.seen >> n * LANES);
        for (int64_t g = 0; g < p.group; ++g) {
            __m512 s = _mm512_mul_ps(room->scores[g][n], scale);
            if (cap > 0) s = _mm512_mul_ps(capped(s, cap), _mm512_set1_ps(LOG2_E));
            room->scores[g][n] = _mm512_mask_mov_ps(none, seen, s);
        }
    }
    for (int64_t g = 0; g < p.group; ++g) {
        __m512 top = none;
        for (int n = 0; n < GROUPS; ++n) top = _mm512_max_ps(room->scores[g][n], top);  // the second if one is a NaN
        const float largest = _mm512_reduce_max_ps(top), old = state->best[g], now = largest > old ? largest : old;
        room->factor[g] = old;
        state->best[g] = now;
        room->shift[g] = now == -INFINITY ? 0.0f : now;
    }
    for (int64_t g = 0; g < p.group; g += LANES) {
        const __m512 factor = exp2_of(_mm512_sub_ps(_mm512_load_ps(room->factor + g), _mm512_load_ps(room->shift + g)));
        _mm512_store_ps(room->factor + g, factor);
        _mm512_store_ps(state->sum + g, _mm512_mul_ps(_mm512_load_ps(state->sum + g), factor));
    }
}

// Scores to weights; their sums, a pair of keys after the other.
void all_weights(const Part &p, OneRoom *room, State *state, int64_t count) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
    for (int64_t g0 = 0; g0 < p.group; g0 += LANES) {
        __m512 sum = _mm512_load_ps(state->sum + g0);
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
        _mm512_store_ps(state->sum + g0, sum);
    }
}

// Weights of G queries times 32 dimensions of the values of all keys.
template <bool CODES, int G>
void add_outputs(const Part &p, OneRoom *room, const Rows &rows, int64_t head, int64_t c, int64_t g0, int64_t count) {
    const void *values = p.job->values;
    const int64_t dim = p.job->value_dim, step = out_step(p);
    const Codes codes = room->states[head].value_codes;
    __m512 *out = room->states[head].out + g0 * step + c / LANES, sums[G][2];
    UNROLL for (int g = 0; g < G; ++g)
        UNROLL for (int n = 0; n < 2; ++n) sums[g][n] = _mm512_mul_ps(out[g * step + n], _mm512_set1_ps(room->factor[g0 + g]));
    for (int64_t t = 0; t < count; t += 2) {
        __m512i low, high;
        pairs_of_keys(some_of<CODES>(values, rows.values[t], head, c, dim, codes),
                      some_of<CODES>(values, rows.values[t + 1], head, c, dim, codes), &low, &high);
        UNROLL for (int g = 0; g < G; ++g) {
            const uint32_t *w = (const uint32_t *)room->weights[g0 + g] + t / 2;
            sums[g][0] = _mm512_dpbf16_ps(sums[g][0], (__m512bh)_mm512_set1_epi32((int32_t)*w), (__m512bh)low);
            sums[g][1] = _mm512_dpbf16_ps(sums[g][1], (__m512bh)_mm512_set1_epi32((int32_t)*w), (__m512bh)high);
        }
    }
    UNROLL for (int g = 0; g < G; ++g) UNROLL for (int n = 0; n < 2; ++n) out[g * step + n] = sums[g][n];
}

template <bool CODES> void all_outputs(const Part &p, OneRoom *room, const Rows &rows, int64_t head, int64_t count) {
    for (int64_t c = 0; c < p.job->value_dim; c += 32) {
        int64_t g = 0;
        for (; g + SOME <= p.group; g += SOME) add_outputs<CODES, SOME>(p, room, rows, head, c, g, count);
        if (p.group - g >= 4) add_outputs<CODES, 4>(p, room, rows, head, c, g, count), g += 4;
        for (; g < p.group; ++g) add_outputs<CODES, 1>(p, room, rows, head, c, g, count);
    }
}

template <bool CODES> void begin_one(const Part &p, int64_t head, State *state) {
    const ptq_prefill *j = p.job;
    if (CODES) read_codes(j, j->key_table, head, &state->key_codes), read_codes(j, j->value_table, head, &state->value_codes);
    for (int64_t g = 0; g < MOST_GROUP; ++g) {
        const int64_t h = head * p.group + at_most(g, p.group - 1);
        state->best[g] = j->sinks ? j->sinks[h] * LOG2_E : -INFINITY;
        state->sum[g] = j->sinks ? 1.0f : 0.0f;
        if (g >= p.group) continue;
        const uint16_t *q = j->q + p.row * j->q_token + h * j->q_head;
        for (int64_t c = 0; c < p.key_step; c += LANES)
            _mm512_store_si512(state->q + g * p.key_step + c, _mm512_maskz_loadu_epi16(first_of_32(j->key_dim - 2 * c), q + 2 * c));
        for (int64_t i = 0; i < out_step(p); ++i) state->out[g * out_step(p) + i] = _mm512_setzero_ps();
    }
}

void finish_one(const Part &p, int64_t head, const State &state) {
    const ptq_prefill *j = p.job;
    alignas(64) uint16_t places[32];  // of dimensions among low and high
    for (int d = 0; d < 32; ++d) places[d] = (uint16_t)(d / 8 * 4 + d % 4 + d % 8 / 4 * 16);
    const __m512i order = _mm512_load_si512(places);
    for (int64_t g = 0; g < p.group; ++g) {
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(state.sum[g]));
        const __m512 *out = state.out + g * out_step(p);
        uint16_t *to = j->out + (p.row * j->heads + head * p.group + g) * j->value_dim;
        for (int64_t c = 0; c < j->value_dim; c += 32, out += 2) {
            const __m512i y = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(out[1], share), _mm512_mul_ps(out[0], share));
            _mm512_mask_storeu_epi16(to + c, first_of_32(j->value_dim - c), _mm512_permutexvar_epi16(order, y));
        }
    }
}

// `heads` key-value heads from that of the part on.
template <bool CODES> void attend_one(const Part &p, int64_t heads) {
    const ptq_prefill *j = p.job;
    OneRoom *room = of_thread<OneRoom>();
    const int64_t size = CODES ? 1 : 2, key_bytes = heads * j->key_dim * size, value_bytes = heads * j->value_dim * size;
    for (int64_t h = 0; h < heads; ++h) begin_one<CODES>(p, p.head + h, room->states + h);
    for (int64_t g = 0; g < MOST_GROUP; ++g) room->shift[g] = 0.0f;
    const int64_t seen = p.place - p.window() + 1, start = seen > 0 ? seen / TILE * TILE : 0;
    find_rows(p, room->rows, start);
    for (int64_t first = start, turn = 0; first < p.end; first += TILE, turn = 1 - turn) {
        const Rows &rows = room->rows[turn], &next = room->rows[1 - turn];
        find_rows(p, room->rows + 1 - turn, first + TILE);
        const int64_t count = at_most((p.end - first + STEP - 1) / STEP * STEP, TILE);
        touch(j->keys, next.keys, size, j->kv_heads * j->key_dim * size);
        touch(j->values, next.values, size, j->kv_heads * j->value_dim * size);
        pull(j->keys, next.keys, size, key_bytes);
        pull(j->values, next.values, size, value_bytes);
        for (int64_t h = 0; h < heads; ++h) {
            all_scores<CODES>(p, room, rows, h);
            all_best(p, room, rows, room->states + h);
            all_weights(p, room, room->states + h, count);
            all_outputs<CODES>(p, room, rows, h, count);
        }
    }
    for (int64_t h = 0; h < heads; ++h) finish_one(p, p.head + h, room->states[h]);
}
