// Drivers: a matrix of blocks, tile by tile.

typedef double doubles __attribute__((vector_size(8 * W)));
typedef int64_t longs __attribute__((vector_size(8 * W)));

// Scale codes of U tiles, x[u * block + k], and their scores where `scores` is not null.
template <class E, bool MX, bool H, int B, int U>
INLINE void search_tiles(const vf *x, const vf *h, int any_block, const vf *largest, const Minifloat3Scale &s, vi *code,
                         double *scores) {
    const int block = B ? B : any_block;
    Lanes<U> lanes;
    Found<U> f;
    vm zero[U], alone[U];  // lanes of zeros, lanes for scan_all
    EACH(u) {
        lanes.largest[u] = largest[u];
        zero[u] = less(largest[u], splat(0x1p-149f));
        alone[u] = mask_and(rare_lanes<MX>(s, largest[u]), mask_not(zero[u]));
        lanes.done[u] = mask_or(zero[u], alone[u]);
        f.code[u] = splat(MX ? 0 : 1), f.score[u] = splat(FLT_MAX);
    }
    if constexpr (filters<E, MX, H, B>()) {
        if (!all_done<U>(lanes.done)) search_by_filter<E, B, U>(x, &lanes, s, &f, scores != 0);
    } else if (!all_done<U>(lanes.done)) {
        if (MX) scan_e8m0<E, H, B, U>(x, h, block, &lanes, &f);
        else scan_minifloat3<E, H, B, U>(x, h, block, &lanes, s, &f);
    }
    EACH(u) {
        code[u] = f.code[u];
        if (scores) {
            alone[u] = mask_or(alone[u], mask_and(less_equal(splat(FLT_MAX), f.score[u]), mask_not(zero[u])));
            const vf score = select(zero[u], splat(0.0f), f.score[u]);
            doubles total = __builtin_convertvector(score, doubles);
            if (MX)  // times the square of 2^(code - 127)
                total = total * (doubles)((__builtin_convertvector(code[u], longs) * 2 + (1023 - 2 * 127)) << 52);
            memcpy(scores + u * W, &total, sizeof total);
        }
        if (!any(alone[u])) continue;
        const unsigned which = lane_bits(alone[u]);
        for (int lane = 0; lane < W; ++lane) {
            if (!(which >> lane & 1)) continue;
            float one[MAX_BLOCK], weights[MAX_BLOCK];
            double score = 0.0;
            for (int k = 0; k < block; ++k)
                one[k] = x[u * block + k][lane], weights[k] = H ? h[u * block + k][lane] : 1.0f;
            code[u][lane] = scan_all<E, MX>(one, H ? weights : 0, block, s, &score);
            if (scores) scores[u * W + lane] = score;
        }
    }
}

// The same for the rules that are no search.
template <class E, bool MX, bool H, int B, int U>
INLINE void rule_tiles(const ptq_blocks *j, const vf *x, const vf *h, int any_block, const vf *largest, const Minifloat3Scale &s,
                       vi *code, double *scores) {
    const int block = B ? B : any_block;
    EACH(u) {
        const vf *part = x + u * block, *weights = H ? h + u * block : 0;
        if (!MX && E::max == 6.0f && j->rule == PTQ_FOUR_OVER_SIX)
            code[u] = four_over_six<E, H, B>(part, weights, block, largest[u], s);
        else code[u] = closed_codes<E, MX>(j->rule, j->flush_code, largest[u], s);
        if (scores) score_codes<E, MX, H, B>(part, weights, block, largest[u], s, code[u], false, scores + u * W);
    }
}

template <class E, bool MX, bool H, int B, int U>
INLINE void choose_tiles(const ptq_blocks *j, const vf *x, const vf *h, int block, const vf *largest, const Minifloat3Scale &s,
                         vi *code, double *scores) {
    if (j->rule == PTQ_EXACT) search_tiles<E, MX, H, B, U>(x, h, block, largest, s, code, scores);
    else rule_tiles<E, MX, H, B, U>(j, x, h, block, largest, s, code, scores);
}

// Elements below 2^-32 of their block's largest count as zero in the search (not in the codes): x, or a flushed copy.
template <int U> INLINE const vf *flush_tiles(const vf *x, int block, const vf *largest, vf *copy) {
    vm tiny = no_lanes();
    EACH(u) {
        vf smallest = splat(FLT_MAX);  // but 0
        for (int k = u * block; k < (u + 1) * block; ++k)
            smallest = select(less(splat(0.0f), x[k]), min_of(x[k], smallest), smallest);
        tiny = mask_or(tiny, less(smallest, largest[u] * 0x1p-32f));
    }
    if (!any(tiny)) return x;
    for (int u = 0; u < U; ++u)
        for (int k = u * block; k < (u + 1) * block; ++k)
            copy[k] = select(less(x[k], largest[u] * 0x1p-32f), splat(0.0f), x[k]);
    return copy;
}

// The codes of a tile for its scale codes, added to its words.
template <class E, bool MX, int B>
INLINE void encode_tile(const vf *x, int block, [[maybe_unused]] vf largest, vi code, const Minifloat3Scale &s, vi *words) {
    vf r, square;
    if (!MX) {
        scale_factors(s, code, &r, &square);
#if defined(PTQ_AVX2)
        if (E::code_bits == 4 && !any(less_equal(splat(E::clamp_from * E::unit), largest * r)))
            return add_codes<E, B, false>(x, block, r, 1.0f, words);
#endif
        return add_codes<E, B>(x, block, r, 1.0f, words);
    }
    r = select(less(splat(253), code), splat(0x1p-127f), from_bits((254 - code) << 23));
    if (E::unit != 1.0f && any(less(code, splat(2)))) return add_codes<E, B>(x, block, r, E::unit, words);  // r * unit is inf
    add_codes<E, B>(x, block, E::unit * r, 1.0f, words);
}

// One run of `blocks` adjacent blocks; `index` is the number of its first block in the whole matrix.
template <class E, bool MX, bool H, int B>
static int32_t run_blocks(const ptq_blocks *j, const Minifloat3Scale *scales, const char *w, int64_t blocks, int64_t index,
                          const vf *h, uint8_t *data, uint8_t *codes, double (*sums)[16]) {
    enum { U = filters<E, MX, H, B>() ? FILTER_TILES : B ? 2 : 1, STEP = U * W, MOST = B ? B : MAX_BLOCK };
    vf x[U * MOST], copy[U * MOST], largest[U];
    vi words[U * MOST / 2 + U], chosen[U];
    char padded[STEP * MOST * 4];
    uint8_t tail_data[STEP * MOST], tail_codes[STEP];
    const int block = B ? B : j->block, in_bytes = block * dtype_bytes(j->dtype), out_bytes = block * E::code_bits / 8;
    const int n_words = (block + codes_per_word<E>() - 1) / codes_per_word<E>();
    // Where scores decide. The filter's integers have no such elements, and what it leaves open is flushed there.
    const bool flushes = !data || j->rule == PTQ_FOUR_OVER_SIX || (j->rule == PTQ_EXACT && !filters<E, MX, H, B>());
    for (int64_t b = 0; b < blocks; b += STEP) {
        const int count = blocks - b < STEP ? (int)(blocks - b) : STEP;
        const char *p = w + b * in_bytes;
        uint8_t *data_out = data ? data + b * out_bytes : 0, *codes_out = codes ? codes + b : 0;
        if (count < STEP) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, p, (size_t)count * in_bytes);
            memset(tail_codes, 1, sizeof tail_codes);
            if (codes && j->rule == PTQ_GIVEN) memcpy(tail_codes, codes_out, (size_t)count);
            p = padded;
            if (data) data_out = tail_data;
            if (codes) codes_out = tail_codes;
        }
        load_tiles<B, U>(j->dtype, p, block, 2 * STEP * in_bytes, x);
        vm bad = no_lanes();
        EACH(u) {
            split_signs<E, B>(x + u * block, block, words + u * n_words, &largest[u]);
            bad = mask_or(bad, mask_not(less(bits(largest[u]), splat(0x7F800000))));
        }
        if (any(bad)) return PTQ_NOT_FINITE;
        const vf *flushed = flushes ? flush_tiles<U>(x, block, largest, copy) : x;
        const vf *weights = H ? h + b / W * block : 0;
        if (!data) {
            double scores[STEP];
            for (int64_t g = 0; g < j->n_global; ++g) {
                choose_tiles<E, MX, H, B, U>(j, flushed, weights, block, largest, scales[g], chosen, scores);
                for (int lane = 0; lane < count; ++lane) sums[g][(index + b + lane) & 15] += scores[lane];
            }
            continue;
        }
        if (j->rule != PTQ_GIVEN)
            choose_tiles<E, MX, H, B, U>(j, flushed, weights, block, largest, scales[0], chosen, 0);
        EACH(u) {
            if (j->rule == PTQ_GIVEN) chosen[u] = load_scales(codes_out + u * W);
            else store_bytes(chosen[u], codes_out + u * W);
            encode_tile<E, MX, B>(x + u * block, block, largest[u], chosen[u], scales[0], words + u * n_words);
            store_words<E, B>(words + u * n_words, block, data_out + u * W * out_bytes);
        }
        if (count < STEP) {
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

static double sum_of(const double *p) {  // in a fixed tree
    double q[8], r[4];
    for (int i = 0; i < 8; ++i) q[i] = p[i] + p[i + 8];
    for (int i = 0; i < 4; ++i) r[i] = q[i] + q[i + 4];
    return (r[0] + r[2]) + (r[1] + r[3]);
}

template <class E, bool MX, bool H, int B> static int32_t run_rows(const ptq_blocks *j) {
    const int64_t per_row = j->cols / j->block, tiles = ((per_row + W - 1) / W + 1) & ~(int64_t)1, n = j->n_global;
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
        status = run_blocks<E, MX, H, B>(j, scales, w, blocks, row * per_row, (const vf *)h, data, codes, sums);
    }
    if (j->totals)
        for (int64_t g = 0; g < n; ++g) j->totals[g] = sum_of(sums[g]);
    free(raw);
    return status;
}

// The usual block of a kind of scales gets code of its own, where it is worth its size.
template <class E, bool MX, int USUAL, int USUAL_H> static int32_t run_scales(const ptq_blocks *j) {
    if (j->importance) return j->block == USUAL_H ? run_rows<E, MX, true, USUAL_H>(j) : run_rows<E, MX, true, 0>(j);
    return j->block == USUAL ? run_rows<E, MX, false, USUAL>(j) : run_rows<E, MX, false, 0>(j);
}

template <class E, int USUAL, int USUAL_H, int USUAL_MX, int USUAL_MX_H>
static int32_t run_element(const ptq_blocks *j) {
    return j->scale_kind == PTQ_SCALE_E8M0 ? run_scales<E, true, USUAL_MX, USUAL_MX_H>(j)
                                           : run_scales<E, false, USUAL, USUAL_H>(j);
}

static int32_t quantize_blocks(const ptq_blocks *j) {
    if (j->block < 2 || j->block > MAX_BLOCK || (j->rule == PTQ_GIVEN && !j->data)) return PTQ_UNSUPPORTED;
    const bool powers = j->scale_kind == PTQ_SCALE_E8M0;
    if (j->rule >= PTQ_OCP_FLOOR && !powers) return PTQ_UNSUPPORTED;
    if (j->rule == PTQ_FOUR_OVER_SIX && (powers || j->element != PTQ_E2M1)) return PTQ_UNSUPPORTED;
    switch (j->element) {
        case PTQ_E2M1: return run_element<E2M1, 16, 16, 32, 32>(j);
        case PTQ_E4M3: return run_element<E4M3, 0, 0, 32, 0>(j);
        case PTQ_E2M3: return run_element<E2M3, 0, 0, 32, 0>(j);
        case PTQ_E3M2: return run_element<E3M2, 0, 0, 32, 0>(j);
        default: return PTQ_UNSUPPORTED;
    }
}
