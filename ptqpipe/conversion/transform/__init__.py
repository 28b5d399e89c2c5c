"""transform: an equivalent float checkpoint that quantizes better."""
