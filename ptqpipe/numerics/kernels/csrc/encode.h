// Codes of a tile, packed: bit stream of each block as ptqpipe/numerics/formats.py defines it, little-endian.
//
// A 32-bit word per lane holds 8 codes of 4 bits, 4 of 8 bits, or 4 of 6 bits (24 bits used).

template <class E> INLINE constexpr int codes_per_word() { return E::code_bits == 4 ? 8 : 4; }
enum { MAX_WORDS = MAX_BLOCK / 4 };

#if defined(PTQ_AVX2)

// The signs of eight numbers, each in the highest bit of its four.
INLINE vi word_of_signs(const vf *x) {
    const __m256i *raw = (const __m256i *)x;  // numbers become bytes, which keep their signs
    const __m256i even = _mm256_packs_epi16(_mm256_packs_epi32(raw[0], raw[2]), _mm256_packs_epi32(raw[4], raw[6]));
    const __m256i odd = _mm256_packs_epi16(_mm256_packs_epi32(raw[1], raw[3]), _mm256_packs_epi32(raw[5], raw[7]));
    const __m256i sign = _mm256_set1_epi8((char)0x80), turn = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i both = _mm256_or_si256(_mm256_srli_epi16(_mm256_and_si256(even, sign), 4), _mm256_and_si256(odd, sign));
    return (vi)_mm256_shuffle_epi8(both, turn);
}

// Eight codes of E2M1. A sum of round_minifloat has steps in its lower half and its exponent, times 128, in its upper one;
// a code is the steps and twice the exponent. So one multiplication of both halves, by 2^k and 2^k / 64, makes a code k
// bits up, high by twice what the exponents are high by. k is 6 to 14, for which three codes have room.
// CLAMP: whether a number may be E::clamp_from or more.
template <bool CLAMP> INLINE vi word_of_codes(const vf *x, vf r, float unit) {
    vu thirds[3] = {};
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const vf y = unit == 1.0f ? x[j] * r : x[j] * r * unit;
        const vf sum = round_minifloat(CLAMP ? min_of(y, splat(E2M1::max)) : y, E2M1::mantissa, E2M1::emin).sum;
        const int by = 64 << (j % 3 * 4);
        thirds[j / 3] += (vu)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi32(by | by / 64 << 16));
    }
    return (vi)((thirds[0] >> 6) + (thirds[1] << 6) + (thirds[2] << 18) - 2 * (127 + 22) * 0x11111111u);
}
#endif

// Signs of raw values x into the words, x replaced by |x|; the largest magnitude.
template <class E, int B> INLINE void split_signs(vf *x, int any_block, vi *words, vf *largest) {
    enum { PER = codes_per_word<E>() };
    const int block = B ? B : any_block;
    vi top = splat(0);
    for (int first = 0; first < block; first += PER) {
        vi word = splat(0);
        bool whole = false;
#if defined(PTQ_AVX2)
        whole = PER == 8 && first + PER <= block;
        if (whole) word = word_of_signs(x + first);
#endif
#pragma GCC unroll 8
        for (int j = 0; j < PER; ++j) {
            if (first + j >= block) break;
            const int bit = j * E::code_bits + E::code_bits - 1;
            if (!whole) word |= shift_right(bits(x[first + j]), 31 - bit) & (int32_t)(1u << bit);
            const vf a = abs_of(x[first + j]);
            x[first + j] = a;
            top = max_of(top, bits(a));
        }
        words[first / PER] = word;
    }
    *largest = from_bits(top);
}

// x: magnitudes; r * unit: unit / scale. Adds the magnitude codes to the words. CLAMP: see word_of_codes.
template <class E, int B, bool CLAMP = true> INLINE void add_codes(const vf *x, int any_block, vf r, float unit, vi *words) {
    enum { PER = codes_per_word<E>() };
    const int block = B ? B : any_block;
    for (int first = 0; first < block; first += PER) {
        vi word = words[first / PER];
#if defined(PTQ_AVX2)
        if (PER == 8 && first + PER <= block) {
            words[first / PER] = word | word_of_codes<CLAMP>(x + first, r, unit);
            continue;
        }
#endif
#pragma GCC unroll 8
        for (int j = 0; j < PER; ++j) {
            if (first + j >= block) break;
            word |= E::code(unit == 1.0f ? x[first + j] * r : x[first + j] * r * unit) << (j * E::code_bits);
        }
        words[first / PER] = word;
    }
}

// The words of W lanes, as W adjacent runs of block*code_bits/8 bytes.
template <class E, int B> INLINE void store_words(const vi *words, int any_block, uint8_t *out) {
    const int block = B ? B : any_block;
    const int bytes = block * E::code_bits / 8, count = (block + codes_per_word<E>() - 1) / codes_per_word<E>();
#if defined(PTQ_AVX512)
    const bool whole = bytes == 4 * count;  // not with codes of 6 bits, nor where the last word is not full
    if (whole && count == 2) {
        __m512i a = _mm512_unpacklo_epi32((__m512i)words[0], (__m512i)words[1]);
        __m512i b = _mm512_unpackhi_epi32((__m512i)words[0], (__m512i)words[1]);
        const __m512i lo = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), hi = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(out, _mm512_permutex2var_epi64(a, lo, b));
        _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi64(a, hi, b));
        return;
    }
    if (whole && count % 4 == 0) {
        for (int i = 0; i < count; i += 4) {
            __m512i a = _mm512_unpacklo_epi32((__m512i)words[i], (__m512i)words[i + 1]);
            __m512i b = _mm512_unpackhi_epi32((__m512i)words[i], (__m512i)words[i + 1]);
            __m512i c = _mm512_unpacklo_epi32((__m512i)words[i + 2], (__m512i)words[i + 3]);
            __m512i d = _mm512_unpackhi_epi32((__m512i)words[i + 2], (__m512i)words[i + 3]);
            const __m512i four[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                                     _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
            for (int j = 0; j < 4; ++j) {  // lane 4*q + j in quarter q
                uint8_t *p = out + j * bytes + i * 4;
                _mm_storeu_si128((__m128i *)p, _mm512_castsi512_si128(four[j]));
                _mm_storeu_si128((__m128i *)(p + 4 * bytes), _mm512_extracti32x4_epi32(four[j], 1));
                _mm_storeu_si128((__m128i *)(p + 8 * bytes), _mm512_extracti32x4_epi32(four[j], 2));
                _mm_storeu_si128((__m128i *)(p + 12 * bytes), _mm512_extracti32x4_epi32(four[j], 3));
            }
        }
        return;
    }
#elif defined(PTQ_NEON)
    if (bytes == 4 * count && count == 2) {
        const uint32x4x2_t both = {{(uint32x4_t)words[0], (uint32x4_t)words[1]}};
        return vst2q_u32((uint32_t *)out, both);
    }
    if (bytes == 4 * count && count == 4) {
        const uint32x4x4_t all = {{(uint32x4_t)words[0], (uint32x4_t)words[1], (uint32x4_t)words[2], (uint32x4_t)words[3]}};
        return vst4q_u32((uint32_t *)out, all);
    }
#elif defined(PTQ_AVX2)
    const bool whole = bytes == 4 * count;
    if (whole && count == 2) {
        const __m256i a = _mm256_unpacklo_epi32((__m256i)words[0], (__m256i)words[1]);
        const __m256i b = _mm256_unpackhi_epi32((__m256i)words[0], (__m256i)words[1]);
        _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(a, b, 0x20));
        _mm256_storeu_si256((__m256i *)(out + 32), _mm256_permute2x128_si256(a, b, 0x31));
        return;
    }
    if (whole && count % 4 == 0) {
        for (int i = 0; i < count; i += 4) {
            const __m256i a = _mm256_unpacklo_epi32((__m256i)words[i], (__m256i)words[i + 1]);
            const __m256i b = _mm256_unpackhi_epi32((__m256i)words[i], (__m256i)words[i + 1]);
            const __m256i c = _mm256_unpacklo_epi32((__m256i)words[i + 2], (__m256i)words[i + 3]);
            const __m256i d = _mm256_unpackhi_epi32((__m256i)words[i + 2], (__m256i)words[i + 3]);
            const __m256i four[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                                     _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
            for (int j = 0; j < 4; ++j) {  // lane j in the lower half, 4 + j in the upper
                uint8_t *p = out + j * bytes + i * 4;
                _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(four[j]));
                _mm_storeu_si128((__m128i *)(p + 4 * bytes), _mm256_extracti128_si256(four[j], 1));
            }
        }
        return;
    }
#endif
    enum { WORD_BYTES = E::code_bits == 6 ? 3 : 4 };
    for (int i = 0; i < count; ++i) {
        const int left = bytes - i * WORD_BYTES;
        for (int lane = 0; lane < W; ++lane) {
            const uint32_t word = (uint32_t)words[i][lane];
            uint8_t *p = out + (int64_t)lane * bytes + i * WORD_BYTES;
            if (WORD_BYTES == 4 && left >= 4) {
                const uint8_t four[4] = {(uint8_t)word, (uint8_t)(word >> 8), (uint8_t)(word >> 16), (uint8_t)(word >> 24)};
                memcpy(p, four, 4);
            } else {
                for (int b = 0; b < (left < WORD_BYTES ? left : WORD_BYTES); ++b) p[b] = (uint8_t)(word >> (8 * b));
            }
        }
    }
}

// The low bytes, all of numbers from 0 to 255.
INLINE void store_bytes(vi codes, uint8_t *out) {
#if defined(PTQ_AVX512)
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)codes));
#elif defined(PTQ_AVX2)
    const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)codes), _mm256_extracti128_si256((__m256i)codes, 1));
    _mm_storel_epi64((__m128i *)out, _mm_packus_epi16(shorts, shorts));
#else
    for (int lane = 0; lane < W; ++lane) out[lane] = (uint8_t)codes[lane];
#endif
}
INLINE vi load_scales(const uint8_t *in) {
    vi codes;
    for (int lane = 0; lane < W; ++lane) codes[lane] = in[lane];
    return codes;
}
