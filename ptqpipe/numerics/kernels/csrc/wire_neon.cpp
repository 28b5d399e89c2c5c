// The steps of the quantized all-reduce for NEON: a file of its own, so that two cores compile the kernels.
#define PTQ_WIRE_ALONE 1
#include "isa_neon.cpp"
