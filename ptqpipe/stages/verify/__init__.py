"""verify: everything that a packed checkpoint claims, recomputed."""
