// Codes of a few columns for many rows: the torch references of quantization/gptq_steps.py, operation by operation.
//
// Matrices lie as [columns, rows], so a lane is a row and no step crosses lanes.

enum { MAX_COLUMNS = 256, SCALES = 2 };  // scales that are tried side by side

// Integers of so many bits; codes are the numbers plus OFFSET, in a byte.
template <int BITS, int OFFSET> struct Integers {
    static constexpr float low = -(1 << (BITS - 1)), max = (1 << (BITS - 1)) - 1;
    static constexpr int offset = OFFSET;
};
template <class E> constexpr bool is_integer = false;  // whose scales are no list: those of a pass are fixed
template <int BITS, int OFFSET> constexpr bool is_integer<Integers<BITS, OFFSET>> = true;

template <class E> struct Step { vi code; vf decoded; };

// The code nearest to t at scale s and what it decodes to.
template <class E> INLINE Step<E> step_of(vf t, vf s) {
    const vf inv = 1.0f / s;
    if constexpr (is_integer<E>) {
        const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the number is in the last bits, and ties go to the even one
        const vf q = max_of(min_of(t * inv, splat(E::max)), splat(E::low)) + magic;
        return {((bits(q) & 0xFFFF) + E::offset) & 0xFF, (q - magic) * s};
    } else {
        const vf y = min_of(abs_of(t) * inv, splat(E::max));
        const Rounded r = round_minifloat(y, E::mantissa, E::emin);
        const vi sign = bits(t) & (int32_t)0x80000000;
        Step<E> found;
        found.code = minifloat_code(y, E::mantissa, E::emin) | shift_right(sign, 32 - E::code_bits);
        found.decoded = from_bits(bits((r.sum - r.power) * s) | sign);
        return found;
    }
}

INLINE vf load_some(const float *p, int64_t count, float rest) {
    vf v = splat(rest);
    memcpy(&v, p, (size_t)(count < W ? count : W) * 4);
    return v;
}
INLINE void store_some(float *p, int64_t count, vf v) { memcpy(p, &v, (size_t)(count < W ? count : W) * 4); }
INLINE void store_codes(uint8_t *p, int64_t count, vi codes) {
    const int n = (int)(count < W ? count : W);
    for (int lane = 0; lane < n; ++lane) p[lane] = (uint8_t)codes[lane];
}

template <class E> static void feed_forward(const struct ptq_columns *job, int64_t row) {
    const int b = (int)job->columns;
    const int64_t n = job->rows, left = n - row;
    vf t[MAX_COLUMNS];
    for (int i = 0; i < b; ++i) t[i] = load_some(job->target + i * n + row, left, 0.0f);
    for (int i = 0; i < b; ++i) {
        const Step<E> found = step_of<E>(t[i], load_some(job->s + i * n + row, left, 1.0f));
        const vf e = load_some(job->exact + i * n + row, left, 0.0f) - found.decoded;
        store_codes(job->codes + i * n + row, left, found.code);
        store_some(job->error + i * n + row, left, e);
        const float *f = job->matrix + (int64_t)i * b;
        for (int j = i + 1; j < b; ++j) t[j] = t[j] + f[j] * e;
    }
}

template <class E> static void descend(const struct ptq_columns *job, int64_t row) {
    const int b = (int)job->columns;
    const int64_t n = job->rows, left = n - row;
    vf slope[MAX_COLUMNS];
    for (int i = 0; i < b; ++i) slope[i] = load_some(job->slope + i * n + row, left, 0.0f);
    for (int i = 0; i < b; ++i) {
        const float *m = job->matrix + (int64_t)i * b;
        const vf exact = load_some(job->exact + i * n + row, left, 0.0f);
        const vf before = load_some(job->error + i * n + row, left, 0.0f);
        const vf target = m[i] > 0.0f ? (exact - before) + slope[i] * (1.0f / m[i]) : exact;
        const Step<E> found = step_of<E>(target, load_some(job->s + i * n + row, left, 1.0f));
        const vf e = exact - found.decoded, moved = e - before;
        store_codes(job->codes + i * n + row, left, found.code);
        store_some(job->error + i * n + row, left, e);
        for (int j = 0; j < b; ++j) slope[j] = slope[j] + job->matrix[j * b + i] * moved;
    }
    for (int i = 0; i < b; ++i) store_some(job->slope + i * n + row, left, slope[i]);
}

// The codes of a block at scale s, and what they decode to where `decoded` is not null.
template <class E, int B>
INLINE void block_codes(const struct ptq_columns *job, const vf *target, vf s, uint8_t *codes, vf *decoded, int64_t left) {
    const int b = B ? B : (int)job->columns;
    vf t[B ? B : MAX_COLUMNS];
    for (int i = 0; i < b; ++i) t[i] = target[i];
    for (int i = 0; i < b; ++i) {
        const Step<E> found = step_of<E>(t[i], s);
        const vf e = target[i] - found.decoded;
        store_codes(codes + i * job->rows, left, found.code);
        if (decoded) decoded[i] = found.decoded;
        const float *f = job->matrix + (int64_t)i * b;
        for (int j = i + 1; j < b; ++j) t[j] = t[j] + f[j] * e;
    }
}

// The cost of a block at each of S scales. They are taken side by side: one alone waits for every column's rounding.
template <class E, int B, int S> INLINE void block_costs(const struct ptq_columns *job, const vf *target, const vf *s, vf *cost) {
    const int b = B ? B : (int)job->columns;
    vf t[B ? B : MAX_COLUMNS][S], e[S];
    for (int c = 0; c < S; ++c) cost[c] = splat(0.0f);
    for (int i = 0; i < b; ++i)
        for (int c = 0; c < S; ++c) t[i][c] = target[i];
    for (int i = 0; i < b; ++i) {
        for (int c = 0; c < S; ++c) {
            const Step<E> found = step_of<E>(t[i][c], s[c]);
            const vf rest = t[i][c] - found.decoded;
            e[c] = target[i] - found.decoded;
            cost[c] = cost[c] + rest * rest * job->weight[i];
        }
        const float *f = job->matrix + (int64_t)i * b;
        for (int j = i + 1; j < b; ++j)
            for (int c = 0; c < S; ++c) t[j][c] = t[j][c] + f[j] * e[c];
    }
}

// Of W rows from `row` on; what the chosen codes decode to, too, where `decoded` [columns] is not null.
template <class E, int B> static void choose_block(const struct ptq_columns *job, int64_t row, vf *decoded) {
    const int b = (int)job->columns;
    const int64_t n = job->rows, left = n - row, top = job->ladder_size - 1;
    const int lanes = (int)(left < W ? left : W);
    vf target[MAX_COLUMNS], best = splat(0.0f), best_s = splat(1.0f);
    int64_t chosen[W] = {0};
    for (int i = 0; i < b; ++i) target[i] = load_some(job->target + i * n + row, left, 0.0f);
    for (int first = 0; first < job->count; first += SCALES) {
        const int count = job->count - first < SCALES ? job->count - first : SCALES;
        int64_t index[SCALES][W] = {};
        vf s[SCALES], cost[SCALES];
        for (int c = 0; c < SCALES; ++c) {
            s[c] = splat(1.0f);
            for (int lane = 0; c < count && lane < lanes; ++lane) {
                const int64_t at = job->first[row + lane] + first + c;
                index[c][lane] = at < 0 ? 0 : at > top ? top : at;
                s[c][lane] = job->ladder[index[c][lane]];
            }
        }
        if (count == SCALES) block_costs<E, B, SCALES>(job, target, s, cost);
        else block_costs<E, B, 1>(job, target, s, cost);
        for (int c = 0; c < count; ++c)
            for (int lane = 0; lane < lanes; ++lane)
                if (first + c == 0 || cost[c][lane] < best[lane])
                    best[lane] = cost[c][lane], best_s[lane] = s[c][lane], chosen[lane] = index[c][lane];
    }
    block_codes<E, B>(job, target, best_s, job->codes + row, decoded, left);
    store_some(job->cost + row, left, best);
    memcpy(job->scales + row, chosen, (size_t)lanes * sizeof(int64_t));
}

template <class E> static int32_t run_columns(const struct ptq_columns *job) {
    for (int64_t row = 0; row < job->rows; row += W) {
        if (job->kind == PTQ_FEED_FORWARD) feed_forward<E>(job, row);
        else if (job->kind == PTQ_DESCEND) descend<E>(job, row);
        else if constexpr (is_integer<E>) return PTQ_UNSUPPORTED;
        else if (job->columns == 16) choose_block<E, 16>(job, row, nullptr);
        else if (job->columns == 32) choose_block<E, 32>(job, row, nullptr);
        else choose_block<E, 0>(job, row, nullptr);
    }
    return PTQ_OK;
}

static int32_t columns(const struct ptq_columns *job) {
    if (job->columns > MAX_COLUMNS) return PTQ_UNSUPPORTED;
    switch (job->element) {
        case PTQ_E2M1: return run_columns<Minifloat<1, 0, 2, 4, 48, 28>>(job);
        case PTQ_E4M3: return run_columns<E4M3>(job);
        case PTQ_E2M3: return run_columns<E2M3>(job);
        case PTQ_E3M2: return run_columns<E3M2>(job);
        case PTQ_INT4: return run_columns<Integers<4, 8>>(job);
        case PTQ_INT8: return run_columns<Integers<8, 128>>(job);
        case PTQ_INT8_SIGNED: return run_columns<Integers<8, 0>>(job);
    }
    return PTQ_UNSUPPORTED;
}
