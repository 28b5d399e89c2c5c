// Codes of E2M1 times x, and every row of x. linear_neon.cpp includes this with and without the instructions for four
// products a lane, which older CPUs lack: sum_of_16 is all that differs, and its sums are exact.

// Of 16 columns in 4 rows: twice the codes (w) times a digit of x.
#if defined(PTQ_DOT)
INLINE int32x4_t sum_of_16(const int8x16_t *w, int8x16_t digit) {
    int32x4_t sum = vdotq_laneq_s32(vdupq_n_s32(0), w[0], digit, 0);
    sum = vdotq_laneq_s32(sum, w[1], digit, 1);
    sum = vdotq_laneq_s32(sum, w[2], digit, 2);
    return vdotq_laneq_s32(sum, w[3], digit, 3);
}
#else
INLINE int32x4_t sum_of_16(const int8x16_t *w, int8x16_t digit) {
    const int32x4_t d = vreinterpretq_s32_s8(digit);
    const int8x16_t x[4] = {vreinterpretq_s8_s32(vdupq_laneq_s32(d, 0)), vreinterpretq_s8_s32(vdupq_laneq_s32(d, 1)),
                            vreinterpretq_s8_s32(vdupq_laneq_s32(d, 2)), vreinterpretq_s8_s32(vdupq_laneq_s32(d, 3))};
    int16x8_t low = vmull_s8(vget_low_s8(w[0]), vget_low_s8(x[0])), high = vmull_high_s8(w[0], x[0]);
    UNROLL for (int i = 1; i < 4; ++i) {  // at most 4 * 12 * 128, and twice that below
        low = vmlal_s8(low, vget_low_s8(w[i]), vget_low_s8(x[i]));
        high = vmlal_high_s8(high, w[i], x[i]);
    }
    return vpaddlq_s16(vpaddq_s16(low, high));
}
#endif

template <int SCALE, int T> void codes_tile(const ptq_linear *j, const void *prepared, int64_t row, int64_t last, int64_t m0) {
    static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(twice);
    const int64_t units = units_of(j), stride = units * (UNIT / BLOCK);
    const uint8_t *d = j->data + row * j->data_stride;
    const Columns *x = (const Columns *)prepared + m0 * stride;
    float32x4_t sums[T][QUARTERS];
    UNROLL for (int t = 0; t < T; ++t) UNROLL for (int q = 0; q < QUARTERS; ++q) sums[t][q] = vdupq_n_f32(0.0f);
    for (int64_t unit = 0; unit < units; ++unit, x += UNIT / BLOCK) {
        for (int b = 0; b < UNIT / BLOCK; ++b, d += 128) {
            __builtin_prefetch(d + 2048);
            __builtin_prefetch(d + 2112);
            const int down = SCALE == PTQ_BLOCK_E8M0 ? (int)(unit % 2) * 16 + b / 2 * 8 : 8 * b;
            UNROLL for (int q = 0; q < QUARTERS; ++q) {
                const uint32x4_t code = scale_bytes<SCALE>(j, row, unit, q) >> down;
                const float32x4_t s = SCALE == PTQ_BLOCK_E8M0 ? e8m0(code) : e4m3_or_nan(code);
                int8x16_t w[4];
                UNROLL for (int i = 0; i < 2; ++i) {
                    const uint8x16_t v = vld1q_u8(d + 64 * i + 16 * q);
                    w[2 * i] = vqtbl1q_s8(table, vandq_u8(v, vdupq_n_u8(15)));
                    w[2 * i + 1] = vqtbl1q_s8(table, vshrq_n_u8(v, 4));
                }
                UNROLL for (int t = 0; t < T; ++t) {
                    const Columns *in = x + t * stride + b;
                    const int8_t *digits = (const int8_t *)in->dwords;
                    const int32x4_t high = sum_of_16(w, vld1q_s8(digits)), low = sum_of_16(w, vld1q_s8(digits + 16));
                    const float32x4_t sum = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low));
                    sums[t][q] = vfmaq_f32(sums[t][q], sum * in->scale, s);
                }
            }
        }
    }
    UNROLL for (int t = 0; t < T; ++t) write(j, sums[t], m0 + t, row, last);
}

// ---- every row of x, in tiles as equal as they can be ----

template <int SCALE> struct Codes {
    enum { MOST = CODE_ROWS };
    template <int T> static void tile(const ptq_linear *j, const void *x, int64_t row, int64_t last, int64_t m0) {
        codes_tile<SCALE, T>(j, x, row, last, m0);
    }
};

template <int ELEMENT, int SCALE, bool NANS> struct Numbers {
    enum { MOST = FLOAT_ROWS };
    template <int T> static void tile(const ptq_linear *j, const void *x, int64_t row, int64_t last, int64_t m0) {
        floats_tile<ELEMENT, SCALE, NANS, T>(j, x, row, last, m0);
    }
};

template <int ELEMENT, int SCALE> void float_panel(const ptq_linear *j, const void *x, int64_t row, int64_t last) {
    if (ELEMENT == PTQ_E4M3 && has_nan(j, row)) panel<Numbers<ELEMENT, SCALE, true>>(j, x, row, last);
    else panel<Numbers<ELEMENT, SCALE, false>>(j, x, row, last);
}

void rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    void (*one)(const ptq_linear *, const void *, int64_t, int64_t) = nullptr;
    if (j->element == PTQ_E2M1) one = j->scale_kind == PTQ_BLOCK_E4M3 ? panel<Codes<PTQ_BLOCK_E4M3>> : panel<Codes<PTQ_BLOCK_E8M0>>;
    else if (j->element == PTQ_BF16_ELEMENT) one = float_panel<PTQ_BF16_ELEMENT, PTQ_NO_SCALES>;
    else if (j->element == PTQ_E2M3) one = float_panel<PTQ_E2M3, PTQ_BLOCK_E8M0>;
    else if (j->element == PTQ_E3M2) one = float_panel<PTQ_E3M2, PTQ_BLOCK_E8M0>;
    else if (j->scale_kind == PTQ_NO_SCALES) one = float_panel<PTQ_E4M3, PTQ_NO_SCALES>;
    else if (j->scale_kind == PTQ_BLOCK_E8M0) one = float_panel<PTQ_E4M3, PTQ_BLOCK_E8M0>;
    else one = float_panel<PTQ_E4M3, PTQ_BLOCK_FLOAT>;
    for (int64_t row = first; row < last; row += LANES) one(j, x, row, last);
}
