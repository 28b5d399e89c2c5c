// Drivers: a matrix of blocks, tile by tile.

template <class E, bool MX, bool H>
INLINE vi search_tile(const vf *x, const vf *h, int block, vf largest, const Minifloat3Scale &s, double *scores) {
    const vm zero = less(largest, splat(0x1p-149f));
    const vm rare = mask_and(rare_lanes<MX>(s, largest), mask_not(zero));
    const vm done = mask_or(zero, rare);
    Found f = {splat(MX ? 0 : 1), splat(FLT_MAX)};
    if (!all(done)) {
        if (MX) f = block == 32 ? scan_e8m0<E, H, 32>(x, h, block, largest, done)
                                : scan_e8m0<E, H, 0>(x, h, block, largest, done);
        else f = block == 16 ? scan_minifloat3<E, H, 16>(x, h, block, largest, done, s)
                             : scan_minifloat3<E, H, 0>(x, h, block, largest, done, s);
    }
    vm alone = rare;
    if (scores) {
        f.score = select(zero, splat(0.0f), f.score);
        for (int lane = 0; lane < W; ++lane) {
            const double value = MX ? ldexp(1.0, f.code[lane] - 127) : 1.0;
            scores[lane] = (double)f.score[lane] * (value * value);
        }
        alone = mask_or(rare, mask_and(less_equal(splat(FLT_MAX), f.score), mask_not(zero)));
    }
    if (!any(alone)) return f.code;
    const unsigned which = lane_bits(alone);
    for (int lane = 0; lane < W; ++lane) {
        if (!(which >> lane & 1)) continue;
        float one[MAX_BLOCK], weights[MAX_BLOCK];
        double score;
        for (int k = 0; k < block; ++k) one[k] = x[k][lane], weights[k] = H ? h[k][lane] : 1.0f;
        f.code[lane] = scan_all<E, MX>(one, H ? weights : 0, block, s, &score);
        if (scores) scores[lane] = score;
    }
    return f.code;
}

// Elements below 2^-32 of their block's largest count as zero in the search (not in the codes): x, or a flushed copy.
INLINE const vf *flush_tile(const vf *x, int block, vf largest, vf smallest, vf *copy) {
    const vf least = largest * 0x1p-32f;
    if (!any(less(smallest, least))) return x;
    for (int k = 0; k < block; ++k) copy[k] = select(less(x[k], least), splat(0.0f), x[k]);
    return copy;
}

template <bool MX> INLINE vf inverse_scale(vi code, const Minifloat3Scale &s) {
    vf r, square;
    if (!MX) {
        scale_factors(s, code, &r, &square);
        return r;
    }
    r = from_bits((254 - code) << 23);
    return s.unit * select(less(splat(253), code), splat(0x1p-127f), r);
}

// One run of `blocks` adjacent blocks; `index` is the number of its first block in the whole matrix.
template <class E, bool MX, bool H>
static int32_t run_blocks(const ptq_blocks *j, const Minifloat3Scale *scales, const char *w, int64_t blocks, int64_t index,
                          const vf *h, uint8_t *data, uint8_t *codes, double (*sums)[16]) {
    vf x[MAX_BLOCK], copy[MAX_BLOCK];
    vi words[MAX_WORDS];
    char padded[MAX_BLOCK * W * 4];
    uint8_t tail_data[MAX_BLOCK * W], tail_codes[W];
    const int block = j->block, in_bytes = block * dtype_bytes(j->dtype), out_bytes = block * E::code_bits / 8;
    for (int64_t b = 0; b < blocks; b += W) {
        const int count = blocks - b < W ? (int)(blocks - b) : W;
        const char *p = w + b * in_bytes;
        uint8_t *data_out = data ? data + b * out_bytes : 0, *codes_out = codes ? codes + b : 0;
        if (count < W) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, p, (size_t)count * in_bytes);
            memset(tail_codes, 1, sizeof tail_codes);
            if (codes && j->rule == PTQ_GIVEN) memcpy(tail_codes, codes_out, (size_t)count);
            p = padded;
            if (data) data_out = tail_data;
            if (codes) codes_out = tail_codes;
        }
        if (j->dtype == PTQ_BF16) load_tile<PTQ_BF16>(p, block, x);
        else if (j->dtype == PTQ_F16) load_tile<PTQ_F16>(p, block, x);
        else load_tile<PTQ_F32>(p, block, x);
        vf largest, smallest;
        split_signs<E>(x, block, words, &largest, &smallest);
        if (any(mask_not(less(bits(largest), splat(0x7F800000))))) return PTQ_NOT_FINITE;
        const vf *flushed = flush_tile(x, block, largest, smallest, copy);
        const vf *weights = H ? h + b / W * block : 0;
        if (!data) {
            double scores[W];
            for (int64_t g = 0; g < j->n_global; ++g) {
                search_tile<E, MX, H>(flushed, weights, block, largest, scales[g], scores);
                for (int lane = 0; lane < count; ++lane) sums[g][(index + b + lane) & 15] += scores[lane];
            }
            continue;
        }
        vi chosen;
        if (j->rule == PTQ_GIVEN) chosen = load_scales(codes_out);
        else chosen = search_tile<E, MX, H>(flushed, weights, block, largest, scales[0], 0);
        add_codes<E>(x, block, inverse_scale<MX>(chosen, scales[0]), words);
        store_words<E>(words, block, data_out);
        if (j->rule != PTQ_GIVEN) store_scales(chosen, codes_out);
        if (count < W) {
            memcpy(data + b * out_bytes, tail_data, (size_t)count * out_bytes);
            if (j->rule != PTQ_GIVEN) memcpy(codes + b, tail_codes, (size_t)count);
        }
    }
    return PTQ_OK;
}

// Weights of one row, per tile and lane; lanes beyond the row get 1.
static void spread_importance(const ptq_blocks *j, int64_t tiles, float *h) {
    const int block = j->block;
    for (int64_t t = 0; t < tiles; ++t)
        for (int k = 0; k < block; ++k)
            for (int lane = 0; lane < W; ++lane) {
                const int64_t column = (t * W + lane) * block + k;
                h[(t * block + k) * W + lane] = column < j->cols ? j->importance[column] : 1.0f;
            }
}

static double sum_of(const double *p) {  // the fixed tree that cpu.py repeats
    double q[8], r[4];
    for (int i = 0; i < 8; ++i) q[i] = p[i] + p[i + 8];
    for (int i = 0; i < 4; ++i) r[i] = q[i] + q[i + 4];
    return (r[0] + r[2]) + (r[1] + r[3]);
}

template <class E, bool MX, bool H> static int32_t run_rows(const ptq_blocks *j) {
    const int64_t per_row = j->cols / j->block, tiles = (per_row + W - 1) / W, n = j->n_global;
    const bool flat = !H && j->row_stride == j->cols;
    const int64_t rows = flat ? 1 : j->rows, blocks = flat ? per_row * j->rows : per_row;
    const size_t scale_bytes = (size_t)n * sizeof(Minifloat3Scale), sum_bytes = (size_t)n * 16 * sizeof(double);
    const size_t h_bytes = H ? (size_t)tiles * W * j->block * sizeof(float) : 0;
    char *raw = (char *)malloc(scale_bytes + sum_bytes + h_bytes + 3 * 64);
    if (!raw) return PTQ_NO_MEMORY;
    char *memory = (char *)(((uintptr_t)raw + 63) & ~(uintptr_t)63);
    Minifloat3Scale *scales = (Minifloat3Scale *)memory;
    memory += (scale_bytes + 63) & ~(size_t)63;
    float *h = (float *)memory;
    double(*sums)[16] = (double(*)[16])(memory + h_bytes);
    memset(sums, 0, sum_bytes);
    for (int64_t g = 0; g < n; ++g) scales[g] = make_scale(j->global_scales[g], E::unit, j->scale_bias, j->scale_top);
    if (H) spread_importance(j, tiles, h);
    int32_t status = PTQ_OK;
    for (int64_t row = 0; row < rows && status == PTQ_OK; ++row) {
        const char *w = (const char *)j->w + row * j->row_stride * dtype_bytes(j->dtype);
        uint8_t *data = j->data ? j->data + row * (j->cols * E::code_bits / 8) : 0;
        uint8_t *codes = j->scales ? j->scales + row * per_row : 0;
        status = run_blocks<E, MX, H>(j, scales, w, blocks, row * per_row, (const vf *)h, data, codes, sums);
    }
    if (j->totals)
        for (int64_t g = 0; g < n; ++g) j->totals[g] = sum_of(sums[g]);
    free(raw);
    return status;
}

template <class E> static int32_t run_element(const ptq_blocks *j) {
    if (j->scale_kind == PTQ_SCALE_E8M0) return j->importance ? run_rows<E, true, true>(j) : run_rows<E, true, false>(j);
    return j->importance ? run_rows<E, false, true>(j) : run_rows<E, false, false>(j);
}

static int32_t quantize_blocks(const ptq_blocks *j) {
    if (j->block < 2 || j->block > MAX_BLOCK) return PTQ_UNSUPPORTED;
    switch (j->element) {
        case PTQ_E2M1: return run_element<E2M1>(j);
        case PTQ_E4M3: return run_element<E4M3>(j);
        case PTQ_E2M3: return run_element<E2M3>(j);
        case PTQ_E3M2: return run_element<E3M2>(j);
        default: return PTQ_UNSUPPORTED;
    }
}
