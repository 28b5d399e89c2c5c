"""plan: a format for every layer, under a budget."""
