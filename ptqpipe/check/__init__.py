"""What judges a checkpoint: verify, evaluate, report, diff, inspect."""
