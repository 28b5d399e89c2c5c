// The exact search: for each of W blocks the scale code of the least score, ties to the smallest code.
//
// Scores are those of ptqpipe/search/objective.py, operation by operation. Why scanning downward from one code and
// stopping early finds what scoring every code finds:
//
// Start. If the block's largest y is below half_edge at scale s, then s/2 has y' = 2y, |d'| <= 2|d| and so no larger a
//   score, and on equality it wins as the smaller code. Codes that are even or >= 16 have such a half, so nothing above
//   max(15, the largest code with y >= half_edge) can win. For E8M0 every code but 0 has a half.
// Stop. Float sums of non-negative terms are monotone, so score(s) >= fl(fl(d*d) * value^2) for the largest element,
//   d = y - max > 0. From a code to the next smaller one, d * value grows by at least (value / 16) * max, far more than
//   the rounding of y (3 ulp) while y < 2^16: the bound increases, and once it exceeds the best score no smaller code
//   can win or tie. With weights the bound is the sum of all clipped elements' terms, less 2^-12 for its rounding (at
//   most 2 * 256 additions of half an ulp).

#define SAFE_Y 0x1p16f

struct Found { vi code; vf score; };  // score: FLT_MAX where no code has a finite one

// sum of (y - nearest)^2 [* h] in element order; *clipped: the part of elements beyond max (with weights only).
template <class E, bool CLAMP, bool H, int B>
INLINE vf block_error(const vf *x, const vf *h, int block, vf r, const typename E::Tables &tables, vf *clipped) {
    const int n = B ? B : block;
    vf sum = splat(0.0f), beyond = splat(0.0f);
#pragma GCC unroll 16
    for (int k = 0; k < n; ++k) {
        vf y = x[k] * r;
        vf d = y - E::template nearest<CLAMP>(y, tables);
        vf t = d * d;
        if (H) {
            t = t * h[k];
            beyond = beyond + select(less(splat(E::max * E::unit), y), t, splat(0.0f));
        }
        sum = k ? sum + t : t;
    }
    if (H) *clipped = beyond;
    return sum;
}

// block_error, clamped only where a lane that still counts needs it: an index beyond the table wraps to a value that is
// too small, which makes the error of a lane that is already done larger still.
template <class E, bool H, int B>
INLINE vf lanes_error(const vf *x, const vf *h, int block, vf r, vf top, vm done, const typename E::Tables &tables,
                      vf *clipped) {
    const bool clamp = E::table_end == 0 || any(mask_and(mask_not(done), less_equal(splat(E::table_end * E::unit), top)));
    if (clamp) return block_error<E, true, H, B>(x, h, block, r, tables, clipped);
    return block_error<E, false, H, B>(x, h, block, r, tables, clipped);
}

template <class E, bool H, int B>
static Found scan_minifloat3(const vf *x, const vf *h, int block, vf largest, vm done, const Minifloat3Scale &s) {
    const typename E::Tables tables = E::tables();
    const float to_edge = 1.0f / (E::half_edge * s.global_scale) * (1.0f + 0x1p-20f);  // a hair high: starts no code late
    vi code = shift_right(bits(largest * to_edge), 20) - ((127 - s.bias) << 3);
    code = max_of(min_of(code, splat(s.top)), splat(s.top < 15 ? s.top : 15));
    Found best = {splat(1), splat(FLT_MAX)};
    vf r, square, clipped;
    scale_factors(s, code, &r, &square);
    vf top = largest * r;
    for (;;) {
        vf error = lanes_error<E, H, B>(x, h, block, r, top, done, tables, &clipped);
        vf score = error * square;
        vm counts = mask_and(less(splat(E::zero_edge * E::unit), top), less(splat(0), code));
        vm better = mask_and(less_equal(score, best.score), counts);
        best.score = select(better, score, best.score);
        best.code = select(better, code, best.code);
        if (H) {
            vf bound = clipped * square * (1.0f - 0x1p-12f);
            done = mask_or(done, mask_and(less(best.score, bound), less(top, splat(SAFE_Y * E::unit))));
        }
        code = code - 1;
        scale_factors(s, code, &r, &square);
        top = largest * r;
        if (!H) {
            vf d = top - E::max * E::unit;
            vm clips = mask_and(less(splat(0.0f), d), less(top, splat(SAFE_Y * E::unit)));
            done = mask_or(done, mask_and(clips, less(best.score, d * d * square)));
        }
        done = mask_or(done, less(code, splat(1)));
        if (all(done)) return best;
    }
}

// Scores of powers of two are compared in units of the current value^2: the best so far is multiplied by 4 on each step
// down, which is exact. `score` of the result is in units of value(code)^2.
template <class E, bool H, int B>
static Found scan_e8m0(const vf *x, const vf *h, int block, vf largest, vm done) {
    const typename E::Tables tables = E::tables();
    vi code = min_of(shift_right(bits(largest * (1.0f / E::half_edge * (1.0f + 0x1p-20f))), 23), splat(253));
    Found best = {splat(0), splat(FLT_MAX)};
    vf limit = splat(FLT_MAX), clipped;
    for (;;) {
        vf r = E::unit * from_bits((254 - code) << 23), top = largest * r;
        vf error = lanes_error<E, H, B>(x, h, block, r, top, done, tables, &clipped);
        vm counts = mask_and(less(splat(E::zero_edge * E::unit), top), mask_not(done));
        vm better = mask_and(less_equal(error, limit), counts);
        best.score = select(better, error * (1.0f / (E::unit * E::unit)), best.score);
        best.code = select(better, code, best.code);
        limit = 4.0f * select(better, error, limit);
        vf bound;
        vm clips;
        if (H) {
            bound = 4.0f * (clipped * (1.0f - 0x1p-12f)), clips = less(splat(0.0f), bound);
        } else {
            vf d = 2.0f * top - E::max * E::unit;
            bound = d * d, clips = less(splat(0.0f), d);
        }
        done = mask_or(done, mask_or(mask_and(clips, less(limit, bound)), less(code, splat(1))));
        if (all(done)) return best;
        code = max_of(code - 1, splat(0));
    }
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

// All codes of one block. Without a scale that keeps any element the code is the smallest one, and the score is what the
// formula gives there: sum x^2.
template <class E, bool MX>
static int scan_all(const float *x, const float *h, int block, const Minifloat3Scale &s, double *best) {
    const int first = MX ? 0 : 1, last = MX ? 254 : s.top;
    int chosen = first;
    bool found = false;
    for (int code = first; code <= last; ++code) {
        union { uint32_t u; float f; } power;
        power.u = code ? (uint32_t)code << 23 : 0x00400000;
        const float value = MX ? power.f : scale_value(code, s.bias);
        float top;
        const float error = error_scalar<E>(x, h, block, MX ? value : value * s.global_scale, &top);
        const double score = MX ? (double)error * ((double)value * value) : (double)(error * (value * value));
        if (code == first) *best = score;
        if (!(top > E::zero_edge)) continue;
        if (found ? score < *best : score < INFINITY) *best = score, chosen = code, found = true;
    }
    return chosen;
}

// Lanes that scan_* must leave to scan_all: y or its powers might leave the float range. (For E8M0: 2^-80 is 37 codes,
// more than any scan goes down, above the smallest scale.)
template <bool MX> INLINE vm rare_lanes(const Minifloat3Scale &s, vf largest) {
    if (MX) return less(largest, splat(0x1p-80f));
    return less(splat(scale_value(s.top, s.bias) * s.global_scale * 0x1p13f), largest);
}
