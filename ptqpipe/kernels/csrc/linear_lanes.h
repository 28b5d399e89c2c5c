// What the products of linear_avx2.cpp and linear_neon.cpp share: a panel of 16 float lanes, x as they read it, and the
// rows of results. Included inside their namespaces, under their target.

#define METHOD inline __attribute__((always_inline))
#define INLINE static METHOD
#define UNROLL _Pragma("GCC unroll 16")  // sums live in registers only if no loop is left around them

enum { LANES = 16, UNIT = 64, BLOCK = 16 };

INLINE int64_t units_of(const ptq_linear *j) { return (j->k + UNIT - 1) / UNIT; }
INLINE float from_bf16(uint16_t v) {
    const uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
INLINE float power_of_two(int e) {
    const uint32_t u = (uint32_t)(e + 127) << 23;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// ---- x for codes of E2M1 ----

// 16 columns as whole numbers of two digits: digits[0..3] are the high, [4..7] the low ones of columns 0 2 4 6, 1 3 5 7,
// 8 10 12 14, 9 11 13 15, a byte each; -12 times their sum, for codes that are read plus 12; half of what 1 of them stands for.
struct Columns {
    int32_t digits[8], offset;
    float scale;
};

void prepare_codes(const uint16_t *x, int64_t count, Columns *to) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = (x[i] & 0x7FFFu) > largest ? x[i] & 0x7FFFu : largest;
    memset(to, 0, sizeof *to);
    if (largest >= 0x7F80u) {  // what is not finite makes NaN of the row's sums
        to->scale = __builtin_nanf("");
        return;
    }
    int e = (int)(largest >> 7) - 127;
    if (e < -100) e = -100;
    const float up = power_of_two(13 - e);
    int8_t *bytes = (int8_t *)to->digits;
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t q = (int32_t)lrintf(from_bf16(x[i]) * up), low = ((q + 128) & 255) - 128;
        const int64_t at = i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
        bytes[at] = (int8_t)((q - low) / 256);
        bytes[16 + at] = (int8_t)low;
        sum += q;
    }
    to->offset = -12 * sum;
    to->scale = power_of_two(e - 14);
}

// ---- x for the other codes: floats, zeros behind the last ----

INLINE bool is_code(const ptq_linear *j) { return j->element == PTQ_E2M1; }

int64_t bytes(const ptq_linear *j) {
    return j->m * units_of(j) * (is_code(j) ? (int64_t)sizeof(Columns) * (UNIT / BLOCK) : UNIT * 4);
}

void prepare(const ptq_linear *j, void *out, int64_t first, int64_t last) {
    const int64_t columns = units_of(j) * UNIT;
    for (int64_t m = first; m < last; ++m) {
        const uint16_t *from = j->x + m * j->k;
        if (is_code(j)) {
            Columns *to = (Columns *)out + m * (columns / BLOCK);
            for (int64_t c = 0; c < columns; c += BLOCK)
                prepare_codes(from + c, c >= j->k ? 0 : j->k - c < BLOCK ? j->k - c : BLOCK, to++);
        } else {
            float *to = (float *)out + m * columns;
            for (int64_t c = 0; c < columns; ++c) to[c] = c < j->k ? from_bf16(from[c]) : 0.0f;
        }
    }
}

// ---- results: the sums of a panel's lanes as bfloat16, and every row of x in tiles as equal as they can be ----

INLINE uint16_t to_bf16(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

INLINE void write_lanes(const ptq_linear *j, const float *y, int64_t m, int64_t row, int64_t last) {
    const int64_t rows = last - row < LANES ? last - row : LANES;
    for (int64_t r = 0; r < rows; ++r) {
        float v = y[r];
        if (j->factor) v *= j->factor[(row + r) * j->factor_step];
        if (j->bias) v += j->bias[row + r];
        j->out[m * j->n + row + r] = to_bf16(v);
    }
}

template <class KIND, int T> INLINE void tile_of(int64_t t, const ptq_linear *j, const void *x, int64_t row, int64_t last, int64_t m0) {
    if (t == T) KIND::template tile<T>(j, x, row, last, m0);
    else if constexpr (T > 1) tile_of<KIND, T - 1>(t, j, x, row, last, m0);
}

template <class KIND> void panel(const ptq_linear *j, const void *x, int64_t row, int64_t last) {
    for (int64_t tiles = (j->m + KIND::MOST - 1) / KIND::MOST, m = 0, t; tiles; --tiles, m += t) {
        t = (j->m - m + tiles - 1) / tiles;
        tile_of<KIND, KIND::MOST>(t, j, x, row, last, m);
    }
}
