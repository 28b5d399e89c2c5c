// Many queries of a sequence against tiles of its keys. Of attention_bf16.cpp, whose first lines say how.

// ---- in and out ----

// Vectors of the block that vector v is in.
INLINE int64_t width_of(const Part &p, int64_t v) { return at_most(p.vectors() - v / WIDE * WIDE, WIDE); }

template <bool CODES> void begin(const Part &p, Room *room) {
    const ptq_prefill *j = p.job;
    if (CODES) read_codes(j, j->key_table, p.head, &room->key_codes), read_codes(j, j->value_table, p.head, &room->value_codes);
    for (int64_t v = 0; v < p.vectors(); ++v) {
        const int64_t width = width_of(p, v), left = at_most(p.rows() - v * LANES, LANES);
        __m512i *to = room->q[v / WIDE * WIDE] + v % WIDE;
        for (int64_t c = 0; c < p.pairs; c += LANES) {
            __m512i m[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const int64_t r = v * LANES + i, token = p.row + r / p.group, head = p.head * p.group + r % p.group;
                const __mmask32 mask = i < left ? first_of_32(j->key_dim - 2 * c) : 0;
                m[i] = _mm512_maskz_loadu_epi16(mask, j->q + token * j->q_token + head * j->q_head + 2 * c);
            }
            transpose(m);
            for (int64_t i = 0; i < at_most(p.pairs - c, LANES); ++i) to[(c + i) * width] = m[i];
        }
        alignas(64) float best[LANES], sum[LANES];
        for (int64_t i = 0; i < LANES; ++i) {
            const int64_t r = at_most(v * LANES + i, p.rows() - 1);
            room->places[v * LANES + i] = (int32_t)(p.place + r / p.group);
            best[i] = j->sinks ? j->sinks[p.head * p.group + r % p.group] * LOG2_E : -INFINITY;
            sum[i] = j->sinks ? 1.0f : 0.0f;
        }
        room->best[v] = _mm512_load_ps(best);
        room->sum[v] = _mm512_load_ps(sum);
        for (int64_t d = 0; d < p.value_step; ++d) room->out[v / WIDE * WIDE][d * width + v % WIDE] = _mm512_setzero_ps();
    }
}

void finish(const Part &p, Room *room) {
    const ptq_prefill *j = p.job;
    const __m512i order = order_of_pairs();
    for (int64_t v = 0; v < p.vectors(); ++v) {
        const int64_t width = width_of(p, v), left = at_most(p.rows() - v * LANES, LANES);
        const __m512 *from = room->out[v / WIDE * WIDE] + v % WIDE;
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), room->sum[v]);
        for (int64_t c = 0; c < j->value_dim; c += 2 * LANES) {
            __m512i m[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const __m512 *x = from + at_most(c + 2 * i, p.value_step - 2) * width;
                m[i] = pairs_of(_mm512_mul_ps(x[0], share), _mm512_mul_ps(x[width], share), order);
            }
            transpose(m);
            for (int64_t i = 0; i < left; ++i) {
                const int64_t r = v * LANES + i, token = p.row + r / p.group, head = p.head * p.group + r % p.group;
                uint16_t *to = j->out + (token * j->heads + head) * j->value_dim + c;
                _mm512_mask_storeu_epi16(to, first_of_32(j->value_dim - c), m[i]);
            }
        }
    }
}

// Keys and values of the tile at `first`, zeros behind the last token.
template <bool CODES> void read_tile(const Part &p, Room *room, int64_t first) {
    const ptq_prefill *j = p.job;
    const int64_t count = at_most(p.end - first, TILE);
    int64_t slots[TILE + 1], block = first / j->block_size, at = first % j->block_size;
    for (int64_t t = 0; t < count; ++t) {
        slots[t] = (p.blocks[block] * j->block_size + at) * j->kv_heads + p.head;
        if (++at == j->block_size) at = 0, ++block;
    }
    for (int64_t t = 0; t < TILE; ++t)
        for (int64_t c = 0; c < p.key_step; c += LANES) {
            const __mmask32 mask = t < count ? first_of_32(j->key_dim - 2 * c) : 0;
            const int64_t at = (t < count ? slots[t] * j->key_dim : 0) + 2 * c;
            _mm512_store_si512(room->keys + t * p.key_step + c, numbers_at<CODES>(j->keys, at, mask, room->key_codes));
        }
    const __m512i top = _mm512_set1_epi16(0x7F80);
    __mmask32 damaged = 0;
    for (int64_t t = 0; t < TILE; t += 2)
        for (int64_t c = 0; c < p.value_step; c += LANES) {
            const __mmask32 mask = first_of_32(at_most(j->value_dim - c, LANES));
            __m512i pair[2] = {};
            for (int64_t i = 0; i < 2 && t + i < count; ++i) {
                const __m512i row = numbers_at<CODES>(j->values, slots[t + i] * j->value_dim + c, mask, room->value_codes);
                pair[i] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(row));
            }
            const __m512i v = _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16));
            damaged |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, top), top);
            _mm512_store_si512(room->values + t / 2 * p.value_step + c, v);
        }
    room->damaged = damaged != 0;
}

// ---- a tile of keys for a block of N vectors of rows ----

// Which rows see the token at `at`.
INLINE __mmask16 seeing(const int32_t *places, int64_t at, int64_t window) {
    const __m512i place = _mm512_load_si512(places), token = _mm512_set1_epi32((int32_t)at);
    const __m512i before = _mm512_sub_epi32(place, _mm512_set1_epi32((int32_t)at_most(window, NO_WINDOW)));
    return _mm512_cmple_epi32_mask(token, place) & _mm512_cmpgt_epi32_mask(token, before);
}

// Scores, in powers of two, of `count` keys from the tile's first on, which is at `first`; their largest to `top`.
template <int N, bool MASKED>
void scores_of(const Part &p, Room *room, int64_t v, int64_t first, int64_t count, __m512 *top) {
    const float cap = p.job->softcap, unit = cap > 0 ? LOG2_E : 1.0f;
    const __m512 scale = _mm512_set1_ps(cap > 0 ? p.job->scaling : p.job->scaling * LOG2_E);
    UNROLL for (int n = 0; n < N; ++n) top[n] = _mm512_set1_ps(-INFINITY);
    for (int64_t t0 = 0; t0 < count; t0 += STEP) {
        const __m512i *q = room->q[v];
        const uint32_t *k = room->keys + t0 * p.key_step, *far = k + 4 * p.key_step;
        const int64_t step = p.key_step;
        __m512 sums[STEP][N];
        UNROLL for (int t = 0; t < STEP; ++t) UNROLL for (int n = 0; n < N; ++n) sums[t][n] = _mm512_setzero_ps();
        for (int64_t i = 0; i < p.pairs; ++i, q += N, ++k, ++far)
            UNROLL for (int t = 0; t < STEP; ++t) {
                const __m512bh key = (__m512bh)_mm512_set1_epi32((int32_t)(t < 4 ? k[t * step] : far[(t - 4) * step]));
                UNROLL for (int n = 0; n < N; ++n) sums[t][n] = _mm512_dpbf16_ps(sums[t][n], (__m512bh)q[n], key);
            }
        UNROLL for (int t = 0; t < STEP; ++t)
            UNROLL for (int n = 0; n < N; ++n) {
                __m512 s = _mm512_mul_ps(sums[t][n], scale);
                if (cap > 0) s = _mm512_mul_ps(capped(s, cap), _mm512_set1_ps(unit));
                if (MASKED) {
                    const __mmask16 seen = seeing(room->places + (v + n) * LANES, first + t0 + t, p.window());
                    s = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, s);
                }
                room->scores[(t0 + t) * N + n] = s;
                top[n] = _mm512_max_ps(s, top[n]);  // the second if one is a NaN: it comes back in the weights
            }
    }
}

// Weights, beside the largest score so far; the factors by which earlier sums shrink.
template <int N> void weigh(Room *room, int64_t v, int64_t count, const __m512 *top, __m512 *factor) {
    const __m512i order = order_of_pairs();
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
    __m512 best[N], sum[N];
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512 old = room->best[v + n], now = _mm512_max_ps(top[n], old);
        room->best[v + n] = now;
        best[n] = _mm512_mask_mov_ps(now, _mm512_cmpeq_ps_mask(now, _mm512_set1_ps(-INFINITY)), _mm512_setzero_ps());
        factor[n] = exp2_of(_mm512_sub_ps(old, best[n]));
        sum[n] = _mm512_mul_ps(room->sum[v + n], factor[n]);
    }
    for (int64_t t = 0; t < count; t += 2)
        UNROLL for (int n = 0; n < N; ++n) {
            const __m512 a = exp2_of(_mm512_sub_ps(room->scores[t * N + n], best[n]));
            const __m512 b = exp2_of(_mm512_sub_ps(room->scores[(t + 1) * N + n], best[n]));
            const __m512i w = pairs_of(a, b, order);
            room->weights[t / 2 * N + n] = w;
            sum[n] = _mm512_dpbf16_ps(sum[n], (__m512bh)w, ones);
        }
    UNROLL for (int n = 0; n < N; ++n) room->sum[v + n] = sum[n];
}

template <int N> void add_values(const Part &p, Room *room, int64_t v, int64_t count, const __m512 *factor) {
    const int64_t step = p.value_step;
    for (int64_t d = 0; d < p.job->value_dim; d += STEP) {
        __m512 *out = room->out[v] + d * N, sums[STEP][N];
        const uint32_t *x = room->values + d;
        const __m512i *w = room->weights;
        UNROLL for (int t = 0; t < STEP; ++t)
            UNROLL for (int n = 0; n < N; ++n) sums[t][n] = _mm512_mul_ps(out[t * N + n], factor[n]);
        for (int64_t k = 0; k < count; k += 2, x += step, w += N)
            UNROLL for (int t = 0; t < STEP; ++t) {
                const __m512bh value = (__m512bh)_mm512_set1_epi32((int32_t)x[t]);
                UNROLL for (int n = 0; n < N; ++n) sums[t][n] = _mm512_dpbf16_ps(sums[t][n], (__m512bh)w[n], value);
            }
        UNROLL for (int t = 0; t < STEP; ++t) UNROLL for (int n = 0; n < N; ++n) out[t * N + n] = sums[t][n];
    }
}

// The same where a value is not finite: no weight, not even 0, times what a row does not see.
template <int N> void add_seen_values(const Part &p, Room *room, int64_t v, int64_t first, int64_t count, const __m512 *factor) {
    for (int64_t d = 0; d < p.job->value_dim; ++d)
        for (int n = 0; n < N; ++n) {
            const int32_t *places = room->places + (v + n) * LANES;
            __m512 sum = _mm512_mul_ps(room->out[v][d * N + n], factor[n]);
            for (int64_t k = 0; k < count; k += 2) {
                const uint32_t x = room->values[k / 2 * p.value_step + d];
                const __m512bh w = (__m512bh)room->weights[k / 2 * N + n];
                const __mmask16 low = seeing(places, first + k, p.window()), high = seeing(places, first + k + 1, p.window());
                sum = _mm512_mask_dpbf16_ps(sum, low & high, w, (__m512bh)_mm512_set1_epi32((int32_t)x));
                sum = _mm512_mask_dpbf16_ps(sum, low & ~high, w, (__m512bh)_mm512_set1_epi32((int32_t)(x & 0xFFFF)));
                sum = _mm512_mask_dpbf16_ps(sum, high & ~low, w, (__m512bh)_mm512_set1_epi32((int32_t)(x & 0xFFFF0000)));
            }
            room->out[v][d * N + n] = sum;
        }
}

template <int N> void tile(const Part &p, Room *room, int64_t v, int64_t first) {
    const int64_t low = room->places[v * LANES], high = room->places[(v + N) * LANES - 1];
    if (first > high || first + TILE - 1 <= low - p.window()) return;
    const int64_t count = at_most((high - first + STEP) / STEP * STEP, TILE);
    const bool masked = first + count - 1 > low || first <= high - p.window();
    __m512 top[N], factor[N];
    if (masked) scores_of<N, true>(p, room, v, first, count, top);
    else scores_of<N, false>(p, room, v, first, count, top);
    weigh<N>(room, v, count, top, factor);
    if (masked && room->damaged) add_seen_values<N>(p, room, v, first, count, factor);
    else add_values<N>(p, room, v, count, factor);
}

template <bool CODES> void attend(const Part &p) {
    Room *room = of_thread<Room>();
    begin<CODES>(p, room);
    const int64_t seen = p.place - p.window() + 1;
    for (int64_t first = seen > 0 ? seen / TILE * TILE : 0; first < p.end; first += TILE) {
        read_tile<CODES>(p, room, first);
        for (int64_t v = 0; v < p.vectors(); v += WIDE) {
            if (p.vectors() - v == 1) tile<1>(p, room, v, first);
            else tile<WIDE>(p, room, v, first);
        }
    }
    finish(p, room);
}
