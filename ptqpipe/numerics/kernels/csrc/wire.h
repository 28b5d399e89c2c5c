// Messages of the quantized all-reduce (ptqpipe/serving/collectives/codecs.py): where codes, scales and exponents lie, numbers of every
// dtype to lanes and back, Hadamard rotation, codes to bytes and back. A message is all codes, then all scales, then all
// exponents; the last unit is filled up with zeros.

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
#elif defined(PTQ_NEON)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
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
