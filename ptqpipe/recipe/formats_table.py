"""formats: everything that can be named on the command line: formats, containers, searches and transforms.

What a container or a transform is for says the first line of its file, a search its row. Nothing here imports torch,
so that the answer comes at once.
"""

import ast
import pkgutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from ptqpipe.errors import arg
from ptqpipe.models.reader_facts import READERS, evidence
from ptqpipe.numerics.schemes import SCHEMES, Activation, Scheme
from ptqpipe.numerics.search import SEARCHES
from ptqpipe.run.quantities import table

SHAPE = (4096, 4096)  # of the weight whose bits are told
LINE = 80  # columns
# Where the files of what has a name lie, and which files there are something else.
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "containers": {"checkpoint.layouts": ()},
    "transforms": {
        "quantization.transforms": ("learn_rotations", "problem"),
        "models.folding": ("find_structure", "structure", "tensors"),
    },
}

_COLUMNS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TRT", "transformers": "HF"}
_LEGEND = (  # with the spellings of `json` and `reader`
    "A name may be written in any case. element/block/scale[/global], such as e2m1/8/ue5m3, is a format, too. Bits are "
    "those of a weight of 4096 x 4096, scales included. The last columns say which programs take the format, from "
    "the container that {reader} of convert chooses (HF: transformers, TRT: TensorRT-LLM), and how that is known: run "
    "(it computed with such a checkpoint), loads (its own loader takes every number, its kernels were not run), read "
    "(its source code was read); {json} has versions and dates. ptqpipe itself reads all of them. See docs/formats.md."
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
        "searches": named("searches"),
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


def named(kind: str) -> list[dict[str, str]]:
    """Name and purpose of all searches, or of everything of a kind of `PACKAGES`; no file is imported."""
    if kind == "searches":
        return [{"name": name, "purpose": row.purpose} for name, row in sorted(SEARCHES.items())]
    files = {}
    for package, others in PACKAGES[kind].items():
        folders = _folders(package)
        for name in {module.name for module in pkgutil.iter_modules(folders)} - set(others):
            if not name.startswith("_"):
                files[name] = next(file for folder in folders if (file := Path(folder, f"{name}.py")).is_file())
    return [{"name": name, "purpose": _purpose(file)} for name, file in sorted(files.items())]


def _folders(package: str) -> list[str]:
    loaded = sys.modules.get(f"ptqpipe.{package}")  # has what was added to it
    if loaded is not None:
        return list(loaded.__path__)
    return [str(Path(__file__).parents[1].joinpath(*package.split(".")))]  # its parent would import torch


def _purpose(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "")


def render() -> str:
    content = to_json()
    head = ["format", "bits", "activations", "multiplies on", *_COLUMNS.values()]
    rows = [
        [
            one["name"],
            f"{one['bits_per_weight']:.2f}",
            one["activations"],
            one["native"] or "any, in 16 bits",
            *(one["readers"][reader]["mark"] if reader in one["readers"] else "-" for reader in _COLUMNS),
        ]
        for one in content["formats"]
    ]
    lines = [
        table(head, rows, left=len(head)),
        "",
        *textwrap.wrap(_LEGEND.format(reader=arg("reader"), json=arg("json")), LINE),
        "",
    ]
    for title in ("containers", "searches", "transforms"):
        width = max(len(one["name"]) for one in content[title])
        lines.append(f"{title}:")
        for one in content[title]:
            start = f"  {one['name']:<{width}}  "
            lines += textwrap.wrap(one["purpose"], LINE, initial_indent=start, subsequent_indent=" " * len(start))
        lines.append("")
    return "\n".join(lines[:-1])
