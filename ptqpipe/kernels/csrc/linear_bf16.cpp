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

enum { CHUNK = 64 };

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
    if (left >= n) memcpy(&packed, p, n);
    else memcpy(&packed, p, (size_t)left);
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

template <int ELEMENT, int SCALE, int TILE>
void tile(const ptq_linear *j, const uint16_t *x, int64_t row, int64_t m0, const Tables &t) {
    const int64_t chunks = (j->k + CHUNK - 1) / CHUNK, stride = chunks * CHUNK;
    const uint8_t *codes = j->data + row * j->data_stride;
    const int bytes = ELEMENT == PTQ_E2M1 ? CHUNK / 2 : CHUNK;
    const int64_t row_bytes = ELEMENT == PTQ_E2M1 ? j->k / 2 : j->k;
    const float *floats = (const float *)j->scales + row / j->scale_rows * j->scale_stride;
    __m512 sums[TILE], more[TILE];
    for (int i = 0; i < TILE; ++i) sums[i] = more[i] = _mm512_setzero_ps();
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t left = row_bytes - c * bytes;
        const __mmask64 mask = left >= bytes ? ~0ull : (1ull << left) - 1;
        const Weights w = decode<ELEMENT>(codes + c * bytes, mask, t);
        __m512 s = _mm512_setzero_ps();
        if (SCALE == PTQ_BLOCK_FLOAT) s = _mm512_set1_ps(floats[c / 2]);
        else if (SCALE != PTQ_NO_SCALES) s = scales_of<SCALE>(packed_scales<SCALE>(j, row, c), t);
        for (int i = 0; i < TILE; ++i) {
            const uint16_t *p = x + (m0 + i) * stride + c * CHUNK;
            const __m512bh xa = (__m512bh)_mm512_load_si512(p), xb = (__m512bh)_mm512_load_si512(p + 32);
            if (SCALE == PTQ_NO_SCALES) {
                sums[i] = _mm512_dpbf16_ps(sums[i], w.a, xa);
                more[i] = _mm512_dpbf16_ps(more[i], w.b, xb);
            } else {
                const __m512 products = _mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), w.a, xa), w.b, xb);
                sums[i] = _mm512_fmadd_ps(products, s, sums[i]);
            }
        }
    }
    for (int i = 0; i < TILE; ++i) {
        float y = _mm512_reduce_add_ps(SCALE == PTQ_NO_SCALES ? _mm512_add_ps(sums[i], more[i]) : sums[i]);
        if (j->factor) y *= j->factor[row * j->factor_step];
        if (j->bias) y += j->bias[row];
        j->out[(m0 + i) * j->n + row] = to_bf16(y);
    }
}

template <int ELEMENT, int SCALE> void some_rows(const ptq_linear *j, const uint16_t *x, int64_t first, int64_t last) {
    const Tables t = make_tables(j->scale_kind);
    for (int64_t m = 0; m < j->m;) {  // x outside: a tile of it stays in the first cache
        const int64_t left = j->m - m;
        const int size = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t row = first; row < last; ++row) {
            if (size == 8) tile<ELEMENT, SCALE, 8>(j, x, row, m, t);
            else if (size == 4) tile<ELEMENT, SCALE, 4>(j, x, row, m, t);
            else if (size == 2) tile<ELEMENT, SCALE, 2>(j, x, row, m, t);
            else tile<ELEMENT, SCALE, 1>(j, x, row, m, t);
        }
        m += size;
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

}  // namespace

extern "C" const struct ptq_linear_ops ptq_linear_bf16 = {bytes, prepare, rows};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
