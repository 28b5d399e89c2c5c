// What cpu_library.py calls through ctypes, and an importable name. Chooses the kernels of the best instruction set at run time.
//
// The exported functions are plain C: no Python object is touched, so ctypes runs them without the interpreter lock.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "api.h"
#include "pool.h"
#include "room.h"

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

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
#if defined(__aarch64__)
    return strcmp(name, "neon") ? nullptr : &ptq_ops_neon;
#else
    return strcmp(name, "baseline") ? nullptr : &ptq_ops_baseline;
#endif
}

// Whether this machine runs the kernels called `name` (avx512, avx2, neon, baseline).
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

// Adds `rows` rows of 16 terms to 16 lanes, one row after the other, on any instruction set: the terms come from memory.
EXPORT int32_t ptq_add_lanes(const char *name, double *lanes, const double *terms, int64_t rows) {
    double sums[16];
    memcpy(sums, lanes, sizeof sums);
    for (int64_t row = 0; row < rows; row++, terms += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += terms[lane];
    memcpy(lanes, sums, sizeof sums);
    return ops_called(name) ? PTQ_OK : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_decode_rows(const char *name, const struct ptq_decode *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->decode(job) : PTQ_UNSUPPORTED;
}

EXPORT int32_t ptq_carry_codes(const char *name, const struct ptq_carry *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->carry(job) : PTQ_UNSUPPORTED;
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

enum { PASS_ROWS = 128 };  // that one part of a pass has at most

struct pass_call {
    const struct ptq_pass *job;
    const struct ptq_ops *ops;
    int64_t rows;  // of one part
    std::atomic<bool> failed;
};

static void pass_part(void *argument, int64_t part) {
    static thread_local kept_room room;
    struct pass_call *c = (struct pass_call *)argument;
    const int64_t first = part * c->rows, last = first + c->rows;
    float *work = (float *)room.of((size_t)pass_room(c->job->columns, c->rows) * sizeof(float));
    if (work) c->ops->pass(c->job, first, last < c->job->rows ? last : c->job->rows, work);
    else c->failed = true;
}

EXPORT int32_t ptq_columns_pass(const char *name, const struct ptq_pass *job) {
    const struct ptq_ops *ops = ops_called(name);
    const int32_t status = ops ? ops->pass(job, 0, 0, nullptr) : PTQ_UNSUPPORTED;
    if (status != PTQ_OK) return status;
    const int64_t share = (job->rows + job->threads * 16 - 1) / (job->threads * 16) * 16;  // no thread without rows
    const int64_t rows = share > PASS_ROWS ? PASS_ROWS : share > 0 ? share : 16;
    struct pass_call c = {job, ops, rows, {false}};
    in_parallel(pass_part, &c, (job->rows + rows - 1) / rows, job->threads);
    return c.failed ? PTQ_NO_MEMORY : PTQ_OK;
}

EXPORT int32_t ptq_collective_step(const char *name, const struct ptq_collective *job) {
    const struct ptq_ops *ops = ops_called(name);
    return ops ? ops->collective(job) : PTQ_UNSUPPORTED;
}

struct linear_call {
    const struct ptq_linear *job;
    const struct ptq_linear_ops *ops;
    void *x;
    int64_t first, last, run;
};

// The parts of a product with several weights: of the first all, then of the next.
static void linear_part(void *argument, int64_t part) {
    const struct linear_call *c = (const struct linear_call *)argument;
    for (;; ++c) {
        const int64_t parts = (c->last + c->run - 1) / c->run;
        if (part < parts) break;
        part -= parts;
    }
    const int64_t first = part * c->run, last = first + c->run;
    c->ops->rows(c->job, c->x, first, last < c->last ? last : c->last);
}

static void prepare_part(void *argument, int64_t part) {
    const struct linear_call *c = (const struct linear_call *)argument;
    const int64_t first = part * c->run, last = first + c->run;
    c->ops->prepare(c->job, c->x, first, last < c->last ? last : c->last);
}

static void unpack_part(void *argument, int64_t part) {
    const struct linear_call *c = (const struct linear_call *)argument;
    const int64_t first = c->first + part * c->run, last = first + c->run;
    c->ops->unpack(c->job, first, last < c->last ? last : c->last, c->job->out + (first - c->first) * c->job->k);
}

#if defined(__x86_64__)
static bool has_fma(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

static bool has_bf16(const struct ptq_ops *ops) {
#if defined(__x86_64__)
    return ops == &ptq_ops_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#else
    return ops && false;
#endif
}

// Whether the kernels called `name` multiply bfloat16 numbers on this machine.
EXPORT int32_t ptq_has_bf16(const char *name) { return has_bf16(ops_called(name)); }

// The kernels for a layout, null where there are none.
static const struct ptq_linear_ops *linear_called(const char *name, bool panels) {
    const struct ptq_ops *ops = ops_called(name);
#if defined(__x86_64__)
    if (panels) return has_bf16(ops) ? &ptq_linear_bf16 : ops && ops != &ptq_ops_baseline && has_fma() ? &ptq_linear_avx2 : nullptr;
#elif defined(__aarch64__)
    if (panels) return ops ? &ptq_linear_neon : nullptr;
#endif
    return ops && !panels ? ops->linear : nullptr;
}

#if defined(__x86_64__)
// Whether the CPU multiplies tiles of bfloat16 (AMX) and the system saves them.
static bool has_amx(void) {
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
}
#else
static bool has_amx(void) { return false; }
#endif

// The most rows of x for which ptq_linear_rows is faster than unpacking and a library's product; 0 without a kernel.
EXPORT int64_t ptq_linear_limit(const char *name, int64_t panels) {
    if (!linear_called(name, panels != 0)) return 0;
    return !panels ? 16 : has_amx() ? 32 : INT64_MAX;
}

enum { NUMBERS_OF_PART = 1 << 14 };  // of x that a thread lays out at a time: fewer are not worth waking another

// Small parts, so that a thread that comes late costs little; whole panels of the kernels' rows.
static int64_t part_of(int64_t rows, int64_t threads) {
    const int64_t parts = threads > 1 ? threads * 8 : 1, each = (rows + parts - 1) / parts;
    return each ? (each + 31) / 32 * 32 : 32;
}

EXPORT int32_t ptq_linear_rows(const char *name, const struct ptq_linear *jobs, int64_t count) {
    static thread_local kept_room room;
    const struct ptq_linear_ops *ops = linear_called(name, jobs->panels != 0);
    if (!ops || count < 1 || count > PTQ_LINEAR_JOBS) return PTQ_UNSUPPORTED;
    struct ptq_linear some[PTQ_LINEAR_JOBS];
    struct linear_call calls[PTQ_LINEAR_JOBS];
    int64_t m = 0, threads = jobs->threads;
    for (int64_t done = 0; done < jobs->m; done += m) {  // rows of x: as many as the kernels keep sums of
        const int64_t turns = (jobs->m - done + PTQ_LINEAR_ROWS - 1) / PTQ_LINEAR_ROWS;
        m = (jobs->m - done + turns - 1) / turns;
        some[0] = *jobs;
        some[0].x += done * jobs->k;
        some[0].m = m;
        void *x = room.of((size_t)ops->bytes(some) + 1);
        if (!x) return PTQ_NO_MEMORY;
        const int64_t each = 1 + NUMBERS_OF_PART / (jobs->k + 1);
        struct linear_call layout = {some, ops, x, 0, m, each};
        in_parallel(prepare_part, &layout, (m + each - 1) / each, threads);
        int64_t parts = 0;
        for (int64_t i = 0; i < count; ++i) {
            some[i] = jobs[i];
            some[i].m = m;
            some[i].out += done * jobs[i].n;
            const struct linear_call c = {some + i, ops, x, 0, jobs[i].n, part_of(jobs[i].n, threads)};
            calls[i] = c;
            parts += (c.last + c.run - 1) / c.run;
        }
        in_parallel(linear_part, calls, parts, threads, true);
    }
    return PTQ_OK;
}

EXPORT int32_t ptq_linear_unpack(const char *name, const struct ptq_linear *job, int64_t first, int64_t last) {
    const struct ptq_linear_ops *ops = linear_called(name, has_bf16(ops_called(name)));
    if (!ops || job->panels) return PTQ_UNSUPPORTED;
    if (first >= last) return PTQ_OK;
    struct linear_call c = {job, ops, nullptr, first, last, part_of(last - first, job->threads)};
    in_parallel(unpack_part, &c, (last - first + c.run - 1) / c.run, job->threads);
    return PTQ_OK;
}

struct norm_call {
    const struct ptq_norm *job;
    const struct ptq_ops *ops;
    int64_t run;
};

static void norm_part(void *argument, int64_t part) {
    const struct norm_call *c = (const struct norm_call *)argument;
    const int64_t first = part * c->run, last = first + c->run;
    c->ops->rms_norm(c->job, first, last < c->job->rows ? last : c->job->rows);
}

EXPORT int32_t ptq_rms_norm(const char *name, const struct ptq_norm *job) {
    const struct ptq_ops *ops = ops_called(name);
    if (!ops) return PTQ_UNSUPPORTED;
    const struct norm_call c = {job, ops, 1 + (1 << 14) / (job->n + 1)};
    in_parallel(norm_part, (void *)&c, (job->rows + c.run - 1) / c.run, job->threads);
    return PTQ_OK;
}

// An empty module, so that `import ptqpipe.numerics.kernels._cpu` says whether the kernels were built.
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__cpu(void) { return PyModule_Create(&definition); }
