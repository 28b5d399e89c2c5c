"""A model as named weights, and what is known of families and of the programs that load them."""
