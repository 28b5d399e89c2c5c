"""convert: a published checkpoint in, a packed low-precision checkpoint out."""
