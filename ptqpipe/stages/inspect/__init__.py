"""inspect: what is in a checkpoint."""
