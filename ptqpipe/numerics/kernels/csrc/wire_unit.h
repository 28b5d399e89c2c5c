// A unit of a message, its values in cache: any element, scale and block of codecs.py. Of collective.h.

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
