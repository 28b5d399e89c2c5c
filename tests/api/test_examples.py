"""Claims: what docstrings and pages show of the Python API runs as it is shown."""

import doctest
import json
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import ptqpipe

# In this order: what one example writes, a later one reads.
SHOWN = (
    "quantize", "convert", "load_tensors", "verify", "inspect", "relayout", "diff", "dequantize", "generate",
    "calibrate", "transform", "tune", "plan", "evaluate", "report", "simulate", "serve", "quantize_model",
    "save_checkpoint", "Config",
)  # fmt: skip


def test_every_docstring_has_an_example_and_it_runs(there: Path) -> None:
    names = {"ptqpipe": ptqpipe, "torch": torch, "json": json, "urllib": urllib, "Path": Path}
    names["AutoModelForCausalLM"] = AutoModelForCausalLM
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for name in SHOWN:
        text = getattr(ptqpipe, name).__doc__
        test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
        assert test.examples, f"{name} has no example"
        runner.run(test, out=said.append)
    assert said == [], "".join(said)
