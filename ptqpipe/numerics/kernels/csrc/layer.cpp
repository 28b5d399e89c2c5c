// A decoder layer of a step in which every sequence has one token: norms, products, rotary embedding, the store into the
// pages, attention and the gated feed-forward in one call. The parts are the other kernels' and the numbers are rounded to
// bfloat16 where a model of separate operators rounds them, so the result is that model's, bit for bit.
#include "system.h"

#include "api.h"
#include "attention_jobs.h"
#include "pool.h"
#include "room.h"

// Mirrored by cpu_layer.py. Everything is bfloat16 and dense; what x, out and q of the parts' jobs are is set by the call.
struct ptq_layer {
    struct ptq_linear products[7];        // query, key, value, output, gate, up, down
    struct ptq_norm norms[2];             // before the attention, before the feed-forward
    struct ptq_prefill *prefill;          // one of these two, the other null
    struct ptq_attention *attention;
    const uint16_t *activation;           // [65536]: what the feed-forward makes of each number of the gate
    uint16_t *keys, *values;              // pages [slots, kv_heads, dim]
    const uint16_t *x, *cosine, *sine;    // [rows, hidden], [rows, dim] both
    const int64_t *slots;                 // [rows]: where the new keys and values go
    uint16_t *out;                        // [rows, hidden]
    int64_t rows, dim, threads;
};

extern "C" int32_t ptq_linear_rows(const char *name, const struct ptq_linear *jobs, int64_t count);
extern "C" int32_t ptq_rms_norm(const char *name, const struct ptq_norm *job);

namespace {

enum { ROWS_WORTH_THREADS = 4 };  // of gates and rotations

// For loops that the compiler makes vectors of: the bits are the same however wide they are.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH_WIDTH __attribute__((target_clones("avx2", "default")))
#else
#define EACH_WIDTH
#endif

inline float number(uint16_t x) {
    const uint32_t u = (uint32_t)x << 16;
    float y;
    memcpy(&y, &u, sizeof y);
    return y;
}

// Of numbers that are no NaN with a payload in the lower bits alone, which arithmetic of bfloat16 numbers does not make.
inline uint16_t rounded(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// x [heads, dim] * cosine + rotate_half(x) * sine, each product and the sum rounded.
EACH_WIDTH void rotate(uint16_t *__restrict x, int64_t heads, int64_t dim, const uint16_t *__restrict cosine,
                       const uint16_t *__restrict sine) {
    const int64_t half = dim / 2;
    for (; heads; --heads, x += dim)
        for (int64_t i = 0; i < half; ++i) {
            const float a = number(x[i]), b = number(x[half + i]);
            const float low = number(rounded(a * number(cosine[i]))), high = number(rounded(b * number(cosine[half + i])));
            x[i] = rounded(low + number(rounded(-b * number(sine[i]))));
            x[half + i] = rounded(high + number(rounded(a * number(sine[half + i]))));
        }
}

// `out` may be `b`.
EACH_WIDTH void add(uint16_t *out, const uint16_t *a, const uint16_t *b, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = rounded(number(a[i]) + number(b[i]));
}

EACH_WIDTH void widen(float *__restrict out, const uint16_t *__restrict x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = number(x[i]);
}

EACH_WIDTH void narrow(uint16_t *__restrict out, const float *__restrict x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = rounded(x[i]);
}

EACH_WIDTH void multiply(uint16_t *__restrict out, const uint16_t *__restrict x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = rounded(number(out[i]) * number(x[i]));
}

// What a layer has between its parts.
struct Between {
    const ptq_layer *layer;
    uint16_t *normed, *query, *key, *value, *attended, *middle, *gate, *up;
    float *query32, *attended32;  // with `attention`

    int64_t width(int part) const { return layer->products[part].n; }

    // Divides the room of a thread; false without memory.
    bool divide(kept_room *room) {
        const int64_t hidden = layer->products[0].k, heads = width(0);
        const int64_t shorts[8] = {hidden, heads, width(1), width(2), heads, hidden, width(4), width(5)};
        uint16_t **const parts[8] = {&normed, &query, &key, &value, &attended, &middle, &gate, &up};
        int64_t bytes = 0, at[10];
        for (int i = 0; i < 10; ++i) {
            at[i] = bytes;
            bytes += (layer->rows * (i < 8 ? 2 * shorts[i] : 4 * heads) + 127) / 64 * 64;
        }
        char *const base = (char *)room->of((size_t)bytes);
        if (!base) return false;
        for (int i = 0; i < 8; ++i) *parts[i] = (uint16_t *)(base + at[i]);
        query32 = (float *)(base + at[8]);
        attended32 = (float *)(base + at[9]);
        return true;
    }

    // Products `first` to `last` of one x.
    int32_t multiply(const char *name, int first, int last, const uint16_t *x, uint16_t *const *outs) const {
        ptq_linear jobs[PTQ_LINEAR_JOBS];
        for (int i = first; i <= last; ++i) {
            ptq_linear *const job = jobs + (i - first);
            *job = layer->products[i];
            job->x = x;
            job->m = layer->rows;
            job->out = outs[i - first];
            if (job->threads > jobs->threads) jobs->threads = job->threads;
        }
        return ptq_linear_rows(name, jobs, last - first + 1);
    }

    int32_t normalize(const char *name, int which, const uint16_t *x) const {
        ptq_norm job = layer->norms[which];
        job.x = x;
        job.out = normed;
        job.rows = layer->rows;
        return ptq_rms_norm(name, &job);
    }

    int32_t attend(const char *name) const {
        if (layer->prefill) {
            layer->prefill->q = query;
            layer->prefill->out = attended;
            return ptq_paged_prefill(name, layer->prefill);
        }
        widen(query32, query, layer->rows * width(0));
        layer->attention->q = query32;
        layer->attention->out = attended32;
        const int32_t status = ptq_paged_attention(name, layer->attention);
        if (status == PTQ_OK) narrow(attended, attended32, layer->rows * width(0));
        return status;
    }
};

// Rotates a row's query and key, and puts its key and value into their slot.
void place_row(void *argument, int64_t row) {
    const Between *const b = (const Between *)argument;
    const ptq_layer *const l = b->layer;
    const int64_t heads = b->width(0), keys = b->width(1), values = b->width(2);
    const uint16_t *const cosine = l->cosine + row * l->dim, *const sine = l->sine + row * l->dim;
    rotate(b->query + row * heads, heads / l->dim, l->dim, cosine, sine);
    rotate(b->key + row * keys, keys / l->dim, l->dim, cosine, sine);
    memcpy(l->keys + l->slots[row] * keys, b->key + row * keys, 2 * (size_t)keys);
    memcpy(l->values + l->slots[row] * values, b->value + row * values, 2 * (size_t)values);
}

// activation(gate) * up, to the gate's place.
void gate_row(void *argument, int64_t row) {
    const Between *const b = (const Between *)argument;
    const int64_t n = b->width(4);
    uint16_t *const gate = b->gate + row * n;
    const uint16_t *const up = b->up + row * n, *const activation = b->layer->activation;
    for (int64_t i = 0; i < n; ++i) gate[i] = activation[gate[i]];
    multiply(gate, up, n);
}

}  // namespace

// What a kernel says that cannot do its part, then `out` has no meaning.
static int32_t ptq_layer_rows(const char *name, struct ptq_layer *layer) {
    static thread_local kept_room room;
    Between b = {};
    b.layer = layer;
    if (!b.divide(&room)) return PTQ_NO_MEMORY;
    const int64_t numbers = layer->rows * layer->products[0].k;
    const int64_t threads = layer->rows < ROWS_WORTH_THREADS ? 1 : layer->threads;
    int32_t status = b.normalize(name, 0, layer->x);
    uint16_t *const first[3] = {b.query, b.key, b.value}, *const second[2] = {b.gate, b.up};
    if (!status) status = b.multiply(name, 0, 2, b.normed, first);
    if (status) return status;
    in_parallel(place_row, &b, layer->rows, threads);
    status = b.attend(name);
    if (!status) status = b.multiply(name, 3, 3, b.attended, &b.middle);
    if (status) return status;
    add(b.middle, layer->x, b.middle, numbers);
    status = b.normalize(name, 1, b.middle);
    if (!status) status = b.multiply(name, 4, 5, b.normed, second);
    if (status) return status;
    in_parallel(gate_row, &b, layer->rows, threads);
    status = b.multiply(name, 6, 6, b.gate, &layer->out);
    if (!status) add(layer->out, b.middle, layer->out, numbers);
    return status;
}

// What pages a step's queries see, from the job of another layer.
template <class JOB> void see_as(JOB *job, const JOB *other) {
    job->tables = other->tables;
    job->totals = other->totals;
    job->spans = other->spans;
    job->table_stride = other->table_stride;
    job->threads = other->threads;
}

// Sets what changes from step to step as the layer before has it: x is what that gives, and `out` comes behind it.
static void follow(ptq_layer *layer, const ptq_layer *before) {
    layer->x = before->out;
    layer->out = before->out + before->rows * before->products[6].n;
    layer->cosine = before->cosine;
    layer->sine = before->sine;
    layer->slots = before->slots;
    if (layer->prefill) {
        see_as(layer->prefill, before->prefill);
        layer->prefill->starts = before->prefill->starts;
    } else {
        see_as(layer->attention, before->attention);
    }
}

// Layers of the same widths one after another. Of the first everything is set, of the others all but what `follow` sets.
extern "C" __attribute__((visibility("default"))) int32_t ptq_layers_step(const char *name, struct ptq_layer *const *layers,
                                                                         int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (i) follow(layers[i], layers[i - 1]);
        const int32_t status = ptq_layer_rows(name, layers[i]);
        if (status) return status;
    }
    return PTQ_OK;
}
