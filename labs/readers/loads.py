"""What sglang_loads.py and vllm_fills.py share: models x outputs through a reader's own loader, tensor by tensor.

A tensor of the checkpoint has landed where its bytes, or its numbers in the wider or narrower float that the reader
keeps, lie in a parameter of the same layer: in one run, or row by row (rows that the reader interleaves, pads or
permutes). The names say nothing, so that this holds for every family. One JSON line an output:

    methods   the classes that the reader chose
    landed    tensors of the checkpoint that lie in its parameters
    missing   those that it left out or changed
    unfilled  matrices of its model, or parts of them, into which nothing was put
    problem   what it said where it refused
    refused   what ``convert --reader`` says instead of writing it for this reader

A pair that the file of ``--results`` has a line of is not tried again: a run that was broken off goes on.
"""

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from labs.readers.loader_child import MARK

ROOT = Path(__file__).resolve().parents[2]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ORDERED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a checkpoint, by their names."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def tensors_of_drafts(folder: Path) -> Tensors:
    """Those of the multi-token prediction layer alone, without its number, which readers' models for drafts do not
    have. Its copies of the embedding and the head are left out: these models share the main one's."""
    from ptqpipe.models.families import mtp_layer

    layer = mtp_layer(json.loads((folder / "config.json").read_text()))
    found = {name.replace(layer, "drafts.").replace(".experts.", ".experts_"): value
             for name, value in tensors_of(folder).items() if name.startswith((layer, "mtp."))}  # fmt: skip
    return {name: value for name, value in found.items() if not name.endswith(("embed_tokens.weight", "head.weight"))}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _lines(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each row."""
    data, step = _bytes(tensor), tensor.shape[-1] * tensor.element_size()
    return [data[at : at + step] for at in range(0, len(data), step)]


def _layer(name: str) -> str:
    """The first number of a name: that of its layer."""
    found = re.search(r"\.(\d+)(\.|$)", name)
    return found[1] if found else ""


class Loaded:
    """The parameters of a reader's model, to be asked for the bytes of tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._bytes = {name: _bytes(value) for name, value in tensors.items()}
        self._rows: dict[tuple[str, int], dict[bytes, int]] = {}
        self._layers: dict[str, list[str]] = {}
        for name in tensors:
            self._layers.setdefault(_layer(name), []).append(name)

    def place(self, name: str, value: torch.Tensor) -> tuple[str, int] | None:
        """(parameter, offset in bytes of the first row) where a tensor of the checkpoint lies."""
        for own in dict.fromkeys((_layer(name), *self._layers)) if not _layer(name) else (_layer(name),):
            for parameter in self._layers.get(own, ()):
                for form in _forms(name, value, self._tensors[parameter].dtype):
                    found = self._find(parameter, form)
                    if found is not None:
                        return parameter, found
        return None

    def _find(self, parameter: str, value: torch.Tensor) -> int | None:
        whole, size = _bytes(value), max(value.element_size(), 1)
        start = self._bytes[parameter].find(whole)
        while start >= 0 and start % size:
            start = self._bytes[parameter].find(whole, start + 1)
        if start >= 0 or value.dim() < 2:
            return start if start >= 0 else None
        row = value.shape[-1] * size
        if row < 8 or math.prod(value.shape[:-1]) < 2:
            return None
        rows = self._rows_of(parameter, row)
        places = [rows.get(whole[at : at + row], -1) for at in range(0, len(whole), row)]
        # Another order of the same rows is one that rotary embeddings of this reader want (Llama 4 in vLLM).
        return min(places) * row if min(places) >= 0 and len(set(places)) == len(places) else None

    def _rows_of(self, parameter: str, row: int) -> dict[bytes, int]:
        """Runs of ``row`` bytes from the beginning of every row of a parameter on, with their order."""
        if (parameter, row) not in self._rows:
            value = self._tensors[parameter]
            step = (value.shape[-1] if value.dim() else 1) * value.element_size()
            data, starts = self._bytes[parameter], range(0, max(step // row, 1) * row, row)
            found: dict[bytes, int] = {}
            for line in range(0, len(data), max(step, 1)):
                for at in starts:
                    found.setdefault(data[line + at : line + at + row], len(found))
            self._rows[parameter, row] = found
        return self._rows[parameter, row]

    def beside(self, name: str, scales: torch.Tensor, codes: torch.Tensor) -> bool:
        """Whether the rows of scales lie in a parameter in the order in which those of their codes lie in another. Rows
        of a few bytes, which others have, too, are not found by themselves where a reader pads or permutes them."""
        near = [self._tensors[each] for each in self._layers.get(_layer(name), ()) if self._tensors[each].dim() > 1]
        wanted, size = _lines(codes), codes.shape[-1] * codes.element_size()
        for held in near:
            first: dict[bytes, int] = {}
            for at, line in enumerate(_lines(held)):
                first.setdefault(line[:size], at)
            order = [first[line] for line in wanted if line in first]
            for other in near if len(order) == len(wanted) else ():
                lines = _lines(other)
                for form in map(_lines, _forms(name, scales, other.dtype)):
                    fits = len(lines) == len(_lines(held)) and len(form) == len(order)
                    if fits and all(lines[at].startswith(line) for at, line in zip(order, form, strict=True)):
                        return True
        return False

    def unfilled(self) -> list[str]:
        """Matrices with a row, or a matrix of experts, that nothing was put into."""
        mark = bytes([MARK])
        return [
            name
            for name, value in self._tensors.items()
            if value.dim() > 1 and value.numel() >= 64 and mark * value.shape[-1] * value.element_size()
            in self._bytes[name]
        ]  # fmt: skip


def _forms(name: str, value: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor as a parameter of ``dtype`` may hold it."""
    if value.is_floating_point() and value.dtype in FLOATS and dtype in FLOATS:
        yield value.to(dtype)
        if name.endswith("A_log"):
            yield (-torch.exp(value.float())).to(dtype)
        if "norm" in name:
            yield value.to(dtype) + 1  # Gemma multiplies by (1 + weight)
        if value.dim() > 1:
            yield value.transpose(-1, -2).to(dtype)
    elif value.element_size() == dtype.itemsize:
        yield value
        if value.dtype == torch.int32 and value.dim() > 1:  # SGLang's experts in packed integers
            yield value.transpose(-1, -2)


def compare(checkpoint: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Where each tensor of the checkpoint went."""
    parameters = Loaded(loaded)
    places = {name: parameters.place(name, value) for name, value in checkpoint.items()}
    missing = sorted(
        name for name, place in places.items() if place is None and not _beside(parameters, checkpoint, name)
    )
    for group in ORDERED:
        for name, place in places.items():
            parent, _, leaf = name.partition(f".{group[0]}.")
            others = [places.get(f"{parent}.{other}.{leaf}") for other in group[1:]] if leaf else []
            for before, after in zip([place, *others], others, strict=False):
                if before and after and before[0] == after[0] and before[1] > after[1]:
                    missing.append(f"{name} (in the wrong order)")
    return {"landed": len(checkpoint) - len(missing), "missing": missing, "unfilled": _kinds(parameters.unfilled())}


def _beside(parameters: Loaded, checkpoint: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether scales that were not found lie as their codes do."""
    parent, _, leaf = name.rpartition(".")
    codes = checkpoint.get(f"{parent}.weight_packed", checkpoint.get(f"{parent}.weight"))
    return leaf == "weight_scale" and codes is not None and parameters.beside(name, checkpoint[name], codes)


def _kinds(names: Iterable[str]) -> list[str]:
    """Names without the numbers of layers and experts, each once."""
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})


class Reader:
    """A reader's process, which has imported it and loads one checkpoint after the other."""

    def __init__(self, child: str, python: str, *, drafts: bool = False) -> None:
        self._drafts = drafts
        command = [python, "-m", f"labs.readers.{child}"]
        log = open(os.environ.get("LOADS_LOG", os.devnull), "a")  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": os.environ.get("READER_PYTHONPATH", "")}
        environment["LOADS_DRAFTS"] = "1" if drafts else ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT
        )

    def load(self, packed: Path) -> dict[str, Any]:
        """What became of the tensors of one checkpoint."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            out = Path(name, "loaded.safetensors")
            self._process.stdin.write(f"{packed.resolve()}\t{out}\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"problem": "the process ended"}')
            if answer:
                return answer
            with safe_open(out, "pt") as file:
                methods = json.loads(file.metadata()["methods"])
                loaded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return {"methods": methods} | compare(tensors_of_drafts(packed) if self._drafts else tensors_of(packed), loaded)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def family_models(kinds: Iterable[str], scratch: Path, *, drafts: bool = False) -> Iterator[Path]:
    """Tiny models of families, in their vendors' layout; all of them for no ``kinds``.

    drafts  those with a multi-token prediction layer, with it
    """
    from tests import families, family_rows

    if drafts:
        for kind in kinds or families.DRAFTING:
            yield families.make_model(scratch / kind, kind, mtp=True)
        return
    for kind in kinds or [*family_rows.PUBLISHED, *families.LOADED]:
        if kind in families.LOADED:
            yield families.make_model(scratch / kind, kind)
        else:
            yield family_rows.make(scratch / kind, kind, published=True)


def outputs_of(reader: str) -> list[str]:
    """SCHEME@CONTAINER of everything that ``convert --reader`` writes for a reader."""
    from ptqpipe.models.reader_facts import READERS

    return [f"{scheme}@{container}" for scheme, found in READERS[reader].items() for container in found]


def checks(
    reader: str,
    models: Iterable[Path],
    outputs: Iterable[str],
    child: Reader,
    *,
    ignore: list[str],
    mtp: str | None = None,
    known: Container[tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """A line for each model and output that is not ``known`` (`_known`).

    mtp  what becomes of the multi-token prediction layer, where that is what is looked at: keep or a format
    """
    import ptqpipe
    from ptqpipe.errors import PtqError

    for model in models:
        name = model.parent.name if model.name == "hf" else model.name
        for output in outputs:
            scheme, _, container = output.partition("@")
            if (name, scheme, container, mtp or "", *ignore) in known:
                continue
            line: dict[str, Any] = {"model": name, "output": scheme}
            line |= ({"ignore": ignore} if ignore else {}) | ({"mtp": mtp} if mtp else {})
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    done = ptqpipe.convert(
                        model, format=scheme, container=container or None, out=Path(scratch, "out"),
                        scale_search="absmax", global_scale="absmax", workers=1, requantize=True, ignore=ignore,
                        mtp=mtp or "keep",
                    )  # fmt: skip
                except PtqError as error:
                    yield line | {"container": container, "not_written": str(error)}
                    continue
                line["container"] = done.record["container"]
                said = refusal(reader, model, scheme, line["container"], ignore, mtp or "keep")
                yield line | ({"refused": said} if said else {}) | child.load(done.out)


def refusal(
    reader: str, model: Path, scheme: str, container: str, ignore: Iterable[str] = (), mtp: str = "keep"
) -> str:
    """What ``convert --reader`` says instead of writing a model in a format for a reader; empty where it writes it."""
    from ptqpipe.conversion.prepare import prepare
    from ptqpipe.errors import UsageError
    from ptqpipe.pipeline.validate import for_reader
    from ptqpipe.recipe.options import RecipeOptions

    try:
        asked = RecipeOptions(format=scheme, container=container, ignore=tuple(ignore), mtp=mtp)
        options = for_reader(reader, asked, None)
        prepare(model, options=options, reader=reader, requantize=True).close()
    except UsageError as error:
        return str(error)
    return ""


def _known(results: Path | None) -> set[tuple[str, ...]]:
    """(model, scheme, container, its layer for drafts, patterns of what was ignored) of a file of results."""
    lines = results.read_text().splitlines() if results and results.exists() else []
    return {
        (row["model"], row["output"], row["container"], row.get("mtp", ""), *row.get("ignore", ()))
        for row in map(json.loads, lines)
    }


def main(reader: str, child: str, description: str, argv: list[str] | None = None) -> int:
    """Parses the options, checks, prints; 1 where a tensor that ``convert --reader`` allows was left out or changed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--families", nargs="*", metavar="KIND", help="tiny models of the families in tests/ [all]")
    parser.add_argument(f"--{reader}", dest="python", required=True, metavar="PYTHON", help="of its environment")
    parser.add_argument("--outputs", nargs="+", default=outputs_of(reader), metavar="SCHEME[@CONTAINER]")
    parser.add_argument("--ignore", nargs="+", default=[], metavar="PATTERN", help="modules that convert leaves out")
    if reader == "sglang":
        parser.add_argument(
            "--drafts", choices=("keep", "fp8", "nvfp4"), metavar="MTP",
            help="its model for drafts, of the multi-token prediction layer that convert --mtp MTP writes",
        )  # fmt: skip
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args(argv)
    query = f"from importlib.metadata import version as v; print(v('{reader}'))"
    environment = {**os.environ, "PYTHONPATH": os.environ.get("READER_PYTHONPATH", "")}
    asked = subprocess.run(
        [options.python, "-P", "-c", query], capture_output=True, text=True, check=True, env=environment
    )
    mtp = getattr(options, "drafts", None)
    bad, process = False, Reader(child, options.python, drafts=mtp is not None)
    with tempfile.TemporaryDirectory() as name:
        models = [*options.models]
        if options.families is not None:
            models += family_models(options.families, Path(name), drafts=mtp is not None)
        for found in checks(
            reader, models, options.outputs, process, ignore=options.ignore, mtp=mtp, known=_known(options.results)
        ):
            bad |= bool(found.get("missing")) and "refused" not in found
            line = json.dumps({**found, reader: asked.stdout.strip()})
            print(line, flush=True)
            if options.results:
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
    process.close()
    return int(bad)
