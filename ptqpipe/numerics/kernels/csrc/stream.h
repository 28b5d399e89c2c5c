// Kernels that walk a matrix once, at memory speed: amax, decode, its error, codes for given float scales.

typedef double vd __attribute__((vector_size(4 * W)));      // W/2 doubles
typedef float vhalf __attribute__((vector_size(2 * W)));    // the W/2 floats that become them
typedef uint8_t vbytes __attribute__((vector_size(W)));
typedef uint16_t vshorts __attribute__((vector_size(2 * W)));

enum { CHUNK = 512, SUM_LANES = 16, SUM_VECTORS = 2 * SUM_LANES / W };

template <int DTYPE> INLINE vf load_lanes(const void *w, int64_t i) {
    if (DTYPE == PTQ_F32) {
        vf x;
        memcpy(&x, (const float *)w + i, sizeof x);
        return x;
    }
    const uint16_t *p = (const uint16_t *)w + i;
    if (DTYPE == PTQ_BF16) {
        vshorts s;
        memcpy(&s, p, sizeof s);
        return from_bits(__builtin_convertvector(s, vi) << 16);
    }
#if defined(PTQ_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(PTQ_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(PTQ_NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vshorts s;  // as half_to_float
    memcpy(&s, p, sizeof s);
    const vi half = __builtin_convertvector(s, vi), rest = (half & 0x7FFF) << 13;
    const vf finite = from_bits(rest) * from_bits(splat((254 - 15) << 23));
    const vf x = select(less(splat(0x0F7FFFFF), rest), from_bits(0x7F800000 | (rest & 0x007FFFFF)), finite);
    return from_bits(bits(x) | ((half & 0x8000) << 16));
#endif
}

template <int DTYPE> static void to_floats(const void *w, int64_t i, int n, float *out) {
    int k = 0;
    for (; k + W <= n; k += W) {
        vf x = load_lanes<DTYPE>(w, i + k);
        memcpy(out + k, &x, sizeof x);
    }
    for (; k < n; ++k) out[k] = load_one<DTYPE>(w, i + k);
}
INLINE void to_floats(int dtype, const void *w, int64_t i, int n, float *out) {
    if (dtype == PTQ_F32) to_floats<PTQ_F32>(w, i, n, out);
    else if (dtype == PTQ_F16) to_floats<PTQ_F16>(w, i, n, out);
    else to_floats<PTQ_BF16>(w, i, n, out);
}

// ---- amax ----

template <class T> INLINE T largest_bits(const T *p, int64_t n, T mask) {
    T top = 0;
    for (int64_t i = 0; i < n; ++i) {
        const T a = (T)(p[i] & mask);
        top = a > top ? a : top;
    }
    return top;
}

static int32_t amax(const ptq_amax *j, float *out, int64_t *first_bad) {
    int32_t top = 0;
    const int32_t infinite = j->dtype == PTQ_F32 ? 0x7F800000 : j->dtype == PTQ_BF16 ? 0x7F80 : 0x7C00;
    *first_bad = -1;
    for (int64_t row = 0; row < j->rows; ++row) {
        const char *p = (const char *)j->w + row * j->row_stride * dtype_bytes(j->dtype);
        const int32_t found = j->dtype == PTQ_F32 ? largest_bits<int32_t>((const int32_t *)p, j->cols, 0x7FFFFFFF)
                                                  : largest_bits<int16_t>((const int16_t *)p, j->cols, 0x7FFF);
        if (found > top) top = found;
        if (found < infinite || *first_bad >= 0) continue;
        for (int64_t i = 0; i < j->cols && *first_bad < 0; ++i) {
            const int32_t bits = j->dtype == PTQ_F32 ? ((const int32_t *)p)[i] & 0x7FFFFFFF : ((const int16_t *)p)[i] & 0x7FFF;
            if (bits >= infinite) *first_bad = row * j->cols + i;
        }
    }
    union { int32_t i; float f; } v;
    v.i = j->dtype == PTQ_BF16 ? top << 16 : top;
    *out = j->dtype == PTQ_F16 ? half_to_float((uint16_t)top) : v.f;
    return *first_bad < 0 ? PTQ_OK : PTQ_NOT_FINITE;
}

// ---- decode ----

struct Decoder {
    const ptq_decode *j;
    float pairs[256][2];  // 4-bit codes: the values of a byte's two nibbles

    explicit Decoder(const ptq_decode *job) : j(job) {
        if (j && j->code_bits == 4)
            for (int i = 0; i < 256; ++i) pairs[i][0] = j->values[i & 15], pairs[i][1] = j->values[i >> 4];
    }
};

INLINE bool decodes(const ptq_decode *j) {
    if ((j->code_bits == 4 && j->block_cols % 2) || (j->code_bits == 6 && j->block_cols % 4)) return false;
    return j->code_bits == 4 || j->code_bits == 6 || j->code_bits == 8;
}

// n values of the codes at p (on a byte edge), times s, each product rounded to float32.
INLINE void decode_run(const Decoder *d, const uint8_t *p, int n, float s, float *out) {
    const float *values = d->j->values;
    if (d->j->code_bits == 8) {
        for (int k = 0; k < n; ++k) out[k] = values[p[k]] * s;
        return;
    }
    if (d->j->code_bits == 6) {
        for (int k = 0; k < n; k += 4, p += 3) {
            const uint32_t word = p[0] | p[1] << 8 | p[2] << 16;
            for (int i = 0; i < 4; ++i) out[k + i] = values[word >> (6 * i) & 63] * s;
        }
        return;
    }
    int k = 0;
#if defined(PTQ_AVX512)
    const __m512 table = _mm512_loadu_ps(values), scale = _mm512_set1_ps(s);
    for (; k + 16 <= n; k += 16) {
        __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(p + k / 2)));
        __m512i nibbles = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));  // only the low 4 bits of a lane count
        _mm512_storeu_ps(out + k, (__m512)((vf)_mm512_permutexvar_ps(nibbles, table) * (vf)scale));
    }
#elif defined(PTQ_AVX2)
    const __m256 low = _mm256_loadu_ps(values), high = _mm256_loadu_ps(values + 8), scale = _mm256_set1_ps(s);
    const __m256i places = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (; k + 8 <= n; k += 8) {
        int32_t word;
        memcpy(&word, p + k / 2, sizeof word);
        const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), places);  // three bits of a lane count
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));    // and the fourth, as a sign
        const __m256 value =
            _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), upper);
        _mm256_storeu_ps(out + k, (__m256)((vf)value * (vf)scale));
    }
#endif
    for (; k < n; k += 2) {
        out[k] = d->pairs[p[k / 2]][0] * s;
        out[k + 1] = d->pairs[p[k / 2]][1] * s;
    }
}

INLINE float scale_at(const ptq_decode *j, int64_t i) {
    return j->scale_codes ? j->scale_values[((const uint8_t *)j->scales)[i]] : ((const float *)j->scales)[i];
}

// Columns [first, first + n) of a row, decoded; `first` is a multiple of CHUNK.
INLINE void decode_chunk(const Decoder *d, int64_t row, int64_t first, int n, float *out) {
    const ptq_decode *j = d->j;
    const uint8_t *data = j->data + row * j->data_stride + first * j->code_bits / 8;
    int64_t scale = row / j->block_rows * j->scale_cols + first / j->block_cols;
    int64_t edge = (first / j->block_cols + 1) * j->block_cols - first;  // of the block, from `first`
    for (int k = 0; k < n; edge += j->block_cols, ++scale) {
        const int stop = edge < n ? (int)edge : n;
        decode_run(d, data + (int64_t)k * j->code_bits / 8, stop - k, scale_at(j, scale), out + k);
        k = stop;
    }
}

INLINE void store_decoded(const float *x, int n, int dtype, void *out, int64_t at) {
    if (dtype == PTQ_F32) {
        memcpy((float *)out + at, x, (size_t)n * sizeof(float));
        return;
    }
    uint16_t *p = (uint16_t *)out + at;
    for (int k = 0; k < n; ++k) {  // round to nearest, ties to even; NaN stays NaN
        uint32_t b;
        memcpy(&b, x + k, sizeof b);
        const uint32_t rounded = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
        p[k] = (uint16_t)((b & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

// Squares and squared differences in SUM_LANES float64 sums: lane = column mod SUM_LANES, rows in order.
struct Sums { vd error[SUM_VECTORS], energy[SUM_VECTORS]; };

INLINE void add_squares(const float *x, const float *w, int n, Sums *sums) {
    vd error[SUM_VECTORS], energy[SUM_VECTORS];
    memcpy(error, sums->error, sizeof error), memcpy(energy, sums->energy, sizeof energy);
    for (int k = 0; k < n; k += SUM_LANES)
        for (int i = 0; i < SUM_VECTORS; ++i) {
            vhalf a, b;
            memcpy(&a, x + k + i * (W / 2), sizeof a), memcpy(&b, w + k + i * (W / 2), sizeof b);
            const vd v = __builtin_convertvector(b, vd), diff = __builtin_convertvector(a, vd) - v;
            error[i] = error[i] + diff * diff;
            energy[i] = energy[i] + v * v;
        }
    memcpy(sums->error, error, sizeof error), memcpy(sums->energy, energy, sizeof energy);
}

// Whether x and w are the same numbers, zero and its negative being one; n a multiple of SUM_LANES.
INLINE bool same_numbers(const float *x, const float *w, int n) {
    vi differ = splat(0);
    for (int k = 0; k < n; k += W) {
        vf a, b;
        memcpy(&a, x + k, sizeof a), memcpy(&b, w + k, sizeof b);
        differ = differ | select(less_equal(a, b), splat(0), splat(1)) | select(less_equal(b, a), splat(0), splat(1));
    }
    int32_t any_lane = 0;
    for (int i = 0; i < W; ++i) any_lane |= differ[i];
    return !any_lane;
}

// The energy of add_squares alone: what it does where x and w are the same numbers, whose differences add +0.
INLINE void add_energy(const float *w, int n, Sums *sums) {
    vd energy[SUM_VECTORS];
    memcpy(energy, sums->energy, sizeof energy);
    for (int k = 0; k < n; k += SUM_LANES)
        for (int i = 0; i < SUM_VECTORS; ++i) {
            vhalf a;
            memcpy(&a, w + k + i * (W / 2), sizeof a);
            const vd v = __builtin_convertvector(a, vd);
            energy[i] = energy[i] + v * v;
        }
    memcpy(sums->energy, energy, sizeof energy);
}

static int32_t decode(const ptq_decode *j) {
    if (!decodes(j) || (j->other && !decodes(j->other))) return PTQ_UNSUPPORTED;
    const Decoder d(j), other(j->other);
    Sums sums;
    memset(&sums, 0, sizeof sums);
    alignas(64) float x[CHUNK], w[CHUNK];
    for (int64_t row = 0; row < j->rows; ++row)
        for (int64_t first = 0; first < j->cols; first += CHUNK) {
            const int n = j->cols - first < CHUNK ? (int)(j->cols - first) : CHUNK;
            decode_chunk(&d, row, first, n, x);
            if (j->out) store_decoded(x, n, j->out_dtype, j->out, row * j->cols + first);
            if (!j->w && !j->other) continue;
            if (j->other) decode_chunk(&other, row, first, n, w);
            else to_floats(j->w_dtype, j->w, row * j->w_stride + first, n, w);
            for (int k = n; k % SUM_LANES; ++k) x[k] = w[k] = 0.0f;
            if (!j->other || !same_numbers(x, w, (n + SUM_LANES - 1) / SUM_LANES * SUM_LANES)) add_squares(x, w, n, &sums);
            else if (!j->only_compare) add_energy(w, n, &sums);
        }
    if (j->sums) {
        double lanes[2][SUM_LANES];
        memcpy(lanes, &sums, sizeof lanes);
        j->sums[0] = sum_of(lanes[0]), j->sums[1] = sum_of(lanes[1]);
    }
    return PTQ_OK;
}

// ---- codes for given float32 scales ----

template <class E, int DTYPE> static int32_t encode_rows(const ptq_encode *j) {
    vi top = splat(0);
    uint8_t tail[W];
    for (int64_t row = 0; row < j->rows; ++row) {
        const int64_t at = row * j->row_stride;
        const float *scales = j->scales + row / j->block_rows * j->scale_cols;
        uint8_t *out = j->data + row * j->cols;
        for (int64_t first = 0; first < j->cols; first += j->block_cols) {
            const int64_t stop = first + j->block_cols < j->cols ? first + j->block_cols : j->cols;
            const vf r = splat(E::unit * (1.0f / scales[first / j->block_cols]));
            for (int64_t k = first; k < stop; k += W) {
                vf x;
                if (stop - k >= W) x = load_lanes<DTYPE>(j->w, at + k);
                else for (int i = 0; i < W; ++i) x[i] = k + i < stop ? load_one<DTYPE>(j->w, at + k + i) : 0.0f;
                const vf a = abs_of(x);
                top = max_of(top, bits(a));
                const vi code = E::code(a * r) | (shift_right(bits(x), 31) << (E::code_bits - 1));
                uint8_t *p = stop - k >= W ? out + k : tail;
                store_bytes(code, p);
                if (p == tail) memcpy(out + k, tail, (size_t)(stop - k));
            }
        }
    }
    return any(mask_not(less(top, splat(0x7F800000)))) ? PTQ_NOT_FINITE : PTQ_OK;
}

static int32_t encode_integers(const ptq_encode *j);  // integers.h

static int32_t encode(const ptq_encode *j) {
    if (j->element != PTQ_E4M3) return encode_integers(j);
    if (j->dtype == PTQ_F32) return encode_rows<E4M3, PTQ_F32>(j);
    return j->dtype == PTQ_F16 ? encode_rows<E4M3, PTQ_F16>(j) : encode_rows<E4M3, PTQ_BF16>(j);
}
