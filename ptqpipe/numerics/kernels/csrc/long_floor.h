// Lower bounds of the scores of a long block at the 128 significands of a bfloat16 scale, in every octave at once.
//
// On a grid of four significant bits with neither smallest nor largest exponent the error of y relative to its binade
// depends on the significands of weight and scale alone, and that grid contains E4M3. So with m in [1, 2) the
// significand of a weight, p = (2^exponent)^2 [* h], r = fl(1/V) and q(y) the grid's number nearest to y,
//
//     score(scale of significand V) >= V^2 sum p (m r - q(m r))^2     up to the rounding of scores, see below
//
// bfloat16 has 128 significands: one sum of p for each and a table of squared errors give the bounds of all scales.
//
// float16 and float32 have more, so theirs are put in bins of equal width, and two sums are kept for each: of p and of
// p m. With y = m r, Q the number nearest to 2 r, and k over the eight midpoints M_k in [r, 2 r) of numbers D_k apart,
//
//     (y - q(y))^2 = (y - Q)^2 + sum_k 2 D_k min(0, y - M_k)
//
// (crossing a midpoint downwards changes q by D_k), and all of this is linear in p and p m but for sum p y^2, which is
// the same for every bin. Bins on one side of M_k count exactly. In the one around M_k, [a, b) in terms of y, min(0,
// y - M_k) is concave, so above its chord (a - M_k) (b - y) / (b - a), which is linear again. What that loses is a few
// 10^-5 of the score, nothing where all weights lie on the bins' edges (float16, and float32 that came from it).
//
// Rounding. y is rounded before its error d is taken, so d >= |m r - q| - 2^-24 y; by Cauchy and Schwarz the sum E of
// the squares falls by at most 2^-23 sqrt(E sum p y^2). The terms' own products and the sums of scores are in LOOSE.
// The bins' sums are float64 (n terms one after another: n 2^-53), and 64 sum p y^2 is more than the magnitudes of all
// that is added to make E (M_k and Q are below 2.2 y, 2 D_k below M_k / 4).

enum { LONG_LANES = 1024, SIGNIFICANDS = 128, FIRST_SCALE = 0x0080, LAST_SCALE = 0x7F7F };
#define LOOSE (1.0 - 0x1p-20)  // rounding of a score's terms (2^-22), of the bound's sums and products, with room
#define LOOSE_Y (1.0 - 0x1p-18)

// One block: rows of columns within the matrix; `width` is what an element's number counts, padding included.
struct LongBlock {
    const void *w;
    int64_t rows, cols, row_stride, width;
    const float *h;  // [cols], or null
    float amax, amax_h;  // the largest magnitude, and the largest weight that one of this magnitude has
    bool powers;  // whether scales are powers of two alone
};

// Bounds by the scale's significand: of all elements, and of those besides one that is the largest.
struct LongFloor { double all[SIGNIFICANDS], rest[SIGNIFICANDS]; };

INLINE float float_of(uint32_t bits) {
    union { uint32_t u; float f; } v;
    v.u = bits;
    return v.f;
}
INLINE uint32_t bits_of(float x) {
    union { float f; uint32_t u; } v;
    v.f = x;
    return v.u;
}
INLINE float scale_number(int code) { return float_of((uint32_t)code << 16); }
INLINE int exponent_field(float x) { return (int)(bits_of(x) >> 23); }
INLINE double binade_squared(float amax) { return ldexp(1.0, 2 * (exponent_field(amax) - 127)); }

// ---- bfloat16 ----

struct LongTable { double t[SIGNIFICANDS][SIGNIFICANDS]; };  // of weight and scale: squared error * V^2

static void make_long_table(LongTable *table) {
    for (int i = 0; i < SIGNIFICANDS; ++i)
        for (int j = 0; j < SIGNIFICANDS; ++j) {
            const float x = 1.0f + i / 128.0f, v = 1.0f + j / 128.0f, y = x * (1.0f / v);
            const float power = float_of((bits_of(y) & 0x7F800000) + (20 << 23));
            const double d = y - ((y + power) - power);
            table->t[i][j] = d * d * ((double)v * v);
        }
}

// Energies by significand in units of (binade of amax)^2. Elements 2^-32 below amax, subnormal ones and zeros are left out:
// less energy is a lower bound still.
static void significand_energy(const LongBlock *b, double *energy) {
    double power[256], sums[4][SIGNIFICANDS];
    const int top = exponent_field(b->amax);
    memset(sums, 0, sizeof sums);
    for (int e = 0; e < 256; ++e) power[e] = e > 0 && e > top - 32 && e <= top ? ldexp(1.0, 2 * (e - top)) : 0.0;
    for (int64_t row = 0; row < b->rows; ++row) {
        const uint16_t *w = (const uint16_t *)b->w + row * b->row_stride;
        int64_t k = 0;
        if (b->h) {
            for (; k < b->cols; ++k) sums[k & 3][w[k] & 127] += power[w[k] >> 7 & 255] * b->h[k];
            continue;
        }
        for (; k + 4 <= b->cols; k += 4) {
            uint64_t four;
            memcpy(&four, w + k, sizeof four);
            for (int i = 0; i < 4; ++i, four >>= 16) sums[i][four & 127] += power[four >> 7 & 255];
        }
        for (; k < b->cols; ++k) sums[0][w[k] & 127] += power[w[k] >> 7 & 255];
    }
    for (int i = 0; i < SIGNIFICANDS; ++i) energy[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

static void table_floor(const LongBlock *b, const LongTable *table, LongFloor *out) {
    double energy[SIGNIFICANDS], sum[SIGNIFICANDS];
    significand_energy(b, energy);
    memset(sum, 0, sizeof sum);
    for (int i = 0; i < SIGNIFICANDS; ++i)
        for (int j = 0; j < SIGNIFICANDS; ++j) sum[j] += energy[i] * table->t[i][j];
    const double unit = binade_squared(b->amax), share = exponent_field(b->amax) ? unit * b->amax_h * (2.0 - LOOSE_Y) : 0.0;
    const double *own = table->t[bits_of(b->amax) >> 16 & 127];
    for (int j = 0; j < SIGNIFICANDS; ++j) {
        out->all[j] = sum[j] * unit * LOOSE;
        out->rest[j] = out->all[j] - own[j] * share;
    }
}

// ---- float16 and float32 ----

typedef double pair __attribute__((vector_size(16)));  // of sums: p, p m

enum { FEW_BINS = 10, MANY_BINS = 12, MANY_ELEMENTS = 1 << 16, SUM_RUN = 1 << 16, FILL = 256, MIDPOINTS = 8 };

struct Midpoint {
    pair below, with;  // factors of the sums of all bins below the one around the midpoint, and of these with that one
    int64_t bin;
};
struct MomentScale {
    double v, r, last;  // V, r, Q
    Midpoint mid[MIDPOINTS];
};
struct MomentTable {
    int bits;
    MomentScale scale[SIGNIFICANDS];
    pair sums[(1 << MANY_BINS) + 1], run[1 << MANY_BINS];  // of a block
};

static void make_moment_table(MomentTable *table, int bits) {
    table->bits = bits;
    const double width = ldexp(1.0, -bits);
    for (int j = 0; j < SIGNIFICANDS; ++j) {
        MomentScale *s = &table->scale[j];
        const float v = 1.0f + j / 128.0f;
        s->v = v, s->r = 1.0f / v;
        int found = 0;
        for (int i = 0; i < 2 * MIDPOINTS; ++i) {  // 17/32, 19/32, .. 31/32, 17/16, .. 31/16
            const double unit = i < MIDPOINTS ? 1 / 32.0 : 1 / 16.0, m = (17 + 2 * (i % MIDPOINTS)) * unit;
            if (m < s->r || m >= 2 * s->r) continue;
            Midpoint *p = &s->mid[found++];
            int64_t bin = (int64_t)((m / s->r - 1.0) / width);
            bin = bin < 0 ? 0 : bin >= 1 << bits ? (1 << bits) - 1 : bin;
            const double from = s->r * (1.0 + bin * width), to = s->r * (1.0 + (bin + 1) * width);
            const double slope = (from - m) / (to - from), twice = 4.0 * unit;  // 2 D_k; unit is half a step
            p->bin = bin;
            p->below = twice * (pair){-m - slope * to, s->r * (1.0 + slope)};
            p->with = twice * (pair){slope * to, -s->r * slope};
            s->last = m + unit;
        }
    }
}

// The n <= W elements from k on, zeros behind them.
template <int DTYPE> INLINE vf load_some(const void *w, int64_t k, int n) {
    if (n >= W) return load_lanes<DTYPE>(w, k);
    vf x = splat(0.0f);
    for (int m = 0; m < n; ++m) x[m] = load_one<DTYPE>(w, k + m);
    return x;
}

// The sum of the lanes, which begin again at zero.
INLINE double taken(vd *lanes) {
    double sum = 0.0;
    for (int i = 0; i < W / 2; ++i) sum += lanes[0][i] + lanes[1][i];
    lanes[0] = lanes[1] = (vd){};
    return sum;
}

// Sums of p and p m by bin into table->sums[1 ..], sum p m^2 returned, in units of (binade of amax)^2. What does not count
// for bfloat16 does not count here.
template <int DTYPE> static double bin_sums(const LongBlock *b, MomentTable *table) {
    const int64_t bins = 1 << table->bits, elements = b->rows * b->cols;
    pair *const total = table->sums + 1, *const sums = elements > SUM_RUN ? table->run : total;
    const int top = exponent_field(b->amax);
    const vi least = splat(top > 32 ? (top - 32) << 23 : 0);
    const vu raise = (vu)splat((int32_t)((127u << 23) - ((uint32_t)top << 24)));
    alignas(64) double p[FILL], pm[FILL];
    alignas(64) int32_t bin[FILL];
    vd squares[2] = {};
    double square = 0.0;
    memset(table->sums, 0, (bins + 1) * sizeof(pair));
    if (sums != total) memset(sums, 0, bins * sizeof(pair));
    int64_t since = 0;
    for (int64_t row = 0; row < b->rows; ++row) {
        const char *w = (const char *)b->w + row * b->row_stride * dtype_bytes(DTYPE);
        for (int64_t k = 0; k < b->cols; k += FILL) {
            const int n = b->cols - k < FILL ? (int)(b->cols - k) : FILL;
            for (int i = 0; i < n; i += W) {
                const vi x = bits(load_some<DTYPE>(w, k + i, n - i)), exponent = x & 0x7F800000;
                const vf m = from_bits((x & 0x007FFFFF) | 0x3F800000);
                vf power = select(less(least, exponent), from_bits((vi)((vu)exponent * 2 + raise)), splat(0.0f));
                if (b->h) power = power * load_some<PTQ_F32>(b->h, k + i, n - i);
                const vi at = shift_right(x & 0x007FFFFF, 23 - table->bits);
                memcpy(bin + i, &at, sizeof at);
                vhalf powers[2], ms[2];
                memcpy(powers, &power, sizeof power), memcpy(ms, &m, sizeof m);
                for (int side = 0; side < 2; ++side) {
                    const vd d = __builtin_convertvector(powers[side], vd), s = __builtin_convertvector(ms[side], vd);
                    const vd ds = d * s;
                    memcpy(p + i + side * (W / 2), &d, sizeof d), memcpy(pm + i + side * (W / 2), &ds, sizeof ds);
                    squares[side] += ds * s;
                }
            }
            for (int i = 0; i < n; ++i) sums[bin[i]] += (pair){p[i], pm[i]};
            since += n;
            if (sums != total && since >= SUM_RUN) {
                for (int64_t i = 0; i < bins; ++i) total[i] += sums[i], sums[i] = (pair){};
                square += taken(squares);
                since = 0;
            }
        }
    }
    if (sums != total)
        for (int64_t i = 0; i < bins; ++i) total[i] += sums[i];
    return square + taken(squares);
}

// What E in exact arithmetic leaves when every y is rounded first; E >= 0 and sum p y^2.
INLINE double after_rounding(double e, double y2) {
    const double left = e > 0.0 ? e - 0x1p-23 * sqrt(e * y2) : 0.0;
    return left > 0.0 ? left : 0.0;
}

template <int DTYPE> static void moment_floor(const LongBlock *b, MomentTable *table, LongFloor *out) {
    const double square = bin_sums<DTYPE>(b, table), unit = binade_squared(b->amax);
    const int64_t bins = 1 << table->bits, elements = b->rows * b->cols;
    pair *const sums = table->sums;  // sums[i]: now of all bins below i
    for (int64_t i = 0; i < bins; ++i) sums[i + 1] += sums[i];
    const int64_t one_by_one = elements < SUM_RUN + FILL ? elements : SUM_RUN + FILL;
    const double error = (double)(one_by_one + elements / SUM_RUN + bins + 64) * (0x1p-53 * 64.0);
    const double m = float_of((bits_of(b->amax) & 0x007FFFFF) | 0x3F800000);
    for (int j = 0; j < SIGNIFICANDS; ++j) {
        const MomentScale *s = &table->scale[j];
        pair at = {}, of = sums[bins] * (pair){s->last * s->last, -2.0 * s->r * s->last};
        for (int k = 0; k < MIDPOINTS; ++k) {
            const Midpoint *p = &s->mid[k];
            at += sums[p->bin] * p->below, of += sums[p->bin + 1] * p->with;
        }
        const double y2 = square * (s->r * s->r), e = y2 + ((at[0] + of[0]) + (at[1] + of[1])) - error * y2;
        const double y = m * s->r, step = y < 1.0 ? 16.0 : 8.0, d = y - nearbyint(y * step) / step;
        const double share = exponent_field(b->amax) ? d * d * b->amax_h * (2.0 - LOOSE) : 0.0;
        out->all[j] = after_rounding(e, y2) * (s->v * s->v) * unit * LOOSE;
        out->rest[j] = after_rounding(e - share, y2) * (s->v * s->v) * unit * LOOSE;
    }
}
