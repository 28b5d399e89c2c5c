"""Fast versions of reference functions. A kernel is bit-equal to the torch code that it mirrors, or it is wrong.

    ptqpipe.kernels.cpu     compiled C++ for CPU tensors (AVX-512, AVX2, baseline), where a compiler built it
    ptqpipe.kernels.triton  the same for CUDA tensors

Each module has ``available()``; a kernel returns None for a combination that it does not have, and the caller then
runs the torch reference. Importing this package loads neither.
"""
