// The steps of the quantized all-reduce for AVX2: a file of its own, so that two cores compile the kernels.
#define PTQ_WIRE_ALONE 1
#include "isa_avx2.cpp"
