"""Fast versions of reference functions, bit-equal to the torch code that they mirror, and products of packed weights.

    ptqpipe.numerics.kernels.cpu     compiled C++ for CPU tensors (AVX-512, AVX2, NEON, baseline), if they were built
    ptqpipe.numerics.kernels.triton  the same for CUDA tensors

    ptqpipe.numerics.kernels.cpu_linear, triton_linear, cuda_fp8
        products with weights that stay packed, whose sums come in an order of their own: equal within stated bounds

Each module has ``available()``; a kernel returns None for a combination that it does not have, and the caller then
runs the torch reference. Importing this package loads neither.
"""
