// The plain C interface between module.cpp, the three per-ISA translation units and cpu.py (ctypes).
//
// cpu.py mirrors these structs field by field; ptq_abi() returns PTQ_ABI so that a stale build is noticed.
#ifndef PTQ_API_H
#define PTQ_API_H

#include <stdint.h>

#define PTQ_ABI 1

enum { PTQ_F32 = 0, PTQ_F16 = 1, PTQ_BF16 = 2 };                       // dtype
enum { PTQ_E2M1 = 0, PTQ_E4M3 = 1, PTQ_E2M3 = 2, PTQ_E3M2 = 3 };       // element
enum { PTQ_SCALE_MINIFLOAT3 = 0, PTQ_SCALE_E8M0 = 1 };                 // scale codec: ?E?M3 or a power of two
enum { PTQ_EXACT = 0, PTQ_GIVEN = 1 };                                 // rule: search, or encode with the scales given
enum { PTQ_OK = 0, PTQ_NOT_FINITE = 1, PTQ_UNSUPPORTED = 2, PTQ_NO_MEMORY = 3 };

// Blocks of `block` consecutive columns of a [rows, cols] matrix whose rows are `row_stride` elements apart.
struct ptq_blocks {
    const void *w;
    int64_t rows, cols, row_stride;
    int32_t dtype, block, element, scale_kind;
    int32_t scale_bias, scale_top;  // of a MINIFLOAT3 scale codec: exponent bias, largest finite code
    int32_t rule, unused;
    const float *importance;        // [cols], normalized, or null
    const float *global_scales;     // [n_global]; one (1.0 without a global scale) when encoding
    int64_t n_global;
    uint8_t *data;                  // [rows, cols*bits/8], or null: score only
    uint8_t *scales;                // [rows, cols/block], written by EXACT, read by GIVEN
    double *totals;                 // [n_global] score sums, or null
};

struct ptq_ops {
    const char *name;
    int32_t (*quantize_blocks)(const struct ptq_blocks *job);
};

extern "C" const struct ptq_ops ptq_ops_avx512, ptq_ops_avx2, ptq_ops_baseline;

#endif
