// Error feedback and refinement of a few rows over all columns: the loops of ptqpipe/algorithms/gptq.py and refine.py,
// with the steps of columns.h.
//
// A lane is a row and its state stays in the cache of one core from the first column to the last. Sums over columns are
// added in the order of the columns, each product and sum rounded by itself, so a row's codes depend on nothing beside it.
// Where there are enough rows, several vectors of them go through the columns side by side: then a number of the matrix is
// read once for all of them.

enum { SUMS = W >= 16 ? 16 : 8, TOGETHER = W >= 16 ? 4 : 2, FEED_RUN = 128, SWEEP_RUN = 32 };

// W rows of one pass, column by column, and what a step of columns.h is given.
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

// The scales of the blocks, of every column.
INLINE void load_ladder(Rows *rows, const struct ptq_pass *job, int64_t row) {
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W;
    for (int64_t i = 0; i < job->columns; ++i) {
        rows->s[i] = splat(1.0f);
        for (int64_t lane = 0; lane < lanes; ++lane)
            rows->s[i][lane] = job->ladder[job->scales[i / job->block * n + row + lane]];
    }
}

INLINE void put_codes(const struct ptq_pass *job, int64_t column, int64_t row, const uint8_t *codes, int64_t count) {
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W;
    for (int64_t i = 0; i < count; ++i) memcpy(job->codes + (column + i) * n + row, codes + i * W, (size_t)lanes);
}

// t[g][c] += sum over j in [0, count) of matrix[c, j] * error[g][j], for C rows of the matrix, `stride` apart, and G
// vectors of rows. All of them are read from one end to the other: reading across rows would touch a page for every number.
template <int C, int G> INLINE void add_products(vf *const *t, const float *matrix, int64_t stride, vf *const *error, int64_t count) {
    vf sum[C][G];
    for (int c = 0; c < C; ++c)
        for (int g = 0; g < G; ++g) sum[c][g] = t[g][c];
    for (int64_t j = 0; j < count; ++j)
        for (int c = 0; c < C; ++c)
            for (int g = 0; g < G; ++g) sum[c][g] = sum[c][g] + matrix[c * stride + j] * error[g][j];
    for (int c = 0; c < C; ++c)
        for (int g = 0; g < G; ++g) t[g][c] = sum[c][g];
}

// What `count` columns from `start` on should be: the weights with the feedback of the errors of all earlier columns.
template <int G> INLINE void targets(const struct ptq_pass *job, const Rows *rows, int64_t start, int count, vf *const *t) {
    const int64_t n = job->columns;
    const float *m = job->matrix + start * n;
    vf *error[G], *at[G];
    for (int g = 0; g < G; ++g) {
        error[g] = rows[g].error, at[g] = t[g];
        for (int i = 0; i < count; ++i) t[g][i] = rows[g].exact[start + i];
    }
    constexpr int C = SUMS / G;
    int i = 0;
    for (; i + C <= count; i += C, m += C * n) {
        add_products<C, G>(at, m, n, error, start);
        for (int g = 0; g < G; ++g) at[g] += C;
    }
    for (; i < count; ++i, m += n) {
        add_products<1, G>(at, m, n, error, start);
        for (int g = 0; g < G; ++g) ++at[g];
    }
}

// What some columns have moved by, in G vectors of rows, and the matrix's rows of these columns.
template <int G> struct Moved {
    int64_t count;
    const float *matrix[MAX_COLUMNS];
    vf by[MAX_COLUMNS][G];
};

// Takes a column in, unless no row has moved in it: adding zeros would change nothing.
template <int G> INLINE void take(Moved<G> *moved, const struct ptq_pass *job, int64_t column, const vf *by) {
    vi changed = splat(0);
    for (int g = 0; g < G; ++g) changed |= bits(abs_of(by[g]));
    if (!any(less(splat(0), changed))) return;
    moved->matrix[moved->count] = job->matrix + column * job->columns;
    for (int g = 0; g < G; ++g) moved->by[moved->count][g] = by[g];
    ++moved->count;
}

template <int C, int G> INLINE void move_slopes(const Moved<G> *moved, Rows *rows, int64_t i) {
    vf sum[C][G];
    for (int c = 0; c < C; ++c)
        for (int g = 0; g < G; ++g) sum[c][g] = rows[g].slope[i + c];
    for (int64_t j = 0; j < moved->count; ++j) {
        const float *m = moved->matrix[j] + i;
        for (int c = 0; c < C; ++c)
            for (int g = 0; g < G; ++g) sum[c][g] = sum[c][g] + m[c] * moved->by[j][g];
    }
    for (int c = 0; c < C; ++c)
        for (int g = 0; g < G; ++g) rows[g].slope[i + c] = sum[c][g];
}

// slope[i] += sum over the moved columns j of moment[j, i] * by[j], for every column i.
template <int G> INLINE void move_slopes(const struct ptq_pass *job, Rows *rows, Moved<G> *moved) {
    constexpr int C = SUMS / G;
    const int64_t n = moved->count ? job->columns : 0;
    int64_t i = 0;
    for (; i + C <= n; i += C) move_slopes<C, G>(moved, rows, i);
    for (; i < n; ++i) move_slopes<1, G>(moved, rows, i);
    moved->count = 0;
}

// Codes at fixed scales.
template <class E, int G> static void feed_rows(const struct ptq_pass *job, int64_t row, Rows *rows) {
    for (int g = 0; g < G; ++g) load_scales(rows + g, job, row + g * W);
    for (int64_t start = 0; start < job->columns; start += FEED_RUN) {
        const int b = (int)(job->columns - start < FEED_RUN ? job->columns - start : FEED_RUN);
        vf *all[G];
        for (int g = 0; g < G; ++g) all[g] = (vf *)rows[g].target;
        targets<G>(job, rows, start, b, all);
        for (int g = 0; g < G; ++g) {
            Rows *one = rows + g;
            vf *t = all[g];
            for (int i = 0; i < b; ++i) {
                const Step<E> found = step_of<E>(t[i], one->s[start + i]);
                const vf e = one->exact[start + i] - found.decoded;
                store_codes(one->codes + i * W, W, found.code);
                one->error[start + i] = e;
                const float *f = job->matrix + start * job->columns + start + i;
                for (int j = i + 1; j < b; ++j) t[j] = t[j] + f[j * job->columns] * e;
            }
            put_codes(job, start, row + g * W, one->codes, b);
        }
    }
}

// A square corner of a matrix with rows of `stride`, transposed.
INLINE void turn_corner(float *out, const float *matrix, int64_t stride, int b) {
    for (int i = 0; i < b; ++i)
        for (int j = 0; j < b; ++j) out[j * b + i] = matrix[i * stride + j];
}

// Codes and the scale of one block of W rows whose target is known.
template <class E, int B>
INLINE void enter_block(const struct ptq_pass *job, int64_t row, Rows *rows, int64_t start, const float *corner, int b) {
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W, top = job->ladder_size - 1;
    const vf *t = (const vf *)rows->target;
    vf decoded[B ? B : MAX_COLUMNS], most = splat(0.0f);
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
    rows->step.columns = b;
    rows->step.matrix = corner;
    rows->step.weight = job->weight + start;
    choose_block<E, B>(&rows->step, 0, decoded);
    for (int i = 0; i < b; ++i) rows->error[start + i] = rows->exact[start + i] - decoded[i];
    put_codes(job, start, row, rows->codes, b);
    memcpy(job->scales + start / b * n + row, rows->scales, (size_t)lanes * sizeof(int64_t));
}

// Codes and the scale of every block, chosen when its turn comes.
template <class E, int B, int G> static void enter_rows(const struct ptq_pass *job, int64_t row, Rows *rows) {
    const int b = B ? B : (int)job->block;
    float corner[B ? B * B : MAX_COLUMNS * MAX_COLUMNS];
    for (int64_t start = 0; start < job->columns; start += b) {
        vf *all[G];
        for (int g = 0; g < G; ++g) all[g] = (vf *)rows[g].target;
        targets<G>(job, rows, start, b, all);
        turn_corner(corner, job->matrix + start * job->columns + start, job->columns, b);
        for (int g = 0; g < G; ++g) enter_block<E, B>(job, row + g * W, rows + g, start, corner, b);
    }
}

// The scale and codes of one block of W rows, taken where they are better with all other blocks fixed; what its columns
// have moved by.
template <class E, int B>
INLINE void sweep_block(const struct ptq_pass *job, int64_t row, Rows *rows, int64_t block, int b, vf *moved) {
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W, start = block * b;
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
    rows->step.columns = b;
    rows->step.matrix = feedback;
    rows->step.weight = weight;
    choose_block<E, B>(&rows->step, 0, decoded);
    vf found = splat(0.0f);
    memcpy(&found, rows->cost, sizeof found);
    const vm better = less(found, cost * job->slack);
    for (int i = 0; i < b; ++i) {
        const vf before = rows->error[start + i];
        const vf after = select(better, rows->exact[start + i] - decoded[i], before);
        rows->error[start + i] = after;
        moved[i] = after - before;
    }
    if (!any(better)) return;
    for (int64_t lane = 0; lane < lanes; ++lane) {
        if (!(found[lane] < cost[lane] * job->slack)) continue;
        scales[lane] = rows->scales[lane];
        for (int i = 0; i < b; ++i) job->codes[(start + i) * n + row + lane] = rows->codes[i * W + lane];
    }
}

template <class E, int B, int G>
static void sweep_blocks(const struct ptq_pass *job, int64_t row, Rows *rows, Moved<G> *moved) {
    const int b = B ? B : (int)job->block;
    for (int64_t block = 0; block < job->columns / b; ++block) {
        if (!job->usable[block]) continue;
        vf by[G][B ? B : MAX_COLUMNS], column[G];
        for (int g = 0; g < G; ++g) sweep_block<E, B>(job, row + g * W, rows + g, block, b, by[g]);
        for (int i = 0; i < b; ++i) {
            for (int g = 0; g < G; ++g) column[g] = by[g][i];
            take<G>(moved, job, block * b + i, column);
        }
        move_slopes<G>(job, rows, moved);
    }
}

// Every code in turn, with all others fixed.
template <class E, int G> static void sweep_columns(const struct ptq_pass *job, int64_t row, Rows *rows, Moved<G> *moved) {
    const int64_t k = job->columns;
    for (int64_t start = 0; start < k; start += SWEEP_RUN) {
        const int b = (int)(k - start < SWEEP_RUN ? k - start : SWEEP_RUN);
        vf by[SWEEP_RUN][G], near[SWEEP_RUN];
        for (int g = 0; g < G; ++g) {
            Rows *one = rows + g;
            for (int i = 0; i < b; ++i) by[i][g] = one->error[start + i], near[i] = one->slope[start + i];
            one->step.columns = b;
            one->step.exact = (const float *)(one->exact + start);
            one->step.error = (float *)(one->error + start);
            one->step.slope = (float *)near;
            one->step.s = (const float *)(one->s + start);
            one->step.matrix = job->matrix + start * k + start;
            descend<E>(&one->step, 0, k);
            for (int i = 0; i < b; ++i) by[i][g] = one->error[start + i] - by[i][g];
            put_codes(job, start, row + g * W, one->codes, b);
        }
        for (int i = 0; i < b; ++i) take<G>(moved, job, start + i, by[i]);
        move_slopes<G>(job, rows, moved);
    }
}

template <class E, int B, int G> static void sweep_rows(const struct ptq_pass *job, int64_t row, Rows *rows) {
    const int64_t k = job->columns, n = job->rows;
    Moved<G> moved;
    moved.count = 0;
    for (int g = 0; g < G; ++g) {
        const int64_t at = row + g * W;
        for (int64_t i = 0; i < k; ++i) {
            rows[g].error[i] = load_some(job->error + i * n + at, n - at, 0.0f);
            rows[g].slope[i] = splat(0.0f);
        }
        if (!job->usable) load_scales(rows + g, job, at);
    }
    for (int64_t i = 0; i < k; ++i) {
        vf by[G];
        for (int g = 0; g < G; ++g) by[g] = rows[g].error[i];
        take<G>(&moved, job, i, by);
        if (i % SWEEP_RUN == SWEEP_RUN - 1 || i == k - 1) move_slopes<G>(job, rows, &moved);
    }
    for (int64_t sweep = 0; sweep < job->sweeps; ++sweep) {
        if (job->usable) {
            sweep_blocks<E, B, G>(job, row, rows, &moved);
            for (int g = 0; g < G; ++g) load_ladder(rows + g, job, row + g * W);
        }
        sweep_columns<E, G>(job, row, rows, &moved);
    }
}

template <class E, int B, int G> static void run_rows(const struct ptq_pass *job, int64_t row, float *work) {
    Rows rows[G];
    for (int g = 0; g < G; ++g) set_up(rows + g, job, row + g * W, work + g * 4 * W * job->columns);
    if (job->kind == PTQ_FEED) feed_rows<E, G>(job, row, rows);
    else if (job->kind == PTQ_ENTER) enter_rows<E, B, G>(job, row, rows);
    else sweep_rows<E, B, G>(job, row, rows);
}

template <class E, int B> static void run_pass(const struct ptq_pass *job, int64_t first, int64_t last, float *work) {
    int64_t row = first;
    for (; row + TOGETHER * W <= last; row += TOGETHER * W) run_rows<E, B, TOGETHER>(job, row, work);
    for (; row < last; row += W) run_rows<E, B, 1>(job, row, work);
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
