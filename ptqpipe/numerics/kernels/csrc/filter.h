// The exact search of E2M1 blocks of 16 with E4M3 or UE5M3 scales on AVX2 and AVX-512: scores in 16-bit integers tell which
// code is the best one of nearly all blocks. The others are left open, and scanned as in search.h.
//
// In units of 1/UNIT let f(c) be the distance of a block's y, the floats of the objective at code c, from the grid of E2M1
// values (the root of the sum of squares), and g(c) that of the integers y'. A distance from a set changes by no more than
// the point moves: |f - g| <= |y - y'|. An element of y' is floor(X F / 65536), where
//   F  is what an element of 65535 is at code c, rounded to the nearest and half a unit more: 0 to 1 high, X / 65536 <= 1;
//   floor takes 0 to 1 away, and so what is high and what is low are 1 at most;
//   X  is an element over the largest, in 1/65535, rounded: 0.51 from it with the roundings of floats, times F / 65536;
//   r(c) of the objective and of F differ by eleven roundings of floats, 2^-24 of 64718 each: 0.043.
// Roots of scores are f(c) value(c) / value(start). That ratio is at most 1, and F / 65536 times it is what it is at the
// start, where F is at most 3.95 UNIT: 0.494, of 0.51 that is 0.252. So it is 1.3 an element, 5.2 for sixteen: where
// g(c) value(c) is APART = 10.4 above the least, f(c) value(c) is above the least, too. SLACK is for the roundings of the
// scores, here and in the objective: fewer than 60 of 2^-24 each.
//
// The scan of search.h starts where the largest y is in [3.5, 3.94], and eight codes further down it has doubled. Nine
// codes are scored; all others clip the largest element by 1.4 or more, and the tenth least ("Stop" in search.h): its
// bound counts as one more score. Sums of squares are below 2^32. One that leaves 31 bits is negative: should it become the
// least, its root is no number, and the lane stays open, as do those that start elsewhere or have numbers so small that
// value * global_scale might be subnormal.

#if defined(PTQ_AVX2) || defined(PTQ_AVX512)
enum { FILTERED = 9, FIRST_FILTERED = 24 };  // codes scored; the tenth from 24 on is 15: none is subnormal
enum { NEAR = 3 };  // codes from the start on at which the largest element is below 5: 3.95 * 10 / 8 is
enum { FILTER_TILES = 8 };  // at a time: the few open blocks of many tiles are scanned side by side
#define UNIT 8192.0f
#define APART 10.4f
#define SLACK (1.0f + 0x1p-16f)

// value(start) / value(start - i) and the square of its inverse, by the significand of start.
struct Ratios { alignas(64) float r[FILTERED + 1][16], square[FILTERED + 1][16]; };
static constexpr Ratios make_ratios() {
    Ratios t{};
    for (int i = 0; i <= FILTERED; ++i)
        for (int m = 0; m < 16; ++m) {
            const int code = 16 + (m & 7) - i;
            const float value = (8 + (code & 7)) * (code < 8 ? 0.25f : code < 16 ? 0.5f : 1.0f), first = 8 + (m & 7);
            t.r[i][m] = first / value, t.square[i][m] = (value / first) * (value / first);
        }
    return t;
}
static constexpr Ratios ratios = make_ratios();

#if defined(PTQ_AVX512)
INLINE vf ratio(const float *row, vi start) { return (vf)_mm512_permutexvar_ps((__m512i)start, _mm512_load_ps(row)); }
INLINE vi rounded(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
INLINE vf root(vf a) { return (vf)_mm512_sqrt_ps((__m512)a); }

// The sums of two squares of y' less the nearest E2M1 value, for y' the product of two numbers of 16 bits.
template <bool> INLINE vi squares(vi pair, vi factor) {
    alignas(64) static const uint16_t nearest[32] = {
        0,     4096,  4096,  8192,  8192,  12288, 12288, 16384, 16384, 16384, 24576, 24576, 24576, 24576, 32768, 32768,
        32768, 32768, 32768, 32768, 49152, 49152, 49152, 49152, 49152, 49152, 49152, 49152, 49152, 49152, 49152, 49152};
    const __m512i y = _mm512_mulhi_epu16((__m512i)pair, (__m512i)factor);
    const __m512i d = _mm512_sub_epi16(y, _mm512_permutexvar_epi16(_mm512_srli_epi16(y, 11), _mm512_load_si512(nearest)));
    return (vi)_mm512_madd_epi16(d, d);
}
#else
INLINE vf ratio(const float *row, vi start) { return (vf)_mm256_permutevar8x32_ps(_mm256_load_ps(row), (__m256i)start); }
INLINE vi rounded(vf a) { return (vi)_mm256_cvtps_epi32((__m256)a); }
INLINE vf root(vf a) { return (vf)_mm256_sqrt_ps((__m256)a); }

// The sums of two squares of y' less the nearest E2M1 value, for y' the product of two numbers of 16 bits.
// Sixteen values are looked up by 4y', the last one for all beyond: that is 4 for y' below 5. FAR: for any y', by 4y' halved
// from y' = 2 on, whose steps are multiples of 1/2. Values are multiples of 256, and so it is the upper bytes that are
// looked up: 0x70 takes what is beyond 15 to 127, 0x80 makes every lower byte negative, which is looked up as 0.
template <bool FAR> INLINE vi squares(vi pair, vi factor) {
    const __m256i nearest = _mm256_broadcastsi128_si256(
        FAR ? _mm_setr_epi8(0, 16, 16, 32, 32, 48, 48, 64, 64, 96, 96, -128, -128, -128, -64, -64)
            : _mm_setr_epi8(0, 16, 16, 32, 32, 48, 48, 64, 64, 64, 96, 96, 96, 96, -128, -128));
    const __m256i y = _mm256_mulhi_epu16((__m256i)pair, (__m256i)factor), by4 = _mm256_srli_epi16(y, 3);
    const __m256i index = FAR ? _mm256_min_epu16(by4, _mm256_avg_epu16(by4, _mm256_set1_epi16(8 * 256 - 1))) : by4;
    const __m256i d = _mm256_sub_epi16(y, _mm256_shuffle_epi8(nearest, _mm256_adds_epi8(index, _mm256_set1_epi16(0x7080))));
    return (vi)_mm256_madd_epi16(d, d);
}
#endif

// FAR: whether the largest y' may be 5 or more.
template <int B, bool FAR> INLINE vf integer_score(const vi *pairs, vi factor) {
    vi sum = squares<FAR>(pairs[0], factor);
#pragma GCC unroll 8
    for (int k = 1; k < B / 2; ++k) sum = sum + squares<FAR>(pairs[k], factor);
    return to_float(sum);
}

// Codes of U tiles, and the lanes where another may be as good: of those `code` is the largest that may be.
template <class E, int B, int U>
INLINE void filter_tiles(const vf *x, const vf *largest, const Minifloat3Scale &s, vi *code, vm *open) {
    vi pairs[U][B / 2], factors[U][FILTERED], start[U];
    vm usual[U];
    vf top[U];
    EACH(u) {  // of every tile first, and then score by score: what one tile waits for, the scores of the other hide
        start[u] = max_of(start_code<E>(largest[u], s), splat(FIRST_FILTERED));
        vf r, square;
        scale_factors(s, start[u], &r, &square);
        top[u] = largest[u] * (r * (1.0f / E::unit));
        usual[u] = mask_and(less(splat(3.49f), top[u]), less(top[u], splat(3.95f)));
        usual[u] = mask_and(usual[u], less(splat(0x1p-64f), largest[u]));
        const vf to_pair = 65535.0f / largest[u], to_factor = top[u] * (UNIT * 65536.0f / 65535.0f);
        for (int k = 0; k < B / 2; ++k)
            pairs[u][k] = rounded(x[u * B + 2 * k] * to_pair) | rounded(x[u * B + 2 * k + 1] * to_pair) << 16;
        for (int i = 0; i < FILTERED; ++i) {
            const vi factor = rounded(to_factor * ratio(ratios.r[i], start[u]) + 0.5f);  // as much high as the product is low
            factors[u][i] = factor | factor << 16;
        }
    }
    vf first[U], best[U], second[U];
    vi down[U];
    const auto rank = [&](int u, int i, vf error) {
        const vf score = error * ratio(ratios.square[i], start[u]);
        second[u] = min_of(second[u], max_of(score, best[u]));
        down[u] = select(less(score, best[u]), splat(i), down[u]);
        best[u] = min_of(score, best[u]);
    };
    EACH(u) {
        first[u] = best[u] = integer_score<B, false>(pairs[u], factors[u][0]);
        second[u] = splat(FLT_MAX), down[u] = splat(0);
    }
    int i = 1;
#pragma GCC unroll 2
    for (; i < NEAR; ++i) EACH(u) rank(u, i, integer_score<B, false>(pairs[u], factors[u][i]));
#pragma GCC unroll 1
    for (; i < FILTERED; ++i) EACH(u) rank(u, i, integer_score<B, true>(pairs[u], factors[u][i]));
    EACH(u) {
        const vf clipped = (top[u] * ratio(ratios.r[FILTERED], start[u]) - E::max) * UNIT;
        second[u] = min_of(second[u], clipped * clipped * ratio(ratios.square[FILTERED], start[u]));
        const vf apart = root(best[u]) + APART, far = apart * apart * SLACK;  // no number where a sum left 31 bits
        open[u] = mask_not(mask_and(usual[u], less_equal(far, second[u])));
        const vi undecided = select(mask_and(usual[u], less_equal(far, first[u])), splat(1), splat(0));
        code[u] = start[u] - select(open[u], undecided, down[u]);
    }
}
#undef UNIT
#undef APART
#undef SLACK

// One block, lane = code: the scan of search.h, W codes at a time. Its smallest code where none has a finite score.
template <class E, int B> static int scan_block(const vf *tile, int lane, float largest, int start, const Minifloat3Scale &s) {
    vf all[B], r, square, error, clipped;
    const float *x = (const float *)tile + lane, flush = largest * 0x1p-32f;
    for (int k = 0; k < B; ++k) all[k] = splat(x[k * W]), all[k] = select(less(all[k], splat(flush)), splat(0.0f), all[k]);
    vi down;
    for (int i = 0; i < W; ++i) down[i] = i;
    float best = FLT_MAX, bound = 0.0f;
    int chosen = 1;
    for (int first = start; first >= 1 && bound <= best; first -= W) {
        scale_factors(s, max_of(first - down, splat(1)), &r, &square);
        block_error<E, true, false, false, B, 1>(all, 0, B, &r, E::tables(), &error, &clipped);
        const vf score = select(less(splat(E::zero_edge * E::unit), largest * r), error * square, splat(INFINITY));
        float least = score[0];
        for (int i = 1; i < W; ++i) least = score[i] < least ? score[i] : least;
        if (least <= best) {
            const int last = 31 - __builtin_clz(lane_bits(less_equal(score, splat(least))));  // the smallest code of them
            best = least, chosen = first - last < 1 ? 1 : first - last;
        }
        scale_factors(s, splat(first - W < 1 ? 1 : first - W), &r, &square);
        const float top = largest * r[0], d = top - E::max * E::unit;
        bound = 0.0f < d && top < SAFE_Y * E::unit ? d * d * square[0] : 0.0f;
    }
    return chosen;
}

// What scan_minifloat3 finds; scores only where they are wanted.
template <class E, int B, int U>
INLINE void search_by_filter(const vf *x, const Lanes<U> *lanes, const Minifloat3Scale &s, Found<U> *best, bool scored) {
    vm open[U];
#pragma GCC unroll 1
    for (int u = 0; u < U; u += 2) filter_tiles<E, B, 2>(x + u * B, lanes->largest + u, s, best->code + u, open + u);
    EACH(u) {
        for (unsigned left = lane_bits(mask_and(open[u], mask_not(lanes->done[u]))); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            int32_t *code = (int32_t *)&best->code[u] + lane;
            *code = scan_block<E, B>(x + u * B, lane, ((const float *)&lanes->largest[u])[lane], *code, s);
        }
        best->code[u] = select(lanes->done[u], splat(1), best->code[u]);
        if (!scored) continue;
        vf r, square, error, clipped;
        scale_factors(s, best->code[u], &r, &square);
        block_error<E, true, false, false, B, 1>(x + u * B, 0, B, &r, E::tables(), &error, &clipped);
        best->score[u] = min_of(error * square, splat(FLT_MAX));  // which is what no number becomes, too
    }
}

template <class E, bool MX, bool H, int B> INLINE constexpr bool filters() { return !MX && !H && B == 16 && E::max == 6.0f; }
#else
enum { FILTER_TILES = 1 };
template <class E, bool MX, bool H, int B> INLINE constexpr bool filters() { return false; }
template <class E, int B, int U>
INLINE void search_by_filter(const vf *, const Lanes<U> *, const Minifloat3Scale &, Found<U> *, bool) {}
#endif
