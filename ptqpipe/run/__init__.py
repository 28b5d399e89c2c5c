"""Threads, memory, processes and quantities; no byte of a checkpoint depends on them."""
