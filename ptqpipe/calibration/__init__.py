"""Calibration: runs a float model one decoder layer at a time and collects statistics of its linear inputs.

The only package that runs a model to learn about it. `runner.py` runs it block by block, and other algorithms iterate
over it, too; `collect.py` observes the inputs of one block; `moments.py` sums them; `data.py` makes the samples.
"""
