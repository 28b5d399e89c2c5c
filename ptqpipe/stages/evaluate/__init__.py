"""eval: what a checkpoint computes, measured."""
