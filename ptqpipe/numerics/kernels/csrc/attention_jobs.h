// Jobs of attention over pages. Mirrored by cpu_attention.py. Pages are [blocks, block_size, kv_heads, dim], dense.
#ifndef PTQ_ATTENTION_JOBS_H
#define PTQ_ATTENTION_JOBS_H

#include <stdint.h>

// One query a sequence.
struct ptq_attention {
    const float *q;                                // [spans, heads, key_dim]
    const void *keys, *values;
    const float *key_table, *value_table;          // CODES: the number of each byte, [table_heads, 256]
    const int64_t *tables;                         // [spans, table_stride] numbers of blocks
    const int64_t *totals;                         // [spans] tokens
    const float *sinks;                            // [heads], or null
    float *out;                                    // [spans, heads, value_dim]
    int64_t spans, heads, kv_heads, key_dim, value_dim, block_size, table_stride, table_heads;
    int64_t window;                                // tokens that are seen, 0: all
    int64_t threads;
    float scaling, softcap;                        // softcap 0: none
    int32_t kind, unused;
};

// Any number of queries a sequence, on AVX-512 with BF16.
struct ptq_prefill {
    const uint16_t *q;                       // [rows, heads, key_dim], tokens and heads q_token and q_head numbers apart
    const void *keys, *values;               // bfloat16, or codes
    const float *key_table, *value_table;    // the bfloat16 number of each code, [table_heads, 256], or null
    const int64_t *tables;                   // [spans, table_stride] numbers of blocks
    const int64_t *starts, *totals;          // [spans + 1] first rows, [spans] tokens: the rows are the last of them
    const float *sinks;                      // [heads], or null
    uint16_t *out;                           // [rows, heads, value_dim], dense
    int64_t spans, heads, kv_heads, key_dim, value_dim, block_size, table_stride, q_token, q_head;
    int64_t table_heads;
    int64_t window;                          // tokens that are seen, 0: all
    int64_t threads;
    float scaling, softcap;                  // softcap 0: none
};

extern "C" int32_t ptq_paged_attention(const char *name, struct ptq_attention *job);
extern "C" int32_t ptq_paged_prefill(const char *name, const struct ptq_prefill *job);

#endif
