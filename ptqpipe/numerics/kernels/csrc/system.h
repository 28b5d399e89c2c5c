// Everything from outside, included before any target pragma.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's AVX-512 intrinsics, which leave a register undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only
#endif
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif
#include "api.h"

// A T that a thread keeps. Its address is hidden from the compiler, which would ask for it anew, by a call that no register
// survives, wherever it can tell that it is this one.
template <class T> static inline T *of_thread() {
    static thread_local T kept;
    T *address = &kept;
    __asm__("" : "+r"(address));
    return address;
}
