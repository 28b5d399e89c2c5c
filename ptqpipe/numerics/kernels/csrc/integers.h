// The exact search for rows and groups of integers (two's complement numbers) with bfloat16 scales, and their codes.
//
// The scores are those of objective.py for scales that are numbers. Every scale that its bounds leave is scored in
// float32 sums first, W scales at a time, and scored as defined only where it comes so near to the least that the order
// of the sums may decide. From above, where each code of a block could be doubled, half of the scale is at least as good;
// from below, clipping alone costs more than the least score, and ever more.

enum { INTEGER_CHUNK = 128 };  // elements between two looks at whether W scales have all passed the least score
#define INTEGER_NEAR 0x1p-16   // relative: a chunk's sum rounds by 2^-17, its terms and the sum of chunks by far less

// One block: x [n] with signs, what counts as zero set to it; h [n] or null; numbers from -low to high.
struct IntegerBlock {
    const float *x, *h;
    int64_t n;
    float low, high, amax;
    int first, last;   // codes of scales that were scored
    double *score;     // [LAST_SCALE + 2 W] by code; infinity where it is none that wins
    double least;
};

INLINE vf nearest_integer(vf y, vf low, vf high) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the unit is 1 there, and ties go to the even one
    return (max_of(min_of(y, high), low) + magic) - magic;
}

// Scores of the scales of codes [from, from + W), those from `stop` on left out.
template <bool WEIGHTED> static void score_integers(IntegerBlock *b, int from, int stop) {
    alignas(64) float inverse[W], value[W];
    for (int i = 0; i < W; ++i) {
        const int code = from + i < LAST_SCALE ? from + i : LAST_SCALE;
        value[i] = scale_number(code), inverse[i] = 1.0f / value[i];
    }
    vf r;
    memcpy(&r, inverse, sizeof r);
    const vf low = splat(-b->low), high = splat(b->high);
    alignas(64) double sum[W];
    memset(sum, 0, sizeof sum);
    bool done = true;
    for (int64_t start = 0; start < b->n; start += INTEGER_CHUNK) {
        const int64_t end = start + INTEGER_CHUNK < b->n ? start + INTEGER_CHUNK : b->n;
        vf acc = splat(0.0f);
        for (int64_t k = start; k < end; ++k) {
            const vf y = splat(b->x[k]) * r, d = y - nearest_integer(y, low, high);
            const vf t = d * d;
            acc = acc + (WEIGHTED ? t * splat(b->h[k]) : t);
        }
        done = false;
        for (int i = 0; i < W; ++i) {
            sum[i] += (double)acc[i];
            done |= sum[i] * ((double)value[i] * value[i]) <= b->least;
        }
        if (!done) break;  // none of them can win
    }
    for (int i = 0; i < W; ++i) {
        const bool legal = done && from + i >= FIRST_SCALE && from + i < stop && b->amax * inverse[i] > 0.5f;
        const double score = legal ? sum[i] * ((double)value[i] * value[i]) : INFINITY;
        b->score[from + i] = score;
        const double bound = score * (1.0 + INTEGER_NEAR) * (1.0 + INTEGER_NEAR);
        if (bound < b->least) b->least = bound;
    }
    b->first = from < b->first ? from : b->first;
    b->last = from + W - 1 > b->last ? from + W - 1 : b->last;
}

// The score of one scale as objective.py defines it.
static double integer_score(const IntegerBlock *b, int code) {
    alignas(64) double lanes[LONG_LANES];
    int64_t width = 1;
    while (width < b->n && width < LONG_LANES) width *= 2;
    memset(lanes, 0, sizeof(double) * (size_t)width);
    const float s = scale_number(code), r = 1.0f / s;
    for (int64_t k = 0; k < b->n; ++k) {
        const float y = b->x[k] * r;
        float q = y < b->high ? y : b->high;
        q = ((q > -b->low ? q : -b->low) + 12582912.0f) - 12582912.0f;
        const float d = y - q;
        float t = d * d;
        if (b->h) t = t * b->h[k];
        lanes[k % LONG_LANES] += (double)t;
    }
    for (int64_t half = width / 2; half >= 1; half /= 2)
        for (int64_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0] * ((double)s * s);
}

// At most the score at the scale of `code`, and at every smaller one: what clipping the anchors costs.
INLINE double integer_clipping(const IntegerBlock *b, const int64_t *anchors, int code) {
    const double s = scale_number(code);
    double most = 0.0;
    for (int i = 0; i < 3; ++i) {
        const double x = b->x[anchors[i]], beyond = (x < 0 ? -x : x) / s * LOOSE_Y - (x < 0 ? b->low : b->high);
        const double cost = beyond > 0 ? beyond * beyond * LOOSE_Y * (s * s) * (b->h ? b->h[anchors[i]] : 1.0f) : 0.0;
        most = cost > most ? cost : most;
    }
    return most;
}

// The scale code (upper half of the float32) of the least score, ties to the smaller one.
template <bool WEIGHTED> static int integer_scale(IntegerBlock *b) {
    if (!(b->amax / scale_number(FIRST_SCALE) > 0.5f)) return FIRST_SCALE;  // zeroed at every scale
    int64_t anchors[3] = {0, 0, 0};  // the largest, the least, and the heaviest element
    double heaviest = -1.0;
    for (int64_t k = 0; k < b->n; ++k) {
        if (b->x[k] > b->x[anchors[0]]) anchors[0] = k;
        if (b->x[k] < b->x[anchors[1]]) anchors[1] = k;
        const double weight = b->h ? (double)b->x[k] * b->x[k] * b->h[k] : -1.0;
        if (weight > heaviest) heaviest = weight, anchors[2] = k;
    }
    const float above = b->x[anchors[0]] > 0 ? b->x[anchors[0]] : 0.0f;
    const float below = b->x[anchors[1]] < 0 ? -b->x[anchors[1]] : 0.0f;
    const float up = above / (0.5f * b->high), down = below / (0.5f * (b->low + 1.0f));
    int top = (int)(bits_of((up > down ? up : down) * (1.0f + 0x1p-20f)) >> 16);
    top = top < FIRST_SCALE + 127 ? FIRST_SCALE + 127 : top;  // the lowest octave has no halves
    // Above 2^126 the inverse of a scale is subnormal: its rounding is another than that of the half's.
    if (b->amax > 0x1p125f) top = LAST_SCALE;
    top = top > LAST_SCALE ? LAST_SCALE : top;
    int begin = (int)(bits_of(b->amax / (b->high + 1.0f)) >> 16) - W / 2;
    begin = begin < FIRST_SCALE ? FIRST_SCALE : begin > top ? top : begin;
    b->least = INFINITY, b->first = begin, b->last = begin;
    score_integers<WEIGHTED>(b, begin, top + 1);
    for (int from = begin; from > FIRST_SCALE && integer_clipping(b, anchors, from - 1) <= b->least; from -= W)
        score_integers<WEIGHTED>(b, from - W, from);
    for (int from = begin + W; from <= top; from += W) score_integers<WEIGHTED>(b, from, top + 1);
    int chosen = -1, near = 0;
    for (int code = b->first; code <= b->last; ++code)
        if (b->score[code] <= b->least && b->score[code] < INFINITY) near += 1, chosen = chosen < 0 ? code : chosen;
    if (near < 2) return chosen < 0 ? FIRST_SCALE : chosen;
    double best = INFINITY;
    for (int code = b->first; code <= b->last; ++code) {
        if (!(b->score[code] <= b->least) || b->score[code] == INFINITY) continue;
        const double score = integer_score(b, code);
        if (score < best) best = score, chosen = code;
    }
    return chosen;
}

template <int DTYPE> static int32_t integer_scales(const ptq_long *j, float low, float high) {
    const size_t room = sizeof(double) * (LAST_SCALE + 3 * W) + sizeof(float) * (size_t)(j->block_cols + W);
    double *memory = (double *)malloc(room);
    if (!memory) return PTQ_NO_MEMORY;
    float *x = (float *)(memory + LAST_SCALE + 3 * W);
    int32_t status = PTQ_OK;
    int64_t index = 0;
    for (int64_t row = 0; row < j->rows && status == PTQ_OK; ++row)
        for (int64_t col = 0; col < j->cols; col += j->block_cols, ++index) {
            const char *w = (const char *)j->w + (row * j->row_stride + col) * dtype_bytes(DTYPE);
            vf most = splat(0.0f);
            vi bad = splat(0);
            for (int64_t k = 0; k < j->block_cols; k += W) {
                const vf a = load_some<DTYPE>(w, k, (int)(j->block_cols - k < W ? j->block_cols - k : W));
                memcpy(x + k, &a, sizeof a);
                most = max_of(most, abs_of(a));
                bad = max_of(bad, bits(abs_of(a)));
            }
            IntegerBlock b = {x, j->importance ? j->importance + col : 0, j->block_cols, low, high, 0.0f, 0, 0, memory, 0.0};
            for (int i = 0; i < W; ++i) {
                if (bad[i] >= 0x7F800000) status = PTQ_NOT_FINITE;
                b.amax = most[i] > b.amax ? most[i] : b.amax;
            }
            if (status != PTQ_OK) break;
            const vf least = splat(b.amax * 0x1p-32f);
            for (int64_t k = 0; k < j->block_cols; k += W) {
                vf a;
                memcpy(&a, x + k, sizeof a);
                a = select(less(abs_of(a), least), splat(0.0f), a);
                memcpy(x + k, &a, sizeof a);
            }
            if (j->rule == PTQ_EXACT) {
                j->scales[index] = (uint16_t)(b.h ? integer_scale<true>(&b) : integer_scale<false>(&b));
                continue;
            }
            const uint32_t code = (bits_of(b.amax / high) + 0xFFFF) >> 16;
            j->scales[index] = (uint16_t)(code < FIRST_SCALE ? FIRST_SCALE : code > LAST_SCALE ? LAST_SCALE : code);
        }
    free(memory);
    return status;
}

static int32_t quantize_integers(const ptq_long *j) {
    const bool known = j->element == PTQ_INT4 || j->element == PTQ_INT8 || j->element == PTQ_INT8_SIGNED;
    if (!known || j->block_rows != 1 || j->cols % j->block_cols || j->rule == PTQ_POWERS) return PTQ_UNSUPPORTED;
    const float low = j->element == PTQ_INT4 ? 8.0f : 128.0f, high = low - 1.0f;
    if (j->dtype == PTQ_F32) return integer_scales<PTQ_F32>(j, low, high);
    return j->dtype == PTQ_F16 ? integer_scales<PTQ_F16>(j, low, high) : integer_scales<PTQ_BF16>(j, low, high);
}

// Codes of integers, one to a byte: the number itself, or how far it is above the least.
template <int DTYPE> static int32_t encode_integers_of(const ptq_encode *j) {
    const float half = j->element == PTQ_INT4 ? 8.0f : 128.0f;
    const vf low = splat(-half), high = splat(half - 1.0f);
    const int32_t offset = j->element == PTQ_INT8_SIGNED ? 0 : (int32_t)half;
    vi top = splat(0);
    uint8_t tail[W];
    for (int64_t row = 0; row < j->rows; ++row) {
        const char *w = (const char *)j->w + row * j->row_stride * dtype_bytes(DTYPE);
        const float *scales = j->scales + row * j->scale_cols;
        uint8_t *out = j->data + row * j->cols;
        for (int64_t first = 0; first < j->cols; first += j->block_cols) {
            const int64_t stop = first + j->block_cols < j->cols ? first + j->block_cols : j->cols;
            const vf r = splat(1.0f / scales[first / j->block_cols]);
            for (int64_t k = first; k < stop; k += W) {
                const int n = stop - k < W ? (int)(stop - k) : W;
                const vf x = load_some<DTYPE>(w, k, n);
                top = max_of(top, bits(abs_of(x)));
                const vf q = max_of(min_of(x * r, high), low) + splat(12582912.0f);  // the number in its last bits
                uint8_t *p = n == W ? out + k : tail;
                store_bytes(((bits(q) & 0xFFFF) + offset) & 0xFF, p);
                if (p == tail) memcpy(out + k, tail, (size_t)n);
            }
        }
    }
    return any(mask_not(less(top, splat(0x7F800000)))) ? PTQ_NOT_FINITE : PTQ_OK;
}

static int32_t encode_integers(const ptq_encode *j) {
    if (j->element < PTQ_INT4 || j->element > PTQ_INT8_SIGNED || j->block_rows != 1) return PTQ_UNSUPPORTED;
    if (j->dtype == PTQ_F32) return encode_integers_of<PTQ_F32>(j);
    return j->dtype == PTQ_F16 ? encode_integers_of<PTQ_F16>(j) : encode_integers_of<PTQ_BF16>(j);
}
