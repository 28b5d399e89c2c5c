// Panels of 16 rows of a packed weight, decoded to pairs of bfloat16 numbers: float lane r holds two columns of row r.
// Of linear_bf16.cpp.
//
// In memory a panel is its rows' bytes transposed in dwords: [dword][row], 64 bytes a dword, so a panel is one stream. A
// unit is 64 columns of it. A dword holds 8 codes of E2M1, 4 of E4M3, a pair of bfloat16 numbers; three dwords hold 16
// codes of 6 bits. Pairs are the columns that then lie 16 bits apart, (0,4)(1,5)(2,6)(3,7), (0,2)(1,3) or (0,1); x is laid
// out to match.

struct Bytes {
    alignas(64) uint8_t low[128], high[128];
};

constexpr int bf16_of(int code, int mantissa_bits, int bias) {  // of a magnitude
    int e = code >> mantissa_bits, m = code & ((1 << mantissa_bits) - 1);
    if (!code) return 0;
    if (!e) {  // subnormal: the leading bit moves into the exponent
        for (e = 1; !(m >> mantissa_bits); m <<= 1) --e;
        m &= (1 << mantissa_bits) - 1;
    }
    return (e - bias + 127) << 7 | m << (7 - mantissa_bits);
}

// E4M3: the 128 magnitudes, of which the last is NaN. The others: all codes, with their signs, repeated.
constexpr Bytes make_bytes(int32_t element) {
    Bytes b{};
    for (int code = 0; code < 128; ++code) {
        int word = 0;
        if (element == PTQ_E4M3) word = code == 127 ? 0x7FC0 : bf16_of(code, 3, 7);
        else if (element == PTQ_E2M3) word = bf16_of(code & 31, 3, 1) | (code & 32) << 10;
        else if (element == PTQ_E3M2) word = bf16_of(code & 31, 2, 3) | (code & 32) << 10;
        else word = bf16_of(code & 7, 1, 1) | (code & 8) << 12;
        b.low[code] = (uint8_t)word;
        b.high[code] = (uint8_t)(word >> 8);
    }
    return b;
}
template <int ELEMENT> struct BytesOf { static constexpr Bytes bytes = make_bytes(ELEMENT); };
template <int ELEMENT> constexpr Bytes BytesOf<ELEMENT>::bytes;

template <int ELEMENT> struct Tables {
    __m512i low[2], high[2], words, shifts;
    METHOD Tables() {
        const Bytes &b = BytesOf<ELEMENT>::bytes;
        for (int i = 0; i < 2; ++i) {
            low[i] = _mm512_load_si512(b.low + 64 * i);
            high[i] = _mm512_load_si512(b.high + 64 * i);
        }
        // E2M1: 32 words, since a word's index may carry the next code's lowest bit in bit 4
        words = _mm512_or_si512(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(low[0])),
                                _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(high[0])), 8));
        shifts = _mm512_set1_epi64(0x322C2620120C0600);  // of 6-bit codes, two dwords of 24 bits
    }
};

template <int ELEMENT> struct Shape {
    enum { BF16 = ELEMENT == PTQ_BF16_ELEMENT };
    enum { DWORDS = BF16 ? 32 : ELEMENT == PTQ_E2M1 ? 8 : ELEMENT == PTQ_E4M3 ? 16 : 12 };  // of a row in a unit
    enum { STEPS = BF16 ? 32 : ELEMENT == PTQ_E2M1 ? 8 : 16, STEP_PAIRS = 32 / STEPS };     // of a unit: see pairs_at
};

// 4 codes a lane to two pairs a lane.
template <int ELEMENT> INLINE void pairs_of(__m512i codes, const Tables<ELEMENT> &t, __m512i *first, __m512i *second) {
    __m512i low, high;
    if (ELEMENT == PTQ_E4M3) {
        low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
        high = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // high | (codes & 0x80)
    } else {
        low = _mm512_permutexvar_epi8(codes, t.low[0]);
        high = _mm512_permutexvar_epi8(codes, t.high[0]);
    }
    const __m512i odd = _mm512_set1_epi16((int16_t)0xFF00);
    *first = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, odd, 0xE4);   // odd ? high : low
    *second = _mm512_ternarylogic_epi32(high, _mm512_srli_epi16(low, 8), odd, 0xE4);
}

// Step q of the unit at `d`: STEP_PAIRS pairs a lane.
template <int ELEMENT> INLINE void pairs_at(const __m512i *d, int q, const Tables<ELEMENT> &t, __m512i *w) {
    if (ELEMENT == PTQ_BF16_ELEMENT) {
        w[0] = _mm512_loadu_si512(d + q);
    } else if (ELEMENT == PTQ_E2M1) {
        const __m512i codes = _mm512_loadu_si512(d + q);
        UNROLL for (int i = 0; i < 4; ++i) w[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), t.words);
    } else if (ELEMENT == PTQ_E4M3) {
        pairs_of<ELEMENT>(_mm512_loadu_si512(d + q), t, w, w + 1);
    } else {  // 24 bits to 4 bytes, each a code and two bits of the next
        const int at = q / 4 * 3 + (q % 4 ? q % 4 - 1 : 0), down = q % 4 ? 32 - 8 * (q % 4) : 0;
        __m512i v = _mm512_srli_epi32(_mm512_loadu_si512(d + at), down);
        if (down && down != 8) v = _mm512_or_si512(v, _mm512_slli_epi32(_mm512_loadu_si512(d + at + 1), 32 - down));
        pairs_of<ELEMENT>(_mm512_multishift_epi64_epi8(t.shifts, v), t, w, w + 1);
    }
}

// E2M1 times a scale in E4M3 is a bfloat16 number: its significand by a table of code and mantissa of the scale, times
// 2^8; then as many binades less as the scale's exponent says. A difference that saturates keeps zeros, and a scale of zero
// subtracts everything.
struct Products {
    alignas(64) uint16_t words[64];               // [mantissa of the scale][magnitude code]
    alignas(64) uint8_t mantissa[128], down[128];  // of a scale's code: its mantissa times 8, the binades
};

constexpr Products make_products() {
    Products t{};
    const int halves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int m = 0; m < 8; ++m)
        for (int c = 1; c < 8; ++c) {
            int v = halves[c] * (8 + m), e = 0;  // 16 times the number
            for (; v >> (e + 1);) ++e;
            t.words[8 * m + c] = (uint16_t)((e - 4 + 8 + 127) << 7 | ((v << 7 >> e) & 127));
        }
    for (int code = 0; code < 128; ++code) {
        int e = code >> 3, m = code & 7;
        if (!e && m)
            for (e = 1; !(m & 8); m <<= 1) --e;
        t.mantissa[code] = (uint8_t)((m & 7) << 3);
        t.down[code] = (uint8_t)(code ? 15 - e : 255);
    }
    return t;
}
static constexpr Products e2m1_products = make_products();

struct ScaledTables {
    __m512i words[2], mantissa[2], down[2], spread[4];
    METHOD ScaledTables() {
        for (int i = 0; i < 2; ++i) {
            words[i] = _mm512_load_si512(e2m1_products.words + 32 * i);
            mantissa[i] = _mm512_load_si512(e2m1_products.mantissa + 64 * i);
            down[i] = _mm512_load_si512(e2m1_products.down + 64 * i);
        }
        for (int i = 0; i < 4; ++i)  // byte i of every dword as two words
            spread[i] = _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(0, -128, 0, -128, 4, -128, 4, -128, 8, -128, 8, -128, 12, -128, 12, -128)),
                                        _mm512_set1_epi8((char)i));
    }
};

// A unit of 16 rows of NVFP4 to pairs of weights w[pair][PANELS], without the global scale. False, and nothing done, if a
// scale is negative or NaN.
INLINE bool decode_scaled(const __m512i *d, __m512i scales, const ScaledTables &t, __m512i *w) {
    if (_mm512_cmpge_epu8_mask(scales, _mm512_set1_epi8(127))) return false;
    const __m512i mantissas = _mm512_permutex2var_epi8(t.mantissa[0], scales, t.mantissa[1]);
    const __m512i downs = _mm512_permutex2var_epi8(t.down[0], scales, t.down[1]);
    UNROLL for (int q = 0; q < 8; ++q) {
        const __m512i codes = _mm512_loadu_si512(d + q);
        const __m512i m = _mm512_shuffle_epi8(mantissas, t.spread[q / 2]);
        const __m512i down = _mm512_slli_epi16(_mm512_shuffle_epi8(downs, t.spread[q / 2]), 7);
        UNROLL for (int i = 0; i < 4; ++i, w += PANELS) {
            const __m512i at_0 = _mm512_srli_epi16(codes, 4 * i), sign = _mm512_slli_epi16(codes, 12 - 4 * i);
            const __m512i index = _mm512_ternarylogic_epi32(at_0, m, _mm512_set1_epi16(7), 0xE4);  // 7 ? at_0 : m
            const __m512i v = _mm512_subs_epu16(_mm512_permutex2var_epi16(t.words[0], index, t.words[1]), down);
            *w = _mm512_ternarylogic_epi32(v, sign, _mm512_set1_epi16((int16_t)0x8000), 0xF8);
        }
    }
    return true;
}

// The four scales in E4M3 of a unit as floats.
INLINE void e4m3_scales(__m512i codes, __m512 *s, int64_t stride) {
    const __m512i magnitude = _mm512_set1_epi32(0x07F00000);
    const __m512 up = _mm512_set1_ps(0x1p120f);
    s[0] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(codes, 20), magnitude)), up);
    s[stride] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(codes, 12), magnitude)), up);
    s[2 * stride] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(codes, 4), magnitude)), up);
    s[3 * stride] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(_mm512_srli_epi32(codes, 4), magnitude)), up);
    if (__builtin_expect(!_mm512_cmpge_epu8_mask(codes, _mm512_set1_epi8(127)), 1)) return;
    for (int i = 0; i < 4; ++i) {  // signs and NaN
        const __m512i code = _mm512_srlv_epi32(codes, _mm512_set1_epi32(8 * i));
        const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(128)), 24);
        const __mmask16 nan = _mm512_cmpeq_epi32_mask(_mm512_and_si512(code, _mm512_set1_epi32(127)), _mm512_set1_epi32(127));
        const __m512i v = _mm512_or_si512(_mm512_castps_si512(s[i * stride]), sign);
        s[i * stride] = _mm512_castsi512_ps(_mm512_mask_mov_epi32(v, nan, _mm512_set1_epi32(0x7FC00000)));
    }
}

// The two scales in E8M0 of a unit as floats; `down` is 0 or 16: a dword holds those of two units.
INLINE void e8m0_scales(__m512i codes, int down, __m512 *s, int64_t stride) {
    codes = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(down));
    UNROLL for (int i = 0; i < 2; ++i) {
        const __m512i e = _mm512_and_si512(_mm512_slli_epi32(codes, 23 - 8 * i), _mm512_set1_epi32(0x7F800000));
        s[i * stride] = _mm512_castsi512_ps(_mm512_max_epu32(e, _mm512_set1_epi32(0x00400000)));
    }
    if (__builtin_expect(!_mm512_cmpeq_epu8_mask(codes, _mm512_set1_epi8(-1)), 1)) return;
    for (int i = 0; i < 2; ++i) {  // 255 is infinity so far, and is NaN
        const __mmask16 nan = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(s[i * stride]), _mm512_set1_epi32(0x7F800000));
        s[i * stride] = _mm512_mask_mov_ps(s[i * stride], nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
    }
}
