// The exact search for long blocks: E4M3 rows, tiles and tensors of bfloat16 weights with bfloat16 scales.
//
// The scores are those of objective.py for scales that are numbers: float32 terms in element order into 1024 float64
// lanes, folded by halves, times value^2. The method is that of ptqpipe/search/_long.py: on a grid with neither smallest
// nor largest exponent the error of y relative to its binade depends on the significands of weight and scale alone (128
// each), and that grid contains E4M3, so
//
//     score(scale of significand V_j) >= sum_i H[i] T[i][j] V_j^2,   H[i] = sum of (2^exponent)^2 [* h] by significand
//
// in every octave. Scales are scored in the order of these bounds until none is at most the best score. The largest
// element contributes its clipping error where that is larger, which ends the descent; the ascent ends as in search.h.

enum { LONG_LANES = 1024, SIGNIFICANDS = 128, FIRST_SCALE = 0x0080, LAST_SCALE = 0x7F7F };
#define LOOSE (1.0 - 0x1p-20)  // rounding of a score's terms (2^-22), of the bound's sums and products, with room
#define LOOSE_Y (1.0 - 0x1p-18)

struct LongTable { double t[SIGNIFICANDS][SIGNIFICANDS]; };  // T[i][j] * V_j^2

// One block: rows of columns within the matrix; `width` is what an element's number counts, padding included.
struct LongBlock {
    const uint16_t *w;
    int64_t rows, cols, row_stride, width;
    const float *h;  // [cols], or null
    float amax;
};

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
    const int top = (int)(bits_of(b->amax) >> 23);
    memset(sums, 0, sizeof sums);
    for (int e = 0; e < 256; ++e) power[e] = e > 0 && e > top - 32 && e <= top ? ldexp(1.0, 2 * (e - top)) : 0.0;
    for (int64_t row = 0; row < b->rows; ++row) {
        const uint16_t *w = b->w + row * b->row_stride;
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

// t of W elements, widened and added to W consecutive lanes.
INLINE void add_terms(vf x, vf h, bool weighted, vf r, vf least, double *lanes) {
    x = select(less(x, least), splat(0.0f), x);
    const vf y = x * r, d = y - E4M3::nearest<true>(y, E4M3::Tables());
    vf t = d * d;
    if (weighted) t = t * h;
    vhalf half[2];
    memcpy(half, &t, sizeof t);
    for (int i = 0; i < 2; ++i) {
        vd sum;
        memcpy(&sum, lanes + i * (W / 2), sizeof sum);
        sum = sum + __builtin_convertvector(half[i], vd);
        memcpy(lanes + i * (W / 2), &sum, sizeof sum);
    }
}

// The score of one scale.
static double long_score(const LongBlock *b, int code) {
    alignas(64) double lanes[LONG_LANES + W];  // the spare ones take the zeros behind a run's end
    const float s = scale_number(code), inverse = 1.0f / s;
    const vf r = splat(inverse), least = splat(b->amax * 0x1p-32f);
    if (b->amax * inverse <= 0x1p-10f) return INFINITY;
    memset(lanes, 0, sizeof lanes);
    for (int64_t row = 0; row < b->rows; ++row) {
        const uint16_t *w = b->w + row * b->row_stride;
        const int64_t first = row * b->width;
        for (int64_t k = 0; k < b->cols;) {  // runs between the edges of the lanes
            const int lane = (int)((first + k) % LONG_LANES);
            const int64_t left = b->cols - k;
            const int n = left < LONG_LANES - lane ? (int)left : LONG_LANES - lane;
            int i = 0;
            for (; i + W <= n; i += W) {
                vf h = splat(1.0f);
                if (b->h) memcpy(&h, b->h + k + i, sizeof h);
                add_terms(abs_of(load_lanes<PTQ_BF16>(w, k + i)), h, b->h, r, least, lanes + lane + i);
            }
            if (i < n) {
                vf x = splat(0.0f), h = splat(1.0f);
                for (int m = 0; i + m < n; ++m) {
                    x[m] = load_one<PTQ_BF16>(w, k + i + m);
                    if (b->h) h[m] = b->h[k + i + m];
                }
                add_terms(abs_of(x), h, b->h, r, least, lanes + lane + i);
            }
            k += n;
        }
    }
    for (int half = LONG_LANES / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0] * ((double)s * s);
}

// The scale code (upper half of the float32) of the least score, ties to the smaller one.
static int long_scale(const LongBlock *b, float amax_h, const LongTable *table) {
    if (!(b->amax / scale_number(FIRST_SCALE) > 0x1p-10f)) return FIRST_SCALE;  // zeroed at every scale
    double energy[SIGNIFICANDS], floor[SIGNIFICANDS], bound[SIGNIFICANDS], best = INFINITY;
    significand_energy(b, energy);
    const double unit = ldexp(1.0, 2 * ((int)(bits_of(b->amax) >> 23) - 127));
    memset(floor, 0, sizeof floor);
    for (int i = 0; i < SIGNIFICANDS; ++i)
        for (int j = 0; j < SIGNIFICANDS; ++j) floor[j] += energy[i] * table->t[i][j];
    const bool normal = bits_of(b->amax) >= 0x00800000;
    const double *own = table->t[bits_of(b->amax) >> 16 & 127];
    int top = (int)(bits_of(b->amax * (1.0f / E4M3::half_edge * (1.0f + 0x1p-20f))) >> 16), chosen = FIRST_SCALE;
    top = top < FIRST_SCALE + 127 ? FIRST_SCALE + 127 : top;  // the lowest octave has no halves
    for (;; top -= SIGNIFICANDS) {
        bool scored = false;
        for (int i = 0; i < SIGNIFICANDS; ++i) {
            const int code = top - i, j = code & 127;
            if (code < FIRST_SCALE) {
                bound[i] = INFINITY;
                continue;
            }
            const float s = scale_number(code);
            const double beyond = (double)(b->amax * (1.0f / s)) * LOOSE_Y - E4M3::max;
            const double clipped = beyond > 0 ? beyond * beyond * LOOSE_Y * ((double)s * s) * amax_h : 0.0;
            const double share = normal ? own[j] * unit * amax_h * (2.0 - LOOSE_Y) : 0.0;
            bound[i] = floor[j] * unit * LOOSE + (clipped > share ? clipped - share : 0.0);
        }
        for (;;) {
            int at = 0;
            for (int i = 1; i < SIGNIFICANDS; ++i) at = bound[i] < bound[at] ? i : at;
            if (!(bound[at] <= best) || bound[at] == INFINITY) break;
            scored = true;
            bound[at] = INFINITY;
            const double score = long_score(b, top - at);
            if (score < best || (score == best && score < INFINITY && top - at < chosen)) best = score, chosen = top - at;
        }
        if (!scored || top - SIGNIFICANDS < FIRST_SCALE) return chosen;
    }
}

// |w| up to `amax`, rounded up to a normal bfloat16 after division by 448: the rule absmax.
INLINE int absmax_number(float amax) {
    const float fitted = amax / E4M3::max;
    const uint32_t code = (bits_of(fitted) + 0xFFFF) >> 16;
    return code < FIRST_SCALE ? FIRST_SCALE : code > LAST_SCALE ? LAST_SCALE : (int)code;
}

static int32_t quantize_long(const ptq_long *j) {
    if (j->dtype != PTQ_BF16 || j->element != PTQ_E4M3) return PTQ_UNSUPPORTED;
    LongTable *table = (LongTable *)malloc(sizeof(LongTable));
    if (!table) return PTQ_NO_MEMORY;
    make_long_table(table);
    int32_t status = PTQ_OK;
    int64_t index = 0;
    for (int64_t row = 0; row < j->rows && status == PTQ_OK; row += j->block_rows)
        for (int64_t col = 0; col < j->cols; col += j->block_cols, ++index) {
            LongBlock b;
            b.w = (const uint16_t *)j->w + row * j->row_stride + col;
            b.rows = j->rows - row < j->block_rows ? j->rows - row : j->block_rows;
            b.cols = j->cols - col < j->block_cols ? j->cols - col : j->block_cols;
            b.row_stride = j->row_stride, b.width = j->block_cols;
            b.h = j->importance ? j->importance + col : 0;
            const ptq_amax whole = {b.w, b.rows, b.cols, b.row_stride, PTQ_BF16, 0};
            int64_t bad;
            if ((status = amax(&whole, &b.amax, &bad)) != PTQ_OK) break;
            if (j->rule == PTQ_EXACT) {
                float amax_h = b.h ? 0.0f : 1.0f;
                const uint16_t pattern = (uint16_t)(bits_of(b.amax) >> 16);
                for (int64_t r = 0; b.h && r < b.rows; ++r)
                    for (int64_t k = 0; k < b.cols; ++k)
                        if ((b.w[r * b.row_stride + k] & 0x7FFF) == pattern && b.h[k] > amax_h) amax_h = b.h[k];
                j->scales[index] = (uint16_t)long_scale(&b, amax_h, table);
            } else {
                j->scales[index] = (uint16_t)absmax_number(b.amax);
            }
        }
    free(table);
    return status;
}
