"""Numbers: formats, schemes, quantized tensors, searches for scales, kernels."""
