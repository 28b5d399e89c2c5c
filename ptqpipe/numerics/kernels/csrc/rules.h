// The baselines: scale codes in closed form from a block's largest magnitude, and four over six, which scores two.
//
// Operation by operation what ptqpipe/numerics/search/baselines.py computes.

// The nearest code of a MINIFLOAT3 scale, ties to even.
INLINE vi nearest_scale(vf fitted, const Minifloat3Scale &s) {
    return minifloat_code(min_of(fitted, splat(scale_value(s.top, s.bias))), 3, 1 - s.bias);
}

// ceil(log2(fitted)) + 127; 0 for all up to 2^-127.
INLINE vi power_above(vf fitted) {
    const vi b = bits(fitted);
    return select(less(splat(0x00400000), b), shift_right(b + 0x7FFFFF, 23), splat(0));
}

template <class E, bool MX> INLINE vi closed_codes(int rule, int flush_code, vf amax, const Minifloat3Scale &s) {
    if (MX) {
        vi code;
        if (rule == PTQ_OCP_FLOOR) code = shift_right(bits(amax), 23) - E::emax;
        else if (rule == PTQ_OCP_EVEN) code = shift_right(bits(amax) + 0x200000, 23) - E::emax;
        else code = power_above(amax / splat(E::max));
        return min_of(max_of(code, splat(0)), splat(254));
    }
    const vi code = nearest_scale(amax / splat(E::max) / splat(s.global_scale), s);
    return rule == PTQ_ABSMAX ? select(less(code, splat(1)), splat(flush_code), code) : max_of(code, splat(1));
}

// What the formula gives at one code per lane, with or without the rule that a scale which zeroes the block costs inf.
template <class E, bool MX, bool H, int B>
static void score_codes(const vf *x, const vf *h, int block, vf largest, const Minifloat3Scale &s, vi code,
                        bool zeroing_costs, double *scores) {
    const typename E::Tables tables = E::tables();
    vf r, square, error, clipped;
    if (MX) r = E::unit * from_bits((254 - min_of(code, splat(253))) << 23), square = splat(1.0f / (E::unit * E::unit));
    else scale_factors(s, code, &r, &square);
    const vf top = largest * r;
    block_error<E, true, H, false, B, 1>(x, h, block, &r, tables, &error, &clipped);
    const vf score = error * square;
    // Where products of the lanes might leave the normal range: one block at a time.
    const vm rare = mask_or(mask_or(rare_lanes<MX>(s, largest), less(top, splat(0x1p-20f * E::unit))),
                            MX ? less(splat(253), code) : no_lanes());
    const unsigned alone = lane_bits(rare), zeroed = lane_bits(less_equal(top, splat(E::zero_edge * E::unit)));
    for (int lane = 0; lane < W; ++lane) {
        const double power = MX ? ldexp(1.0, code[lane] - 127) : 1.0;
        scores[lane] = (double)score[lane] * (power * power);
        bool zeroes = zeroed >> lane & 1;
        if (alone >> lane & 1) {
            float one[MAX_BLOCK], weights[MAX_BLOCK];
            for (int k = 0; k < block; ++k) one[k] = x[k][lane], weights[k] = H ? h[k][lane] : 1.0f;
            scores[lane] = score_scalar<E, MX>(one, H ? weights : 0, block, code[lane], s, &zeroes);
        }
        if (zeroing_costs && zeroes) scores[lane] = INFINITY;
    }
}

template <class E, bool H, int B>
static vi four_over_six(const vf *x, const vf *h, int block, vf largest, const Minifloat3Scale &s) {
    const vf fitted = largest / splat(E::max) / splat(s.global_scale);
    const vi six = max_of(nearest_scale(fitted, s), splat(1)), four = max_of(nearest_scale(fitted * 1.5f, s), splat(1));
    double error_six[W], error_four[W];
    score_codes<E, false, H, B>(x, h, block, largest, s, six, true, error_six);
    score_codes<E, false, H, B>(x, h, block, largest, s, four, true, error_four);
    vi code = six;
    for (int lane = 0; lane < W; ++lane)
        if (error_four[lane] < error_six[lane]) code[lane] = four[lane];
    return code;
}
