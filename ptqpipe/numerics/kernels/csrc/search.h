// The exact search: for each of W blocks the scale code of the least score, ties to the smallest code.
//
// Scores are those of ptqpipe/numerics/search/objective.py, operation by operation. Why scanning downward from one code and
// stopping early finds what scoring every code finds:
//
// Start. If the block's largest y is below half_edge at scale s, then s/2 has y' = 2y, |d'| <= 2|d| and so no larger a
//   score, and on equality it wins as the smaller code. Codes that are even or >= 16 have such a half, so nothing above
//   max(15, the largest code with y >= half_edge) can win. For E8M0 every code but 0 has a half.
// Stop. Float sums of non-negative terms in a fixed order are monotone in every term, so score(s) is no less than the sum
//   of the terms of any of the elements, in the same order. A code is out once such a sum exceeds the best score, and so
//   is every smaller one, if the elements are clipped (y > max): from a code to the next smaller one, d * value with
//   d = y - max grows by at least (value / 16) * max, far more than the rounding of y (3 ulp) while y < 2^16. Two sums:
//   - the largest element alone, fl(fl(d*d) * value^2): free, and enough for most blocks. It never exceeds a best score
//     that is larger than the energy of that element: n elements of one magnitude whose relative error is above 1/n.
//   - all clipped elements. For E4M3 and UE5M3 scales less 2^-12, for its rounding (at most 2 * 256 additions of half an
//     ulp). For E8M0, y and d of the next code are 2y and 2y - max >= 2d exactly, so nothing is rounded differently.
// Scans of E4M3 and UE5M3 scales end at code 1 anyway, so a bound that never fires costs time and nothing else. Those of
// E8M0 multiply their best score by 4 from code to code, and must end before that leaves the float range. The sum of all
// clipped elements sees to it: let E = sum h x^2 and m the element with the largest term of it. At the code where
// y_m is in [half_edge, 2 half_edge) its error is below a ninth of its energy, and no element's error is above its energy,
// so from there on the best score is below E - 8/9 h_m x_m^2 <= E (1 - 1/288) with blocks of up to 256. The sum lacks
// min(1, 2 max / y_k) of each element's energy, so it exceeds that when what is left out is below E / 288. Without
// weights (m is the largest, so count against x_m^2 alone): 2 max sum y_k <= 512 max y_m <= 8/9 y_m^2, from y_m = 576 max
// on, 11 codes below the start. With weights in 2^-24 .. 2, E >= 2^-24 of the largest's square: elements below 2^-22 of
// the largest hold less than E / 2^11 together, and those above are cut by less than E / 2^9 from y_k = 2^10 max on: no
// more than 34 codes below the start. Codes below that are only reached by lanes that are done.

#define SAFE_Y 0x1p16f

#define EACH(u) _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u)

// U tiles are scanned side by side: the additions of one hide the latency of the other's, and they leave the loop once.
template <int U> struct Found { vi code[U]; vf score[U]; };  // score: FLT_MAX where no code has a finite one
template <int U> struct Lanes { vf largest[U]; vm done[U]; };

// C: whether the terms of elements beyond max are summed as well.
template <class E, bool CLAMP, bool H, bool C, int U>
INLINE void add_element(const vf *x, const vf *h, int n, int k, const vf *r, const typename E::Tables &tables, vf *sum,
                        vf *clipped) {
    EACH(u) {
        vf y = x[u * n + k] * r[u];
        vf d = y - E::template nearest<CLAMP>(y, tables);
        vf t = d * d;
        if (H) t = t * h[u * n + k];
        if (C) clipped[u] = clipped[u] + select(less(splat(E::max * E::unit), y), t, splat(0.0f));
        sum[u] = k ? sum[u] + t : t;
        settle(sum[u]);
    }
}

// sum of (y - nearest)^2 [* h] in element order; clipped: the part of elements beyond max, 0 unless C.
template <class E, bool CLAMP, bool H, bool C, int B, int U>
INLINE void block_error(const vf *x, const vf *h, int block, const vf *r, const typename E::Tables &tables, vf *sum,
                        vf *clipped) {
    EACH(u) clipped[u] = splat(0.0f);
    add_element<E, CLAMP, H, C, U>(x, h, B ? B : block, 0, r, tables, sum, clipped);
    if (B) {
#pragma GCC unroll 32
        for (int k = 1; k < B; ++k) add_element<E, CLAMP, H, C, U>(x, h, B, k, r, tables, sum, clipped);
    } else {
        for (int k = 1; k < block; ++k) add_element<E, CLAMP, H, C, U>(x, h, block, k, r, tables, sum, clipped);
    }
}

// Whether the largest y of a lane that still counts is `y` or more.
template <class E, int U> INLINE bool any_from(float y, const vf *top, const vm *done) {
    vm from = no_lanes();
    EACH(u) from = mask_or(from, mask_and(mask_not(done[u]), less_equal(splat(y * E::unit), top[u])));
    return any(from);
}

// block_error, clamped only where a lane that still counts needs it; those that are done may get any error. FAR: without
// weights the clipping is summed too, once the largest element is so far beyond max that few blocks are still scanned.
// Returns whether it was summed.
template <class E, bool H, bool FAR, int B, int U>
INLINE bool lanes_error(const vf *x, const vf *h, int block, const vf *r, const vf *top, const vm *done,
                        const typename E::Tables &tables, vf *sum, vf *clipped) {
    const bool clamp = any_from<E, U>(E::clamp_from, top, done);
    const bool summed = H || (FAR && clamp && any_from<E, U>(2.0f * E::max, top, done));
    if (summed && clamp) block_error<E, true, H, H || FAR, B, U>(x, h, block, r, tables, sum, clipped);
    else if (clamp) block_error<E, true, H, H, B, U>(x, h, block, r, tables, sum, clipped);
    else block_error<E, false, H, H, B, U>(x, h, block, r, tables, sum, clipped);
    return summed;
}

template <int U> INLINE bool all_done(const vm *done) {
    vm every = done[0];
    EACH(u) every = mask_and(every, done[u]);
    return all(every);
}

// Where the scan of E4M3 and UE5M3 scales starts.
template <class E> INLINE vi start_code(vf largest, const Minifloat3Scale &s) {
    const float to_edge = 1.0f / (E::half_edge * s.global_scale) * (1.0f + 0x1p-20f);  // a hair high: starts no code late
    const vi code = shift_right(bits(largest * to_edge), 20) - ((127 - s.bias) << 3);
    return max_of(min_of(code, splat(s.top)), splat(s.top < 15 ? s.top : 15));
}

template <class E, bool H, int B, int U>
static void scan_minifloat3(const vf *x, const vf *h, int block, const Lanes<U> *lanes, const Minifloat3Scale &s,
                            Found<U> *best) {
    const typename E::Tables tables = E::tables();
    vf r[U], square[U], top[U], error[U], clipped[U], score[U];
    vi code[U];
    vm done[U];
    EACH(u) {
        code[u] = start_code<E>(lanes->largest[u], s);
        best->score[u] = splat(FLT_MAX), best->code[u] = splat(1), done[u] = lanes->done[u];
        scale_factors(s, code[u], &r[u], &square[u]);
        top[u] = lanes->largest[u] * r[u];
    }
    do {
        lanes_error<E, H, false, B, U>(x, h, block, r, top, done, tables, error, clipped);
        EACH(u) {
            score[u] = error[u] * square[u];
            vm counts = mask_and(less(splat(E::zero_edge * E::unit), top[u]), mask_not(done[u]));
            vm better = mask_and(less_equal(score[u], best->score[u]), counts);
            best->score[u] = select(better, score[u], best->score[u]);
            best->code[u] = select(better, code[u], best->code[u]);
            vm ends = no_lanes();
            if (H) {
                vf bound = clipped[u] * square[u] * (1.0f - 0x1p-12f);
                ends = mask_and(less(best->score[u], bound), less(top[u], splat(SAFE_Y * E::unit)));
            }
            code[u] = code[u] - 1;
            scale_factors(s, code[u], &r[u], &square[u]);
            top[u] = lanes->largest[u] * r[u];
            if (!H) {
                vf d = top[u] - E::max * E::unit;
                vm clips = mask_and(less(splat(0.0f), d), less(top[u], splat(SAFE_Y * E::unit)));
                ends = mask_and(clips, less(best->score[u], d * d * square[u]));
            }
            done[u] = mask_or(done[u], mask_or(ends, less(code[u], splat(1))));
        }
    } while (!all_done<U>(done));
}

// Scores of powers of two are compared in units of the current value^2: the best so far is multiplied by 4 on each step
// down, which is exact. `score` of the result is in units of value(code)^2.
template <class E, bool H, int B, int U>
static void scan_e8m0(const vf *x, const vf *h, int block, const Lanes<U> *lanes, Found<U> *best) {
    const typename E::Tables tables = E::tables();
    vf r[U], top[U], error[U], clipped[U], limit[U];
    vi code[U];
    vm done[U];
    EACH(u) {
        const vf s = lanes->largest[u] * (1.0f / E::half_edge * (1.0f + 0x1p-20f));
        code[u] = min_of(shift_right(bits(s), 23), splat(253));
        best->score[u] = limit[u] = splat(FLT_MAX), best->code[u] = splat(0), done[u] = lanes->done[u];
    }
    do {
        EACH(u) r[u] = E::unit * from_bits((254 - code[u]) << 23), top[u] = lanes->largest[u] * r[u];
        const bool summed = lanes_error<E, H, true, B, U>(x, h, block, r, top, done, tables, error, clipped);
        EACH(u) {
            vm counts = mask_and(less(splat(E::zero_edge * E::unit), top[u]), mask_not(done[u]));
            vm better = mask_and(less_equal(error[u], limit[u]), counts);
            best->score[u] = select(better, error[u] * (1.0f / (E::unit * E::unit)), best->score[u]);
            best->code[u] = select(better, code[u], best->code[u]);
            const vf least = select(better, error[u], limit[u]);
            if (summed) done[u] = mask_or(done[u], less(least, clipped[u]));
            limit[u] = 4.0f * least;
            const vf d = 2.0f * top[u] - E::max * E::unit;
            if (!H) done[u] = mask_or(done[u], less(limit[u], max_of(d, splat(0.0f)) * d));
            done[u] = mask_or(done[u], less(code[u], splat(1)));
            code[u] = max_of(code[u] - 1, splat(0));
        }
    } while (!all_done<U>(done));
}

// One block, one operation at a time: for magnitudes that the lanes' arithmetic is not proven for.
template <class E> INLINE float nearest_scalar(float y) {
    union { float f; uint32_t u; } power, clamped;
    const uint32_t lowest = (uint32_t)(127 + E::emin) << 23;
    clamped.f = y < E::max ? y : E::max;
    power.u = clamped.u & 0x7F800000;
    power.u = (power.u < lowest ? lowest : power.u) + ((23 - E::mantissa) << 23);
    return (clamped.f + power.f) - power.f;
}

template <class E> INLINE float error_scalar(const float *x, const float *h, int block, float s, float *top) {
    const float r = 1.0f / s;
    float sum = 0.0f;
    *top = 0.0f;
    for (int k = 0; k < block; ++k) {
        float y = x[k] * r, d = y - nearest_scalar<E>(y), t = d * d;
        if (h) t = t * h[k];
        sum = k ? sum + t : t;
        *top = y > *top ? y : *top;
    }
    return sum;
}

// The formula of the objective at one code; *zeroes: whether it rounds the whole block to zero.
template <class E, bool MX>
INLINE double score_scalar(const float *x, const float *h, int block, int code, const Minifloat3Scale &s, bool *zeroes) {
    union { uint32_t u; float f; } power;
    power.u = code ? (uint32_t)code << 23 : 0x00400000;
    const float value = MX ? power.f : scale_value(code, s.bias);
    float top;
    const float error = error_scalar<E>(x, h, block, MX ? value : value * s.global_scale, &top);
    *zeroes = !(top > E::zero_edge);
    return MX ? (double)error * ((double)value * value) : (double)(error * (value * value));
}

// All codes of one block. Without a scale that keeps any element the code is the smallest one, and the score is what the
// formula gives there: sum x^2.
template <class E, bool MX>
static int scan_all(const float *x, const float *h, int block, const Minifloat3Scale &s, double *best) {
    const int first = MX ? 0 : 1, last = MX ? 254 : s.top;
    int chosen = first;
    bool found = false, zeroes;
    *best = 0.0;
    for (int code = first; code <= last; ++code) {
        const double score = score_scalar<E, MX>(x, h, block, code, s, &zeroes);
        if (code == first) *best = score;
        if (!zeroes && (found ? score < *best : score < INFINITY)) *best = score, chosen = code, found = true;
    }
    return chosen;
}

// Lanes that scan_* must leave to scan_all: y or its powers might leave the float range. (For E8M0: a scan from 2^-64 on
// starts at code 55 or above, and no scan goes down more than 34 codes; see "Stop" at the top.)
template <bool MX> INLINE vm rare_lanes(const Minifloat3Scale &s, vf largest) {
    if (MX) return less(largest, splat(0x1p-64f));
    return less(splat(scale_value(s.top, s.bias) * s.global_scale * 0x1p13f), largest);
}
