"""formats: everything that can be named on the command line: formats, containers, searches and transforms.

What a container, a search or a transform is for says the first line of its file. Nothing here imports torch, so that
the answer comes at once.
"""

import ast
import pkgutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ptqpipe.models.reader_facts import READERS, evidence
from ptqpipe.numerics.schemes import SCHEMES, Activation, Scheme
from ptqpipe.run.quantities import table

SHAPE = (4096, 4096)  # of the weight whose bits are told
LINE = 80  # columns
# Packages whose files are found by name, and their files that are something else.
PACKAGES: dict[str, tuple[str, ...]] = {
    "containers": (),
    "search": ("least", "objective", "proof"),
    "transforms": ("find_structure", "folding", "learn_rotations", "problem", "structure"),
}

_COLUMNS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TRT", "transformers": "HF"}
_LEGEND = (
    "A name may be written in any case. element/block/scale[/global], such as e2m1/8/ue5m3, is a format, too. Bits are "
    "those of a weight of 4096 x 4096, scales included. The last columns say which programs take the format, from "
    "the container that `convert --for` chooses (HF: transformers, TRT: TensorRT-LLM), and how that is known: run (it "
    "computed with such a checkpoint), loads (its own loader takes every number, its kernels were not run), read (its "
    "source code was read); `--json` has versions and dates. ptqpipe itself reads all of them. See docs/formats.md."
)

_ACTIVATIONS = {
    Activation.NONE: "16 bits",
    Activation.NVFP4_STATIC_GLOBAL: "NVFP4, static",
    Activation.MXFP4: "MXFP4",
    Activation.MXFP8: "MXFP8",
    Activation.FP8_TOKEN: "FP8 per token",
    Activation.FP8_GROUP: "FP8 per 128",
    Activation.FP8_TENSOR_STATIC: "FP8, static",
    Activation.INT8_TOKEN: "INT8, dynamic",
}


def to_json() -> dict[str, Any]:
    """All names: of formats with what they cost and need, of containers, searches and transforms with a line each."""
    return {
        "formats": [_described(scheme) for scheme in SCHEMES.values()],
        "containers": [{**row, "written": "read only" not in row["purpose"]} for row in named("containers")],
        "searches": named("search"),
        "transforms": named("transforms"),
    }


def _described(scheme: Scheme) -> dict[str, Any]:
    return {
        "name": scheme.name,
        "aliases": list(scheme.aliases),
        "bits_per_weight": round(scheme.bits_per_weight(SHAPE), 3),
        "activations": _ACTIVATIONS[scheme.activation],
        "native": scheme.native,
        "readers": {name: evidence(name, scheme.name)._asdict() for name in READERS if scheme.name in READERS[name]},
        "container": scheme.container,
        "description": scheme.describe(),
    }


def named(package: str) -> list[dict[str, str]]:
    """Name and purpose of every file of a package of `PACKAGES` that can be named; none is imported."""
    folders = _folders(package)
    names = sorted({found.name for found in pkgutil.iter_modules(folders)} - set(PACKAGES[package]))
    files = {name: next(file for folder in folders if (file := Path(folder, f"{name}.py")).is_file()) for name in names}
    return [{"name": name, "purpose": _purpose(file)} for name, file in files.items() if not name.startswith("_")]


def _folders(package: str) -> list[str]:
    """Where the files of a package lie."""
    loaded = sys.modules.get(f"ptqpipe.{package}")  # has what was added to it
    if loaded is not None:
        return list(loaded.__path__)
    spec = find_spec(f"ptqpipe.{package}")
    return [] if spec is None else list(spec.submodule_search_locations or ())


def _purpose(file: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "")


def render() -> str:
    """Tables for a terminal of 80 columns."""
    found = to_json()
    head = ["format", "bits", "activations", "multiplies on", *_COLUMNS.values()]
    rows = [
        [
            one["name"],
            f"{one['bits_per_weight']:.2f}",
            one["activations"],
            one["native"] or "any, in 16 bits",
            *(one["readers"][reader]["mark"] if reader in one["readers"] else "-" for reader in _COLUMNS),
        ]
        for one in found["formats"]
    ]
    lines = [table(head, rows, left=len(head)), "", *textwrap.wrap(_LEGEND, LINE), ""]
    for title in ("containers", "searches", "transforms"):
        width = max(len(one["name"]) for one in found[title])
        lines.append(f"{title}:")
        for one in found[title]:
            start = f"  {one['name']:<{width}}  "
            lines += textwrap.wrap(one["purpose"], LINE, initial_indent=start, subsequent_indent=" " * len(start))
        lines.append("")
    return "\n".join(lines[:-1])
