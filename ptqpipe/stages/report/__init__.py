"""report: the numbers of one checkpoint, gathered for people."""
