// Root-mean-square norm of rows of bfloat16, rounded where a model that computes in bfloat16 rounds: the normalized row, and
// its product with the weight. The sum of squares is kept in four vectors of lanes.

// Of lanes that are not NaN with a payload in the lower bits alone.
INLINE vf rounded_to_bf16(vf x) {
    const vi u = bits(x);
    return from_bits((u + 0x7FFF + (shift_right(u, 16) & 1)) & splat((int32_t)0xFFFF0000));
}

static void rms_norm_row(const ptq_norm *j, int64_t row) {
    const int64_t first = row * j->n, whole = j->n / (4 * W) * (4 * W);
    vf sums[4] = {};
    for (int64_t i = 0; i < whole; i += 4 * W)
        for (int k = 0; k < 4; ++k) {
            const vf x = load_lanes<PTQ_BF16>(j->x, first + i + k * W);
            sums[k] = sums[k] + x * x;
        }
    float total = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (int64_t i = whole; i < j->n; ++i) {
        const float x = load_one<PTQ_BF16>(j->x, first + i);
        total += x * x;
    }
    const float scale = 1.0f / sqrtf(total / (float)j->n + j->eps);
    int64_t i = 0;
    for (; i + W <= j->n; i += W) {
        const vf y = rounded_to_bf16(load_lanes<PTQ_BF16>(j->x, first + i) * splat(scale));
        store_lanes<PTQ_BF16>(j->out, first + i, load_lanes<PTQ_BF16>(j->weight, i) * y);
    }
    for (; i < j->n; ++i) {
        const vf y = rounded_to_bf16(splat(load_one<PTQ_BF16>(j->x, first + i) * scale));
        j->out[first + i] = to_bf16(load_one<PTQ_BF16>(j->weight, i) * y[0]);
    }
}

static void rms_norm(const ptq_norm *j, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) rms_norm_row(j, row);
}
