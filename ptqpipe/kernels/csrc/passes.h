// Error feedback and refinement of a few rows over all columns: the loops of ptqpipe/algorithms/gptq.py and refine.py,
// with the steps of columns.h.
//
// A lane is a row and its state stays in the cache of one core from the first column to the last. Sums over columns are
// added in the order of the columns, each product and sum rounded by itself, so a row's codes depend on nothing beside it.

enum { SUMS = W >= 16 ? 16 : 8, FEED_RUN = 128, SWEEP_RUN = 32 };

// t[c] += sum over j in [0, count) of matrix[c, j] * rows[j], for C rows of the matrix, `stride` apart. All of them are read
// from one end to the other: reading across rows would touch a page for every number.
template <int C> INLINE void add_products(vf *t, const float *matrix, int64_t stride, const vf *rows, int64_t count) {
    vf sum[C];
    for (int c = 0; c < C; ++c) sum[c] = t[c];
    for (int64_t j = 0; j < count; ++j) {
        const vf e = rows[j];
        for (int c = 0; c < C; ++c) sum[c] = sum[c] + matrix[c * stride + j] * e;
    }
    for (int c = 0; c < C; ++c) t[c] = sum[c];
}

// What `count` columns from `start` on should be: the weights with the feedback of the errors of all earlier columns.
INLINE void targets(const struct ptq_pass *job, const vf *exact, const vf *error, int64_t start, int count, vf *t) {
    const int64_t n = job->columns;
    const float *m = job->matrix + start * n;
    for (int i = 0; i < count; ++i) t[i] = exact[start + i];
    int i = 0;
    for (; i + SUMS <= count; i += SUMS) add_products<SUMS>(t + i, m + i * n, n, error, start);
    for (; i < count; ++i) add_products<1>(t + i, m + i * n, n, error, start);
}

// slope[i] += sum over j < b of moment[start + j, i] * moved[j], for every column i.
INLINE void move_slopes(const struct ptq_pass *job, vf *slope, int64_t start, const vf *moved, int64_t b) {
    const int64_t n = job->columns;
    const float *moment = job->matrix + start * n;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vf s0 = slope[i], s1 = slope[i + 1], s2 = slope[i + 2], s3 = slope[i + 3];
        for (int64_t j = 0; j < b; ++j) {
            const float *m = moment + j * n + i;
            const vf d = moved[j];
            s0 = s0 + m[0] * d;
            s1 = s1 + m[1] * d;
            s2 = s2 + m[2] * d;
            s3 = s3 + m[3] * d;
        }
        slope[i] = s0, slope[i + 1] = s1, slope[i + 2] = s2, slope[i + 3] = s3;
    }
    for (; i < n; ++i)
        for (int64_t j = 0; j < b; ++j) slope[i] = slope[i] + moment[j * n + i] * moved[j];
}

// The rows of one pass, column by column, and what a step of columns.h is given: W rows, one after the other.
struct Rows {
    vf *exact, *error, *slope, *s;
    struct ptq_columns step;
    alignas(64) float target[MAX_COLUMNS * W], cost[W];
    alignas(64) uint8_t codes[MAX_COLUMNS * W];
    int64_t first[W], scales[W];
};

INLINE void set_up(Rows *rows, const struct ptq_pass *job, int64_t row, float *work) {
    const int64_t k = job->columns, n = job->rows;
    rows->exact = (vf *)work;
    rows->error = rows->exact + k;
    rows->slope = rows->error + k;
    rows->s = rows->slope + k;
    for (int64_t i = 0; i < k; ++i) rows->exact[i] = load_some(job->exact + i * n + row, n - row, 0.0f);
    struct ptq_columns step = {};
    step.rows = W;
    step.element = job->element;
    step.target = rows->target;
    step.cost = rows->cost;
    step.codes = rows->codes;
    step.first = rows->first;
    step.scales = rows->scales;
    step.ladder = job->ladder;
    step.ladder_size = job->ladder_size;
    step.count = job->count;
    rows->step = step;
}

INLINE void load_scales(Rows *rows, const struct ptq_pass *job, int64_t row) {
    for (int64_t i = 0; i < job->columns; ++i)
        rows->s[i] = load_some(job->s + i * job->rows + row, job->rows - row, 1.0f);
}

INLINE void put_codes(const struct ptq_pass *job, int64_t column, int64_t row, const uint8_t *codes, int64_t count) {
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W;
    for (int64_t i = 0; i < count; ++i) memcpy(job->codes + (column + i) * n + row, codes + i * W, (size_t)lanes);
}

// Codes at fixed scales.
template <class E> static void feed_rows(const struct ptq_pass *job, int64_t row, Rows *rows) {
    load_scales(rows, job, row);
    for (int64_t start = 0; start < job->columns; start += FEED_RUN) {
        const int b = (int)(job->columns - start < FEED_RUN ? job->columns - start : FEED_RUN);
        vf t[FEED_RUN];
        targets(job, rows->exact, rows->error, start, b, t);
        for (int i = 0; i < b; ++i) {
            const Step<E> found = step_of<E>(t[i], rows->s[start + i]);
            const vf e = rows->exact[start + i] - found.decoded;
            store_codes(rows->codes + i * W, W, found.code);
            rows->error[start + i] = e;
            const float *f = job->matrix + start * job->columns + start + i;
            for (int j = i + 1; j < b; ++j) t[j] = t[j] + f[j * job->columns] * e;
        }
        put_codes(job, start, row, rows->codes, b);
    }
}

// A square corner of a matrix with rows of `stride`, transposed.
INLINE void turn_corner(float *out, const float *matrix, int64_t stride, int b) {
    for (int i = 0; i < b; ++i)
        for (int j = 0; j < b; ++j) out[j * b + i] = matrix[i * stride + j];
}

// Codes and the scale of every block, chosen when its turn comes.
template <class E, int B> static void enter_rows(const struct ptq_pass *job, int64_t row, Rows *rows) {
    const int b = B ? B : (int)job->block;
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W, top = job->ladder_size - 1;
    float corner[B ? B * B : MAX_COLUMNS * MAX_COLUMNS];
    rows->step.columns = b;
    rows->step.matrix = corner;
    for (int64_t start = 0; start < job->columns; start += b) {
        vf decoded[B ? B : MAX_COLUMNS], most = splat(0.0f);
        vf *t = (vf *)rows->target;
        targets(job, rows->exact, rows->error, start, b, t);
        for (int i = 0; i < b; ++i) most = max_of(most, abs_of(t[i]));
        most = most / E::max;
        for (int lane = 0; lane < W; ++lane) {  // the smallest scale that does not clip
            const float wanted = most[lane];
            int64_t low = 0, high = job->ladder_size;
            while (low < high) {
                const int64_t middle = (low + high) / 2;
                if (job->ladder[middle] < wanted) low = middle + 1;
                else high = middle;
            }
            low = (low < top ? low : top) - job->below;
            rows->first[lane] = low > 0 ? low : 0;
        }
        turn_corner(corner, job->matrix + start * job->columns + start, job->columns, b);
        rows->step.weight = job->weight + start;
        choose_block<E, B>(&rows->step, 0, decoded);
        for (int i = 0; i < b; ++i) rows->error[start + i] = rows->exact[start + i] - decoded[i];
        put_codes(job, start, row, rows->codes, b);
        memcpy(job->scales + start / b * n + row, rows->scales, (size_t)lanes * sizeof(int64_t));
    }
}

// The scale and codes of every block, taken where they are better with all other blocks fixed.
template <class E, int B> static void sweep_blocks(const struct ptq_pass *job, int64_t row, Rows *rows) {
    const int b = B ? B : (int)job->block;
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W;
    rows->step.columns = b;
    for (int64_t block = 0; block < job->columns / b; ++block) {
        if (!job->usable[block]) continue;
        const int64_t start = block * b;
        const float *feedback = job->feedback + block * b * b, *inverse = job->inverse + block * b * b;
        const float *weight = job->weight + start;
        vf decoded[B ? B : MAX_COLUMNS], left[B ? B : MAX_COLUMNS], cost = splat(0.0f);
        vf *t = (vf *)rows->target;
        for (int i = 0; i < b; ++i) {
            vf pull = splat(0.0f);
            for (int j = 0; j < b; ++j) pull = pull + inverse[i * b + j] * rows->slope[start + j];
            t[i] = (rows->exact[start + i] - rows->error[start + i]) + pull;
            left[i] = t[i] - (rows->exact[start + i] - rows->error[start + i]);
        }
        for (int i = 0; i < b; ++i) {
            vf r = splat(0.0f);
            for (int j = 0; j <= i; ++j) r = r + feedback[j * b + i] * left[j];
            cost = cost + r * r * weight[i];
        }
        int64_t *scales = job->scales + block * n + row;
        for (int lane = 0; lane < W; ++lane) {
            const int64_t first = (lane < lanes ? scales[lane] : 0) - job->below;
            rows->first[lane] = first > 0 ? first : 0;
        }
        rows->step.matrix = feedback;
        rows->step.weight = weight;
        choose_block<E, B>(&rows->step, 0, decoded);
        vf found = splat(0.0f);
        memcpy(&found, rows->cost, sizeof found);
        const vm better = less(found, cost * job->slack);
        if (!any(better)) continue;
        vf moved[B ? B : MAX_COLUMNS];
        for (int i = 0; i < b; ++i) {
            const vf before = rows->error[start + i];
            const vf after = select(better, rows->exact[start + i] - decoded[i], before);
            rows->error[start + i] = after;
            moved[i] = after - before;
        }
        move_slopes(job, rows->slope, start, moved, b);
        for (int64_t lane = 0; lane < lanes; ++lane) {
            if (!(found[lane] < cost[lane] * job->slack)) continue;
            scales[lane] = rows->scales[lane];
            for (int i = 0; i < b; ++i) job->codes[(start + i) * n + row + lane] = rows->codes[i * W + lane];
        }
    }
}

// Every code in turn, with all others fixed.
template <class E> static void sweep_columns(const struct ptq_pass *job, int64_t row, Rows *rows) {
    const int64_t k = job->columns;
    for (int64_t start = 0; start < k; start += SWEEP_RUN) {
        const int b = (int)(k - start < SWEEP_RUN ? k - start : SWEEP_RUN);
        vf moved[SWEEP_RUN], near[SWEEP_RUN];
        for (int i = 0; i < b; ++i) moved[i] = rows->error[start + i], near[i] = rows->slope[start + i];
        rows->step.columns = b;
        rows->step.exact = (const float *)(rows->exact + start);
        rows->step.error = (float *)(rows->error + start);
        rows->step.slope = (float *)near;
        rows->step.s = (const float *)(rows->s + start);
        rows->step.matrix = job->matrix + start * k + start;
        descend<E>(&rows->step, 0, k);
        for (int i = 0; i < b; ++i) moved[i] = rows->error[start + i] - moved[i];
        move_slopes(job, rows->slope, start, moved, b);
        put_codes(job, start, row, rows->codes, b);
    }
}

template <class E, int B> static void sweep_rows(const struct ptq_pass *job, int64_t row, Rows *rows) {
    const int64_t k = job->columns, n = job->rows, lanes = n - row < W ? n - row : W;
    for (int64_t i = 0; i < k; ++i) {
        rows->error[i] = load_some(job->error + i * n + row, n - row, 0.0f);
        rows->slope[i] = splat(0.0f);
    }
    for (int64_t start = 0; start < k; start += SWEEP_RUN)
        move_slopes(job, rows->slope, start, rows->error + start, k - start < SWEEP_RUN ? k - start : SWEEP_RUN);
    if (!job->usable) load_scales(rows, job, row);
    for (int64_t sweep = 0; sweep < job->sweeps; ++sweep) {
        if (job->usable) {
            sweep_blocks<E, B>(job, row, rows);
            for (int64_t i = 0; i < k; ++i) {
                rows->s[i] = splat(1.0f);
                for (int64_t lane = 0; lane < lanes; ++lane)
                    rows->s[i][lane] = job->ladder[job->scales[i / job->block * n + row + lane]];
            }
        }
        sweep_columns<E>(job, row, rows);
    }
}

template <class E, int B> static void run_pass(const struct ptq_pass *job, int64_t first, int64_t last, float *work) {
    Rows rows;
    for (int64_t row = first; row < last; row += W) {
        set_up(&rows, job, row, work);
        if (job->kind == PTQ_FEED) feed_rows<E>(job, row, &rows);
        else if (job->kind == PTQ_ENTER) enter_rows<E, B>(job, row, &rows);
        else sweep_rows<E, B>(job, row, &rows);
    }
}

template <class E> static int32_t run_pass(const struct ptq_pass *job, int64_t first, int64_t last, float *work) {
    if (job->block == 16) run_pass<E, 16>(job, first, last, work);
    else if (job->block == 32) run_pass<E, 32>(job, first, last, work);
    else if (job->block == 0) run_pass<E, 1>(job, first, last, work);
    else return PTQ_UNSUPPORTED;
    return PTQ_OK;
}

static int32_t pass(const struct ptq_pass *job, int64_t first, int64_t last, float *work) {
    switch (job->element) {
        case PTQ_E2M1: return run_pass<Minifloat<1, 0, 2, 4, 48, 28>>(job, first, last, work);
        case PTQ_E4M3: return run_pass<E4M3>(job, first, last, work);
        case PTQ_E2M3: return run_pass<E2M3>(job, first, last, work);
        case PTQ_E3M2: return run_pass<E3M2>(job, first, last, work);
    }
    return PTQ_UNSUPPORTED;
}
