// x times a packed weight on NEON, from one row of x to many. The weight's bytes lie in panels (see api.h), so that each of
// 16 float lanes, four to a vector, is a row of it.
//
// E2M1 is multiplied in integers. 16 columns of x become whole numbers of 15 bits over one power of two, so that a number
// of x is exact unless it is less than 1/64 of the largest of its 16, and is at most 2^-14 of that largest off. Two digits
// of 8 bits meet twice the codes. The sum of these 16 columns is exact, and is added to the sum of the row times the scales
// of both, by FMA, in the order of columns.
//
// The other codes become floats: products and sums are FMA in the order of columns inside a block (32 columns of E8M0
// scales, 64 else), whose sum is added to the sum of the row times its scale.
//
// So the order of a sum depends on K alone: neither threads nor other rows of x change a bit of a row's result.
#include "system.h"
#if defined(__aarch64__)

namespace {

enum { NUMBER_BITS = 14, WEIGHT_BITS = 1 };
#include "linear_lanes.h"

enum { QUARTERS = 4 };
enum { CODE_ROWS = 4, FLOAT_ROWS = 4 };  // of x that meet a panel together: as many as the registers hold

// ---- scales ----

// The lowest byte of every dword, a code of E4M3, as a float.
INLINE float32x4_t e4m3(uint32x4_t v) {
    const int32x4_t bits = ((int32x4_t)(v << 24) >> 4) & vdupq_n_s32((int32_t)0x87F00000);
    return vreinterpretq_f32_s32(bits) * 0x1p120f;
}

INLINE float32x4_t e4m3_or_nan(uint32x4_t v) {
    const uint32x4_t nan = vceqq_u32(v & vdupq_n_u32(127), vdupq_n_u32(127));
    return vreinterpretq_f32_u32(vreinterpretq_u32_f32(e4m3(v)) | nan);
}

INLINE float32x4_t e8m0(uint32x4_t v) {
    const uint32x4_t code = v & vdupq_n_u32(255);
    const uint32x4_t bits = vmaxq_u32(code << 23, vdupq_n_u32(0x00400000)), nan = vceqq_u32(code, vdupq_n_u32(255));
    return vreinterpretq_f32_u32(vbslq_u32(nan, vdupq_n_u32(0x7FC00000), bits));
}

// Quarter q of the dword of scales that a unit of the panel at `row` begins with.
template <int SCALE> INLINE uint32x4_t scale_bytes(const ptq_linear *j, int64_t row, int64_t unit, int q) {
    const int64_t dword = SCALE == PTQ_BLOCK_E8M0 ? unit / 2 : unit;
    return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)j->scales + row * j->scale_stride + 64 * dword + 16 * q));
}

// ---- sums to bfloat16 ----

INLINE void write(const ptq_linear *j, const float32x4_t *sums, int64_t m, int64_t row, int64_t last) {
    float y[LANES];
    for (int q = 0; q < QUARTERS; ++q) vst1q_f32(y + 4 * q, sums[q]);
    write_lanes(j, y, m, row, last);
}

// ---- x for E2M1 ----

// Two digits of a byte: the high ones of columns 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15, then the low ones.
INLINE void lay_out(const int32_t *numbers, Columns *to) {
    int8_t *digits = (int8_t *)to->dwords;
    for (int i = 0; i < BLOCK; ++i) {
        const int32_t low = ((numbers[i] + 128) & 255) - 128;
        const int at = i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
        digits[at] = (int8_t)((numbers[i] - low) / 256);
        digits[BLOCK + at] = (int8_t)low;
    }
}

// ---- the codes that are not E2M1 ----

template <int ELEMENT> struct Shape {
    enum { SIX = ELEMENT == PTQ_E2M3 || ELEMENT == PTQ_E3M2 };
    enum { STEP = ELEMENT == PTQ_BF16_ELEMENT ? 2 : SIX ? 16 : 4, STEP_DWORDS = SIX ? 3 : 1 };  // columns that whole dwords hold
};

// Column c of a step whose dwords are `v`, 64 bytes apart.
template <int ELEMENT, bool NANS> INLINE float32x4_t column(const uint8_t *v, int c) {
    const int at = Shape<ELEMENT>::SIX ? 6 * c / 32 : 0, down = 6 * c % 32;
    const uint32x4_t dword = vreinterpretq_u32_u8(vld1q_u8(v + 64 * at));
    if (ELEMENT == PTQ_BF16_ELEMENT) return vreinterpretq_f32_u32(c ? dword & vdupq_n_u32(0xFFFF0000) : dword << 16);
    if (ELEMENT == PTQ_E4M3) return NANS ? e4m3_or_nan(dword >> (8 * c)) : e4m3(dword >> (8 * c));
    uint32x4_t code = dword >> down;
    if (down > 26) code |= vreinterpretq_u32_u8(vld1q_u8(v + 64 * at + 64)) << (32 - down);
    const uint32x4_t magnitude = (code & vdupq_n_u32(31)) << (ELEMENT == PTQ_E2M3 ? 20 : 21);
    const uint32x4_t sign = (code & vdupq_n_u32(32)) << 26;
    return vreinterpretq_f32_u32(magnitude | sign) * (ELEMENT == PTQ_E2M3 ? 0x1p126f : 0x1p124f);
}

template <int ELEMENT, int SCALE, bool NANS, int T>
void floats_tile(const ptq_linear *j, const void *prepared, int64_t row, int64_t last, int64_t m0) {
    typedef Shape<ELEMENT> S;
    enum { BLOCKS = SCALE == PTQ_BLOCK_E8M0 ? 2 : 1, STEPS = UNIT / S::STEP / BLOCKS };
    const int64_t units = units_of(j), stride = units * UNIT;
    const uint8_t *d = j->data + row * j->data_stride;
    const float *x = (const float *)prepared + m0 * stride;
    float32x4_t sums[T][QUARTERS];
    UNROLL for (int t = 0; t < T; ++t) UNROLL for (int q = 0; q < QUARTERS; ++q) sums[t][q] = vdupq_n_f32(0.0f);
    for (int64_t unit = 0; unit < units; ++unit) {
        for (int b = 0; b < BLOCKS; ++b) {
            float32x4_t part[T][QUARTERS];
            UNROLL for (int t = 0; t < T; ++t) UNROLL for (int q = 0; q < QUARTERS; ++q) part[t][q] = vdupq_n_f32(0.0f);
            for (int step = 0; step < STEPS; ++step, d += 64 * S::STEP_DWORDS, x += S::STEP) {
                __builtin_prefetch(d + 2048);
                UNROLL for (int c = 0; c < S::STEP; ++c)
                    UNROLL for (int q = 0; q < QUARTERS; ++q) {
                        const float32x4_t w = column<ELEMENT, NANS>(d + 16 * q, c);
                        UNROLL for (int t = 0; t < T; ++t) part[t][q] = vfmaq_n_f32(part[t][q], w, x[t * stride + c]);
                    }
            }
            UNROLL for (int q = 0; q < QUARTERS; ++q) {
                float32x4_t s = vdupq_n_f32(1.0f);
                if (SCALE == PTQ_BLOCK_E8M0) s = e8m0(scale_bytes<SCALE>(j, row, unit, q) >> ((int)(unit % 2) * 16 + 8 * b));
                if (SCALE == PTQ_BLOCK_FLOAT)
                    s = vdupq_n_f32(((const float *)j->scales)[row / j->scale_rows * j->scale_stride + unit / 2]);
                UNROLL for (int t = 0; t < T; ++t)
                    sums[t][q] = SCALE == PTQ_NO_SCALES ? sums[t][q] + part[t][q] : vfmaq_f32(sums[t][q], part[t][q], s);
            }
        }
    }
    UNROLL for (int t = 0; t < T; ++t) write(j, sums[t], m0 + t, row, last);
}

// Whether the panel at `row` has a code of E4M3 that is NaN.
bool has_nan(const ptq_linear *j, int64_t row) {
    const uint8_t *d = j->data + row * j->data_stride;
    bool found = false;
    for (int64_t i = 0; i < j->data_stride * LANES; ++i) found |= (d[i] & 127) == 127;
    return found;
}

namespace plain {
#include "linear_neon_rows.h"
}  // namespace plain

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define PTQ_DOT 1
namespace dot {
#include "linear_neon_rows.h"
}  // namespace dot
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

void rows(const ptq_linear *j, const void *x, int64_t first, int64_t last) {
    static const bool has_dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
    (has_dot ? dot::rows : plain::rows)(j, x, first, last);
}

}  // namespace

extern "C" const struct ptq_linear_ops ptq_linear_neon = {bytes, prepare, rows, nullptr};
#endif
