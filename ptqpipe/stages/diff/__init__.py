"""diff: what two checkpoints say differently."""
