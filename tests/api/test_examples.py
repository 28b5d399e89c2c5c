"""Claims: what docstrings and pages show of the Python API runs as it is shown."""

import doctest
import json
import re
import runpy
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ptqpipe

ROOT = Path(__file__).resolve().parents[2]
# In this order: what one example writes, a later one reads.
SHOWN = (
    "quantize", "convert", "load_tensors", "verify", "inspect", "relayout", "diff", "dequantize", "generate",
    "calibrate", "transform", "tune", "plan", "evaluate", "report", "serve", "quantize_model",
    "save_checkpoint", "Config", "load_model", "QTensor", "PtqError",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_every_docstring_has_an_example_and_it_runs(there: Path) -> None:
    names = {"ptqpipe": ptqpipe, "torch": torch, "json": json, "urllib": urllib, "Path": Path}
    names["AutoModelForCausalLM"] = AutoModelForCausalLM
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    assert {*SHOWN, "__version__"} == set(dir(ptqpipe))
    for name in SHOWN:
        text = getattr(ptqpipe, name).__doc__
        test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
        assert test.examples, f"{name} has no example"
        runner.run(test, out=said.append)
    assert said == [], "".join(said)


def python_blocks(page: Path) -> list[str]:
    """The blocks of code of a page that are Python's."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_every_block_of_the_page_runs(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("MODEL", tmp_path / "MODEL")
    shutil.copyfile("TEXT.txt", tmp_path / "TEXT.txt")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = python_blocks(ROOT / "docs" / "python.md")
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["checked"].ok
    assert names["best"].path == Path("CALIBRATED")
    assert names["served"]["data"][0]["id"] == "OUT"
    assert ptqpipe.diff("FROM-MEMORY", "OUT").same_tensors


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(there: Path) -> None:
    content = json.loads((ROOT / "examples" / "quantize.ipynb").read_text(encoding="utf-8"))
    assert (content["nbformat"], len({cell["id"] for cell in content["cells"]})) == (4, len(content["cells"]))
    names: dict[str, Any] = {}
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
    assert names["checked"].ok
    assert names["measured"].kl > 0


_QUICK = ["--quality", "fast", "--samples", "8", "--seqlen", "64"]
SCRIPTS: dict[str, list[str]] = {
    "quantize.py": ["MODEL", "--out", "script-quantize", "--text", "TEXT.txt"],
    "calibrate.py": ["MODEL", "TEXT.txt", *_QUICK, "--out", "script-cal"],
    "in_memory.py": ["MODEL", "TEXT.txt", *_QUICK, "--out", "script-mem"],
}


def test_every_example_has_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == SCRIPTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_run(name: str, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *SCRIPTS[name]])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out = Path(SCRIPTS[name][SCRIPTS[name].index("--out") + 1])
    assert ptqpipe.verify(out).ok
