// Few rows of x times a packed weight on AVX-512 with BF16 and VBMI: codes become bfloat16 by permutes of a register.
//
// A chunk is 64 columns. Two registers of 32 bfloat16 weights meet two of x, which is laid out to match; VDPBF16PS leaves
// 16 float lanes of four columns each, so a block of 16 is one 128-bit lane, and the scales of a chunk are one multiply.
#include "system.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#endif

namespace {

#define INLINE static inline __attribute__((always_inline))

#define UNROLL _Pragma("GCC unroll 16")  // sums live in registers only if no loop is left around them

// Codes are asked for AHEAD bytes before they are needed: rows are short, and two are read at once, so the hardware's own
// prefetch does not keep up. Weights that are in no cache take a quarter of the time; 4096 does less well.
enum { CHUNK = 64, AHEAD = 8192 };

// bfloat16 of the codes of E2M1, twice: a word may carry the next code's lowest bit in bit 4.
alignas(64) const uint16_t e2m1_words[32] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0,
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

struct Bytes {
    alignas(64) uint8_t low[128], high[128];
};

constexpr Bytes make_bytes() {  // bfloat16 of the magnitudes of E4M3
    Bytes b{};
    for (int code = 0; code < 128; ++code) {
        int e = code >> 3, m = code & 7, word = 0;
        if (code == 127) {
            word = 0x7FC0;
        } else if (code) {
            if (!e) {  // m * 2^-9 with the leading bit moved into the exponent
                for (e = 1; !(m & 8); m <<= 1) --e;
                m &= 7;
            }
            word = (e + 120) << 7 | m << 4;
        }
        b.low[code] = (uint8_t)word;
        b.high[code] = (uint8_t)(word >> 8);
    }
    return b;
}
constexpr Bytes e4m3_bytes = make_bytes();

struct Tables {
    __m512i words, low[2], high[2], spread;
};

struct Weights {
    __m512bh a, b;
};

template <int ELEMENT> INLINE Weights decode(const uint8_t *p, __mmask64 mask, const Tables &t) {
    if (ELEMENT == PTQ_E2M1) {
        const __m512i w = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8((__mmask32)mask, p));
        return {(__m512bh)_mm512_permutexvar_epi16(w, t.words),
                (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), t.words)};
    }
    const __m512i codes = _mm512_maskz_loadu_epi8(mask, p);
    const __m512i low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8((char)0x80), 0xF8);
    return {(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
}

// Where decode() puts the columns of a chunk: the i-th number of register a (then b) is column `column_of`.
INLINE int column_of(int32_t element, int i) {
    const int second = i >= 32, k = i & 31;
    return element == PTQ_E2M1 ? 2 * k + second : k / 8 * 16 + 8 * second + k % 8;
}

// The scales of a chunk, one a float lane. `packed` holds its bytes.
template <int SCALE> INLINE __m512 scales_of(uint32_t packed, const Tables &t) {
    const __m512i at_16 = _mm512_shuffle_epi8(_mm512_set1_epi32((int32_t)packed), t.spread);
    if (SCALE == PTQ_BLOCK_E4M3)  // the bits of a float of 2^-120 times the value
        return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(at_16, 4)), _mm512_set1_ps(0x1p120f));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(at_16, 7), _mm512_set1_epi32(0x00400000)));
}

template <int SCALE> INLINE uint32_t packed_scales(const ptq_linear *j, int64_t row, int64_t c) {
    const int n = SCALE == PTQ_BLOCK_E4M3 ? 4 : 2;
    const int64_t count = SCALE == PTQ_BLOCK_E4M3 ? j->k / 16 : j->k / 32, left = count - c * n;
    const uint8_t *p = (const uint8_t *)j->scales + row * j->scale_stride + c * n;
    uint32_t packed = 0;
    if (left < n) {
        memcpy(&packed, p, (size_t)left);
    } else if (n == 4) {
        memcpy(&packed, p, 4);
    } else {  // through a word of its size: two bytes stored and four loaded again would wait for each other
        uint16_t two;
        memcpy(&two, p, 2);
        packed = two;
    }
    return packed;
}

Tables make_tables(int32_t scale_kind) {
    Tables t;
    t.words = _mm512_load_si512(e2m1_words);
    for (int i = 0; i < 2; ++i) {
        t.low[i] = _mm512_load_si512(e4m3_bytes.low + 64 * i);
        t.high[i] = _mm512_load_si512(e4m3_bytes.high + 64 * i);
    }
    alignas(64) uint8_t spread[64];  // in byte 2 of every lane the scale of its block
    for (int i = 0; i < 64; ++i) {
        const int block = scale_kind == PTQ_BLOCK_E4M3 ? i / 16 : i / 32;
        spread[i] = i % 4 == 2 ? (uint8_t)block : 0x80;
    }
    t.spread = _mm512_load_si512(spread);
    return t;
}

INLINE uint16_t to_bf16(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// ROWS rows of the weight and TILE rows of x, whose registers serve all of those. The order of every sum is the same
// whatever these two are.
template <int ELEMENT, int SCALE, int ROWS, int TILE>
void tile(const ptq_linear *j, const uint16_t *x, int64_t row, int64_t m0, const Tables &t) {
    const int64_t chunks = (j->k + CHUNK - 1) / CHUNK, stride = chunks * CHUNK;
    const int bytes = ELEMENT == PTQ_E2M1 ? CHUNK / 2 : CHUNK;
    const int64_t row_bytes = ELEMENT == PTQ_E2M1 ? j->k / 2 : j->k;
    const uint8_t *codes = j->data + row * j->data_stride;
    __m512 sums[ROWS][TILE], more[ROWS][TILE];
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int i = 0; i < TILE; ++i) sums[r][i] = more[r][i] = _mm512_setzero_ps();
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t left = row_bytes - c * bytes;
        const __mmask64 mask = left >= bytes ? ~0ull : (1ull << left) - 1;
        Weights w[ROWS];
        __m512 s[ROWS];
        UNROLL for (int r = 0; r < ROWS; ++r) {
            if (bytes == 64 || !(c & 1)) _mm_prefetch((const char *)(codes + r * j->data_stride + c * bytes + AHEAD), _MM_HINT_T0);
            w[r] = decode<ELEMENT>(codes + r * j->data_stride + c * bytes, mask, t);
            if (SCALE == PTQ_BLOCK_FLOAT)
                s[r] = _mm512_set1_ps(((const float *)j->scales)[(row + r) / j->scale_rows * j->scale_stride + c / 2]);
            else if (SCALE != PTQ_NO_SCALES)
                s[r] = scales_of<SCALE>(packed_scales<SCALE>(j, row + r, c), t);
        }
        UNROLL for (int i = 0; i < TILE; ++i) {
            const uint16_t *p = x + (m0 + i) * stride + c * CHUNK;
            const __m512bh xa = (__m512bh)_mm512_load_si512(p), xb = (__m512bh)_mm512_load_si512(p + 32);
            UNROLL for (int r = 0; r < ROWS; ++r) {
                if (SCALE == PTQ_NO_SCALES) {
                    sums[r][i] = _mm512_dpbf16_ps(sums[r][i], w[r].a, xa);
                    more[r][i] = _mm512_dpbf16_ps(more[r][i], w[r].b, xb);
                } else {
                    const __m512 half = _mm512_dpbf16_ps(_mm512_setzero_ps(), w[r].a, xa);
                    sums[r][i] = _mm512_fmadd_ps(_mm512_dpbf16_ps(half, w[r].b, xb), s[r], sums[r][i]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int i = 0; i < TILE; ++i) {
            const __m512 sum = SCALE == PTQ_NO_SCALES ? _mm512_add_ps(sums[r][i], more[r][i]) : sums[r][i];
            float y = _mm512_reduce_add_ps(sum);
            if (j->factor) y *= j->factor[(row + r) * j->factor_step];
            if (j->bias) y += j->bias[row + r];
            j->out[(m0 + i) * j->n + row + r] = to_bf16(y);
        }
}

template <int ELEMENT, int SCALE, int ROWS, int TILE>
void tiles(const ptq_linear *j, const uint16_t *x, int64_t first, int64_t last, int64_t m, const Tables &t) {
    int64_t row = first;
    for (; row + ROWS <= last; row += ROWS) tile<ELEMENT, SCALE, ROWS, TILE>(j, x, row, m, t);
    for (; row < last; ++row) tile<ELEMENT, SCALE, 1, TILE>(j, x, row, m, t);
}

template <int ELEMENT, int SCALE> void some_rows(const ptq_linear *j, const uint16_t *x, int64_t first, int64_t last) {
    const Tables t = make_tables(j->scale_kind);
    const int wide = SCALE == PTQ_NO_SCALES ? 1 : 2;  // two sums each without scales: the registers are as many
    for (int64_t m = 0; m < j->m;) {  // x outside: a tile of it stays in the nearest caches
        const int64_t left = j->m - m;
        if (left >= 8) tiles<ELEMENT, SCALE, wide, 8>(j, x, first, last, m, t), m += 8;
        else if (left >= 4) tiles<ELEMENT, SCALE, 2 * wide, 4>(j, x, first, last, m, t), m += 4;
        else if (left >= 2) tiles<ELEMENT, SCALE, 2 * wide, 2>(j, x, first, last, m, t), m += 2;
        else tiles<ELEMENT, SCALE, 2, 1>(j, x, first, last, m, t), m += 1;
    }
}

int64_t bytes(const ptq_linear *j) { return j->m * ((j->k + CHUNK - 1) / CHUNK * CHUNK) * 2; }

void prepare(const ptq_linear *j, void *out) {
    const int64_t chunks = (j->k + CHUNK - 1) / CHUNK;
    uint16_t *to = (uint16_t *)out;
    int order[CHUNK];
    for (int i = 0; i < CHUNK; ++i) order[i] = column_of(j->element, i);
    for (int64_t m = 0; m < j->m; ++m)
        for (int64_t c = 0; c < chunks; ++c, to += CHUNK) {
            const uint16_t *from = j->x + m * j->k + c * CHUNK;
            const int64_t left = j->k - c * CHUNK;
            for (int i = 0; i < CHUNK; ++i) to[i] = order[i] < left ? from[order[i]] : 0;
        }
}

void rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    const uint16_t *p = (const uint16_t *)x;
    if (j->element == PTQ_E2M1) {
        if (j->scale_kind == PTQ_BLOCK_E4M3) some_rows<PTQ_E2M1, PTQ_BLOCK_E4M3>(j, p, first, last);
        else if (j->scale_kind == PTQ_BLOCK_E8M0) some_rows<PTQ_E2M1, PTQ_BLOCK_E8M0>(j, p, first, last);
        return;
    }
    if (j->scale_kind == PTQ_NO_SCALES) some_rows<PTQ_E4M3, PTQ_NO_SCALES>(j, p, first, last);
    else if (j->scale_kind == PTQ_BLOCK_E8M0) some_rows<PTQ_E4M3, PTQ_BLOCK_E8M0>(j, p, first, last);
    else some_rows<PTQ_E4M3, PTQ_BLOCK_FLOAT>(j, p, first, last);
}

// ---- rows as bfloat16 numbers, for a library's product ----

INLINE float scale_at(const ptq_linear *j, int64_t row, int64_t column) {
    const int64_t at = row / j->scale_rows * j->scale_stride;
    uint32_t u;
    if (j->scale_kind == PTQ_NO_SCALES) return 1.0f;
    if (j->scale_kind == PTQ_BLOCK_FLOAT) return ((const float *)j->scales)[at + column / 128];
    if (j->scale_kind == PTQ_BLOCK_E4M3) {
        const uint8_t code = ((const uint8_t *)j->scales)[at + column / 16];
        u = (uint32_t)e4m3_bytes.high[code & 127] << 24 | (uint32_t)e4m3_bytes.low[code & 127] << 16;
    } else {
        const uint32_t e = ((const uint8_t *)j->scales)[at + column / 32];
        u = e == 255 ? 0x7FC00000u : e ? e << 23 : 0x00400000u;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// 16 codes from column `column` as floats.
template <int ELEMENT> INLINE __m512 floats_of(const uint8_t *codes, int64_t column, __m512i nibbles, __m512 values) {
    if (ELEMENT == PTQ_E2M1) {
        uint64_t q;
        memcpy(&q, codes + column / 2, 8);
        return _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(nibbles, _mm512_set1_epi64((int64_t)q)), values);
    }
    // A float of 2^-120 times the magnitude, made whole by a multiplication; its largest is the code of NaN.
    const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + column)));
    const __m512i magnitude = _mm512_and_si512(c, _mm512_set1_epi32(127));
    const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(c, magnitude), 24);
    const __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(127));
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(v), nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
}

template <int ELEMENT> void unpack_row(const ptq_linear *j, int64_t row, uint16_t *out) {
    alignas(64) static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    alignas(64) uint8_t shifts[64];
    for (int i = 0; i < 64; ++i) shifts[i] = (uint8_t)(i / 4 * 4);
    const __m512i nibbles = _mm512_load_si512(shifts);
    const __m512 values = _mm512_load_ps(e2m1);
    const uint8_t *codes = j->data + row * j->data_stride;
    int64_t k = 0;
    for (; k + 16 <= j->k; k += 16) {
        const __m512 w = floats_of<ELEMENT>(codes, k, nibbles, values);
        const __m512 scaled = _mm512_mul_ps(w, _mm512_set1_ps(scale_at(j, row, k)));
        _mm256_storeu_si256((__m256i *)(out + k), (__m256i)_mm512_cvtneps_pbh(scaled));
    }
    for (; k < j->k; ++k) {  // rows of FP8 need not be whole blocks
        const uint8_t code = codes[k];
        uint32_t u = (uint32_t)e4m3_bytes.high[code & 127] << 24 | (uint32_t)e4m3_bytes.low[code & 127] << 16 |
                     (uint32_t)(code & 128) << 24;
        float f;
        memcpy(&f, &u, 4);
        out[k] = to_bf16(f * scale_at(j, row, k));
    }
}

void unpack(const ptq_linear *j, int64_t first, int64_t last, uint16_t *out) {
    for (int64_t row = first; row < last; ++row, out += j->k) {
        if (j->element == PTQ_E2M1) unpack_row<PTQ_E2M1>(j, row, out);
        else unpack_row<PTQ_E4M3>(j, row, out);
    }
}

}  // namespace

extern "C" const struct ptq_linear_ops ptq_linear_bf16 = {bytes, prepare, rows, unpack};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
