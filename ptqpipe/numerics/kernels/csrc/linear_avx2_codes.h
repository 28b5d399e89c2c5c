// Codes of E2M1 times x. Of linear_avx2.cpp, which says what the sums are.

enum { TILE = 6 };                               // rows of x whose sums the registers hold
enum { STRETCH = 4 * UNIT / BLOCK, TURN = 48 };  // blocks that are decoded at a time, where there are more; rows that meet them

// 16 columns in the order that pairs_of gives those of a weight: (0,4) (2,6) (1,5) (3,7), the next eight likewise.
INLINE void lay_out(const int32_t *numbers, Columns *to) {
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15);
    const __m256i *from = (const __m256i *)numbers;
    const __m256i words = _mm256_packs_epi32(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xD8);
    _mm256_storeu_si256((__m256i *)to->dwords, _mm256_shuffle_epi8(in_order, _mm256_broadcastsi128_si256(order)));
}

// 8 columns of 8 rows, a dword of codes each, as 512 times the numbers they stand for: columns (0,4), (2,6), (1,5), (3,7).
INLINE void pairs_of(const uint8_t *d, __m256i *w) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi16((int16_t)0xFF00);
    const __m256i v = _mm256_loadu_si256((const __m256i *)d);
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(v, nibble));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
    w[0] = _mm256_slli_epi16(low, 8);
    w[1] = _mm256_and_si256(low, upper);
    w[2] = _mm256_slli_epi16(high, 8);
    w[3] = _mm256_and_si256(high, upper);
}

// The scales of a unit's four blocks, 16 rows each, to `s`. Dwords of `bad` are no longer zero where one is NaN.
template <int SCALE> INLINE void unit_scales(const ptq_linear *j, int64_t row, int64_t unit, float *s, __m256i *bad) {
    enum { E4M3 = SCALE == PTQ_BLOCK_E4M3, ALIKE = E4M3 ? 1 : 2 };  // blocks of 16 that have one scale
    UNROLL for (int h = 0; h < HALVES; ++h) {
        __m256i v = scale_bytes<SCALE>(j, row, unit, h);
        const __m256i bits = _mm256_set1_epi8(E4M3 ? 127 : -1);
        bad[h] = _mm256_or_si256(bad[h], _mm256_cmpeq_epi8(_mm256_and_si256(v, bits), bits));
        if (!E4M3) v = _mm256_srl_epi32(v, _mm_cvtsi32_si128((int)(unit % 2) * 16));
        UNROLL for (int b = 0; b < UNIT / BLOCK; b += ALIKE) {
            const __m256 scale = E4M3 ? e4m3(v, b) : e8m0(v, b / ALIKE);
            UNROLL for (int i = 0; i < ALIKE; ++i) _mm256_store_ps(s + LANES * (b + i) + 8 * h, scale);
        }
    }
}

// Products of two columns each, added to their sum. GCC would move the products before the sums, for which there are not
// registers enough.
INLINE void add_products(__m256i *sum, __m256i w, __m256i x) {
    __m256i product;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(*sum), "=&x"(product) : "x"(w), "x"(x));
}

// What `whole` of a block stands for, times its scales, added to the sums.
INLINE __m256 added(__m256i whole, __m256 unit_of_x, __m256 s, __m256 sum) {
    return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), unit_of_x), s, sum);
}

// A panel times T rows of x, decoded on the way.
template <int SCALE, int T> void codes_tile(const ptq_linear *j, const void *prepared, int64_t row, int64_t last, int64_t m0) {
    const int64_t units = units_of(j), stride = units * (UNIT / BLOCK);
    const uint8_t *d = j->data + row * j->data_stride;
    const Columns *x = (const Columns *)prepared + m0 * stride;
    alignas(32) float s[UNIT / BLOCK][LANES];
    __m256i bad[HALVES] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256 sums[T][HALVES];
    UNROLL for (int t = 0; t < T; ++t) UNROLL for (int h = 0; h < HALVES; ++h) sums[t][h] = _mm256_setzero_ps();
    for (int64_t unit = 0; unit < units; ++unit) {
        unit_scales<SCALE>(j, row, unit, s[0], bad);
        for (int b = 0; b < UNIT / BLOCK; ++b, ++x, d += 128) {
            _mm_prefetch((const char *)(d + AHEAD), _MM_HINT_T0);
            _mm_prefetch((const char *)(d + AHEAD + 64), _MM_HINT_T0);
            __m256i whole[T][HALVES];
            UNROLL for (int i = 0; i < 2; ++i) {
                __m256i w[HALVES][4];
                UNROLL for (int h = 0; h < HALVES; ++h) pairs_of(d + 64 * i + 32 * h, w[h]);
                UNROLL for (int p = 0; p < 4; ++p)
                    UNROLL for (int t = 0; t < T; ++t) {
                        const __m256i numbers = _mm256_set1_epi32(x[t * stride].dwords[4 * i + p]);
                        UNROLL for (int h = 0; h < HALVES; ++h)
                            if (i || p) add_products(&whole[t][h], w[h][p], numbers);
                            else whole[t][h] = _mm256_madd_epi16(w[h][p], numbers);
                    }
            }
            UNROLL for (int t = 0; t < T; ++t)
                UNROLL for (int h = 0; h < HALVES; ++h)
                    sums[t][h] = added(whole[t][h], _mm256_set1_ps(x[t * stride].scale), _mm256_load_ps(s[b] + 8 * h), sums[t][h]);
        }
    }
    UNROLL for (int t = 0; t < T; ++t) {
        spoil(sums[t], bad);
        write(j, sums[t], m0 + t, row, last);
    }
}

// Some blocks of a panel, decoded.
struct Decoded {
    __m256i pairs[STRETCH][BLOCK / 2][HALVES];
    alignas(32) float scales[STRETCH][LANES];
};

// `count` blocks times T rows of x, added to their sums [T][LANES].
template <int T> void decoded_tile(const Decoded &w, int64_t count, const Columns *x, int64_t stride, float *sums) {
    for (int64_t b = 0; b < count; ++b, ++x) {
        __m256i whole[T][HALVES];
        UNROLL for (int p = 0; p < BLOCK / 2; ++p) {
            const __m256i pairs[HALVES] = {w.pairs[b][p][0], w.pairs[b][p][1]};
            UNROLL for (int t = 0; t < T; ++t) {
                const __m256i numbers = _mm256_set1_epi32(x[t * stride].dwords[p]);
                UNROLL for (int h = 0; h < HALVES; ++h)
                    if (p) add_products(&whole[t][h], pairs[h], numbers);
                    else whole[t][h] = _mm256_madd_epi16(pairs[h], numbers);
            }
        }
        __asm__ volatile("" : "+r"(sums));  // or GCC keeps them in registers from block to block, which it has not
        UNROLL for (int t = 0; t < T; ++t)
            UNROLL for (int h = 0; h < HALVES; ++h) {
                float *sum = sums + LANES * t + 8 * h;
                const __m256 s = _mm256_load_ps(w.scales[b] + 8 * h);
                _mm256_store_ps(sum, added(whole[t][h], _mm256_set1_ps(x[t * stride].scale), s, _mm256_load_ps(sum)));
            }
    }
}

template <int T> INLINE void decoded_tile_of(int64_t t, const Decoded &w, int64_t count, const Columns *x, int64_t stride, float *sums) {
    if (t == T) decoded_tile<T>(w, count, x, stride, sums);
    else if constexpr (T > 1) decoded_tile_of<T - 1>(t, w, count, x, stride, sums);
}

// A panel times rows [m0, m0 + m) of x, at most TURN of them.
template <int SCALE> void codes_panel(const ptq_linear *j, const void *prepared, int64_t row, int64_t last, int64_t m0, int64_t m) {
    const int64_t units = units_of(j), stride = units * (UNIT / BLOCK), tiles = (m + TILE - 1) / TILE;
    const uint8_t *d = j->data + row * j->data_stride;
    const Columns *x = (const Columns *)prepared + m0 * stride;
    alignas(32) float sums[TURN][LANES];
    __m256i bad[HALVES] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    Decoded w;
    memset(sums, 0, (size_t)m * sizeof sums[0]);
    for (int64_t unit = 0, b = 0; unit < units; b = 0) {
        for (; unit < units && b < STRETCH; ++unit) {
            unit_scales<SCALE>(j, row, unit, w.scales[b], bad);
            for (const int64_t end = b + UNIT / BLOCK; b < end; ++b, d += 128) {
                _mm_prefetch((const char *)(d + AHEAD), _MM_HINT_T0);
                _mm_prefetch((const char *)(d + AHEAD + 64), _MM_HINT_T0);
                UNROLL for (int i = 0; i < 2; ++i)
                    UNROLL for (int h = 0; h < HALVES; ++h) {
                        __m256i some[4];
                        pairs_of(d + 64 * i + 32 * h, some);
                        UNROLL for (int p = 0; p < 4; ++p) w.pairs[b][4 * i + p][h] = some[p];
                    }
            }
        }
        int64_t at = 0;
        for (int64_t left = tiles; left; --left) {
            const int64_t t = (m - at + left - 1) / left;
            decoded_tile_of<TILE>(t, w, b, x + at * stride, stride, sums[at]);
            at += t;
        }
        x += b;
    }
    for (int64_t t = 0; t < m; ++t) {
        __m256 sum[HALVES] = {_mm256_load_ps(sums[t]), _mm256_load_ps(sums[t] + 8)};
        spoil(sum, bad);
        write(j, sum, m0 + t, row, last);
    }
}

template <int SCALE> struct Codes {
    enum { MOST = TILE };
    template <int T> static void tile(const ptq_linear *j, const void *x, int64_t row, int64_t last, int64_t m0) {
        codes_tile<SCALE, T>(j, x, row, last, m0);
    }
};

// Every row of x: a few with each panel once, many in turns, whose numbers stay in a cache.
template <int SCALE> void codes_rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    if (j->m <= TILE) {
        for (int64_t row = first; row < last; row += LANES) panel<Codes<SCALE>>(j, x, row, last);
        return;
    }
    int64_t m = 0;
    for (int64_t turns = (j->m + TURN - 1) / TURN; turns; --turns) {
        const int64_t some = (j->m - m + turns - 1) / turns;
        for (int64_t row = first; row < last; row += LANES) codes_panel<SCALE>(j, x, row, last, m, some);
        m += some;
    }
}
