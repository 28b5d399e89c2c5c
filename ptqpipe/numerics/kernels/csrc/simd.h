// W float lanes and their masks, on AVX-512 (16), AVX2 (8), NEON (4) or whatever the compiler makes of 4 lanes.
//
// Included inside an unnamed namespace of each per-ISA translation unit, after the target pragma: everything here has
// internal linkage, so no code compiled for a newer CPU can be merged into an older path by the linker.
// GCC and clang vector extensions carry the arithmetic; intrinsics are used where they map badly.

#define INLINE static inline __attribute__((always_inline))

#if defined(PTQ_AVX512)
enum { W = 16 };
#elif defined(PTQ_AVX2)
enum { W = 8 };
#else
enum { W = 4 };
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));

INLINE vf splat(float a) { return a - (vf){}; }
INLINE vi splat(int32_t a) { return a - (vi){}; }
INLINE vi bits(vf a) { return (vi)a; }
INLINE vf from_bits(vi a) { return (vf)a; }
INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
INLINE vi shift_right(vi a, int n) { return (vi)((vu)a >> n); }
INLINE vf abs_of(vf a) { return (vf)((vi)a & 0x7FFFFFFF); }

// Has `a` computed before the code behind it. GCC leaves a sum of many terms to its end otherwise, and all terms wait for
// it in memory.
#if defined(__x86_64__)
INLINE void settle(vf &a) { __asm__("" : "+v"(a)); }
#elif defined(__aarch64__)
INLINE void settle(vf &a) { __asm__("" : "+w"(a)); }
#else
INLINE void settle(vf &) {}
#endif

#if defined(PTQ_AVX512)
typedef __mmask16 vm;
INLINE vm less(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
INLINE vm less_equal(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }
INLINE vm less(vi a, vi b) { return _mm512_cmp_epi32_mask((__m512i)a, (__m512i)b, _MM_CMPINT_LT); }
INLINE vf select(vm m, vf a, vf b) { return (vf)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
INLINE vi select(vm m, vi a, vi b) { return (vi)_mm512_mask_blend_epi32(m, (__m512i)b, (__m512i)a); }
INLINE vf min_of(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vf max_of(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vm mask_and(vm a, vm b) { return (vm)(a & b); }
INLINE vm mask_or(vm a, vm b) { return (vm)(a | b); }
INLINE vm mask_not(vm a) { return (vm)~a; }
INLINE bool any(vm m) { return m != 0; }
INLINE bool all(vm m) { return m == 0xFFFF; }
INLINE unsigned lane_bits(vm m) { return m; }
#else
typedef vi vm;
INLINE vm less(vf a, vf b) { return a < b; }
INLINE vm less_equal(vf a, vf b) { return a <= b; }
INLINE vm less(vi a, vi b) { return a < b; }
INLINE vm mask_and(vm a, vm b) { return a & b; }
INLINE vm mask_or(vm a, vm b) { return a | b; }
INLINE vm mask_not(vm a) { return ~a; }
#if defined(PTQ_AVX2)
INLINE vf select(vm m, vf a, vf b) { return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)m); }
INLINE vf min_of(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vf max_of(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE unsigned lane_bits(vm m) { return (unsigned)_mm256_movemask_ps((__m256)m); }
#else
#if defined(PTQ_NEON)
INLINE vf select(vm m, vf a, vf b) { return (vf)vbslq_f32((uint32x4_t)m, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf select(vm m, vf a, vf b) { return (vf)(((vi)a & m) | ((vi)b & ~m)); }
#endif
#if defined(__SSE2__)
INLINE vf min_of(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
INLINE vf max_of(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE unsigned lane_bits(vm m) { return (unsigned)_mm_movemask_ps((__m128)m); }
#else
INLINE vf min_of(vf a, vf b) { return select(a < b, a, b); }
INLINE vf max_of(vf a, vf b) { return select(a > b, a, b); }
#if defined(PTQ_NEON)
INLINE unsigned lane_bits(vm m) { return vaddvq_u32((uint32x4_t)(m & (vi){1, 2, 4, 8})); }
#else
INLINE unsigned lane_bits(vm m) {
    unsigned out = 0;
    for (int i = 0; i < W; ++i) out |= (unsigned)(m[i] & 1) << i;
    return out;
}
#endif
#endif
#endif
INLINE vi select(vm m, vi a, vi b) { return (vi)select(m, (vf)a, (vf)b); }
INLINE bool any(vm m) { return lane_bits(m) != 0; }
INLINE bool all(vm m) { return lane_bits(m) == (1u << W) - 1; }
#endif

#if defined(PTQ_AVX512)
INLINE vi max_of(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vi min_of(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE vm no_lanes() { return 0; }
#elif defined(PTQ_AVX2)
INLINE vi max_of(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vi min_of(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE vm no_lanes() { return splat(0); }
#else
#if defined(PTQ_NEON)
INLINE vi max_of(vi a, vi b) { return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
INLINE vi min_of(vi a, vi b) { return (vi)vminq_s32((int32x4_t)a, (int32x4_t)b); }
#else
INLINE vi max_of(vi a, vi b) { return select(less(a, b), b, a); }
INLINE vi min_of(vi a, vi b) { return select(less(a, b), a, b); }
#endif
INLINE vm no_lanes() { return splat(0); }
#endif

// Of numbers that are not negative, whose bits are in their order: integers compare on more ports, and sooner.
#if defined(PTQ_AVX512) || defined(PTQ_AVX2)
INLINE vf larger(vf a, vf b) { return from_bits(max_of(bits(a), bits(b))); }
INLINE vf smaller(vf a, vf b) { return from_bits(min_of(bits(a), bits(b))); }
#else
INLINE vf larger(vf a, vf b) { return max_of(a, b); }
INLINE vf smaller(vf a, vf b) { return min_of(a, b); }
#endif
