// The exact search for long blocks: E4M3 rows, tiles and tensors with bfloat16 scales.
//
// The scores are those of objective.py for scales that are numbers: float32 terms in element order into 1024 float64
// lanes, folded by halves, times value^2. The method is that of ptqpipe/numerics/search/_long.py: scales are scored in the order
// of the bounds of long_floor.h until none is at most the best score. The largest element contributes its clipping error
// where that is larger, which ends the descent; the ascent ends as in search.h. PTQ_POWERS scores powers of two alone.

enum { SCORE_RUN = 1 << 15 };  // elements between two looks at whether the score has passed the best one

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

// The sum of the lanes in the order of objective.py.
INLINE double folded(double *lanes) {
    for (int half = LONG_LANES / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

// The score of one scale, or infinity where it is above `best`: lanes only grow, and rounding keeps the order of sums.
template <int DTYPE> static double long_score(const LongBlock *b, int code, double best) {
    alignas(64) double lanes[LONG_LANES + W];  // the spare ones take the zeros behind a run's end
    const float s = scale_number(code), inverse = 1.0f / s;
    const double square = (double)s * s;
    const vf r = splat(inverse), least = splat(b->amax * 0x1p-32f);
    if (b->amax * inverse <= 0x1p-10f) return INFINITY;
    memset(lanes, 0, sizeof lanes);
    int64_t since = 0;
    for (int64_t row = 0; row < b->rows; ++row) {
        const char *w = (const char *)b->w + row * b->row_stride * dtype_bytes(DTYPE);
        const int64_t first = row * b->width;
        for (int64_t k = 0; k < b->cols;) {  // runs between the edges of the lanes
            const int lane = (int)((first + k) % LONG_LANES);
            const int64_t left = b->cols - k;
            const int n = left < LONG_LANES - lane ? (int)left : LONG_LANES - lane;
            for (int i = 0; i < n; i += W) {
                const vf h = b->h ? load_some<PTQ_F32>(b->h, k + i, n - i) : splat(1.0f);
                add_terms(abs_of(load_some<DTYPE>(w, k + i, n - i)), h, b->h, r, least, lanes + lane + i);
            }
            k += n, since += n;
            if (since >= SCORE_RUN) {
                alignas(64) double sums[LONG_LANES];
                memcpy(sums, lanes, sizeof sums);
                if (folded(sums) * square > best) return INFINITY;
                since = 0;
            }
        }
    }
    return folded(lanes) * square;
}

// The scale code (upper half of the float32) of the least score, ties to the smaller one.
template <int DTYPE> static int long_scale(const LongBlock *b, const LongFloor *floor) {
    double bound[SIGNIFICANDS], best = INFINITY;
    int top = (int)(bits_of(b->amax * (1.0f / E4M3::half_edge * (1.0f + 0x1p-20f))) >> 16), chosen = FIRST_SCALE;
    top = top < FIRST_SCALE + 127 ? FIRST_SCALE + 127 : top;  // the lowest octave has no halves
    // Above 2^126 the inverse of a scale is subnormal: its rounding is another than that of the half's.
    if (b->amax > E4M3::zero_edge * 0x1p126f) top = LAST_SCALE;
    for (;; top -= SIGNIFICANDS) {
        bool scored = false;
        for (int i = 0; i < SIGNIFICANDS; ++i) {
            const int code = top - i, j = code & 127;
            if (code < FIRST_SCALE || (b->powers && j)) {
                bound[i] = INFINITY;
                continue;
            }
            const float s = scale_number(code);
            const double beyond = (double)(b->amax * (1.0f / s)) * LOOSE_Y - E4M3::max;
            const double clipped = beyond > 0 ? beyond * beyond * LOOSE_Y * ((double)s * s) * b->amax_h : 0.0;
            const double one = floor->rest[j] + clipped;
            bound[i] = s > 0x1p126f ? 0.0 : floor->all[j] > one ? floor->all[j] : one;
        }
        for (;;) {
            int at = 0;
            for (int i = 1; i < SIGNIFICANDS; ++i) at = bound[i] < bound[at] ? i : at;
            if (!(bound[at] <= best) || bound[at] == INFINITY) break;
            scored = true;
            bound[at] = INFINITY;
            const double score = long_score<DTYPE>(b, top - at, best);
            if (score < best || (score == best && score < INFINITY && top - at < chosen)) best = score, chosen = top - at;
        }
        if (!scored || top - SIGNIFICANDS < FIRST_SCALE) return chosen;
    }
}

// The largest weight that an element of the largest magnitude has.
template <int DTYPE> static float weight_of_largest(const LongBlock *b) {
    vf largest = splat(0.0f);
    for (int64_t row = 0; row < b->rows; ++row) {
        const char *w = (const char *)b->w + row * b->row_stride * dtype_bytes(DTYPE);
        for (int64_t k = 0; k < b->cols; k += W) {
            const int n = b->cols - k < W ? (int)(b->cols - k) : W;
            const vm is = less_equal(splat(b->amax), abs_of(load_some<DTYPE>(w, k, n)));
            largest = select(is, max_of(largest, load_some<PTQ_F32>(b->h, k, n)), largest);
        }
    }
    float h = 0.0f;
    for (int lane = 0; lane < W; ++lane) h = largest[lane] > h ? largest[lane] : h;
    return h;
}

// |w| up to `amax`, rounded up to a normal bfloat16 after division by 448: the rule absmax.
INLINE int absmax_number(float amax) {
    const float fitted = amax / E4M3::max;
    const uint32_t code = (bits_of(fitted) + 0xFFFF) >> 16;
    return code < FIRST_SCALE ? FIRST_SCALE : code > LAST_SCALE ? LAST_SCALE : (int)code;
}

// The exact scale of a block whose amax is known; `table` is a LongTable for bfloat16, else a MomentTable.
template <int DTYPE> static int exact_number(LongBlock *b, void *table) {
    if (!(b->amax / scale_number(FIRST_SCALE) > 0x1p-10f)) return FIRST_SCALE;  // zeroed at every scale
    b->amax_h = b->h ? weight_of_largest<DTYPE>(b) : 1.0f;
    LongFloor floor;
    if (DTYPE == PTQ_BF16) table_floor(b, (const LongTable *)table, &floor);
    else moment_floor<DTYPE>(b, (MomentTable *)table, &floor);
    return long_scale<DTYPE>(b, &floor);
}

template <int DTYPE> static int32_t quantize_blocks_of(const ptq_long *j, void *table) {
    int64_t index = 0;
    for (int64_t row = 0; row < j->rows; row += j->block_rows)
        for (int64_t col = 0; col < j->cols; col += j->block_cols, ++index) {
            LongBlock b;
            b.w = (const char *)j->w + (row * j->row_stride + col) * dtype_bytes(DTYPE);
            b.rows = j->rows - row < j->block_rows ? j->rows - row : j->block_rows;
            b.cols = j->cols - col < j->block_cols ? j->cols - col : j->block_cols;
            b.row_stride = j->row_stride, b.width = j->block_cols;
            b.h = j->importance ? j->importance + col : 0;
            b.powers = j->rule == PTQ_POWERS;
            const ptq_amax whole = {b.w, b.rows, b.cols, b.row_stride, DTYPE, 0};
            int64_t bad;
            const int32_t status = amax(&whole, &b.amax, &bad);
            if (status != PTQ_OK) return status;
            const bool exact = j->rule == PTQ_EXACT || b.powers;
            j->scales[index] = (uint16_t)(exact ? exact_number<DTYPE>(&b, table) : absmax_number(b.amax));
        }
    return PTQ_OK;
}

static int32_t quantize_long(const ptq_long *j) {
    if (j->element != PTQ_E4M3) return quantize_integers(j);
    const bool numbers = j->dtype == PTQ_BF16;
    void *table = malloc(numbers ? sizeof(LongTable) : sizeof(MomentTable));
    if (!table) return PTQ_NO_MEMORY;
    if (numbers) make_long_table((LongTable *)table);
    else make_moment_table((MomentTable *)table, j->block_rows * j->block_cols < MANY_ELEMENTS ? FEW_BINS : MANY_BINS);
    const int32_t status = numbers ? quantize_blocks_of<PTQ_BF16>(j, table)
                           : j->dtype == PTQ_F16 ? quantize_blocks_of<PTQ_F16>(j, table)
                                                 : quantize_blocks_of<PTQ_F32>(j, table);
    free(table);
    return status;
}
