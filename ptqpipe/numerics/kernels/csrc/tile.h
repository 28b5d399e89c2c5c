// A tile: W blocks side by side, lane = block, so that a block's sum needs no horizontal addition.
//
// load_tile turns W consecutive blocks of a row (each `block` elements, adjacent in memory) into x[k] = element k of
// every block. Included by body.h inside the per-ISA namespace.

enum { MAX_BLOCK = 256 };

INLINE float half_to_float(uint16_t h) {
    // Exact, subnormals included: (exponent, mantissa) of a half is a float times 2^-112.
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7FFF) << 13;
    union { uint32_t u; float f; } v, magic;
    if (rest >= 0x0F800000) {  // inf, NaN
        v.u = sign | 0x7F800000 | (rest & 0x007FFFFF);
        return v.f;
    }
    magic.u = (254 - 15) << 23;  // 2^112
    v.u = rest;
    v.f *= magic.f;
    v.u |= sign;
    return v.f;
}

template <int DTYPE> INLINE float load_one(const void *w, int64_t i) {
    if (DTYPE == PTQ_F32) return ((const float *)w)[i];
    if (DTYPE == PTQ_F16) return half_to_float(((const uint16_t *)w)[i]);
    union { uint32_t u; float f; } v;
    v.u = (uint32_t)((const uint16_t *)w)[i] << 16;
    return v.f;
}

INLINE int dtype_bytes(int dtype) { return dtype == PTQ_F32 ? 4 : 2; }

#if defined(PTQ_AVX512)

// out[j] lane i = 32-bit word j of the 32 bytes at p + i*stride.
INLINE void transpose_words(const char *p, int64_t stride, __m512i *out) {
    __m512i a[8], b[8];
    for (int i = 0; i < 8; ++i) {
        __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(p + i * stride)));
        a[i] = _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)(p + (i + 8) * stride)), 1);
    }
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    const __m512i lo = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), hi = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm512_permutex2var_epi64(a[i], lo, a[i + 4]);
        out[i + 4] = _mm512_permutex2var_epi64(a[i], hi, a[i + 4]);
    }
}
INLINE void halves_to_float(__m512i pair, vf *even, vf *odd) {
    *even = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pair));
    *odd = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pair, 16)));
}
typedef __m512i words;

#elif defined(PTQ_AVX2)

INLINE void transpose_words(const char *p, int64_t stride, __m256i *out) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256((const __m256i *)(p + i * stride));
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    }
}
INLINE void halves_to_float(__m256i pair, vf *even, vf *odd) {
    const __m256i pick = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                          0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m256i sorted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(pair, pick), 0xD8);
    *even = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(sorted));
    *odd = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1));
}
typedef __m256i words;

#elif defined(PTQ_NEON)

INLINE void transpose_words(const char *p, int64_t stride, uint32x4_t *out) {
    for (int half = 0; half < 2; ++half) {
        uint32x4_t a[4], b[4];
        for (int i = 0; i < 4; ++i) a[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p + i * stride + 16 * half));
        for (int i = 0; i < 2; ++i) {  // words 0 and 1, then 2 and 3, of rows i and i + 2
            b[i] = vzip1q_u32(a[i], a[i + 2]);
            b[i + 2] = vzip2q_u32(a[i], a[i + 2]);
        }
        for (int i = 0; i < 2; ++i) {
            out[4 * half + 2 * i] = vzip1q_u32(b[2 * i], b[2 * i + 1]);
            out[4 * half + 2 * i + 1] = vzip2q_u32(b[2 * i], b[2 * i + 1]);
        }
    }
}
INLINE void halves_to_float(uint32x4_t pair, vf *even, vf *odd) {
    *even = (vf)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(pair)));
    *odd = (vf)vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(pair, 16)));
}
typedef uint32x4_t words;

#endif

template <int DTYPE, int B> INLINE void load_tile(const char *p, int any_block, vf *x) {
    const int block = B ? B : any_block;
    [[maybe_unused]] const int64_t stride = (int64_t)block * dtype_bytes(DTYPE);
    int k = 0;
#if defined(PTQ_AVX512) || defined(PTQ_AVX2) || defined(PTQ_NEON)
    words t[8];
    if (DTYPE == PTQ_F32) {
        for (; k + 8 <= block; k += 8) {
            transpose_words(p + 4 * k, stride, t);
            for (int j = 0; j < 8; ++j) x[k + j] = (vf)t[j];
        }
    } else {
        for (; k + 16 <= block; k += 16) {
            transpose_words(p + 2 * k, stride, t);
            for (int j = 0; j < 8; ++j) {
                if (DTYPE == PTQ_F16) {
                    halves_to_float(t[j], &x[k + 2 * j], &x[k + 2 * j + 1]);
                } else {
                    x[k + 2 * j] = from_bits((vi)t[j] << 16);
                    x[k + 2 * j + 1] = from_bits((vi)t[j] & (int32_t)0xFFFF0000);
                }
            }
        }
    }
#endif
    for (; k < block; ++k)
        for (int lane = 0; lane < W; ++lane) x[k][lane] = load_one<DTYPE>(p, (int64_t)lane * block + k);
}

// U tiles that follow each other, and the lines `ahead` bytes further on into the cache, a few at a time: tiles read lines out
// of order, which hides the stream from the hardware's prefetcher.
template <int DTYPE, int B, int U> INLINE void load_tiles(const char *p, int any_block, int ahead, vf *x) {
    const int block = B ? B : any_block, bytes = W * block * dtype_bytes(DTYPE);
#pragma GCC unroll 1
    for (int u = 0; u < U; ++u) {
        for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + u * bytes + ahead + line);
        load_tile<DTYPE, B>(p + u * bytes, block, x + u * block);
    }
}

template <int B, int U> INLINE void load_tiles(int dtype, const char *p, int block, int ahead, vf *x) {
    if (dtype == PTQ_BF16) load_tiles<PTQ_BF16, B, U>(p, block, ahead, x);
    else if (dtype == PTQ_F16) load_tiles<PTQ_F16, B, U>(p, block, ahead, x);
    else load_tiles<PTQ_F32, B, U>(p, block, ahead, x);
}
