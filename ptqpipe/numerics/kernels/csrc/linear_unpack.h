// Rows of a packed weight as bfloat16 numbers without their factors, for a library's product. Of linear_bf16.cpp.

INLINE uint16_t to_bf16(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// Rounded to even, subnormal numbers too, which VCVTNEPS2BF16 takes as zero.
INLINE __m256i to_bf16(__m512 v) {
    const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7FFF));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}

INLINE float scale_at(const ptq_linear *j, int64_t row, int64_t column) {
    const int64_t at = row / j->scale_rows * j->scale_stride;
    uint32_t u;
    if (j->scale_kind == PTQ_NO_SCALES) return 1.0f;
    if (j->scale_kind == PTQ_BLOCK_FLOAT) return ((const float *)j->scales)[at + column / 128];
    if (j->scale_kind == PTQ_BLOCK_E4M3) {
        const uint8_t code = ((const uint8_t *)j->scales)[at + column / 16];
        u = (uint32_t)BytesOf<PTQ_E4M3>::bytes.high[code & 127] << 24 | (uint32_t)BytesOf<PTQ_E4M3>::bytes.low[code & 127] << 16 |
            (uint32_t)(code & 128) << 24;
    } else {
        const uint32_t e = ((const uint8_t *)j->scales)[at + column / 32];
        u = e == 255 ? 0x7FC00000u : e ? e << 23 : 0x00400000u;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

template <int ELEMENT> INLINE int code_at(const uint8_t *codes, int64_t column) {
    if (ELEMENT == PTQ_E2M1) return codes[column / 2] >> column % 2 * 4 & 15;
    if (ELEMENT == PTQ_E4M3) return codes[column];
    const uint8_t *p = codes + column / 4 * 3;
    return (p[0] | p[1] << 8 | p[2] << 16) >> column % 4 * 6 & 63;
}

// A weight, rounded: exact but for FP8 in blocks of 128x128.
template <int ELEMENT> INLINE uint16_t weight_at(const ptq_linear *j, int64_t row, int64_t column) {
    const int code = code_at<ELEMENT>(j->data + row * j->data_stride, column), sign = ELEMENT == PTQ_E4M3 ? code & 128 : 0;
    const Bytes &b = BytesOf<ELEMENT>::bytes;
    const uint32_t u = (uint32_t)(b.high[code ^ sign] | sign) << 24 | (uint32_t)b.low[code ^ sign] << 16;
    float f;
    memcpy(&f, &u, 4);
    return to_bf16(f * scale_at(j, row, column));
}

// 16 codes from column `column` as floats.
template <int ELEMENT> INLINE __m512 floats_of(const uint8_t *codes, int64_t column, __m512i nibbles, __m512 values) {
    if (ELEMENT == PTQ_E2M1) {
        uint64_t q;
        memcpy(&q, codes + column / 2, 8);
        return _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(nibbles, _mm512_set1_epi64((int64_t)q)), values);
    }
    // A float of 2^-120 times the magnitude, made whole by a multiplication; its largest is the code of NaN.
    const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + column)));
    const __m512i magnitude = _mm512_and_si512(c, _mm512_set1_epi32(127));
    const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(c, magnitude), 24);
    const __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(127));
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(v), nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
}

template <int ELEMENT> void unpack_row(const ptq_linear *j, int64_t row, uint16_t *out) {
    alignas(64) static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    alignas(64) uint8_t shifts[64];
    for (int i = 0; i < 64; ++i) shifts[i] = (uint8_t)(i / 4 * 4);
    const __m512i nibbles = _mm512_load_si512(shifts);
    const __m512 values = _mm512_load_ps(e2m1);
    const uint8_t *codes = j->data + row * j->data_stride;
    int64_t k = 0;
    for (; k + 16 <= j->k; k += 16) {
        const __m512 w = floats_of<ELEMENT>(codes, k, nibbles, values);
        const __m512 scaled = _mm512_mul_ps(w, _mm512_set1_ps(scale_at(j, row, k)));
        _mm256_storeu_si256((__m256i *)(out + k), to_bf16(scaled));
    }
    for (; k < j->k; ++k) out[k] = weight_at<ELEMENT>(j, row, k);  // rows of FP8 need not be whole blocks
}

template <int ELEMENT> void each_of_row(const ptq_linear *j, int64_t row, uint16_t *out) {
    for (int64_t k = 0; k < j->k; ++k) out[k] = weight_at<ELEMENT>(j, row, k);
}

void unpack(const ptq_linear *j, int64_t first, int64_t last, uint16_t *out) {
    for (int64_t row = first; row < last; ++row, out += j->k) {
        if (j->element == PTQ_E2M1) unpack_row<PTQ_E2M1>(j, row, out);
        else if (j->element == PTQ_E4M3) unpack_row<PTQ_E4M3>(j, row, out);
        else if (j->element == PTQ_E2M3) each_of_row<PTQ_E2M3>(j, row, out);
        else each_of_row<PTQ_E3M2>(j, row, out);
    }
}

