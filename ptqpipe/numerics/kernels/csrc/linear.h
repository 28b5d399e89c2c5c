// Few rows of x times a packed weight: a run of a row of the weight becomes floats, which meet every row of x.
//
// Sums are kept in W lanes, lane = column mod W, and folded in halves.

enum { LINEAR_RUN = 512, LINEAR_TILE = 8 };

struct Floats {
    float pair[256][2], e4m3[256], e2m3[64], e3m2[64];
};

constexpr float power_of_two(int e) {
    float v = 1.0f;
    for (; e > 0; --e) v *= 2.0f;
    for (; e < 0; ++e) v *= 0.5f;
    return v;
}
constexpr float minifloat_value(int code, int exponent_bits, int mantissa_bits, int bias) {
    const int m = code & ((1 << mantissa_bits) - 1), e = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int whole = (e ? 1 << mantissa_bits : 0) + m;
    const float magnitude = (float)whole * power_of_two((e ? e : 1) - bias - mantissa_bits);
    return code >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}
constexpr Floats make_floats() {
    Floats f{};
    for (int code = 0; code < 256; ++code) {
        f.pair[code][0] = minifloat_value(code & 15, 2, 1, 1);
        f.pair[code][1] = minifloat_value(code >> 4, 2, 1, 1);
        f.e4m3[code] = (code & 127) == 127 ? __builtin_nanf("") : minifloat_value(code, 4, 3, 7);
    }
    for (int code = 0; code < 64; ++code) {
        f.e2m3[code] = minifloat_value(code, 2, 3, 1);
        f.e3m2[code] = minifloat_value(code, 3, 2, 3);
    }
    return f;
}
static constexpr Floats FLOATS = make_floats();

INLINE float block_scale(const ptq_linear *j, int64_t row, int64_t column) {
    const int64_t at = row / j->scale_rows * j->scale_stride;
    if (j->scale_kind == PTQ_BLOCK_E4M3) return FLOATS.e4m3[((const uint8_t *)j->scales)[at + column / 16]];
    if (j->scale_kind == PTQ_BLOCK_FLOAT) return ((const float *)j->scales)[at + column / 128];
    const uint32_t e = ((const uint8_t *)j->scales)[at + column / 32];
    union { uint32_t u; float f; } v;
    v.u = e == 255 ? 0x7FC00000u : e ? e << 23 : 0x00400000u;
    return v.f;
}

// Weights [column, column + count) of a row as floats, zeros up to a multiple of W.
static void decode_run(const ptq_linear *j, int64_t row, int64_t column, int64_t count, float *out) {
    const uint8_t *codes = j->data + row * j->data_stride;
    if (j->element == PTQ_E2M1)
        for (int64_t i = 0; i < count; i += 2) memcpy(out + i, FLOATS.pair[codes[(column + i) / 2]], 8);
    else if (j->element == PTQ_E4M3)
        for (int64_t i = 0; i < count; ++i) out[i] = FLOATS.e4m3[codes[column + i]];
    else
        for (int64_t i = 0; i < count; i += 4) {
            const uint8_t *p = codes + (column + i) / 4 * 3;
            const uint32_t four = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16;
            const float *values = j->element == PTQ_E2M3 ? FLOATS.e2m3 : FLOATS.e3m2;
            for (int c = 0; c < 4; ++c) out[i + c] = values[four >> 6 * c & 63];
        }
    for (int64_t i = count; i % W; ++i) out[i] = 0.0f;
    if (j->scale_kind == PTQ_NO_SCALES) return;
    const int64_t block = j->scale_kind == PTQ_BLOCK_E4M3 ? 16 : j->scale_kind == PTQ_BLOCK_E8M0 ? 32 : 128;
    for (int64_t i = 0; i < count; i += block) {
        const float s = block_scale(j, row, column + i);
        const int64_t end = i + block < count ? i + block : count;
        for (int64_t k = i; k < end; ++k) out[k] *= s;
    }
}

INLINE float sum_of(vf v) {
    float lanes[W];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE uint16_t to_bf16(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static int64_t linear_columns(const ptq_linear *j) { return (j->k + W - 1) / W * W; }
static int64_t linear_bytes(const ptq_linear *j) { return j->m * linear_columns(j) * 4; }

static void linear_prepare(const ptq_linear *j, void *x, int64_t first, int64_t last) {
    const int64_t columns = linear_columns(j);
    for (int64_t m = first; m < last; ++m) {
        float *row = (float *)x + m * columns;
        for (int64_t i = 0; i < columns; ++i) row[i] = i < j->k ? load_one<PTQ_BF16>(j->x, m * j->k + i) : 0.0f;
    }
}

template <int TILE> static void linear_tile(const ptq_linear *j, const float *x, int64_t row, int64_t m0, int64_t count) {
    const int64_t columns = linear_columns(j);
    alignas(64) float w[LINEAR_RUN];
    vf sums[TILE];
    for (int t = 0; t < TILE; ++t) sums[t] = splat(0.0f);
    for (int64_t c = 0; c < j->k; c += LINEAR_RUN) {
        const int64_t run = j->k - c < LINEAR_RUN ? j->k - c : LINEAR_RUN;
        decode_run(j, row, c, run, w);
        for (int64_t i = 0; i < run; i += W) {
            vf a;
            memcpy(&a, w + i, sizeof a);
            for (int t = 0; t < TILE; ++t) {
                vf b;
                memcpy(&b, x + (m0 + t) * columns + c + i, sizeof b);
                sums[t] = sums[t] + a * b;
            }
        }
    }
    for (int64_t t = 0; t < count; ++t) {
        float y = sum_of(sums[t]);
        if (j->factor) y *= j->factor[row * j->factor_step];
        if (j->bias) y += j->bias[row];
        j->out[(m0 + t) * j->n + row] = to_bf16(y);
    }
}

static void linear_rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        int64_t m = 0;
        for (; m + LINEAR_TILE <= j->m; m += LINEAR_TILE) linear_tile<LINEAR_TILE>(j, (const float *)x, row, m, LINEAR_TILE);
        for (; m < j->m; ++m) linear_tile<1>(j, (const float *)x, row, m, 1);
    }
}

static void linear_unpack(const ptq_linear *j, int64_t first, int64_t last, uint16_t *out) {
    alignas(64) float w[LINEAR_RUN];
    for (int64_t row = first; row < last; ++row)
        for (int64_t c = 0; c < j->k; c += LINEAR_RUN) {
            const int64_t run = j->k - c < LINEAR_RUN ? j->k - c : LINEAR_RUN;
            decode_run(j, row, c, run, w);
            for (int64_t i = 0; i < run; ++i) *out++ = to_bf16(w[i]);
        }
}

static const struct ptq_linear_ops linear_ops = {linear_bytes, linear_prepare, linear_rows, linear_unpack};
