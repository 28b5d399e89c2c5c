"""tune: learned codes, or GPTQ in the order of the model."""
