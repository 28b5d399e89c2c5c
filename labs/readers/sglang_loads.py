"""Loads what ptqpipe writes with SGLang's own code, on the CPU, and compares every parameter with the checkpoint.

Usage: python -m labs.readers.sglang_loads [MODEL ...] [--families [KIND ...]] --sglang PYTHON
           [--outputs nvfp4@modelopt ...]

MODEL is a float checkpoint; ``--families`` are the tiny models of the tests, in their vendors' layout. Each output
(SCHEME[@CONTAINER], by default all that ``convert --reader sglang`` writes) is converted from it. PYTHON is the
interpreter of an environment with sglang 0.5.23; its CUDA packages need not be there (``sglang_child.py``). SGLang
reads config.json, chooses its layer classes, makes their parameters and fills them from the files. Its kernels, and
what it repacks for them, need a GPU and are not run. What is printed: ``loads.py``.
"""

import sys

from labs.readers.loads import main

if __name__ == "__main__":
    sys.exit(main("sglang", "sglang_child", __doc__ or ""))
