"""convert with a text, under a budget, measured: several stages in one run."""
