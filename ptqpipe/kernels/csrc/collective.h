// Messages of the quantized all-reduce: ptqpipe/collectives/reference.py, unit by unit, with the values of one unit in cache.
//
// A message is all codes, then all scales, then all exponents (codecs.py). The last unit is filled up with zeros.

enum { MAX_UNIT = 1024 };

struct WireShape {
    int64_t units, unit, code_bytes, scale_bytes, exponents;  // the last three: of one unit
};

struct Message {
    uint8_t *codes, *scales, *exponents;  // of one unit
};

INLINE int wire_bits(int element) { return element == PTQ_WIRE_INT6 ? 6 : element == PTQ_WIRE_INT4 || element == PTQ_WIRE_E2M1 ? 4 : 8; }

static WireShape wire_shape(const ptq_collective *j) {
    WireShape s;
    s.unit = j->block;  // all three are powers of two
    if (j->hadamard > s.unit) s.unit = j->hadamard;
    if (j->group > s.unit) s.unit = j->group;
    s.units = (j->elements + s.unit - 1) / s.unit;
    s.code_bytes = s.unit * wire_bits(j->element) / 8;
    s.scale_bytes = s.unit / j->block * (j->scale == PTQ_WIRE_BF16_SCALE ? 2 : 1);
    s.exponents = j->group ? s.unit / j->group : 0;
    return s;
}

INLINE Message message_at(const WireShape &s, const uint8_t *message, int64_t unit) {
    uint8_t *codes = (uint8_t *)message, *scales = codes + s.units * s.code_bytes;
    return {codes + unit * s.code_bytes, scales + unit * s.scale_bytes,
            scales + s.units * s.scale_bytes + unit * s.exponents};
}

INLINE vf load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE uint32_t power_bits(int code) { return code == 255 ? 0x7FC00000u : code ? (uint32_t)code << 23 : 0x00400000u; }

// ---- values ----

// x[l ^ STEP] in lane l, and a + b, a - b of each such pair.
template <int STEP> INLINE vf butterfly(vf x) {
    vf swapped, sign;
#if defined(PTQ_AVX512)
    const __m512 a = (__m512)x;
    if (STEP == 1) swapped = (vf)_mm512_permute_ps(a, 0xB1);
    else if (STEP == 2) swapped = (vf)_mm512_permute_ps(a, 0x4E);
    else if (STEP == 4) swapped = (vf)_mm512_shuffle_f32x4(a, a, 0xB1);
    else swapped = (vf)_mm512_shuffle_f32x4(a, a, 0x4E);
#else
    for (int lane = 0; lane < W; ++lane) swapped[lane] = x[lane ^ STEP];
#endif
    for (int lane = 0; lane < W; ++lane) sign[lane] = lane & STEP ? -1.0f : 1.0f;
    return swapped + x * sign;
}

static void rotate(float *v, int64_t n, int64_t size) {
    for (int64_t i = 0; i < n; i += W) {
        vf x = load(v + i);
        if (size > 1) x = butterfly<1>(x);
        if (size > 2) x = butterfly<2>(x);
        if (W > 4 && size > 4) x = butterfly<4 & (W - 1)>(x);
        if (W > 8 && size > 8) x = butterfly<8 & (W - 1)>(x);
        store(v + i, x);
    }
    for (int64_t step = W; step < size; step *= 2)
        for (int64_t i = 0; i < n; i += 2 * step)
            for (int64_t k = i; k < i + step; k += W) {
                const vf a = load(v + k), b = load(v + k + step);
                store(v + k, a + b);
                store(v + k + step, a - b);
            }
}

static void times(float *v, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i += W) store(v + i, load(v + i) * factor);
}

// Powers of two: 2^-floor(b/2) before the rotation of 2^b elements, 2^-ceil(b/2) after the one back.
INLINE float half_norm(int64_t size, bool back) {
    const int b = __builtin_ctzll((uint64_t)size);
    return float_of((uint32_t)(127 - (back ? b - b / 2 : b / 2)) << 23);
}

template <int DTYPE> INLINE void load_unit(const ptq_collective *j, int64_t unit, int64_t first, float *v) {
    const int64_t left = j->elements - first, n = left < unit ? left : unit;
    to_floats<DTYPE>(j->x, first, (int)n, v);
    for (int64_t i = n; i < unit; ++i) v[i] = 0.0f;
    if (!j->hadamard) return;
    times(v, unit, half_norm(j->hadamard, false));
    rotate(v, unit, j->hadamard);
}

INLINE uint16_t to_half(float f) {  // to the nearest, ties to even; NaN stays
    const uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (a >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // 65520 and more
    if (a >= 0x38800000) return (uint16_t)(sign | ((a - 0x38000000 + 0xFFF + (a >> 13 & 1)) >> 13));
    return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - 0x3F000000));  // a multiple of 2^-24: the ulp of 0.5
}

template <int DTYPE> INLINE void store_lanes(void *out, int64_t i, vf x) {
    if (DTYPE == PTQ_F32) {
        memcpy((float *)out + i, &x, sizeof x);
        return;
    }
    uint16_t *p = (uint16_t *)out + i;
    if (DTYPE == PTQ_BF16) {
        const vi u = bits(x), rounded = shift_right(u + 0x7FFF + (shift_right(u, 16) & 1), 16);
        const vi quiet = shift_right(u, 16) | 0x40;
        const vshorts s = __builtin_convertvector(select(less(splat(0x7F800000), u & 0x7FFFFFFF), quiet, rounded), vshorts);
        memcpy(p, &s, sizeof s);
        return;
    }
#if defined(PTQ_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(PTQ_AVX2)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int lane = 0; lane < W; ++lane) p[lane] = to_half(x[lane]);
#endif
}

template <int DTYPE> INLINE void store_unit(const ptq_collective *j, int64_t unit, int64_t first, float *v) {
    if (j->hadamard) {
        rotate(v, unit, j->hadamard);
        times(v, unit, half_norm(j->hadamard, true));
    }
    const int64_t left = j->elements - first, n = left < unit ? left : unit;
    int64_t i = 0;
    for (; i + W <= n; i += W) store_lanes<DTYPE>(j->out, first + i, load(v + i));
    if (i == n) return;
    alignas(64) char last[4 * W];
    store_lanes<DTYPE>(last, 0, load(v + i));  // v has whole units
    memcpy((char *)j->out + (first + i) * dtype_bytes(DTYPE), last, (size_t)((n - i) * dtype_bytes(DTYPE)));
}

// ---- codes ----

typedef int8_t vsigned __attribute__((vector_size(W)));

template <int ELEMENT> INLINE vi codes_of(vf v, vf scaled) {
    if (ELEMENT == PTQ_WIRE_E4M3) return E4M3::code(abs_of(scaled)) | (shift_right(bits(v), 31) << 7);
    if (ELEMENT == PTQ_WIRE_E2M1)
        return minifloat_code(min_of(abs_of(scaled), splat(6.0f)), 1, 0) | (shift_right(bits(v), 31) << 3);
    const float top = ELEMENT == PTQ_WIRE_INT8 ? 127.0f : ELEMENT == PTQ_WIRE_INT6 ? 31.0f : 7.0f, magic = 12582912.0f;
    const vf y = min_of(max_of(scaled, splat(-top)), splat(top)) + magic;  // the sum's low bits are the nearest integer
    return bits(y) - (int32_t)0x4B400000;
}

template <int ELEMENT> INLINE vf values_of(vi code) {
    if (ELEMENT == PTQ_WIRE_INT8 || ELEMENT == PTQ_WIRE_INT6 || ELEMENT == PTQ_WIRE_INT4) return to_float(code);
    const int mantissa = ELEMENT == PTQ_WIRE_E4M3 ? 3 : 1, bias = ELEMENT == PTQ_WIRE_E4M3 ? 7 : 1;
    const int width = ELEMENT == PTQ_WIRE_E4M3 ? 8 : 4;
    const vi magnitude = code & ((1 << (width - 1)) - 1);
    const vf normal = from_bits((magnitude << (23 - mantissa)) + ((127 - bias) << 23));
    const vf small = to_float(magnitude) * power_of_two(1 - bias - mantissa);
    const vf value = select(less(magnitude, splat(1 << mantissa)), small, normal);
    return from_bits(bits(value) | ((code << (32 - width)) & (int32_t)0x80000000));
}

// Codes of `n` elements, one a byte, from and to the packed bytes.
template <int ELEMENT> INLINE void pack_codes(const uint8_t *codes, int64_t n, uint8_t *out) {
    if (wire_bits(ELEMENT) == 4)
        for (int64_t i = 0; i < n / 2; ++i) out[i] = (uint8_t)((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    else
        for (int64_t i = 0; i < n; i += 4, out += 3) {
            const uint32_t word = (codes[i] & 63u) | (codes[i + 1] & 63u) << 6 | (codes[i + 2] & 63u) << 12 |
                                  (codes[i + 3] & 63u) << 18;
            out[0] = (uint8_t)word, out[1] = (uint8_t)(word >> 8), out[2] = (uint8_t)(word >> 16);
        }
}

template <int ELEMENT> INLINE void unpack_codes(const uint8_t *in, int64_t n, uint8_t *codes) {
    const bool integers = ELEMENT == PTQ_WIRE_INT4;
    if (wire_bits(ELEMENT) == 4)
        for (int64_t i = 0; i < n / 2; ++i) {
            const int8_t low = (int8_t)(in[i] << 4), high = (int8_t)in[i];
            codes[2 * i] = integers ? (uint8_t)(low >> 4) : in[i] & 15;
            codes[2 * i + 1] = integers ? (uint8_t)(high >> 4) : in[i] >> 4;
        }
    else
        for (int64_t i = 0; i < n; i += 4, in += 3) {
            const uint32_t word = in[0] | in[1] << 8 | in[2] << 16;
            for (int k = 0; k < 4; ++k) codes[i + k] = (uint8_t)((int8_t)(word >> (6 * k) << 2) >> 2);
        }
}

// ---- a unit ----

INLINE uint32_t block_top(const float *v, int64_t n) {
    vi top = splat(0);
    for (int64_t i = 0; i < n; i += W) top = max_of(top, bits(load(v + i)) & 0x7FFFFFFF);
#if defined(PTQ_AVX512)
    return (uint32_t)_mm512_reduce_max_epi32((__m512i)top);
#else
    int32_t most = 0;
    for (int lane = 0; lane < W; ++lane) most = top[lane] > most ? top[lane] : most;
    return (uint32_t)most;
#endif
}

// Writes the scale of a block and returns its inverse, by which to multiply after `power`; 0 makes every code 0.
struct Inverse { float power, scale; bool none; };

template <int SCALE> INLINE Inverse scale_block(uint32_t top, float reciprocal, int exponent, uint8_t *out, int64_t block) {
    const bool bad = top >= 0x7F800000;
    if (SCALE == PTQ_WIRE_BF16_SCALE) {
        uint32_t u = bits_of(float_of(top) * reciprocal);
        u = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000;
        u = bad ? 0x7FC00000 : u < 0x00400000 ? 0 : u;
        const uint16_t code = (uint16_t)(u >> 16);
        memcpy(out + 2 * block, &code, 2);
        return {1.0f, 1.0f / float_of(u), bad || !u};
    }
    if (SCALE == PTQ_WIRE_E8M0_SCALE) {
        int code = (int)(top >> 23) - 8 + ((top & 0x7FFFFF) > 0x600000);
        code = bad ? 255 : code < 0 ? 0 : code;
        out[block] = (uint8_t)code;
        return {1.0f, 1.0f / float_of(power_bits(code)), bad};
    }
    const float power = 1.0f / float_of(power_bits(exponent));
    const int code = bad ? 127 : minifloat_code(min_of(splat(float_of(top) * power * reciprocal), splat(448.0f)), 3, -6)[0];
    out[block] = (uint8_t)code;
    return {power, 1.0f / scale_value(code, 7), bad || !code};
}

template <int SCALE> INLINE float scale_of(const Message &m, int64_t block, int64_t exponent) {
    if (SCALE == PTQ_WIRE_BF16_SCALE) {
        uint16_t code;
        memcpy(&code, m.scales + 2 * block, 2);
        return float_of((uint32_t)code << 16);
    }
    if (SCALE == PTQ_WIRE_E8M0_SCALE) return float_of(power_bits(m.scales[block]));
    const float s = m.scales[block] == 127 ? float_of(0x7FC00000) : scale_value(m.scales[block], 7);
    return s * float_of(power_bits(m.exponents[exponent]));
}

template <int SCALE> INLINE int group_exponent(const float *v, const ptq_collective *j) {
    uint32_t whole = 0;
    for (int64_t i = 0; i < j->group; i += j->block) {
        const uint32_t top = block_top(v + i, j->block);
        if (top < 0x7F800000 && top > whole) whole = top;
    }
    const int code = (int)(whole >> 23) - 11 + ((whole & 0x7FFFFF) > 0x280000);
    return code < 0 ? 0 : code;
}

template <int ELEMENT, int SCALE, int B> INLINE void encode_unit(const ptq_collective *j, int64_t unit, const float *v, const Message &m) {
    const int64_t block = B ? B : j->block;
    const float reciprocal = 1.0f / (ELEMENT == PTQ_WIRE_INT8 ? 127.0f : ELEMENT == PTQ_WIRE_INT6 ? 31.0f
                                     : ELEMENT == PTQ_WIRE_INT4 ? 7.0f : ELEMENT == PTQ_WIRE_E4M3 ? 448.0f : 6.0f);
    const bool bytes = wire_bits(ELEMENT) == 8;
    alignas(64) uint8_t wide[bytes ? 1 : MAX_UNIT];
    uint8_t *codes = bytes ? m.codes : wide;
    int exponent = 0;
    for (int64_t i = 0; i < unit; i += block) {
        if (SCALE == PTQ_WIRE_E4M3_SCALE && i % j->group == 0) {
            exponent = group_exponent<SCALE>(v + i, j);
            m.exponents[i / j->group] = (uint8_t)exponent;
        }
        const Inverse inverse = scale_block<SCALE>(block_top(v + i, block), reciprocal, exponent, m.scales, i / block);
        if (__builtin_expect(inverse.none, 0)) {  // a NaN would become a code, a zero of a float keeps its sign
            const bool nan = block_top(v + i, block) >= 0x7F800000;
            for (int64_t k = i; k < i + block; ++k) codes[k] = nan || ELEMENT <= PTQ_WIRE_INT4 ? 0 : (uint8_t)((bits_of(v[k]) >> 31) << (wire_bits(ELEMENT) - 1));
            continue;
        }
        for (int64_t k = i; k < i + block; k += W) {
            const vf x = load(v + k);
            vf y = SCALE == PTQ_WIRE_E4M3_SCALE ? x * inverse.power * inverse.scale : x * inverse.scale;
            const vbytes c = __builtin_convertvector((vu)codes_of<ELEMENT>(x, y), vbytes);
            memcpy(codes + k, &c, sizeof c);
        }
    }
    if (!bytes) pack_codes<ELEMENT>(wide, unit, m.codes);
}

template <int ELEMENT, int SCALE, int B, bool ADD> INLINE void decode_unit(const ptq_collective *j, int64_t unit, const Message &m, float *v) {
    const int64_t block = B ? B : j->block;
    const bool bytes = wire_bits(ELEMENT) == 8;
    alignas(64) uint8_t wide[bytes ? 1 : MAX_UNIT];
    if (!bytes) unpack_codes<ELEMENT>(m.codes, unit, wide);
    const uint8_t *codes = bytes ? m.codes : wide;
    for (int64_t i = 0; i < unit; i += block) {
        const float s = scale_of<SCALE>(m, i / block, j->group ? i / j->group : 0);
        for (int64_t k = i; k < i + block; k += W) {
            vi c;
            if (ELEMENT <= PTQ_WIRE_INT4) {
                vsigned b;
                memcpy(&b, codes + k, sizeof b);
                c = __builtin_convertvector(b, vi);
            } else {
                vbytes b;
                memcpy(&b, codes + k, sizeof b);
                c = __builtin_convertvector(b, vi);
            }
            const vf value = values_of<ELEMENT>(c) * s;
            store(v + k, ADD ? load(v + k) + value : value);
        }
    }
}

// ---- blocks of 8-bit codes in registers: what int8, fp8 and mxfp8 spend their time in ----

INLINE vi nearest_integer(vf y) {  // ties to even, for |y| < 2^22
#if defined(PTQ_AVX512)
    return (vi)_mm512_cvtps_epi32((__m512)y);
#elif defined(PTQ_AVX2)
    return (vi)_mm256_cvtps_epi32((__m256)y);
#else
    return bits(y + splat(12582912.0f)) - (int32_t)0x4B400000;
#endif
}

template <bool SIGNED, int V> INLINE void store_codes(uint8_t *p, const vi *c) {
    int i = 0;
#if defined(PTQ_AVX512)
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (; i + 4 <= V; i += 4) {
        const __m512i a = _mm512_packs_epi32((__m512i)c[i], (__m512i)c[i + 1]);
        const __m512i b = _mm512_packs_epi32((__m512i)c[i + 2], (__m512i)c[i + 3]);
        const __m512i bytes = SIGNED ? _mm512_packs_epi16(a, b) : _mm512_packus_epi16(a, b);
        _mm512_storeu_si512((void *)(p + i * W), _mm512_permutexvar_epi32(order, bytes));
    }
#elif defined(PTQ_AVX2)
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (; i + 4 <= V; i += 4) {
        const __m256i a = _mm256_packs_epi32((__m256i)c[i], (__m256i)c[i + 1]);
        const __m256i b = _mm256_packs_epi32((__m256i)c[i + 2], (__m256i)c[i + 3]);
        const __m256i bytes = SIGNED ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b);
        _mm256_storeu_si256((__m256i *)(p + i * W), _mm256_permutevar8x32_epi32(bytes, order));
    }
#elif defined(__SSE2__)
    for (; i + 4 <= V; i += 4) {
        const __m128i a = _mm_packs_epi32((__m128i)c[i], (__m128i)c[i + 1]);
        const __m128i b = _mm_packs_epi32((__m128i)c[i + 2], (__m128i)c[i + 3]);
        _mm_storeu_si128((__m128i *)(p + i * W), SIGNED ? _mm_packs_epi16(a, b) : _mm_packus_epi16(a, b));
    }
#endif
    for (; i < V; ++i) {
        const vbytes b = __builtin_convertvector((vu)c[i], vbytes);
        memcpy(p + i * W, &b, sizeof b);
    }
}

template <bool SIGNED> INLINE vi load_code(const uint8_t *p) {
#if defined(PTQ_AVX512)
    const __m128i b = _mm_loadu_si128((const __m128i *)p);
    return (vi)(SIGNED ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
#elif defined(PTQ_AVX2)
    const __m128i b = _mm_loadl_epi64((const __m128i *)p);
    return (vi)(SIGNED ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#else
    if (SIGNED) {
        vsigned b;
        memcpy(&b, p, sizeof b);
        return __builtin_convertvector(b, vi);
    }
    vbytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
#endif
}

// Values of a block to memory. FINITE: none is NaN, which saves a look at each.
template <int DTYPE, bool FINITE, int V> INLINE void store_values(void *out, int64_t i, const vf *x) {
    int k = 0;
#if defined(PTQ_AVX512)
    if (DTYPE == PTQ_BF16 && FINITE) {
        const __m512i half = _mm512_set1_epi32(0x7FFF), one = _mm512_set1_epi32(1);
        const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                              23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        for (; k + 2 <= V; k += 2) {
            __m512i u[2];
            for (int h = 0; h < 2; ++h) {
                const __m512i a = (__m512i)x[k + h];
                u[h] = _mm512_add_epi32(_mm512_add_epi32(a, half), _mm512_and_si512(_mm512_srli_epi32(a, 16), one));
            }
            _mm512_storeu_si512((uint16_t *)out + i + k * W, _mm512_permutex2var_epi16(u[0], high, u[1]));
        }
    }
#elif defined(PTQ_AVX2)
    if (DTYPE == PTQ_BF16 && FINITE) {
        for (; k + 2 <= V; k += 2) {
            __m256i u[2];
            for (int h = 0; h < 2; ++h) {
                const vi a = bits(x[k + h]);
                u[h] = (__m256i)shift_right(a + 0x7FFF + (shift_right(a, 16) & 1), 16);
            }
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(u[0], u[1]), 0xD8);
            _mm256_storeu_si256((__m256i *)((uint16_t *)out + i + k * W), both);
        }
    }
#endif
    for (; k < V; ++k) store_lanes<DTYPE>(out, i + k * W, x[k]);
}

enum { SAFE = 0x71800000 };  // 2^100: magnitudes below stay finite, rotated or not

template <int ELEMENT, int SCALE, int B, int DTYPE, bool ROTATED> struct Blocks8 {
    enum { V = B / W };
    static constexpr bool integers = ELEMENT == PTQ_WIRE_INT8;

    INLINE void load_values(const void *x, int64_t i, vf *v) {
        for (int k = 0; k < V; ++k) v[k] = load_lanes<DTYPE>(x, i + k * W);
        if (!ROTATED) return;
        for (int k = 0; k < V; ++k) v[k] = v[k] * half_norm(B, false);
        rotate_registers(v);
    }
    INLINE void rotate_registers(vf *v) {  // as rotate() does it
        for (int k = 0; k < V; ++k) {
            v[k] = butterfly<2>(butterfly<1>(v[k]));
            if (W > 4) v[k] = butterfly<4 & (W - 1)>(v[k]);
            if (W > 8) v[k] = butterfly<8 & (W - 1)>(v[k]);
        }
        for (int step = 1; step < V; step *= 2)
            for (int k = 0; k < V; ++k)
                if (!(k & step)) {
                    const vf a = v[k], b = v[k + step];
                    v[k] = a + b;
                    v[k + step] = a - b;
                }
    }
    INLINE uint32_t top(const vf *v) {
        vi most = bits(v[0]) & 0x7FFFFFFF;
        for (int k = 1; k < V; ++k) most = max_of(most, bits(v[k]) & 0x7FFFFFFF);
        float lanes[W];
        store(lanes, (vf)most);
        return block_top(lanes, W);
    }
    // Writes codes and scale of block `b`; v becomes what they say. Returns whether that is finite.
    template <bool BACK> INLINE bool encode(vf *v, const Message &m, int64_t b) {
        const uint32_t most = top(v);
        const Inverse inverse = scale_block<SCALE>(most, 1.0f / (integers ? 127.0f : 448.0f), 0, m.scales, b);
        const float s = BACK ? scale_of<SCALE>(m, b, 0) : 0.0f;
        vi c[V];
        if (__builtin_expect(inverse.none, 0)) {
            const bool keep_sign = !integers && most < 0x7F800000;
            for (int k = 0; k < V; ++k) c[k] = keep_sign ? shift_right(bits(v[k]), 31) << 7 : splat(0);
        } else if (__builtin_expect(inverse.scale > 0x1p126f, 0)) {  // scales below 2^-126 are coarse: codes may exceed top
            for (int k = 0; k < V; ++k) c[k] = codes_of<ELEMENT>(v[k], v[k] * inverse.scale);
        } else {
            for (int k = 0; k < V; ++k) {
                const vf y = v[k] * inverse.scale;
                c[k] = integers ? nearest_integer(y) : codes_of<ELEMENT>(v[k], y);
            }
        }
        store_codes<integers, V>(m.codes + b * B, c);
        if (BACK)
            for (int k = 0; k < V; ++k) v[k] = values_of<ELEMENT>(c[k]) * s;
        return most < SAFE;
    }
    template <bool ADD> INLINE float decode(const Message &m, int64_t b, vf *v) {
        const float s = scale_of<SCALE>(m, b, 0);
        for (int k = 0; k < V; ++k) {
            const vf x = values_of<ELEMENT>(load_code<integers>(m.codes + b * B + k * W)) * s;
            v[k] = ADD ? v[k] + x : x;
        }
        return s;
    }
    INLINE void store_all(const ptq_collective *j, int64_t i, vf *v, bool finite) {
        if (ROTATED) {
            rotate_registers(v);
            for (int k = 0; k < V; ++k) v[k] = v[k] * half_norm(B, true);
        }
        if (finite) store_values<DTYPE, true, V>(j->out, i, v);
        else store_values<DTYPE, false, V>(j->out, i, v);
    }

    static int64_t encode_blocks(const ptq_collective *j, const WireShape &s) {
        const int64_t blocks = j->elements / B;
        const Message m = message_at(s, j->message, 0);
        vf v[V];
        for (int64_t b = 0; b < blocks; ++b) {
            load_values(j->x, b * B, v);
            encode<false>(v, m, b);
        }
        return blocks;
    }
    static int64_t decode_blocks(const ptq_collective *j, const WireShape &s) {
        const int64_t blocks = j->elements / B;
        const Message m = message_at(s, j->message, 0);
        vf v[V];
        for (int64_t b = 0; b < blocks; ++b) {
            const float scale = decode<false>(m, b, v);
            store_all(j, b * B, v, bits_of(scale) < SAFE);
        }
        return blocks;
    }
    static int64_t reduce_blocks(const ptq_collective *j, const WireShape &s) {
        const ptq_collective job = *j;  // bytes are stored below, which might be those of *j for all the compiler knows
        const int64_t blocks = job.elements / B;
        const Message sum = message_at(s, job.message, 0);
        for (int64_t b = 0; b < blocks; ++b) {
            vf v[V], own[V];
            for (int k = 0; k < V; ++k) v[k] = splat(-0.0f);  // adds nothing, not even to -0
            for (int64_t rank = 0; rank < job.ranks; ++rank) {
                if (job.messages[rank]) {
                    decode<true>(message_at(s, job.messages[rank], 0), b, v);
                } else {
                    load_values(job.x, b * B, own);
                    for (int k = 0; k < V; ++k) v[k] = v[k] + own[k];
                }
            }
            const bool finite = job.message && encode<true>(v, sum, b);
            store_all(&job, b * B, v, finite);
        }
        return blocks;
    }
};

template <class Blocks> INLINE int64_t walk_blocks(const ptq_collective *j, const WireShape &s) {
    if (j->step == PTQ_WIRE_ENCODE) return Blocks::encode_blocks(j, s);
    if (j->step == PTQ_WIRE_DECODE) return Blocks::decode_blocks(j, s);
    return Blocks::reduce_blocks(j, s);
}

// The first blocks, which are whole and rotated by themselves or not at all, for those codecs that have the above; how many units that were.
template <int ELEMENT, int SCALE, int B, int DTYPE> INLINE int64_t whole_blocks(const ptq_collective *j, const WireShape &s) {
    if constexpr (B != 0 && (ELEMENT == PTQ_WIRE_INT8 || ELEMENT == PTQ_WIRE_E4M3)) {
        if (!j->hadamard) return walk_blocks<Blocks8<ELEMENT, SCALE, B, DTYPE, false>>(j, s);
        if (ELEMENT == PTQ_WIRE_INT8 && j->hadamard == B)
            return walk_blocks<Blocks8<ELEMENT, SCALE, B, DTYPE, ELEMENT == PTQ_WIRE_INT8>>(j, s);
    }
    return 0;
}

// ---- messages ----

template <int ELEMENT, int SCALE, int B, int DTYPE> static void encode_message(const ptq_collective *j) {
    const WireShape s = wire_shape(j);
    alignas(64) float v[MAX_UNIT];
    for (int64_t u = whole_blocks<ELEMENT, SCALE, B, DTYPE>(j, s); u < s.units; ++u) {
        load_unit<DTYPE>(j, s.unit, u * s.unit, v);
        encode_unit<ELEMENT, SCALE, B>(j, s.unit, v, message_at(s, j->message, u));
    }
}

template <int ELEMENT, int SCALE, int B, int DTYPE> static void decode_message(const ptq_collective *j) {
    const WireShape s = wire_shape(j);
    alignas(64) float v[MAX_UNIT];
    for (int64_t u = whole_blocks<ELEMENT, SCALE, B, DTYPE>(j, s); u < s.units; ++u) {
        decode_unit<ELEMENT, SCALE, B, false>(j, s.unit, message_at(s, j->message, u), v);
        store_unit<DTYPE>(j, s.unit, u * s.unit, v);
    }
}

template <int ELEMENT, int SCALE, int B, int DTYPE> static void reduce_messages(const ptq_collective *j) {
    const WireShape s = wire_shape(j);
    alignas(64) float v[MAX_UNIT], own[MAX_UNIT];
    for (int64_t u = whole_blocks<ELEMENT, SCALE, B, DTYPE>(j, s); u < s.units; ++u) {
        for (int64_t rank = 0; rank < j->ranks; ++rank) {
            const uint8_t *message = j->messages[rank];
            if (message) {
                const Message m = message_at(s, message, u);
                if (rank) decode_unit<ELEMENT, SCALE, B, true>(j, s.unit, m, v);
                else decode_unit<ELEMENT, SCALE, B, false>(j, s.unit, m, v);
            } else if (rank) {
                load_unit<DTYPE>(j, s.unit, u * s.unit, own);
                for (int64_t i = 0; i < s.unit; i += W) store(v + i, load(v + i) + load(own + i));
            } else {
                load_unit<DTYPE>(j, s.unit, u * s.unit, v);
            }
        }
        if (j->message) {
            const Message m = message_at(s, j->message, u);
            encode_unit<ELEMENT, SCALE, B>(j, s.unit, v, m);
            decode_unit<ELEMENT, SCALE, B, false>(j, s.unit, m, v);
        }
        store_unit<DTYPE>(j, s.unit, u * s.unit, v);
    }
}

template <int ELEMENT, int SCALE, int B, int DTYPE> static int32_t collective_step(const ptq_collective *j) {
    if (j->step == PTQ_WIRE_ENCODE) encode_message<ELEMENT, SCALE, B, DTYPE>(j);
    else if (j->step == PTQ_WIRE_DECODE) decode_message<ELEMENT, SCALE, B, DTYPE>(j);
    else reduce_messages<ELEMENT, SCALE, B, DTYPE>(j);
    return PTQ_OK;
}

template <int ELEMENT, int SCALE, int B> static int32_t collective_dtype(const ptq_collective *j) {
    if (j->dtype == PTQ_BF16) return collective_step<ELEMENT, SCALE, B, PTQ_BF16>(j);
    if (j->dtype == PTQ_F32) return collective_step<ELEMENT, SCALE, B, PTQ_F32>(j);
    return collective_step<ELEMENT, SCALE, B, PTQ_F16>(j);
}

// Messages that are numbers of the dtype themselves: their sum in float32, rounded once.
template <int DTYPE> static int32_t sum_numbers(const ptq_collective *j) {
    const ptq_collective job = *j;
    int64_t i = 0;
    for (; i + W <= job.elements; i += W) {
        vf total = splat(-0.0f);  // adds nothing, not even to -0
        for (int64_t rank = 0; rank < job.ranks; ++rank)
            total = total + load_lanes<DTYPE>(job.messages[rank] ? (const void *)job.messages[rank] : job.x, i);
        store_lanes<DTYPE>(job.out, i, total);
    }
    for (; i < job.elements; ++i) {
        vf total = splat(-0.0f);
        for (int64_t rank = 0; rank < job.ranks; ++rank)
            total = total + splat(load_one<DTYPE>(job.messages[rank] ? (const void *)job.messages[rank] : job.x, i));
        char lanes[4 * W];
        store_lanes<DTYPE>(lanes, 0, total);
        memcpy((char *)job.out + i * dtype_bytes(DTYPE), lanes, (size_t)dtype_bytes(DTYPE));
    }
    return PTQ_OK;
}

template <int ELEMENT> static int32_t collective_block(const ptq_collective *j) {
    if (j->block == 32) return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 32>(j);
    if (j->block == 64) return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 64>(j);
    if (j->block == 128) return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 128>(j);
    return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 0>(j);
}

static int32_t collective(const ptq_collective *j) {
    if (j->step == PTQ_WIRE_SUM)
        return j->dtype == PTQ_BF16 ? sum_numbers<PTQ_BF16>(j) : j->dtype == PTQ_F32 ? sum_numbers<PTQ_F32>(j) : sum_numbers<PTQ_F16>(j);
    if (j->block < W || j->block % W) return PTQ_UNSUPPORTED;
    if (j->element == PTQ_WIRE_INT8) return collective_block<PTQ_WIRE_INT8>(j);
    if (j->element == PTQ_WIRE_INT6) return collective_dtype<PTQ_WIRE_INT6, PTQ_WIRE_BF16_SCALE, 0>(j);
    if (j->element == PTQ_WIRE_INT4) return collective_dtype<PTQ_WIRE_INT4, PTQ_WIRE_BF16_SCALE, 0>(j);
    if (j->element == PTQ_WIRE_E2M1) return collective_dtype<PTQ_WIRE_E2M1, PTQ_WIRE_E4M3_SCALE, 16>(j);
    return j->scale == PTQ_WIRE_E8M0_SCALE ? collective_dtype<PTQ_WIRE_E4M3, PTQ_WIRE_E8M0_SCALE, 32>(j)
                                           : collective_dtype<PTQ_WIRE_E4M3, PTQ_WIRE_BF16_SCALE, 0>(j);
}
