"""How good a model is: perplexity, KL divergence to another model's logits, lm-eval tasks; with intervals."""
