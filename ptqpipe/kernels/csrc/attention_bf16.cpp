// Causal attention over pages of bfloat16 numbers or E4M3 codes, on AVX-512 with BF16: of many queries a sequence here, the
// prefill step of the engine; of one in attention_one.h.
//
// The queries of all heads that share keys are rows, 16 to a vector, so that a softmax needs no sum over lanes. Keys come
// in tiles of TILE tokens that begin at multiples of TILE in their sequence: VDPBF16PS makes their scores from pairs of
// dimensions, and the output from pairs of keys, with weights rounded to bfloat16 below a running maximum. The sum of the
// weights is that of the rounded ones. The order of a query's sums depends on its place in its sequence alone.
#include "system.h"

#include "pool.h"

// Mirrored by cpu_attention.py. Pages are [blocks, block_size, kv_heads, dim], dense.
struct ptq_prefill {
    const uint16_t *q;                       // [rows, heads, key_dim], tokens and heads q_token and q_head numbers apart
    const void *keys, *values;               // bfloat16, or codes
    const float *key_table, *value_table;    // the bfloat16 number of each code, [table_heads, 256], or null
    const int64_t *tables;                   // [spans, table_stride] numbers of blocks
    const int64_t *starts, *totals;          // [spans + 1] first rows, [spans] tokens: the rows are the last of them
    const float *sinks;                      // [heads], or null
    uint16_t *out;                           // [rows, heads, value_dim], dense
    int64_t spans, heads, kv_heads, key_dim, value_dim, block_size, table_stride, q_token, q_head;
    int64_t table_heads;
    int64_t window;                          // tokens that are seen, 0: all
    int64_t threads;
    float scaling, softcap;                  // softcap 0: none
};

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

namespace {

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")  // sums live in registers only if no loop is left around them

// STEP keys or dimensions times WIDE vectors of rows: as many sums as hide the latency of VDPBF16PS.
enum { LANES = 16, WIDE = 2, STEP = 8, TILE = 64, MOST_ROWS = 256, LEAST_ROWS = 64, MOST_DIM = 512 };
enum { NO_WINDOW = 1 << 30 };
const float LOG2_E = 1.44269504f;

// The numbers of codes without their signs, which stand for the same numbers with them.
struct Codes {
    __m512i words[4];
};

INLINE void read_codes(const ptq_prefill *j, const float *table, int64_t head, Codes *codes) {
    alignas(64) uint16_t words[128];
    const float *numbers = table + (j->table_heads > 1 ? head : 0) * 256;
    for (int i = 0; i < 128; ++i) {
        uint32_t u;
        memcpy(&u, numbers + i, 4);
        words[i] = (uint16_t)(u >> 16);
    }
    for (int i = 0; i < 4; ++i) codes->words[i] = _mm512_load_si512(words + 32 * i);
}

// 32 bfloat16 numbers from element `at` of pages on, zeros where the mask says so.
template <bool CODES> INLINE __m512i numbers_at(const void *pages, int64_t at, __mmask32 mask, const Codes &codes) {
    if (!CODES) return _mm512_maskz_loadu_epi16(mask, (const uint16_t *)pages + at);
    const __m512i c = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, (const uint8_t *)pages + at));
    const __m512i small = _mm512_permutex2var_epi16(codes.words[0], c, codes.words[1]);
    const __m512i large = _mm512_permutex2var_epi16(codes.words[2], c, codes.words[3]);
    const __m512i v = _mm512_mask_mov_epi16(small, _mm512_test_epi16_mask(c, _mm512_set1_epi16(64)), large);
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(c, 7), 15);
    return _mm512_mask_mov_epi16(_mm512_setzero_si512(), mask, _mm512_or_si512(v, sign));
}

// What a thread works in. Per block of WIDE vectors of rows: its queries, outputs and states.
struct Room {
    __m512i q[MOST_ROWS / LANES][MOST_DIM / 2];   // [block][pair][vector]
    __m512 out[MOST_ROWS / LANES][MOST_DIM];      // [block][dimension][vector]
    __m512 best[MOST_ROWS / LANES], sum[MOST_ROWS / LANES];
    alignas(64) int32_t places[MOST_ROWS];        // of the rows' tokens in their sequence
    alignas(64) uint32_t keys[TILE * MOST_DIM / 2];    // pairs of dimensions, [key][pair]
    alignas(64) uint32_t values[TILE / 2 * MOST_DIM];  // pairs of keys, [pair][dimension]
    __m512 scores[TILE * WIDE];                   // [key][vector]
    __m512i weights[TILE / 2 * WIDE];             // pairs of keys, [pair][vector]
    Codes key_codes, value_codes;
    bool damaged;                                 // a value of the tile is infinite or NaN
};

// Some queries of a sequence with all heads of one key-value head.
struct Part {
    const ptq_prefill *job;
    const int64_t *blocks;
    int64_t head, row, place, count, end;  // first query: its row and its place; how many; the sequence's tokens
    int64_t group, pairs, key_step, value_step;

    Part(const ptq_prefill *j, int64_t span, int64_t h, int64_t first, int64_t most) : job(j), head(h) {
        const int64_t queries = j->starts[span + 1] - j->starts[span];
        blocks = j->tables + span * j->table_stride;
        row = j->starts[span] + first;
        place = j->totals[span] - queries + first;
        count = queries - first < most ? queries - first : most;
        end = place + count;
        group = j->heads / j->kv_heads;
        pairs = (j->key_dim + 1) / 2;
        key_step = (pairs + LANES - 1) / LANES * LANES;
        value_step = (j->value_dim + LANES - 1) / LANES * LANES;
    }

    int64_t rows() const { return count * group; }
    int64_t vectors() const { return (rows() + LANES - 1) / LANES; }
    int64_t window() const { return job->window ? job->window : (int64_t)NO_WINDOW; }
};

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE __mmask32 first_of_32(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }

// 2^x within 2.9e-6 of itself, 1 for 0; 0 below 2^-200. Its error is lost in the rounding to bfloat16.
INLINE __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // the second if it is a NaN
    const __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(0.00958285201f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0559064262f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240240991f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693124175f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// cap tanh(s / cap), by 1 - 2 / (1 + e^(2 s / cap)).
INLINE __m512 capped(__m512 s, float cap) {
    const __m512 x = _mm512_min_ps(_mm512_set1_ps(200.0f), _mm512_mul_ps(s, _mm512_set1_ps(2.0f * LOG2_E / cap)));
    const __m512 one = _mm512_set1_ps(1.0f), part = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(one, exp2_of(x)));
    return _mm512_mul_ps(_mm512_sub_ps(one, part), _mm512_set1_ps(cap));
}

// Two vectors as pairs of bfloat16 numbers, those of `a` in the lower halves.
INLINE __m512i pairs_of(__m512 a, __m512 b, __m512i order) {
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

INLINE __m512i order_of_pairs() {
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 32; ++i) order[i] = (uint16_t)(i / 2 + i % 2 * 16);
    return _mm512_load_si512(order);
}

// A square of dwords, mirrored.
INLINE void transpose(__m512i *m) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int k = 0; k < 2; ++k) {
            m[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + 2 + k]);
            m[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + 2 + k]);
        }
    UNROLL for (int i = 0; i < 4; ++i) {  // quarter q of m[4 b + i] is column 4 q + i of rows 4 b ..
        const __m512i a = _mm512_shuffle_i32x4(m[i], m[4 + i], 0x88), b = _mm512_shuffle_i32x4(m[i], m[4 + i], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(m[8 + i], m[12 + i], 0x88), d = _mm512_shuffle_i32x4(m[8 + i], m[12 + i], 0xDD);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xDD);
        t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
    UNROLL for (int i = 0; i < 16; ++i) m[i] = t[i];
}

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
