// x times a packed weight on AVX-512 with BF16 and VBMI, from one row of x to many.
//
// VDPBF16PS adds two columns to each of 16 float lanes, one a row of the weight, whose bytes lie in panels (see
// linear_panel.h). A few rows of x (`most_few`) meet codes as they are decoded; for more, two panels and SLAB columns are
// decoded at a time into a buffer of the nearest cache, which then meets every row of x. The sum of a block of 32 columns is
// added to the sum of the row, times its scale. So the order of a sum depends on K alone. But for NVFP4: few rows meet
// blocks of 16, more of them weights that are decoded with their scales, in blocks of 64, unless the job wants one order.
#include "system.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#endif

namespace {

#define METHOD inline __attribute__((always_inline))
#define INLINE static METHOD

#define UNROLL _Pragma("GCC unroll 16")  // sums live in registers only if no loop is left around them

// TILE rows of x: as many sums as hide the latency of VDPBF16PS, and no more than there are registers.
enum { LANES = 16, PANELS = 2, GROUP = LANES * PANELS, UNIT = 64, SLAB = 256, PAIRS = SLAB / 2, TILE = 8 };
// Units whose codes are asked for early, where the hardware by itself fetches them less fast (0: where it does not).
constexpr int ahead(int element, int scale) {
    return element == PTQ_BF16_ELEMENT ? 1 : element == PTQ_E4M3 ? 0 : scale == PTQ_BLOCK_E4M3 ? 16 : 8;
}
// Blocks that go side by side for T rows of x, so that their sums do not wait for each other. Of wide elements one: a block
// is many cache lines, and the hardware fetches best what is read in order.
constexpr int beside(int element, int rows) { return rows > 2 || element == PTQ_BF16_ELEMENT || element == PTQ_E4M3 ? 1 : 2; }
enum { FAR_ROWS = 48, FAR_GROUPS = 4 };  // from so many rows of x on, more of the weight meets each of them

#include "linear_panel.h"
#include "linear_unpack.h"

INLINE int64_t slabs_of(const ptq_linear *j) { return (j->k + SLAB - 1) / SLAB; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// What a thread decodes to and sums in.
struct Room {
    __m512i w[FAR_GROUPS][PAIRS * PANELS];
    __m512 scales[FAR_GROUPS][SLAB / 16 * PANELS];
    __m512 sums[FAR_GROUPS][PTQ_LINEAR_ROWS][PANELS];
};

// ---- x: [slab][row][SLAB], the columns of a pair side by side, zeros behind the last ----

int64_t bytes(const ptq_linear *j) { return j->m * slabs_of(j) * SLAB * 2; }

void prepare(const ptq_linear *j, void *out, int64_t first, int64_t last) {
    const __m512i order = _mm512_broadcast_i32x4(
        j->element == PTQ_BF16_ELEMENT ? _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        : j->element == PTQ_E2M1       ? _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
                                       : _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int64_t slab = 0; slab < slabs_of(j); ++slab)
        for (int64_t m = first; m < last; ++m) {
            uint16_t *to = (uint16_t *)out + (slab * j->m + m) * SLAB;
            const uint16_t *from = j->x + m * j->k + slab * SLAB;
            const int64_t left = at_most(j->k - slab * SLAB, SLAB);
            for (int64_t c = 0; c < SLAB; c += 32) {
                const __mmask32 mask = left - c >= 32 ? ~0u : left <= c ? 0 : (1u << (left - c)) - 1;
                const __m512i v = _mm512_maskz_loadu_epi16(mask, from + c);
                _mm512_store_si512(to + c, _mm512_shuffle_epi8(v, order));
            }
        }
}

// ---- a panel ----

template <int ELEMENT, int SCALE, bool INSIDE> struct Weight {
    typedef Shape<ELEMENT> S;
    // Columns whose sum is taken before it meets the others, and its scale if it has one (INSIDE: has met it already).
    enum { BLOCK = INSIDE ? 64 : SCALE == PTQ_BLOCK_E4M3 ? 16 : 32, BLOCKS = UNIT / BLOCK };
    enum { SCALED = SCALE != PTQ_NO_SCALES && !INSIDE };

    const ptq_linear *j;
    Tables<ELEMENT> tables;
    ScaledTables scaled;

    explicit Weight(const ptq_linear *job) : j(job) {}

    METHOD const __m512i *codes(int64_t row) const { return (const __m512i *)(j->data + row * j->data_stride); }

    // The dwords of scales that a unit of 16 rows begins with.
    METHOD __m512i bytes_of_scales(int64_t row, int64_t unit) const {
        const int64_t dword = SCALE == PTQ_BLOCK_E8M0 ? unit / 2 : unit;
        return _mm512_loadu_si512((const uint8_t *)j->scales + row * j->scale_stride + 64 * dword);
    }

    // s[block][stride]
    METHOD void scales_at(int64_t row, int64_t unit, __m512 *s, int64_t stride) const {
        if (SCALE == PTQ_BLOCK_E4M3) e4m3_scales(bytes_of_scales(row, unit), s, stride);
        if (SCALE == PTQ_BLOCK_E8M0) e8m0_scales(bytes_of_scales(row, unit), (int)(unit % 2) * 16, s, stride);
        if (SCALE == PTQ_BLOCK_FLOAT) {
            const float *numbers = (const float *)j->scales + row / j->scale_rows * j->scale_stride;
            s[0] = s[stride] = _mm512_set1_ps(numbers[unit / 2]);
        }
    }

    // w[pair][PANELS] and s[block][PANELS]
    METHOD void decode(int64_t row, int64_t unit, __m512i *w, __m512 *s) const {
        const __m512i *d = codes(row) + unit * S::DWORDS;
        if (INSIDE) {
            if (!decode_scaled(d, bytes_of_scales(row, unit), scaled, w)) odd_scales(row, unit, w);
            return;
        }
        UNROLL for (int q = 0; q < S::STEPS; ++q) {
            __m512i v[S::STEP_PAIRS];
            pairs_at<ELEMENT>(d, q, tables, v);
            UNROLL for (int i = 0; i < S::STEP_PAIRS; ++i) w[(q * S::STEP_PAIRS + i) * PANELS] = v[i];
        }
        scales_at(row, unit, s, PANELS);
    }

    // Any scales at all.
    __attribute__((noinline)) void odd_scales(int64_t row, int64_t unit, __m512i *w) const {
        __m512 s[4];
        e4m3_scales(bytes_of_scales(row, unit), s, 1);
        for (int q = 0; q < 8; ++q) {
            __m512i v[4];
            pairs_at<PTQ_E2M1>(codes(row) + unit * Shape<PTQ_E2M1>::DWORDS, q, Tables<PTQ_E2M1>(), v);
            for (int i = 0; i < 4; ++i) {
                const __m512i even = _mm512_slli_epi32(v[i], 16), odd = _mm512_and_si512(v[i], _mm512_set1_epi32(-65536));
                const __m512i a = _mm512_cvtepu16_epi32(to_bf16(_mm512_mul_ps(_mm512_castsi512_ps(even), s[q / 2])));
                const __m512i b = _mm512_cvtepu16_epi32(to_bf16(_mm512_mul_ps(_mm512_castsi512_ps(odd), s[q / 2])));
                w[(4 * q + i) * PANELS] = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            }
        }
    }
};

// ---- the product ----

// `blocks` blocks of a slab of two panels times T rows of x, added to sums[T][PANELS]. x starts a slab.
template <int BLOCK, bool SCALED, int T>
void product(const __m512i *w, const __m512 *s, const uint32_t *x, __m512 (*sums)[PANELS], int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b, s += PANELS, x += BLOCK / 2) {
        __m512 part[T][PANELS];
        UNROLL for (int t = 0; t < T; ++t) UNROLL for (int p = 0; p < PANELS; ++p) part[t][p] = _mm512_setzero_ps();
        UNROLL for (int k = 0; k < BLOCK / 2; ++k, w += PANELS) {
            const __m512bh a = (__m512bh)w[0], c = (__m512bh)w[1];
            UNROLL for (int t = 0; t < T; ++t) {
                const __m512bh v = (__m512bh)_mm512_set1_epi32((int32_t)x[t * PAIRS + k]);
                part[t][0] = _mm512_dpbf16_ps(part[t][0], a, v);
                part[t][1] = _mm512_dpbf16_ps(part[t][1], c, v);
            }
        }
        UNROLL for (int t = 0; t < T; ++t)
            UNROLL for (int p = 0; p < PANELS; ++p)
                sums[t][p] = SCALED ? _mm512_fmadd_ps(part[t][p], s[p], sums[t][p]) : _mm512_add_ps(part[t][p], sums[t][p]);
    }
}

// m rows of x, in tiles as equal as they can be.
template <int BLOCK, bool SCALED>
void products(const __m512i *w, const __m512 *s, const uint32_t *x, __m512 (*sums)[PANELS], int64_t blocks, int64_t m) {
    for (int64_t tiles = (m + TILE - 1) / TILE, t; tiles; --tiles, m -= t, x += t * PAIRS, sums += t) {
        t = (m + tiles - 1) / tiles;
        if (t == 8) product<BLOCK, SCALED, 8>(w, s, x, sums, blocks);
        else if (t == 7) product<BLOCK, SCALED, 7>(w, s, x, sums, blocks);
        else if (t == 6) product<BLOCK, SCALED, 6>(w, s, x, sums, blocks);
        else if (t == 5) product<BLOCK, SCALED, 5>(w, s, x, sums, blocks);
        else if (t == 4) product<BLOCK, SCALED, 4>(w, s, x, sums, blocks);
        else if (t == 3) product<BLOCK, SCALED, 3>(w, s, x, sums, blocks);
        else if (t == 2) product<BLOCK, SCALED, 2>(w, s, x, sums, blocks);
        else product<BLOCK, SCALED, 1>(w, s, x, sums, blocks);
    }
}

// Sums of 16 rows of the weight, with factor and bias, to bfloat16.
INLINE void write(const ptq_linear *j, __m512 sum, int64_t m, int64_t row, int64_t rows) {
    const __mmask16 mask = rows >= LANES ? 0xFFFF : (__mmask16)((1u << rows) - 1);
    if (j->factor)
        sum = _mm512_mul_ps(sum, j->factor_step ? _mm512_maskz_loadu_ps(mask, j->factor + row) : _mm512_set1_ps(*j->factor));
    if (j->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, j->bias + row));
    const __m256i y = to_bf16(sum);
    uint16_t *to = j->out + m * j->n + row;
    if (rows >= LANES) _mm256_storeu_si256((__m256i *)to, y);
    else _mm256_mask_storeu_epi16(to, mask, y);
}

// Asks for the slab that is decoded after the products: while they go on, the hardware's prefetcher sees no stream.
template <class W> INLINE void ask_for_next(const W &weight, int64_t row, int64_t last, int64_t unit, int64_t units) {
    const int64_t dwords = W::S::DWORDS * at_most(SLAB / UNIT, units - unit);
    for (int64_t p = 0; p < PANELS && row + p * LANES < last; ++p) {
        const __m512i *d = weight.codes(row + p * LANES) + unit * W::S::DWORDS;
        for (int64_t i = 0; i < dwords; ++i) _mm_prefetch((const char *)(d + i), _MM_HINT_T0);
    }
}

// Rows [row, last) of the weight, at most FAR_GROUPS groups of them, times x.
template <class W> void block_of_rows(const W &weight, const uint16_t *x, Room *room, int64_t row, int64_t last) {
    const ptq_linear *j = weight.j;
    const int64_t slabs = slabs_of(j), groups = (last - row + GROUP - 1) / GROUP, units = (j->k + UNIT - 1) / UNIT;
    for (int64_t g = 0; g < groups; ++g) memset(room->sums[g], 0, (size_t)j->m * sizeof room->sums[g][0]);
    for (int64_t slab = 0; slab < slabs; ++slab) {
        const int64_t first = slab * (SLAB / UNIT), count = at_most(SLAB / UNIT, units - first);
        const uint32_t *inputs = (const uint32_t *)(x + slab * j->m * SLAB);
        for (int64_t g = 0; g < groups; ++g) {
            for (int64_t p = 0; p < PANELS; ++p) {
                const int64_t at = row + g * GROUP + p * LANES;
                for (int64_t u = 0; at < last && u < count; ++u)
                    weight.decode(at, first + u, room->w[g] + u * UNIT / 2 * PANELS + p, room->scales[g] + u * W::BLOCKS * PANELS + p);
            }
            ask_for_next(weight, row + (g + 1 < groups ? g + 1 : 0) * GROUP, last, first + (g + 1 < groups ? 0 : count), units);
            products<W::BLOCK, W::SCALED>(room->w[g], room->scales[g], inputs, room->sums[g], count * W::BLOCKS, j->m);
        }
    }
    for (int64_t g = 0; g < groups; ++g)
        for (int p = 0; p < PANELS; ++p) {
            const int64_t first = row + g * GROUP + p * LANES;
            if (first < last)
                for (int64_t m = 0; m < j->m; ++m) write(j, room->sums[g][m][p], m, first, last - first);
        }
}

// N pairs of 16 rows of the weight times T rows of x, added to part[T].
template <int T, int N> INLINE void add_pairs(const __m512i *w, const uint32_t *x, __m512 *part) {
    UNROLL for (int i = 0; i < N; ++i)
        UNROLL for (int t = 0; t < T; ++t)
            part[t] = _mm512_dpbf16_ps(part[t], (__m512bh)w[i], (__m512bh)_mm512_set1_epi32((int32_t)x[t * PAIRS + i]));
}

template <bool SCALED, int T> INLINE void add_block(const __m512 *part, __m512 s, __m512 *sums) {
    UNROLL for (int t = 0; t < T; ++t) sums[t] = SCALED ? _mm512_fmadd_ps(part[t], s, sums[t]) : _mm512_add_ps(part[t], sums[t]);
}

template <bool SCALED, int T, int N> INLINE void add_whole_block(const __m512i *w, const uint32_t *x, __m512 s, __m512 *sums) {
    __m512 part[T];
    UNROLL for (int t = 0; t < T; ++t) part[t] = _mm512_setzero_ps();
    add_pairs<T, N>(w, x, part);
    add_block<SCALED, T>(part, s, sums);
}

// The panel at `row` times T rows of x, all there are. More than a tile of them in two, whose sums need not all be in
// registers: they meet theirs once a block.
template <int ELEMENT, int SCALE, int T>
void few_rows(const Weight<ELEMENT, SCALE, false> &weight, const uint32_t *x, int64_t row, int64_t last) {
    typedef Weight<ELEMENT, SCALE, false> W;
    typedef Shape<ELEMENT> S;
    enum { N = UNIT / 2 / W::BLOCKS, STEPS = S::STEPS / W::BLOCKS, FIRST = T > TILE ? (T + 1) / 2 : T, SECOND = T - FIRST };
    enum { BESIDE = beside(ELEMENT, T), EARLY = ahead(ELEMENT, SCALE) * S::DWORDS };
    const int64_t units = (weight.j->k + UNIT - 1) / UNIT;
    const __m512i *d = weight.codes(row);
    __m512 sums[T];
    UNROLL for (int t = 0; t < T; ++t) sums[t] = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < units; ++unit, d += S::DWORDS) {
        const uint32_t *in = x + unit / 4 * T * PAIRS + unit % 4 * (UNIT / 2);
        if (EARLY) UNROLL for (int i = 0; i < S::DWORDS; ++i) _mm_prefetch((const char *)(d + EARLY + i), _MM_HINT_T0);
        __m512 s[4];
        weight.scales_at(row, unit, s, 1);
        UNROLL for (int b = 0; b < W::BLOCKS; b += BESIDE, in += N * BESIDE) {
            if constexpr (SECOND > 0) {
                __m512i w[N];
                UNROLL for (int q = 0; q < STEPS; ++q)
                    pairs_at<ELEMENT>(d, b * STEPS + q, weight.tables, w + q * S::STEP_PAIRS);
                add_whole_block<W::SCALED, FIRST, N>(w, in, s[b], sums);
                add_whole_block<W::SCALED, SECOND, N>(w, in + FIRST * PAIRS, s[b], sums + FIRST);
            } else {  // a step at a time: the other sums and a whole block of weights do not fit the registers
                __m512 part[BESIDE][T];
                UNROLL for (int i = 0; i < BESIDE; ++i) UNROLL for (int t = 0; t < T; ++t) part[i][t] = _mm512_setzero_ps();
                UNROLL for (int q = 0; q < STEPS; ++q)
                    UNROLL for (int i = 0; i < BESIDE; ++i) {
                        __m512i w[S::STEP_PAIRS];
                        pairs_at<ELEMENT>(d, (b + i) * STEPS + q, weight.tables, w);
                        add_pairs<T, S::STEP_PAIRS>(w, in + i * N + q * S::STEP_PAIRS, part[i]);
                    }
                UNROLL for (int i = 0; i < BESIDE; ++i) add_block<W::SCALED, T>(part[i], s[b + i], sums);
            }
        }
    }
    for (int t = 0; t < T; ++t) write(weight.j, sums[t], t, row, last - row);
}

// The most rows of x for which decoding on the fly is faster than by way of the buffer.
constexpr int most_few(int element, int scale) {
    return element == PTQ_BF16_ELEMENT || (element == PTQ_E2M1 && scale == PTQ_BLOCK_E4M3) ? 2 * TILE : TILE;
}

// Whether there are at most T rows of x, which it did then.
template <int ELEMENT, int SCALE, int T> bool few(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    if constexpr (T == 0) {
        return false;
    } else if (j->m != T) {
        return few<ELEMENT, SCALE, T - 1>(j, x, first, last);
    } else {
        const Weight<ELEMENT, SCALE, false> weight(j);
        for (int64_t row = first; row < last; row += LANES) few_rows<ELEMENT, SCALE, T>(weight, (const uint32_t *)x, row, last);
        return true;
    }
}

template <class W> void many(const W &weight, const void *x, int64_t first, int64_t last) {
    const int64_t step = GROUP * (weight.j->m >= FAR_ROWS ? FAR_GROUPS : 1);
    for (int64_t row = first; row < last; row += step)
        block_of_rows(weight, (const uint16_t *)x, of_thread<Room>(), row, at_most(row + step, last));
}

template <int ELEMENT, int SCALE> void some_rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    if (few<ELEMENT, SCALE, most_few(ELEMENT, SCALE)>(j, x, first, last)) return;
    if (SCALE == PTQ_BLOCK_E4M3 && !j->one_order) many(Weight<ELEMENT, SCALE, SCALE == PTQ_BLOCK_E4M3>(j), x, first, last);
    else many(Weight<ELEMENT, SCALE, false>(j), x, first, last);
}

void rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    if (j->element == PTQ_E2M1) {
        if (j->scale_kind == PTQ_BLOCK_E4M3) some_rows<PTQ_E2M1, PTQ_BLOCK_E4M3>(j, x, first, last);
        else some_rows<PTQ_E2M1, PTQ_BLOCK_E8M0>(j, x, first, last);
    } else if (j->element == PTQ_BF16_ELEMENT) {
        some_rows<PTQ_BF16_ELEMENT, PTQ_NO_SCALES>(j, x, first, last);
    } else if (j->element == PTQ_E2M3) {
        some_rows<PTQ_E2M3, PTQ_BLOCK_E8M0>(j, x, first, last);
    } else if (j->element == PTQ_E3M2) {
        some_rows<PTQ_E3M2, PTQ_BLOCK_E8M0>(j, x, first, last);
    } else if (j->scale_kind == PTQ_NO_SCALES) {
        some_rows<PTQ_E4M3, PTQ_NO_SCALES>(j, x, first, last);
    } else if (j->scale_kind == PTQ_BLOCK_E8M0) {
        some_rows<PTQ_E4M3, PTQ_BLOCK_E8M0>(j, x, first, last);
    } else {
        some_rows<PTQ_E4M3, PTQ_BLOCK_FLOAT>(j, x, first, last);
    }
}

}  // namespace

extern "C" const struct ptq_linear_ops ptq_linear_bf16 = {bytes, prepare, rows, unpack};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
