// What the kernels of attention_bf16.cpp work on: a part of the queries with its room, and helpers on vectors.

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
