"""Writing one checkpoint from another: what will be written, how a unit is quantized, and the run itself.

    job.py              `CheckpointJob`, the contract of everything that writes a checkpoint, and what runs it
    planned_outputs.py  what a recipe writes for a source
    units.py            quantizes a unit by its rule; input_moments.py: the statistics of its inputs
    kv_cache.py         the scales of an FP8 KV cache
    conversion.py       the `CheckpointJob` of convert and tune; consume.py: learned codes, deleted once written

Knows no command line and prints nothing but progress.
"""
