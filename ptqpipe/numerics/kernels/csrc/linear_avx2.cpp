// x times a packed weight on AVX2 with FMA, from one row of x to many. The weight's bytes lie in panels (see api.h), so
// that each of 16 float lanes is a row of it.
//
// E2M1 is multiplied in integers. 16 columns of x become whole numbers of 16 bits over one power of two, so that a number
// of x is exact unless it is less than 1/128 of the largest of its 16, and is at most 2^-15 of that largest off. They meet
// 512 times what the codes stand for. The sum of these 16 columns is exact, and is added to the sum of the row times the
// scales of both, by FMA, in the order of columns.
//
// The other codes become floats: products and sums are FMA in the order of columns inside a block (32 columns of E8M0
// scales, 64 else), whose sum is added to the sum of the row times its scale.
//
// So the order of a sum depends on K alone: neither threads nor other rows of x change a bit of a row's result.
#include "system.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace {

enum { NUMBER_BITS = 15, WEIGHT_BITS = 9 };
#include "linear_lanes.h"

enum { HALVES = 2, AHEAD = 4096 };  // bytes of a weight that are asked for before they are read
enum { FLOAT_ROWS = 6 };            // of x that meet a panel together: as many as the registers hold

// ---- scales ----

// Byte i of every dword, a code of E4M3 that is not NaN (which would be 480), as a float.
INLINE __m256 e4m3(__m256i v, int i) {
    const __m256i top = _mm256_slli_epi32(v, 24 - 8 * i);
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(top, 4), _mm256_set1_epi32((int)0x87F00000));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

// Byte i of every dword, 0 or 1, a code of E8M0 that is not NaN (which would be infinity), as a float.
INLINE __m256 e8m0(__m256i v, int i) {
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi32(v, 23 - 8 * i), _mm256_set1_epi32(0x7F800000));
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000)));
}

// Half h of the dword of scales that a unit of the panel at `row` begins with.
template <int SCALE> INLINE __m256i scale_bytes(const ptq_linear *j, int64_t row, int64_t unit, int h) {
    const int64_t dword = SCALE == PTQ_BLOCK_E8M0 ? unit / 2 : unit;
    return _mm256_loadu_si256((const __m256i *)((const uint8_t *)j->scales + row * j->scale_stride + 64 * dword + 32 * h));
}

// ---- sums to bfloat16 ----

// The sums of a panel's rows, NaN where a dword of `bad` is not zero.
INLINE void spoil(__m256 *sums, const __m256i *bad) {
    UNROLL for (int h = 0; h < HALVES; ++h) {
        const __m256i sound = _mm256_cmpeq_epi32(bad[h], _mm256_setzero_si256());
        sums[h] = _mm256_blendv_ps(_mm256_set1_ps(__builtin_nanf("")), sums[h], _mm256_castsi256_ps(sound));
    }
}

// 8 numbers as bfloat16, a dword each, rounded as to_bf16 does.
INLINE __m256i rounded(__m256 v) {
    const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(u, _mm256_set1_epi32(0x400000)));
    const __m256 either = _mm256_blendv_ps(_mm256_castsi256_ps(up), quiet, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_castps_si256(either), 16);
}

INLINE void write(const ptq_linear *j, const __m256 *sums, int64_t m, int64_t row, int64_t last) {
    __m256 v[HALVES] = {sums[0], sums[1]};
    if (last - row < LANES) {
        alignas(32) float y[LANES];
        for (int h = 0; h < HALVES; ++h) _mm256_store_ps(y + 8 * h, v[h]);
        return write_lanes(j, y, m, row, last);
    }
    UNROLL for (int h = 0; h < HALVES; ++h) {
        if (j->factor) v[h] = _mm256_mul_ps(v[h], j->factor_step ? _mm256_loadu_ps(j->factor + row + 8 * h) : _mm256_set1_ps(*j->factor));
        if (j->bias) v[h] = _mm256_add_ps(v[h], _mm256_loadu_ps(j->bias + row + 8 * h));
    }
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(v[0]), rounded(v[1])), 0xD8);
    _mm256_storeu_si256((__m256i *)(j->out + m * j->n + row), words);
}

// ---- E2M1 ----

#include "linear_avx2_codes.h"

// ---- the other codes ----

template <int ELEMENT> struct Shape {
    enum { SIX = ELEMENT == PTQ_E2M3 || ELEMENT == PTQ_E3M2, DWORDS = ELEMENT == PTQ_BF16_ELEMENT ? 32 : SIX ? 12 : 16 };
    enum { STEP = ELEMENT == PTQ_BF16_ELEMENT ? 2 : SIX ? 16 : 4, STEP_DWORDS = SIX ? 3 : 1 };  // columns that whole dwords hold
};

// Column c of a step whose dwords are `v`, 64 bytes apart.
template <int ELEMENT> INLINE __m256 column(const uint8_t *v, int c) {
    const __m256i *d = (const __m256i *)v;
    if (ELEMENT == PTQ_BF16_ELEMENT) {
        const __m256i pair = _mm256_loadu_si256(d);
        return _mm256_castsi256_ps(c ? _mm256_and_si256(pair, _mm256_set1_epi32((int)0xFFFF0000)) : _mm256_slli_epi32(pair, 16));
    }
    if (ELEMENT == PTQ_E4M3) return e4m3(_mm256_loadu_si256(d), c);
    const int at = 6 * c / 32, down = 6 * c % 32;
    __m256i code = _mm256_srli_epi32(_mm256_loadu_si256(d + 2 * at), down);
    if (down > 26) code = _mm256_or_si256(code, _mm256_slli_epi32(_mm256_loadu_si256(d + 2 * at + 2), 32 - down));
    const int up = ELEMENT == PTQ_E2M3 ? 20 : 21;
    const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(31)), up);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(32)), 26);
    const __m256 scale = _mm256_set1_ps(ELEMENT == PTQ_E2M3 ? 0x1p126f : 0x1p124f);
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(magnitude, sign)), scale);
}

// A code that is NaN, which makes every sum of its row NaN, is noted in passing: a byte of `bad`.
template <int ELEMENT> INLINE void note_nan(const uint8_t *v, __m256i *bad) {
    const __m256i nan = _mm256_set1_epi8(127), codes = _mm256_loadu_si256((const __m256i *)v);
    if (ELEMENT == PTQ_E4M3) *bad = _mm256_or_si256(*bad, _mm256_cmpeq_epi8(_mm256_and_si256(codes, nan), nan));
}

template <int ELEMENT, int SCALE, int T>
void floats_tile(const ptq_linear *j, const void *prepared, int64_t row, int64_t last, int64_t m0) {
    typedef Shape<ELEMENT> S;
    enum { BLOCKS = SCALE == PTQ_BLOCK_E8M0 ? 2 : 1, STEPS = UNIT / S::STEP / BLOCKS };
    enum { EARLY = ELEMENT == PTQ_BF16_ELEMENT && T == 1 ? 2 * AHEAD : AHEAD };  // what decodes nothing reads twice as fast
    const int64_t units = units_of(j), stride = units * UNIT;
    const uint8_t *d = j->data + row * j->data_stride;
    const float *x = (const float *)prepared + m0 * stride;
    __m256i bad[HALVES] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256 sums[T][HALVES];
    UNROLL for (int t = 0; t < T; ++t) UNROLL for (int h = 0; h < HALVES; ++h) sums[t][h] = _mm256_setzero_ps();
    for (int64_t unit = 0; unit < units; ++unit) {
        for (int b = 0; b < BLOCKS; ++b) {
            __m256 part[T][HALVES];
            UNROLL for (int t = 0; t < T; ++t) UNROLL for (int h = 0; h < HALVES; ++h) part[t][h] = _mm256_setzero_ps();
            for (int q = 0; q < STEPS; ++q, d += 64 * S::STEP_DWORDS, x += S::STEP) {
                UNROLL for (int i = 0; i < S::STEP_DWORDS; ++i) _mm_prefetch((const char *)(d + EARLY + 64 * i), _MM_HINT_T0);
                UNROLL for (int h = 0; h < HALVES; ++h) note_nan<ELEMENT>(d + 32 * h, bad + h);
                UNROLL for (int c = 0; c < S::STEP; ++c) {
                    const __m256 w[HALVES] = {column<ELEMENT>(d, c), column<ELEMENT>(d + 32, c)};
                    UNROLL for (int t = 0; t < T; ++t) {
                        const __m256 v = _mm256_broadcast_ss(x + t * stride + c);
                        UNROLL for (int h = 0; h < HALVES; ++h) part[t][h] = _mm256_fmadd_ps(w[h], v, part[t][h]);
                    }
                }
            }
            UNROLL for (int h = 0; h < HALVES; ++h) {
                __m256 s = _mm256_set1_ps(1.0f);
                if (SCALE == PTQ_BLOCK_E8M0) {
                    const __m256i v = scale_bytes<SCALE>(j, row, unit, h);
                    bad[h] = _mm256_or_si256(bad[h], _mm256_cmpeq_epi8(v, _mm256_set1_epi8(-1)));
                    s = e8m0(_mm256_srl_epi32(v, _mm_cvtsi32_si128((int)(unit % 2) * 16)), b);
                }
                if (SCALE == PTQ_BLOCK_FLOAT)
                    s = _mm256_set1_ps(((const float *)j->scales)[row / j->scale_rows * j->scale_stride + unit / 2]);
                UNROLL for (int t = 0; t < T; ++t)
                    sums[t][h] = SCALE == PTQ_NO_SCALES ? _mm256_add_ps(part[t][h], sums[t][h]) : _mm256_fmadd_ps(part[t][h], s, sums[t][h]);
            }
        }
    }
    UNROLL for (int t = 0; t < T; ++t) {
        if (ELEMENT == PTQ_E4M3 || SCALE == PTQ_BLOCK_E8M0) spoil(sums[t], bad);
        write(j, sums[t], m0 + t, row, last);
    }
}

// ---- every row of x, in tiles as equal as they can be ----

template <int ELEMENT, int SCALE> struct Numbers {
    enum { MOST = FLOAT_ROWS };
    template <int T> static void tile(const ptq_linear *j, const void *x, int64_t row, int64_t last, int64_t m0) {
        floats_tile<ELEMENT, SCALE, T>(j, x, row, last, m0);
    }
};

void rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    void (*one)(const ptq_linear *, const void *, int64_t, int64_t) = nullptr;
    if (j->element == PTQ_E2M1)
        return (j->scale_kind == PTQ_BLOCK_E4M3 ? codes_rows<PTQ_BLOCK_E4M3> : codes_rows<PTQ_BLOCK_E8M0>)(j, x, first, last);
    if (j->element == PTQ_BF16_ELEMENT) one = panel<Numbers<PTQ_BF16_ELEMENT, PTQ_NO_SCALES>>;
    else if (j->element == PTQ_E2M3) one = panel<Numbers<PTQ_E2M3, PTQ_BLOCK_E8M0>>;
    else if (j->element == PTQ_E3M2) one = panel<Numbers<PTQ_E3M2, PTQ_BLOCK_E8M0>>;
    else if (j->scale_kind == PTQ_NO_SCALES) one = panel<Numbers<PTQ_E4M3, PTQ_NO_SCALES>>;
    else if (j->scale_kind == PTQ_BLOCK_E8M0) one = panel<Numbers<PTQ_E4M3, PTQ_BLOCK_E8M0>>;
    else one = panel<Numbers<PTQ_E4M3, PTQ_BLOCK_FLOAT>>;
    for (int64_t row = first; row < last; row += LANES) one(j, x, row, last);
}

}  // namespace

extern "C" const struct ptq_linear_ops ptq_linear_avx2 = {bytes, prepare, rows, nullptr};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
