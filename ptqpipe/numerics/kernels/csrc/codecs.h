// Element codecs (nearest value of a non-negative y, its code) and scale codecs, in vectors of W lanes.
//
// With e = max(exponent of y, smallest normal exponent) and M = 2^(e + 23 - mantissa bits), the float sum y + M rounds y
// to a multiple of 2^(e - mantissa bits), ties to even, and holds that multiple in its low mantissa bits.

struct Rounded { vf power, sum; };

INLINE Rounded round_minifloat(vf y, int mantissa, int emin) {
    const vf e = larger(from_bits(bits(y) & 0x7F800000), from_bits(splat((127 + emin) << 23)));
    Rounded r;
    r.power = from_bits(bits(e) + ((23 - mantissa) << 23));
    r.sum = y + r.power;
    return r;
}

// The code of a y that does not exceed the largest magnitude.
INLINE vi minifloat_code(vf y, int mantissa, int emin) {
    Rounded r = round_minifloat(y, mantissa, emin);
    vi binade = shift_right(bits(r.power) - ((127 + emin + 23 - mantissa) << 23), 23 - mantissa);
    return bits(r.sum) - bits(r.power) + binade;
}

// MAX_X8 and EDGE_X8 are eight times the largest magnitude and the midpoint of max/2 and the next magnitude: a block whose
// largest y is below that midpoint has no code above code(max/2).
template <int MANTISSA, int EMIN, int EMAX, int BITS, int MAX_X8, int EDGE_X8> struct Minifloat {
    static constexpr int code_bits = BITS, mantissa = MANTISSA, emin = EMIN, emax = EMAX;
    static constexpr float max = MAX_X8 / 8.0f, half_edge = EDGE_X8 / 8.0f;
    static constexpr float zero_edge = 1.0f / (1 << (1 + MANTISSA - EMIN));  // half the smallest: y up to here rounds to 0
    static constexpr float unit = 1.0f;             // nearest() takes y times this power of two
    // y up to which `Clamp = false` has the right error: the middle of the largest value and the one that would follow
    static constexpr float clamp_from = max + (1 << EMAX) * 0.5f / (1 << MANTISSA);
    struct Tables {};                               // registers that nearest() wants prepared
    INLINE Tables tables() { return Tables(); }

    template <bool CLAMP> INLINE vf nearest(vf y, const Tables &) {
        Rounded r = round_minifloat(CLAMP ? smaller(y, splat(max)) : y, MANTISSA, EMIN);
        return r.sum - r.power;
    }
    INLINE vi code(vf y) { return minifloat_code(min_of(y, splat(max)), MANTISSA, EMIN); }  // magnitude code
};

typedef Minifloat<3, -6, 8, 8, 448 * 8, 232 * 8> E4M3;
typedef Minifloat<3, 0, 2, 6, 60, 31> E2M3;
typedef Minifloat<2, -2, 4, 6, 28 * 8, 15 * 8> E3M2;

#if defined(PTQ_AVX512)

// All boundaries of E2M1 are multiples of 1/4, so floor(4y) says which value is nearest; a y on a boundary may take
// either side (the differences are equal), which is all that a score needs. Codes resolve ties by floor + ceil.
alignas(64) static const float e2m1_x4[32] = {0,  2,  2,  4,  4,  6,  6,  8,  8,  8,  12, 12, 12, 12, 16, 16,
                                              16, 16, 16, 16, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24};
// index floor(4y) + ceil(4y): odd strictly between two multiples of 1/4, even on one
alignas(64) static const uint16_t e2m1_codes[64] = {
    0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6,
    6, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};

struct E2M1 {
    static constexpr int code_bits = 4, mantissa = 1, emin = 0, emax = 2;
    static constexpr float max = 6.0f, half_edge = 3.5f, zero_edge = 0.25f, unit = 4.0f;
    static constexpr float clamp_from = 8.0f;  // an index has five bits
    struct Tables { __m512 low, high; };
    INLINE Tables tables() { return Tables{_mm512_load_ps(e2m1_x4), _mm512_load_ps(e2m1_x4 + 16)}; }

    template <bool CLAMP> INLINE vf nearest(vf y4, const Tables &t) {
        __m512 y = (__m512)y4;
        if (CLAMP) y = _mm512_min_ps(y, _mm512_set1_ps(31.0f));
        return (vf)_mm512_permutex2var_ps(t.low, _mm512_cvttps_epi32(y), t.high);
    }
    INLINE vi code(vf y4) {
        __m512 y = _mm512_min_ps((__m512)y4, _mm512_set1_ps(31.0f));
        __m512i lo = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        __m512i hi = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
        return (vi)_mm512_permutex2var_epi16(_mm512_load_si512(e2m1_codes), _mm512_add_epi32(lo, hi),
                                             _mm512_load_si512(e2m1_codes + 32));
    }
};

#else
typedef Minifloat<1, 0, 2, 4, 48, 28> E2M1;
#endif

// Scale codecs with 3 mantissa bits (E4M3, UE5M3): code c has the value (c & 7) * 2^(-2-bias) below 8 and
// (8 + (c & 7)) * 2^((c >> 3) - 3 - bias) above. s = value * global_scale, r = unit / s, square = value^2 / unit^2.
struct Minifloat3Scale {
    float global_scale, unit;
    int bias, top;
    // r and square of the first codes; those above 15 differ from 8..15 by a power of two, which is exact
#if defined(PTQ_AVX512)
    __m512 r_low, square_low;  // of codes 0..15
#elif defined(PTQ_AVX2)
    __m256 r_least, square_least, r_low, square_low;  // of codes 0..7, and of 8..15
#endif
};

INLINE float scale_value(int code, int bias) {
    union { uint32_t u; float f; } p;
    int shift = (code >> 3) ? (code >> 3) - 1 : 0;
    p.u = (uint32_t)(127 + shift - 2 - bias) << 23;
    return (float)(code < 8 ? code : 8 + (code & 7)) * p.f;
}

INLINE Minifloat3Scale make_scale(float global_scale, float unit, int bias, int top) {
    Minifloat3Scale s;
    s.global_scale = global_scale, s.unit = unit, s.bias = bias, s.top = top;
#if defined(PTQ_AVX512) || defined(PTQ_AVX2)
    alignas(64) float r[16], square[16];
    for (int c = 0; c < 16; ++c) {
        float v = scale_value(c, bias);
        r[c] = unit * (1.0f / (v * global_scale));
        square[c] = v * v / (unit * unit);
    }
#endif
#if defined(PTQ_AVX512)
    s.r_low = _mm512_load_ps(r), s.square_low = _mm512_load_ps(square);
#elif defined(PTQ_AVX2)
    s.r_least = _mm256_load_ps(r), s.square_least = _mm256_load_ps(square);
    s.r_low = _mm256_load_ps(r + 8), s.square_low = _mm256_load_ps(square + 8);
#endif
    return s;
}

INLINE void scale_factors(const Minifloat3Scale &s, vi code, vf *r, vf *square) {
#if defined(PTQ_AVX512)
    __m512i c = (__m512i)code;
    __m512i first = _mm512_min_epi32(c, (__m512i)((code & 7) | 8));
    __m512i up = _mm512_slli_epi32(_mm512_sub_epi32(c, first), 20);
    *r = (vf)_mm512_sub_epi32((__m512i)_mm512_permutexvar_ps(first, s.r_low), up);
    *square = (vf)_mm512_add_epi32((__m512i)_mm512_permutexvar_ps(first, s.square_low), _mm512_slli_epi32(up, 1));
#elif defined(PTQ_AVX2)
    const __m256i c = (__m256i)code;  // its lowest three bits are what a permutation takes
    vi r_bits = (vi)_mm256_permutevar8x32_ps(s.r_low, c), square_bits = (vi)_mm256_permutevar8x32_ps(s.square_low, c);
    const vm least = less(code, splat(8));
    if (__builtin_expect(any(least), 0)) {
        r_bits = select(least, (vi)_mm256_permutevar8x32_ps(s.r_least, c), r_bits);
        square_bits = select(least, (vi)_mm256_permutevar8x32_ps(s.square_least, c), square_bits);
    }
    const vi up = ((max_of(code, splat(8)) & ~7) - 8) << 20;
    *r = from_bits(r_bits - up), *square = from_bits(square_bits + (up << 1));
#else
    vi up = max_of(shift_right(code, 3), splat(1)) - 1;
    vi significand = (code & 7) + (less(splat(7), code) & 8);
    vf v = to_float(significand) * from_bits((up + (127 - 2 - s.bias)) << 23);
    *r = s.unit * (1.0f / (v * s.global_scale));
    *square = v * v / (s.unit * s.unit);
#endif
}
