"""relayout: the same numbers in another container."""
