// The steps of the quantized all-reduce, unit by unit (ptqpipe/serving/collectives/codec_reference.py): encode, decode, reduce, sum.
#include "wire.h"
#include "wire_unit.h"
#include "wire_blocks8.h"

template <int ELEMENT, int SCALE, int B, int DTYPE> static void encode_message(const ptq_collective *j) {
    const WireShape s = wire_shape(j);
    alignas(64) float v[MAX_UNIT];
    for (int64_t u = whole_blocks<ELEMENT, SCALE, B, DTYPE>(j, s); u < s.units; ++u) {
        load_unit<DTYPE>(j, s.unit, u * s.unit, v);
        encode_unit<ELEMENT, SCALE, B>(j, s.unit, v, message_at(s, j->message, u));
    }
}

template <int ELEMENT, int SCALE, int B, int DTYPE> static void decode_message(const ptq_collective *j) {
    const WireShape s = wire_shape(j);
    alignas(64) float v[MAX_UNIT];
    for (int64_t u = whole_blocks<ELEMENT, SCALE, B, DTYPE>(j, s); u < s.units; ++u) {
        decode_unit<ELEMENT, SCALE, B, false>(j, s.unit, message_at(s, j->message, u), v);
        store_unit<DTYPE>(j, s.unit, u * s.unit, v);
    }
}

template <int ELEMENT, int SCALE, int B, int DTYPE> static void reduce_messages(const ptq_collective *j) {
    const WireShape s = wire_shape(j);
    alignas(64) float v[MAX_UNIT], own[MAX_UNIT];
    for (int64_t u = whole_blocks<ELEMENT, SCALE, B, DTYPE>(j, s); u < s.units; ++u) {
        for (int64_t rank = 0; rank < j->ranks; ++rank) {
            const uint8_t *message = j->messages[rank];
            if (message) {
                const Message m = message_at(s, message, u);
                if (rank) decode_unit<ELEMENT, SCALE, B, true>(j, s.unit, m, v);
                else decode_unit<ELEMENT, SCALE, B, false>(j, s.unit, m, v);
            } else if (rank) {
                load_unit<DTYPE>(j, s.unit, u * s.unit, own);
                for (int64_t i = 0; i < s.unit; i += W) store(v + i, load(v + i) + load(own + i));
            } else {
                load_unit<DTYPE>(j, s.unit, u * s.unit, v);
            }
        }
        if (j->message) {
            const Message m = message_at(s, j->message, u);
            encode_unit<ELEMENT, SCALE, B>(j, s.unit, v, m);
            decode_unit<ELEMENT, SCALE, B, false>(j, s.unit, m, v);
        }
        store_unit<DTYPE>(j, s.unit, u * s.unit, v);
    }
}

template <int ELEMENT, int SCALE, int B, int DTYPE> static int32_t collective_step(const ptq_collective *j) {
    if (j->step == PTQ_WIRE_ENCODE) encode_message<ELEMENT, SCALE, B, DTYPE>(j);
    else if (j->step == PTQ_WIRE_DECODE) decode_message<ELEMENT, SCALE, B, DTYPE>(j);
    else reduce_messages<ELEMENT, SCALE, B, DTYPE>(j);
    return PTQ_OK;
}

template <int ELEMENT, int SCALE, int B> static int32_t collective_dtype(const ptq_collective *j) {
    if (j->dtype == PTQ_BF16) return collective_step<ELEMENT, SCALE, B, PTQ_BF16>(j);
    if (j->dtype == PTQ_F32) return collective_step<ELEMENT, SCALE, B, PTQ_F32>(j);
    return collective_step<ELEMENT, SCALE, B, PTQ_F16>(j);
}

// Messages that are numbers of the dtype themselves: their sum in float32, rounded once.
template <int DTYPE> static int32_t sum_numbers(const ptq_collective *j) {
    const ptq_collective job = *j;
    int64_t i = 0;
    for (; i + W <= job.elements; i += W) {
        vf total = splat(-0.0f);  // adds nothing, not even to -0
        for (int64_t rank = 0; rank < job.ranks; ++rank)
            total = total + load_lanes<DTYPE>(job.messages[rank] ? (const void *)job.messages[rank] : job.x, i);
        store_lanes<DTYPE>(job.out, i, total);
    }
    for (; i < job.elements; ++i) {
        vf total = splat(-0.0f);
        for (int64_t rank = 0; rank < job.ranks; ++rank)
            total = total + splat(load_one<DTYPE>(job.messages[rank] ? (const void *)job.messages[rank] : job.x, i));
        char lanes[4 * W];
        store_lanes<DTYPE>(lanes, 0, total);
        memcpy((char *)job.out + i * dtype_bytes(DTYPE), lanes, (size_t)dtype_bytes(DTYPE));
    }
    return PTQ_OK;
}

template <int ELEMENT> static int32_t collective_block(const ptq_collective *j) {
    if (j->block == 32) return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 32>(j);
    if (j->block == 64) return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 64>(j);
    if (j->block == 128) return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 128>(j);
    return collective_dtype<ELEMENT, PTQ_WIRE_BF16_SCALE, 0>(j);
}

static int32_t collective(const ptq_collective *j) {
    if (j->step == PTQ_WIRE_SUM)
        return j->dtype == PTQ_BF16 ? sum_numbers<PTQ_BF16>(j) : j->dtype == PTQ_F32 ? sum_numbers<PTQ_F32>(j) : sum_numbers<PTQ_F16>(j);
    if (j->block < W || j->block % W) return PTQ_UNSUPPORTED;
    if (j->element == PTQ_WIRE_INT8) return collective_block<PTQ_WIRE_INT8>(j);
    if (j->element == PTQ_WIRE_INT6) return collective_dtype<PTQ_WIRE_INT6, PTQ_WIRE_BF16_SCALE, 0>(j);
    if (j->element == PTQ_WIRE_INT4) return collective_dtype<PTQ_WIRE_INT4, PTQ_WIRE_BF16_SCALE, 0>(j);
    if (j->element == PTQ_WIRE_E2M1) return collective_dtype<PTQ_WIRE_E2M1, PTQ_WIRE_E4M3_SCALE, 16>(j);
    return j->scale == PTQ_WIRE_E8M0_SCALE ? collective_dtype<PTQ_WIRE_E4M3, PTQ_WIRE_E8M0_SCALE, 32>(j)
                                           : collective_dtype<PTQ_WIRE_E4M3, PTQ_WIRE_BF16_SCALE, 0>(j);
}
