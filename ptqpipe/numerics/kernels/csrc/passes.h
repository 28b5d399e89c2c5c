// Error feedback and refinement of a few rows over all columns: the loops of ptqpipe/quantization/gptq.py and refine.py,
// with the steps of columns.h.
//
// A lane is a row and its state stays in the cache of one core from the first column to the last. Sums over columns are
// added in the order of the columns, each product and sum rounded by itself, so a row's codes depend on nothing beside it.
// Where there are enough rows, several vectors of them go through the columns side by side: then a number of the matrix is
// read once for all of them. What refinement changes is a few codes of every row, and others in each: a row's slope, whose
// columns lie side by side, moves by those of the row alone.

enum { SUMS = W >= 16 ? 16 : 8, TOGETHER = W >= 16 ? 4 : 2, FEED_RUN = 128, SWEEP_RUN = 128, SWEPT = 128, MOVED = 8 };
// FEED_RUN, SWEEP_RUN: columns between two updates of all others. SWEPT: rows that are refined together. MOVED: vectors of
// columns of a row's slope that move at once.

struct Move { int32_t column; float by; };

// W rows of one pass, column by column, and what a step of columns.h is given.
struct Rows {
    vf *exact, *error, *s;
    float *slope;  // [W, stride]: a row's columns lie side by side, unlike those of the others
    int64_t stride;
    int32_t moved[W];          // columns of each row that the slope does not know yet
    Move moves[W][SWEEP_RUN];  // these, ascending
    alignas(64) vf near[SWEEP_RUN];  // the slope of the columns at hand, which knows them
    struct ptq_columns step;
    alignas(64) float target[MAX_COLUMNS * W], cost[W];
    alignas(64) uint8_t codes[MAX_COLUMNS * W];
    int64_t first[W], scales[W];
};

INLINE void set_up(Rows *rows, const struct ptq_pass *job, int64_t row, float *work) {
    const int64_t k = job->columns, n = job->rows;
    rows->exact = (vf *)work;
    rows->error = rows->exact + k;
    rows->s = rows->error + k;
    rows->slope = (float *)(rows->s + k);
    // Whole steps of move_slopes, and not a power of two: then all rows would share a set of the cache.
    rows->stride = (k + MOVED * W - 1) / (MOVED * W) * MOVED * W + W;
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

// A column in which some of W rows have moved.
INLINE void take(Rows *rows, int64_t column, vf by) {
    for (unsigned lanes = lane_bits(less(splat(0), bits(abs_of(by)))); lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        rows->moves[lane][rows->moved[lane]++] = {(int32_t)column, by[lane]};
    }
}

// Columns [i, i + C vectors) of the matrix's rows from `first` on that are wanted, zeros behind its end, one row after the
// other: where it lies, rows a power of two apart share a set of the cache.
template <int C>
INLINE void gather(vf *part, const struct ptq_pass *job, int64_t first, int count, int64_t i, const bool *wanted) {
    const int64_t k = job->columns, left = k - i;
    for (int j = 0; j < count; ++j) {
        if (!wanted[j]) continue;
        const float *m = job->matrix + (first + j) * k + i;
        for (int c = 0; c < C * W; c += 16) __builtin_prefetch(m + C * W + c, 0, 2);  // of the next part
        if (left >= C * W) memcpy(part + j * C, m, C * sizeof(vf));
        else
            for (int c = 0; c < C; ++c)
                part[j * C + c] = load_some(m + c * W, left > c * W ? left - c * W : 0, 0.0f);
    }
}

// Every row's slope by its own moves, in `count` columns from `first` on: slope[i] += the sum over them of
// moment[column, i] * by, for every column i.
static void move_slopes(const struct ptq_pass *job, Rows *rows, int vectors, int64_t first, int count) {
    enum { C = MOVED };
    vf part[SWEEP_RUN * C];
    bool wanted[SWEEP_RUN] = {};
    for (int row = 0; row < vectors * W; ++row) {
        const Rows *of = rows + row / W;
        for (int j = 0; j < of->moved[row % W]; ++j) wanted[of->moves[row % W][j].column - first] = true;
    }
    for (int64_t i = 0; i < job->columns; i += C * W) {
        gather<C>(part, job, first, count, i, wanted);
        for (int row = 0; row < vectors * W; ++row) {
            const Rows *of = rows + row / W;
            const int moved = of->moved[row % W];
            const Move *moves = of->moves[row % W];
            if (!moved) continue;
            vf sum[C], *slope = (vf *)(of->slope + row % W * of->stride + i);
            for (int c = 0; c < C; ++c) sum[c] = slope[c];
            for (int j = 0; j < moved; ++j)
                for (int c = 0; c < C; ++c) sum[c] = sum[c] + part[(moves[j].column - first) * C + c] * moves[j].by;
            for (int c = 0; c < C; ++c) slope[c] = sum[c];
        }
    }
    for (int g = 0; g < vectors; ++g) memset(rows[g].moved, 0, sizeof rows[g].moved);
}

// Every row's slope by the errors of `count` columns from `first` on, which all rows have.
static void add_slopes(const struct ptq_pass *job, Rows *rows, int vectors, int64_t first, int count) {
    enum { C = 2, R = W >= 16 ? 8 : 4 };  // vectors of columns, and rows, side by side
    vf part[SWEEP_RUN * C];
    bool wanted[SWEEP_RUN];
    memset(wanted, 1, sizeof wanted);
    for (int64_t i = 0; i < job->columns; i += C * W) {
        gather<C>(part, job, first, count, i, wanted);
        for (int row = 0; row < vectors * W; row += R) {
            const Rows *of = rows + row / W;
            const float *error = (const float *)(of->error + first) + row % W;
            float *slope = of->slope + row % W * of->stride + i;
            vf sum[R][C];
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) sum[r][c] = ((vf *)(slope + r * of->stride))[c];
            for (int j = 0; j < count; ++j)
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) sum[r][c] = sum[r][c] + part[j * C + c] * error[j * W + r];
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) ((vf *)(slope + r * of->stride))[c] = sum[r][c];
        }
    }
}

INLINE void load_near(Rows *rows, int64_t start, int count) {
    float *near = (float *)rows->near;
    for (int lane = 0; lane < W; ++lane)
        for (int i = 0; i < count; ++i) near[i * W + lane] = rows->slope[lane * rows->stride + start + i];
}

// Column start + i has moved: its slope behind it, of `count` columns from `start` on, and what is left for the others.
INLINE void move_near(const struct ptq_pass *job, Rows *rows, int64_t start, int i, int behind, int count, vf by) {
    if (!any(less(splat(0), bits(abs_of(by))))) return;
    const float *m = job->matrix + (start + i) * job->columns + start;
    for (int j = behind; j < count; ++j) rows->near[j] = rows->near[j] + m[j] * by;
    take(rows, start + i, by);
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
// have moved by. slope: of its columns.
template <class E, int B>
INLINE void sweep_block(const struct ptq_pass *job, int64_t row, Rows *rows, int64_t block, int b, const vf *slope,
                        vf *moved) {
    const int64_t n = job->rows, lanes = n - row < W ? n - row : W, start = block * b;
    const float *feedback = job->feedback + block * b * b, *inverse = job->inverse + block * b * b;
    const float *weight = job->weight + start;
    vf decoded[B ? B : MAX_COLUMNS], left[B ? B : MAX_COLUMNS], cost = splat(0.0f);
    vf *t = (vf *)rows->target;
    for (int i = 0; i < b; ++i) {
        vf pull = splat(0.0f);
        for (int j = 0; j < b; ++j) pull = pull + inverse[i * b + j] * slope[j];
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

template <class E, int B> static void sweep_blocks(const struct ptq_pass *job, int64_t row, Rows *rows, int vectors) {
    const int b = B ? B : (int)job->block;
    for (int64_t start = 0; start < job->columns; start += SWEEP_RUN) {
        const int count = (int)(job->columns - start < SWEEP_RUN ? job->columns - start : SWEEP_RUN);
        for (int g = 0; g < vectors; ++g) {
            vf by[B ? B : MAX_COLUMNS];
            load_near(rows + g, start, count);
            for (int i = 0; i < count; i += b) {
                if (!job->usable[(start + i) / b]) continue;
                sweep_block<E, B>(job, row + g * W, rows + g, (start + i) / b, b, rows[g].near + i, by);
                for (int j = 0; j < b; ++j) move_near(job, rows + g, start, i + j, i + b, count, by[j]);
            }
        }
        move_slopes(job, rows, vectors, start, count);
    }
}

// Every code in turn, with all others fixed.
template <class E> static void sweep_columns(const struct ptq_pass *job, int64_t row, Rows *rows, int vectors) {
    const int64_t k = job->columns;
    for (int64_t start = 0; start < k; start += SWEEP_RUN) {
        const int count = (int)(k - start < SWEEP_RUN ? k - start : SWEEP_RUN);
        for (int g = 0; g < vectors; ++g) {
            Rows *one = rows + g;
            load_near(one, start, count);
            for (int i = 0; i < count; ++i) {
                const float m = job->matrix[(start + i) * k + start + i];
                const vf exact = one->exact[start + i], before = one->error[start + i];
                const vf target = m > 0.0f ? (exact - before) + one->near[i] * (1.0f / m) : exact;
                const Step<E> found = step_of<E>(target, one->s[start + i]);
                const vf e = exact - found.decoded;
                store_codes(one->codes + i * W, W, found.code);
                one->error[start + i] = e;
                move_near(job, one, start, i, i + 1, count, e - before);
            }
            put_codes(job, start, row + g * W, one->codes, count);
        }
        move_slopes(job, rows, vectors, start, count);
    }
}

template <class E, int B> static void sweep_rows(const struct ptq_pass *job, int64_t row, Rows *rows, int vectors) {
    const int64_t k = job->columns, n = job->rows;
    for (int g = 0; g < vectors; ++g) {
        const int64_t at = row + g * W;
        for (int64_t i = 0; i < k; ++i) rows[g].error[i] = load_some(job->error + i * n + at, n - at, 0.0f);
        memset(rows[g].slope, 0, (size_t)(rows[g].stride * W) * sizeof(float));
        memset(rows[g].moved, 0, sizeof rows[g].moved);
        if (!job->usable) load_scales(rows + g, job, at);
    }
    for (int64_t i = 0; i < k; i += SWEEP_RUN) add_slopes(job, rows, vectors, i, (int)(k - i < SWEEP_RUN ? k - i : SWEEP_RUN));
    for (int64_t sweep = 0; sweep < job->sweeps; ++sweep) {
        if constexpr (!is_integer<E>)
            if (job->usable) {
                sweep_blocks<E, B>(job, row, rows, vectors);
                for (int g = 0; g < vectors; ++g) load_ladder(rows + g, job, row + g * W);
            }
        sweep_columns<E>(job, row, rows, vectors);
    }
}

// `vectors` of rows from `row` on; G of them, unless they are swept.
template <class E, int B, int G> static void run_rows(const struct ptq_pass *job, int64_t row, int vectors, float *work) {
    Rows rows[SWEPT / W];
    for (int g = 0; g < vectors; ++g) set_up(rows + g, job, row + g * W, work + g * pass_room(job->columns, W));
    if (job->kind == PTQ_FEED) feed_rows<E, G>(job, row, rows);
    else if (job->kind == PTQ_SWEEP) sweep_rows<E, B>(job, row, rows, vectors);
    else if constexpr (!is_integer<E>) enter_rows<E, B, G>(job, row, rows);
}

template <class E, int B> static void run_pass(const struct ptq_pass *job, int64_t first, int64_t last, float *work) {
    for (int64_t row = first; row < last;) {
        const int left = (int)((last - row + W - 1) / W);
        int vectors = left < TOGETHER ? 1 : TOGETHER;
        if (job->kind == PTQ_SWEEP) vectors = left < SWEPT / W ? left : SWEPT / W;
        if (vectors == TOGETHER) run_rows<E, B, TOGETHER>(job, row, vectors, work);
        else run_rows<E, B, 1>(job, row, vectors, work);
        row += vectors * W;
    }
}

template <class E> static int32_t run_pass(const struct ptq_pass *job, int64_t first, int64_t last, float *work) {
    if constexpr (is_integer<E>) {
        if (job->block || job->kind == PTQ_ENTER) return PTQ_UNSUPPORTED;
        run_pass<E, 1>(job, first, last, work);
    } else if (job->block == 16) run_pass<E, 16>(job, first, last, work);
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
        case PTQ_INT4: return run_pass<Integers<4, 8>>(job, first, last, work);
        case PTQ_INT8: return run_pass<Integers<8, 128>>(job, first, last, work);
        case PTQ_INT8_SIGNED: return run_pass<Integers<8, 0>>(job, first, last, work);
    }
    return PTQ_UNSUPPORTED;
}
