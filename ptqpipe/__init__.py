"""ptqpipe: Hugging Face checkpoints to FP4 and FP8, streaming, with block scales that are proven optimal."""
