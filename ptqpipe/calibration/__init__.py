"""Calibration: runs a float model one decoder layer at a time and collects statistics of its linear inputs.

The only place that runs a model to learn about it. `runner.py` is the block-by-block run, which other algorithms can
iterate over as well; `collect.py` watches one block; `moments.py` sums; `data.py` makes the samples.
"""
