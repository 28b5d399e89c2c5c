// The plain C interface between module.cpp, the per-ISA translation units and cpu_library.py (ctypes).
//
// cpu_library.py mirrors these structs field by field; ptq_abi() returns PTQ_ABI so that a stale build is noticed.
#ifndef PTQ_API_H
#define PTQ_API_H

#include <stdint.h>

#define PTQ_ABI 20

enum { PTQ_F32 = 0, PTQ_F16 = 1, PTQ_BF16 = 2 };                       // dtype
enum { PTQ_E2M1 = 0, PTQ_E4M3 = 1, PTQ_E2M3 = 2, PTQ_E3M2 = 3,           // element
       PTQ_BF16_ELEMENT = 4,                                           // of a ptq_linear in panels only: no code, the number
       PTQ_INT4 = 5, PTQ_INT8 = 6, PTQ_INT8_SIGNED = 7 };              // of ptq_encode and ptq_long
enum { PTQ_SCALE_MINIFLOAT3 = 0, PTQ_SCALE_E8M0 = 1 };                 // scale codec: ?E?M3 or a power of two
// rule: the exact search, the scales given, or one of the baselines of ptqpipe/numerics/search
enum { PTQ_EXACT = 0, PTQ_GIVEN = 1, PTQ_ABSMAX = 2, PTQ_ABSMAX_PZ = 3, PTQ_FOUR_OVER_SIX = 4, PTQ_OCP_FLOOR = 5,
       PTQ_OCP_EVEN = 6, PTQ_OCP_CEIL = 7,
       PTQ_POWERS = 8 };  // of a ptq_long: the exact search over powers of two
enum { PTQ_FEED_FORWARD = 0, PTQ_DESCEND = 1, PTQ_CHOOSE_BLOCK = 2 };  // kind of a step over columns
enum { PTQ_OK = 0, PTQ_NOT_FINITE = 1, PTQ_UNSUPPORTED = 2, PTQ_NO_MEMORY = 3 };

// Blocks of `block` consecutive columns of a [rows, cols] matrix whose rows are `row_stride` elements apart.
struct ptq_blocks {
    const void *w;
    int64_t rows, cols, row_stride;
    int32_t dtype, block, element, scale_kind;
    int32_t scale_bias, scale_top;  // of a MINIFLOAT3 scale codec: exponent bias, largest finite code
    int32_t rule;
    int32_t flush_code;             // ABSMAX: the code of a block whose scale rounds to zero
    const float *importance;        // [cols], normalized, or null
    const float *global_scales;     // [n_global]; one (1.0 without a global scale) when encoding
    int64_t n_global;
    uint8_t *data;                  // [rows, cols*bits/8], or null: score only
    uint8_t *scales;                // [rows, cols/block], written by EXACT, read by GIVEN
    double *totals;                 // [n_global] score sums, or null
};

// Largest magnitude of a matrix, and the row-major index of its first NaN or inf (-1: none).
struct ptq_amax {
    const void *w;
    int64_t rows, cols, row_stride;
    int32_t dtype, unused;
};

// value(code) * scale in float32: written to `out`, compared with `w` (or with what `other` says), or both.
struct ptq_decode {
    const uint8_t *data;          // packed codes, rows data_stride bytes apart
    int64_t data_stride, rows, cols;
    const void *scales;           // [rows/block_rows, scale_cols] uint8 codes (scale_codes) or float32
    int64_t scale_cols, block_rows, block_cols;
    const float *values;          // [256] of element codes; 4-bit: the first 16
    const float *scale_values;    // [256] of scale codes, global scale included
    int32_t code_bits, scale_codes;
    int32_t out_dtype, w_dtype;
    void *out;                    // [rows, cols] float32 or bfloat16, or null
    const void *w;                // rows w_stride elements apart, or null
    int64_t w_stride;
    double *sums;                 // [2] sum (decode - w)^2, sum w^2, or null
    const struct ptq_decode *other;  // codes in the place of `w`, of as many rows and columns, or null
    int64_t only_compare;         // with `other`: sum w^2 is not wanted
};

enum { PTQ_PLACES = 0, PTQ_TO_NVFP4 = 1, PTQ_TO_E4M3 = 2 };  // step of a ptq_carry
enum { PTQ_NO_PLACE = -32768 };  // of a block of zeros

// MXFP4 (E2M1 in blocks of 32, E8M0 scales) in other codes, without loss; csrc/carry.h has the places.
struct ptq_carry {
    const uint8_t *data, *scales;  // [rows, cols/2] and [rows, cols/32], rows so many bytes apart:
    int64_t data_stride, scale_stride, rows, cols;
    int32_t step, exponent;       // TO_NVFP4: of the global scale, a power of two
    int16_t *places;              // PLACES: [rows, cols/32], of the largest number of each block
    const int16_t *exponents;     // TO_E4M3: [rows/block_rows, cols/block_cols], of the scales, powers of two
    int64_t block_rows, block_cols;
    uint8_t *out, *out_scales;    // TO_NVFP4: [rows, cols/2] and [rows, cols/16]; TO_E4M3: [rows, cols] and null
    int64_t *lost;                // blocks that cannot be written without loss, or null
};

// Codes of E4M3 or integers, one to a byte, for given float32 scales.
struct ptq_encode {
    const void *w;
    int64_t rows, cols, row_stride;
    const float *scales;          // [rows/block_rows, scale_cols]
    int64_t scale_cols, block_rows, block_cols;
    int32_t dtype, element;
    uint8_t *data;                // [rows, cols]
};

// bfloat16 scales of long blocks of E4M3, or of rows and groups of integers; rule EXACT or ABSMAX.
struct ptq_long {
    const void *w;
    int64_t rows, cols, row_stride, block_rows, block_cols;
    int32_t dtype, element, rule, unused;
    const float *importance;      // [cols], normalized, or null
    uint16_t *scales;             // [rows/block_rows, cols/block_cols], rounded up
};

// A step of ptqpipe/quantization/gptq_steps.py over [columns, rows] matrices; what a kind does not need is null.
struct ptq_columns {
    int64_t columns, rows;
    int32_t kind, element;
    const float *exact;           // FEED_FORWARD, DESCEND
    const float *target;          // FEED_FORWARD, CHOOSE_BLOCK
    const float *s;               // FEED_FORWARD, DESCEND: the scale of every weight
    float *error;                 // FEED_FORWARD: out; DESCEND: in and out
    float *slope;                 // DESCEND: in and out
    const float *matrix;          // [columns, columns] feedback, or moment for DESCEND
    const float *weight;          // CHOOSE_BLOCK: [columns]
    const float *ladder;          // CHOOSE_BLOCK: [ladder_size] scales, ascending
    int64_t ladder_size, count;   // CHOOSE_BLOCK: scales to try from first[row] on
    const int64_t *first;
    uint8_t *codes;               // out
    int64_t *scales;              // CHOOSE_BLOCK: [rows] out
    float *cost;                  // CHOOSE_BLOCK: [rows] out
};

enum { PTQ_FEED = 0, PTQ_ENTER = 1, PTQ_SWEEP = 2 };

// Error feedback at fixed scales (FEED), with the scale of each block (ENTER), or sweeps of refinement (SWEEP) of rows over
// all columns. Matrices lie as [columns, rows]; what a kind does not need is null.
struct ptq_pass {
    int64_t columns, rows, block;  // block: columns of a scale that is chosen, 16 or 32; 0 where scales are fixed
    int32_t kind, element;
    const float *exact;
    const float *s;               // where scales are fixed: of every weight
    const float *matrix;          // [columns, columns] the metric's factor, transposed; SWEEP: the moment
    const float *weight;          // ENTER: [columns]; SWEEP: [columns/block, block]
    const float *feedback, *inverse;  // SWEEP: [columns/block, block, block]
    const uint8_t *usable;        // SWEEP: [columns/block] whether the block may change; null where scales are fixed
    const float *ladder;          // [ladder_size] scales, ascending
    int64_t ladder_size, below, count;  // count of them are tried, from `below` under the one at hand on
    int64_t sweeps;
    const float *error;           // SWEEP: of the codes that are given
    uint8_t *codes;               // out; SWEEP: in and out
    int64_t *scales;              // [columns/block, rows] indices: ENTER: out; SWEEP: in and out
    float slack;                  // SWEEP: share of its cost that a block's new cost has to be below
    int32_t threads;
};

// Floats that a pass over some rows works in.
static inline int64_t pass_room(int64_t columns, int64_t rows) { return (4 * columns + 256) * rows; }

enum { PTQ_WIRE_INT8 = 0, PTQ_WIRE_INT6 = 1, PTQ_WIRE_INT4 = 2, PTQ_WIRE_E4M3 = 3, PTQ_WIRE_E2M1 = 4 };  // element
enum { PTQ_WIRE_BF16_SCALE = 0, PTQ_WIRE_E8M0_SCALE = 1, PTQ_WIRE_E4M3_SCALE = 2 };                     // scale
enum { PTQ_WIRE_ENCODE = 0, PTQ_WIRE_DECODE = 1, PTQ_WIRE_REDUCE = 2, PTQ_WIRE_SUM = 3 };                                 // step

// A step of ptqpipe/serving/collectives/codec_reference.py: x -> message, message -> out, or messages (null: x itself) -> their sum.
// SUM: the messages are numbers of the dtype, and there is no codec.
struct ptq_collective {
    int32_t step, dtype, element, scale, block, hadamard, group, unused;
    int64_t elements, ranks;
    const void *x;                // [elements] of dtype; ENCODE, and REDUCE with a null among the messages
    const uint8_t *const *messages;  // [ranks], REDUCE
    uint8_t *message;             // ENCODE and REDUCE: out; DECODE: in. Null in REDUCE: `out` is the sum itself
    void *out;                    // [elements] of dtype; DECODE, and REDUCE: what the message says. May be x
};

enum { PTQ_NO_SCALES = 0, PTQ_BLOCK_E4M3 = 1, PTQ_BLOCK_E8M0 = 2, PTQ_BLOCK_FLOAT = 3 };  // scale_kind of a ptq_linear

// out [m, n] = x [m, k] times a packed weight [n, k], transposed; x and out dense bfloat16.
struct ptq_linear {
    const uint8_t *data;          // packed codes, rows data_stride bytes apart; or in panels
    int64_t data_stride, n, k;
    const void *scales;           // E4M3 per 16 columns, E8M0 per 32, float32 per 128; rows scale_stride numbers apart
    int64_t scale_stride, scale_rows;  // rows of the weight that share a row of scales
    int32_t element, scale_kind;
    const float *factor;          // multiplies the sums of a row, factor_step apart, or null
    int64_t factor_step;
    const uint16_t *x;
    int64_t m;
    const float *bias;            // [n] or null
    uint16_t *out;
    int64_t threads;
    // 1: 16 rows of codes follow each other transposed in dwords, [row / 16][dword][row % 16], rows padded to 16 and to
    // data_stride bytes, 64 columns or a multiple of them; scales of a byte too, to scale_stride bytes. Zeros in padding.
    int64_t panels;
    int64_t one_order;            // of NVFP4 in panels: sums of few and of many rows of x go in one order, a little slower
};

enum { PTQ_LINEAR_JOBS = 4 };    // of one x, layout and element, at most, in a call of ptq_linear_rows
enum { PTQ_LINEAR_ROWS = 512 };  // of x, at most, in a call of these

// How an instruction set does it: any thread lays out any rows of x, then any thread does any rows of the weight.
struct ptq_linear_ops {
    int64_t (*bytes)(const struct ptq_linear *job);
    void (*prepare)(const struct ptq_linear *job, void *x, int64_t first, int64_t last);
    void (*rows)(const struct ptq_linear *job, const void *x, int64_t first, int64_t last);
    // Rows of the weight without their factors, bfloat16 [last - first, k], to `out`.
    void (*unpack)(const struct ptq_linear *job, int64_t first, int64_t last, uint16_t *out);
};

// out [rows, n] = x [rows, n] over the root of the mean of its squares, times weight [n]; all dense bfloat16.
struct ptq_norm {
    const uint16_t *x, *weight;
    uint16_t *out;
    int64_t rows, n, threads;
    float eps;
    int32_t unused;
};

struct ptq_ops {
    const char *name;
    int32_t (*quantize_blocks)(const struct ptq_blocks *job);
    int32_t (*amax)(const struct ptq_amax *job, float *out, int64_t *first_bad);
    int32_t (*decode)(const struct ptq_decode *job);
    int32_t (*carry)(const struct ptq_carry *job);
    int32_t (*encode)(const struct ptq_encode *job);
    int32_t (*quantize_long)(const struct ptq_long *job);
    int32_t (*columns)(const struct ptq_columns *job);
    // Rows [first, last), in work of pass_room on a cache line; UNSUPPORTED before anything is written.
    int32_t (*pass)(const struct ptq_pass *job, int64_t first, int64_t last, float *work);
    const struct ptq_linear_ops *linear;
    int32_t (*collective)(const struct ptq_collective *job);
    void (*rms_norm)(const struct ptq_norm *job, int64_t first, int64_t last);
};

extern "C" const struct ptq_ops ptq_ops_avx512, ptq_ops_avx2, ptq_ops_neon, ptq_ops_baseline;
// In panels: AVX-512 with BF16 and VBMI, whose `unpack` is for rows; AVX2 with FMA, and NEON, which have none.
extern "C" const struct ptq_linear_ops ptq_linear_bf16, ptq_linear_avx2, ptq_linear_neon;

#endif
