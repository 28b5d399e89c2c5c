// What the products of linear_avx2.cpp and linear_neon.cpp share: a panel of 16 float lanes, x as they read it, and the
// rows of results. Included inside their namespaces, under their target, after what differs: NUMBER_BITS, of the whole
// numbers that columns of x become, and 2^WEIGHT_BITS, by which codes of E2M1 are multiplied to be whole numbers.

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
INLINE int32_t bits_of(float f) {
    int32_t u;
    memcpy(&u, &f, 4);
    return u;
}
INLINE float power_of_two(int e) {
    const uint32_t u = (uint32_t)(e + 127) << 23;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// ---- x for codes of E2M1 ----

// 16 columns as whole numbers, in the order of a kernel's lay_out, and what 1 of them times 1 of its weights stands for.
struct Columns {
    int32_t dwords[8];
    float scale;
};

INLINE void lay_out(const int32_t *numbers, Columns *to);

INLINE void prepare_codes(const uint16_t *x, int64_t count, Columns *to) {
    uint16_t all[BLOCK] = {0};
    int32_t numbers[BLOCK], largest = 0;
    memcpy(all, x, count < BLOCK ? (size_t)count * 2 : sizeof all);
    for (int i = 0; i < BLOCK; ++i) largest = (all[i] & 0x7FFF) > largest ? all[i] & 0x7FFF : largest;
    int e = (largest >> 7) - 127;
    if (e < -100) e = -100;
    // What is not finite makes NaN of the row's sums. A sum with 1.5 * 2^23 is rounded to a whole number, its lowest bits.
    const float up = largest >= 0x7F80 ? 0.0f : power_of_two(NUMBER_BITS - 1 - e);
    for (int i = 0; i < BLOCK; ++i) numbers[i] = bits_of(from_bf16(all[i]) * up + 12582912.0f) - 0x4B400000;
    lay_out(numbers, to);
    to->scale = largest >= 0x7F80 ? __builtin_nanf("") : power_of_two(e - (NUMBER_BITS - 1) - WEIGHT_BITS);
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
            for (int64_t c = 0; c < columns; c += BLOCK) prepare_codes(from + c, c < j->k ? j->k - c : 0, to++);
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
