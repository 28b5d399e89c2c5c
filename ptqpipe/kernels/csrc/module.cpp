// What cpu.py calls through ctypes, and an importable name. Chooses the kernels of the best instruction set at run time.
//
// The exported functions are plain C: no Python object is touched, so ctypes runs them without the interpreter lock.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "api.h"
#include "pool.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

static const struct ptq_ops *ops_called(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &ptq_ops_avx512;
    // F16C came before AVX2 in every line of CPUs; older compilers cannot ask for it.
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2")) return &ptq_ops_avx2;
#endif
    return strcmp(name, "baseline") ? nullptr : &ptq_ops_baseline;
}

// Whether this machine runs the kernels called `name` (avx512, avx2, baseline).
EXPORT int32_t ptq_has(const char *name) { return ops_called(name) != nullptr; }
EXPORT int32_t ptq_abi(void) { return PTQ_ABI; }

EXPORT int32_t ptq_quantize_blocks(const char *name, const struct ptq_blocks *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->quantize_blocks(job) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_amax_of(const char *name, const struct ptq_amax *job, float *out, int64_t *first_bad) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->amax(job, out, first_bad) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_decode_rows(const char *name, const struct ptq_decode *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->decode(job) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_encode_rows(const char *name, const struct ptq_encode *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->encode(job) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_quantize_long(const char *name, const struct ptq_long *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->quantize_long(job) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_columns_step(const char *name, const struct ptq_columns *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->columns(job) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_collective_step(const char *name, const struct ptq_collective *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->collective(job) : PTQ_UNSUPPORTED;
}

struct linear_call {
    const struct ptq_linear *job;
    const struct ptq_linear_ops *ops;
    const void *x;
    int64_t first, last, run;
};

static void linear_part(void *argument, int64_t part) {
    const struct linear_call *c = (const struct linear_call *)argument;
    const int64_t first = c->first + part * c->run, last = first + c->run;
    c->ops->rows(c->job, c->x, first, last < c->last ? last : c->last);
}

static void unpack_part(void *argument, int64_t part) {
    const struct linear_call *c = (const struct linear_call *)argument;
    const int64_t first = c->first + part * c->run, last = first + c->run;
    c->ops->unpack(c->job, first, last < c->last ? last : c->last, c->job->out + (first - c->first) * c->job->k);
}

static const struct ptq_linear_ops *linear_called(const char *name) {
    const struct ptq_ops *ops = ops_called(name);
#if defined(__x86_64__)
    if (ops == &ptq_ops_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"))
        return &ptq_linear_bf16;
#endif
    return ops ? ops->linear : nullptr;
}

// Small parts, so that a thread that comes late costs little.
static int64_t part_of(int64_t rows, int64_t threads) {
    const int64_t parts = threads > 1 ? threads * 8 : 1;
    return (rows + parts - 1) / parts;
}

EXPORT int32_t ptq_linear_rows(const char *name, const struct ptq_linear *job) {
    const struct ptq_linear_ops *ops = linear_called(name);
    if (!ops) return PTQ_UNSUPPORTED;
    if (!job->n || !job->m) return PTQ_OK;
    void *x = aligned_alloc(64, (size_t)(ops->bytes(job) + 64) / 64 * 64);
    if (!x) return PTQ_NO_MEMORY;
    ops->prepare(job, x);
    struct linear_call c = {job, ops, x, 0, job->n, part_of(job->n, job->threads)};
    in_parallel(linear_part, &c, (job->n + c.run - 1) / c.run, job->threads);
    free(x);
    return PTQ_OK;
}

EXPORT int32_t ptq_linear_unpack(const char *name, const struct ptq_linear *job, int64_t first, int64_t last) {
    const struct ptq_linear_ops *ops = linear_called(name);
    if (!ops) return PTQ_UNSUPPORTED;
    if (first >= last) return PTQ_OK;
    struct linear_call c = {job, ops, nullptr, first, last, part_of(last - first, job->threads)};
    in_parallel(unpack_part, &c, (last - first + c.run - 1) / c.run, job->threads);
    return PTQ_OK;
}

// An empty module, so that `import ptqpipe.kernels._cpu` says whether the kernels were built.
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__cpu(void) { return PyModule_Create(&definition); }
