// Blocks of 8-bit codes in registers: what int8, fp8 and mxfp8 spend their time in. Of collective.h.

INLINE vi nearest_integer(vf y) {  // ties to even, for |y| < 2^22
#if defined(PTQ_AVX512)
    return (vi)_mm512_cvtps_epi32((__m512)y);
#elif defined(PTQ_AVX2)
    return (vi)_mm256_cvtps_epi32((__m256)y);
#elif defined(PTQ_NEON)
    return (vi)vcvtnq_s32_f32((float32x4_t)y);
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
#elif defined(PTQ_NEON)
    for (; i + 4 <= V; i += 4) {
        const uint16x8_t a = vcombine_u16(vmovn_u32((uint32x4_t)c[i]), vmovn_u32((uint32x4_t)c[i + 1]));
        const uint16x8_t b = vcombine_u16(vmovn_u32((uint32x4_t)c[i + 2]), vmovn_u32((uint32x4_t)c[i + 3]));
        vst1q_u8(p + i * W, vcombine_u8(vmovn_u16(a), vmovn_u16(b)));
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
#elif defined(PTQ_NEON)
    uint32_t four;
    memcpy(&four, p, sizeof four);
    const uint8x8_t b = vreinterpret_u8_u32(vdup_n_u32(four));
    if (SIGNED) return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(b))));
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(b)));
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
