// MXFP4 written in another format without being decoded: every number keeps its value, or its block counts as lost.
//
// Integers alone, 16 codes to a word of 64 bits. A number that is not zero is 2^e or 1.5 * 2^e. Its place is
// 2 (e + 127) + (0 or 1), which puts them in order: that of code c in a block with the scale byte s is 2 s - 2 + c, but
// 2 s - 2 for c = 1, which is 2^-1.
//
// The scales are those of the exact search: quantization/lossless_mxfp4.py says why the codes tell which these are.

typedef int64_t v64 __attribute__((vector_size(4 * W)));
typedef uint64_t vu64 __attribute__((vector_size(4 * W)));

enum { WORD_LANES = W / 2, WORDS = 64 };  // words in a vector, and at a time
enum { LEAST_E4M3 = -9, TOP_E4M3 = 8 };   // exponents of its powers of two

INLINE v64 splat64(int64_t a) { return a - (v64){}; }
INLINE v64 where(v64 mask, v64 a, v64 b) { return (mask & a) | (~mask & b); }  // a mask is -1 or 0
INLINE v64 exists(vu64 bits) { return (v64)(bits != (vu64){}); }

// The bits of all magnitudes, each in the lowest one of its nibble.
struct Planes { vu64 low, middle, high; };
INLINE Planes planes_of(vu64 words) {
    const vu64 lowest = (vu64)splat64(0x1111111111111111);
    return Planes{words & lowest, words >> 1 & lowest, words >> 2 & lowest};
}

// The largest magnitude code of each word.
INLINE v64 top_code(vu64 words) {
    const Planes p = planes_of(words);
    v64 top = -exists(p.low);
    top = where(exists(p.middle), 2 - exists(p.middle & p.low), top);
    top = where(exists(p.high), 4 - exists(p.high & p.low), top);
    return where(exists(p.high & p.middle), 6 - exists(p.high & p.middle & p.low), top);
}

// Every number times two, and times four; none may become more than 6.
INLINE vu64 doubled(vu64 words) {
    const Planes p = planes_of(words);
    const vu64 normal = p.middle | p.high;
    return words + (normal << 1 | (p.low & ~normal));
}
INLINE vu64 fourfold(vu64 words) {
    const Planes p = planes_of(words);
    const vu64 normal = p.middle | p.high, half = p.low & ~normal;
    return words + (normal << 2 | half << 1 | half);
}

// Every number over two, and whether that has no code in E2M1.
INLINE vu64 halved(vu64 words, v64 *lost) {
    const Planes p = planes_of(words);
    *lost = exists(p.low & ~p.high);
    return words - (p.high << 1 | (p.middle & ~p.high));
}

// Of each word: the code of its scale, its codes for that scale in place, and whether there is none without loss (-1).
struct Carried { alignas(64) uint64_t words[WORDS]; alignas(64) int64_t d[WORDS], power[WORDS], lost[WORDS]; };

// d: exponents of the scales over the global one; out: power, the exponent of the new one, and the words.
INLINE void carry_words(Carried *c) {
    v64 least = splat64(0);
    for (int i = 0; i < WORDS; i += WORD_LANES) {
        vu64 words;
        v64 d;
        memcpy(&words, c->words + i, sizeof words), memcpy(&d, c->d + i, sizeof d);
        const v64 top = top_code(words), empty = (v64)(top == splat64(0));
        const v64 wanted = d - ((7 - top) >> 1);
        v64 power = where((v64)(wanted < splat64(LEAST_E4M3)), splat64(LEAST_E4M3), wanted);
        v64 lost = (v64)(power > splat64(TOP_E4M3));
        power = where(lost | empty, splat64(LEAST_E4M3), power);
        const v64 up = where(lost | empty, splat64(0), d - power);
        lost &= ~empty;
        words = (vu64)where((v64)(up > splat64(1)), (v64)fourfold(words), (v64)words);
        words = (vu64)where((v64)((up == splat64(1)) | (up == splat64(3))), (v64)doubled(words), (v64)words);
        memcpy(c->words + i, &words, sizeof words), memcpy(c->power + i, &power, sizeof power);
        memcpy(c->d + i, &up, sizeof up), memcpy(c->lost + i, &lost, sizeof lost);
        least = where((v64)(up < least), up, least);
    }
    int64_t lowest = 0;
    for (int i = 0; i < WORD_LANES; ++i) lowest = least[i] < lowest ? least[i] : lowest;
    if (!lowest) return;
    for (int i = 0; i < WORDS; i += WORD_LANES) {  // scales below E4M3's least
        vu64 words;
        v64 up, lost, half;
        memcpy(&words, c->words + i, sizeof words), memcpy(&up, c->d + i, sizeof up);
        memcpy(&lost, c->lost + i, sizeof lost);
        lost |= (v64)(up < splat64(-3));
        for (int k = 0; k < 3; ++k) {
            const v64 below = (v64)(up < splat64(-k));
            const vu64 less = halved(words, &half);
            words = (vu64)where(below, (v64)less, (v64)words), lost |= below & half;
        }
        memcpy(c->words + i, &words, sizeof words), memcpy(c->lost + i, &lost, sizeof lost);
    }
}

static int64_t to_nvfp4(const ptq_carry *j, const uint8_t *data, const uint8_t *scales, int64_t row, int64_t first, int n) {
    static const uint8_t codes[] = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120};
    Carried c;
    memset(&c, 0, sizeof c);
    memcpy(c.words, data, (size_t)n * 8);
    for (int i = 0; i < n; ++i) c.d[i] = scales[i / 2] - 127 - j->exponent;
    carry_words(&c);
    memcpy(j->out + row * (j->cols / 2) + first * 8, c.words, (size_t)n * 8);
    uint8_t *out = j->out_scales + row * (j->cols / 16) + first;
    int64_t lost = 0;
    for (int i = 0; i < n; ++i) out[i] = codes[c.power[i] - LEAST_E4M3], lost -= c.lost[i];
    return lost;
}

static void to_places(const ptq_carry *j, const uint8_t *data, const uint8_t *scales, int64_t row, int64_t first, int n) {
    alignas(64) uint64_t words[WORDS];
    alignas(64) int64_t top[WORDS];
    memset(words, 0, sizeof words);
    memcpy(words, data, (size_t)n * 8);
    for (int i = 0; i < WORDS; i += WORD_LANES) {
        vu64 some;
        memcpy(&some, words + i, sizeof some);
        const v64 found = top_code(some);
        memcpy(top + i, &found, sizeof found);
    }
    int16_t *out = j->places + row * (j->cols / 32) + first / 2;
    for (int i = 0; i < n / 2; ++i) {
        const int c = (int)(top[2 * i] > top[2 * i + 1] ? top[2 * i] : top[2 * i + 1]);
        out[i] = (int16_t)(c ? 2 * scales[i] - 2 + (c > 1 ? c : 0) : PTQ_NO_PLACE);
    }
}

// E4M3 codes of the numbers of a byte, by the exponent of its block's scale over that of E4M3's.
enum { FROM_FP4 = -12, TO_FP4 = 10, LOST_CODE = 0x7F };  // beyond, nothing but zero has a code
struct Pairs { uint16_t of[TO_FP4 - FROM_FP4 + 1][256]; };

INLINE int e4m3_code(int c, int d) {  // of the magnitude code c of E2M1, times 2^d
    const int e = c > 1 ? d + (c >> 1) - 1 : d - 1, half = c > 1 ? c & 1 : 0;
    if (!c) return 0;
    if (e > TOP_E4M3 || e < LEAST_E4M3 + half) return LOST_CODE;
    if (e >= -6) return (e + 7) << 3 | half << 2;
    return (2 + half) << (e + 9) >> 1;
}

static void fill_pairs(Pairs *p) {
    for (int d = FROM_FP4; d <= TO_FP4; ++d) {
        int code[16];
        for (int c = 0; c < 16; ++c) code[c] = e4m3_code(c & 7, d) | (c & 8) << 4;
        for (int b = 0; b < 256; ++b) {
            const uint8_t two[2] = {(uint8_t)code[b & 15], (uint8_t)code[b >> 4]};
            memcpy(&p->of[d - FROM_FP4][b], two, 2);
        }
    }
}

static int64_t to_e4m3(const ptq_carry *j, const Pairs *pairs, const uint8_t *data, const uint8_t *scales, int64_t row) {
    const int16_t *exponents = j->exponents + row / j->block_rows * ((j->cols + j->block_cols - 1) / j->block_cols);
    int64_t lost = 0;
    for (int64_t b = 0; b < j->cols / 32; ++b, data += 16) {
        int d = scales[b] - 127 - exponents[b * 32 / j->block_cols];
        d = d < FROM_FP4 ? FROM_FP4 : d > TO_FP4 ? TO_FP4 : d;
        const uint16_t *table = pairs->of[d - FROM_FP4];
        uint16_t found[16];
        for (int i = 0; i < 16; ++i) found[i] = table[data[i]];
        uint64_t words[4], bad = 0;
        memcpy(words, found, sizeof found);
        for (int i = 0; i < 4; ++i) bad |= ((words[i] & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101) & 0x8080808080808080;
        lost += bad != 0;
        memcpy(j->out + row * j->cols + b * 32, found, sizeof found);
    }
    return lost;
}

static int32_t carry(const ptq_carry *j) {
    if (j->cols % 32 || (j->step == PTQ_TO_E4M3 && (j->block_cols % 32 || j->block_rows < 1))) return PTQ_UNSUPPORTED;
    Pairs pairs;
    if (j->step == PTQ_TO_E4M3) fill_pairs(&pairs);
    int64_t lost = 0;
    for (int64_t row = 0; row < j->rows; ++row) {
        const uint8_t *data = j->data + row * j->data_stride, *scales = j->scales + row * j->scale_stride;
        if (j->step == PTQ_TO_E4M3) {
            lost += to_e4m3(j, &pairs, data, scales, row);
            continue;
        }
        for (int64_t first = 0; first < j->cols / 16; first += WORDS) {
            const int n = j->cols / 16 - first < WORDS ? (int)(j->cols / 16 - first) : WORDS;
            if (j->step == PTQ_PLACES) to_places(j, data + first * 8, scales + first / 2, row, first, n);
            else lost += to_nvfp4(j, data + first * 8, scales + first / 2, row, first, n);
        }
    }
    if (j->lost) *j->lost = lost;
    return PTQ_OK;
}
