// Sums of outer products of rows on AVX-512 with BF16: x^T y, added in double to what is there.
//
// Rows are taken CHUNK at a time. They are laid out in panels of LANES columns whose numbers of two rows lie side by side,
// as VDPBF16PS takes them; a tile of TILE by up to WIDE panels keeps its sums in registers over the whole chunk. So a sum is
// a float's over CHUNK rows and a double's beyond, and its order depends on nothing else.
#include "system.h"

#include "api.h"
#include "pool.h"
#include "room.h"

// Mirrored by cpu_gram.py: sums [x_columns, y_columns] += x^T y. Without y: x^T x, of which only what is on and above the
// diagonal has a meaning afterwards.
struct ptq_gram {
    const uint16_t *x, *y;  // rows of bfloat16, so many numbers apart:
    int64_t x_stride, y_stride, rows, x_columns, y_columns;
    double *sums;
    int64_t threads;
};

extern "C" int32_t ptq_has_bf16(const char *name);

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

namespace {

#define UNROLL _Pragma("GCC unroll 16")  // sums live in registers only if no loop is left around them

// BLOCK columns of y stay in the second cache while those of x go by.
enum { LANES = 16, CHUNK = 1024, PAIRS = CHUNK / 2, TILE = 8, WIDE = 3, BLOCK = 192 };

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t panels(int64_t columns) { return (columns + LANES - 1) / LANES; }
inline int64_t blocks(int64_t columns) { return (columns + BLOCK - 1) / BLOCK; }

// The rows [first, first + pairs * 2) of a panel: [pairs][LANES], zeros behind the last row and column.
void lay_out(const uint16_t *x, int64_t stride, int64_t rows, int64_t columns, __m512i *out) {
    const __mmask16 own = columns < LANES ? (__mmask16)((1 << columns) - 1) : (__mmask16)0xFFFF;
    for (int64_t row = 0; row < rows; row += 2, x += 2 * stride) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(own, x));
        const __m512i high = row + 1 < rows ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(own, x + stride)) : _mm512_setzero_si512();
        *out++ = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
}

// Rows `rows` of x's panel at `a` by N panels of y, the first at `b`, added to `sums`.
template <int N>
void tile(const int32_t *a, const __m512i *b, int64_t pairs, double *sums, int64_t stride, int64_t rows, int64_t columns) {
    __m512 acc[TILE][N];
    UNROLL for (int m = 0; m < TILE; ++m) UNROLL for (int n = 0; n < N; ++n) acc[m][n] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
        __m512bh y[N];
        UNROLL for (int n = 0; n < N; ++n) y[n] = (__m512bh)b[n * PAIRS + p];
        UNROLL for (int m = 0; m < TILE; ++m) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(a[p * LANES + m]);
            UNROLL for (int n = 0; n < N; ++n) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], x, y[n]);
        }
    }
    float part[TILE][N][LANES];
    UNROLL for (int m = 0; m < TILE; ++m) UNROLL for (int n = 0; n < N; ++n) _mm512_storeu_ps(part[m][n], acc[m][n]);
    for (int64_t m = 0; m < rows; ++m)
        for (int n = 0; n < N; ++n) {
            double *const to = sums + m * stride + n * LANES;
            const int64_t left = columns - n * LANES;
            if (left >= LANES) {
                for (int i = 0; i < LANES; ++i) to[i] += part[m][n][i];
            } else {
                for (int64_t i = 0; i < left; ++i) to[i] += part[m][n][i];
            }
        }
}

void block(const ptq_gram *j, const __m512i *x, const __m512i *y, int64_t rows, int64_t first_row, int64_t first_column) {
    const bool upper = j->y == nullptr;
    const int64_t pairs = (rows + 1) / 2, last_row = at_most(first_row + BLOCK, j->x_columns);
    const int64_t last_column = at_most(first_column + BLOCK, j->y_columns);
    for (int64_t row = first_row; row < last_row; row += TILE) {
        if (upper && last_column <= row) break;
        const int32_t *const a = (const int32_t *)(x + row / LANES * PAIRS) + row % LANES;
        for (int64_t column = first_column; column < last_column; column += WIDE * LANES) {
            if (upper && column + WIDE * LANES <= row) continue;
            const __m512i *const b = y + column / LANES * PAIRS;
            double *const sums = j->sums + row * j->y_columns + column;
            const int64_t own = at_most(TILE, last_row - row), left = last_column - column;
            if (left > 2 * LANES) tile<3>(a, b, pairs, sums, j->y_columns, own, left);
            else if (left > LANES) tile<2>(a, b, pairs, sums, j->y_columns, own, left);
            else tile<1>(a, b, pairs, sums, j->y_columns, own, left);
        }
    }
}

struct Chunk {
    const ptq_gram *job;
    __m512i *x, *y;
    int64_t first, rows;

    void lay_out_panel(int64_t part) const {
        const int64_t of_x = panels(job->x_columns), panel = part < of_x ? part : part - of_x;
        const bool second = part >= of_x;
        const int64_t stride = second ? job->y_stride : job->x_stride, columns = second ? job->y_columns : job->x_columns;
        const uint16_t *const from = (second ? job->y : job->x) + first * stride + panel * LANES;
        lay_out(from, stride, rows, columns - panel * LANES, (second ? y : x) + panel * PAIRS);
    }

    void add_block(int64_t part) const {
        const int64_t down = blocks(job->x_columns), row = part % down * BLOCK, column = part / down * BLOCK;
        if (job->y || row <= column) block(job, x, y, rows, row, column);
    }
};

}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace {

int32_t add(const ptq_gram *job) {
    static thread_local kept_room room;
    const int64_t of_x = panels(job->x_columns), of_y = job->y ? panels(job->y_columns) : 0;
    __m512i *const x = (__m512i *)room.of((size_t)(of_x + of_y) * PAIRS * sizeof(__m512i));
    if (!x) return PTQ_NO_MEMORY;
    for (int64_t first = 0; first < job->rows; first += CHUNK) {
        Chunk chunk = {job, x, job->y ? x + of_x * PAIRS : x, first, at_most(CHUNK, job->rows - first)};
        in_parallel([](void *c, int64_t part) { ((const Chunk *)c)->lay_out_panel(part); }, &chunk, of_x + of_y, job->threads);
        const int64_t parts = blocks(job->x_columns) * blocks(job->y_columns);
        in_parallel([](void *c, int64_t part) { ((const Chunk *)c)->add_block(part); }, &chunk, parts, job->threads);
    }
    return PTQ_OK;
}

}  // namespace
#endif

// UNSUPPORTED where the instruction set has no products of bfloat16.
extern "C" __attribute__((visibility("default"))) int32_t ptq_add_gram(const char *name, const struct ptq_gram *job) {
#if defined(__x86_64__)
    if (ptq_has_bf16(name)) return add(job);
#endif
    (void)job, (void)name;
    return PTQ_UNSUPPORTED;
}
