"""simulate: all-reduces on machines that are not at hand."""
