"""Loads what ptqpipe writes with SGLang's own code, on the CPU, and compares every parameter with the checkpoint.

Usage: python scripts/sglang_loads.py MODEL [MODEL ...] --sglang PYTHON [--outputs nvfp4 mxfp8@mxfp8_hf ...]

MODEL is a float checkpoint; each output (SCHEME[@CONTAINER]) is converted from it. PYTHON is the interpreter of an
environment with sglang 0.5.23; its CUDA packages need not be there (``sglang_child.py``). SGLang reads config.json,
chooses its layer classes, makes their parameters and fills them from the files. Its kernels, and what it repacks for
them, need a GPU and are not run. One JSON line an output:

    methods  the classes that SGLang chose
    landed   tensors of the checkpoint that lie, number for number, where SGLang fuses them to
    unused   those that it left in the files;  differs: those that lie there with other numbers
    unfilled parameters of its quantized layers that the checkpoint has no tensor for
    problem  what it said where it refused
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

OUTPUTS = (
    "nvfp4", "nvfp4@modelopt", "nvfp4_w4a4", "nvfp4_w4a4@modelopt", "mxfp4", "mxfp8", "mxfp8@modelopt",
    "mxfp8@mxfp8_hf", "fp8", "fp8@modelopt", "fp8_tensor", "fp8_static", "fp8_static@modelopt", "fp8_block",
    "fp8_block@compressed_tensors", "fp8_block@modelopt",
)  # fmt: skip
CHILD = Path(__file__).with_name("sglang_child.py")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT = {"w13": (("gate_proj", "w1"), ("up_proj", "w3")), "w2": (("down_proj", "w2"),)}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by their names."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def parts_of(name: str, known: Mapping[str, torch.Tensor]) -> list[str]:
    """The checkpoint's tensors that one of SGLang's parameters holds, in their order; none for one it has not."""
    expert = re.fullmatch(r"(.*\.experts)\.(w13|w2)_(\w+)", name)
    if expert is not None:
        stem, matrix, suffix = expert.groups()
        count = len({at[1] for key in known if (at := re.match(re.escape(stem) + r"\.(\d+)\.", key))})
        spelled = (
            f"{stem}.{number}.{spelling}.{suffix}"
            for number in range(count)
            for spellings in EXPERT[matrix]
            for spelling in spellings
        )
        return _known(spelled, known)
    owner, _, leaf = name.rpartition(".")
    stem, dot, last = owner.rpartition(".")
    return _known((f"{stem}{dot}{part}.{leaf}" for part in FUSED.get(last, (last,))), known)


def _known(names: Iterable[str], known: Mapping[str, torch.Tensor]) -> list[str]:
    """Those names that there are. SGLang calls ModelOpt's scales of MXFP8 ``weight_scale_inv``."""
    both = ((name, name.removesuffix("_inv")) for name in names)
    return [next(name for name in spelled if name in known) for spelled in both if set(spelled) & set(known)]


def compare(checkpoint: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Where each tensor of the checkpoint went."""
    landed: list[str] = []
    differs: list[str] = []
    unfilled: list[str] = []
    for name, value in loaded.items():
        parts = parts_of(name, checkpoint)
        if not parts:
            unfilled.append(name)
            continue
        same = any(
            _same(torch.cat([checkpoint[part].reshape(-1) for part in order]), value)
            for order in _orders(name, parts, checkpoint)
        )
        (landed if same else differs).extend(parts)
    unused = sorted(set(checkpoint) - {*landed, *differs})
    return {"landed": len(landed), "unused": unused, "differs": differs, "unfilled": _kinds(unfilled)}


def _orders(name: str, parts: list[str], checkpoint: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """How the parts of a parameter may follow each other.

    Some kernels want an expert's up before its gate, and one number where both have the same.
    """
    gates, ups = parts[::2], parts[1::2]
    if ".w13_" not in name or len(gates) != len(ups):
        return [parts]
    found = [parts, [part for pair in zip(ups, gates, strict=True) for part in pair]]
    shared = all(torch.equal(checkpoint[gate], checkpoint[up]) for gate, up in zip(gates, ups, strict=True))
    return [*found, gates] if shared else found


def _same(stored: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Whether the bits are the same, or the numbers where SGLang keeps a wider float (its float32 for bfloat16)."""
    loaded = loaded.reshape(-1)
    if stored.dtype != loaded.dtype and stored.is_floating_point() and loaded.dtype == torch.float32:
        stored = stored.float()
    return torch.equal(stored.view(torch.uint8), loaded.view(torch.uint8))


def _kinds(names: list[str]) -> list[str]:
    """Last parts of names, each once."""
    return sorted({name.rpartition(".")[2] for name in names})


def check(packed: Path, python: str, limit_s: int) -> dict[str, Any]:
    """One checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "loaded.safetensors")
        command = [python, str(CHILD), str(packed.resolve()), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if re.search(r"(Error|Exception)\b", line)]
            return {"problem": re.sub(r"^\[rank0\]: ", "", lines[-1])[:300] if lines else f"exit {done.returncode}"}
        with safe_open(out, "pt") as file:
            methods = json.loads(file.metadata()["methods"])
            loaded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return {"methods": methods} | compare(tensors_of(packed), loaded)


def checks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each model and output."""
    import ptqpipe
    from ptqpipe.errors import PtqError

    for model in options.models:
        for output in options.outputs:
            scheme, _, container = output.partition("@")
            line: dict[str, Any] = {"model": model.parent.name if model.name == "hf" else model.name, "output": scheme}
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    done = ptqpipe.convert(model, format=scheme, container=container or None, out=Path(scratch, "out"))
                except PtqError as error:
                    yield line | {"container": container, "not_written": str(error)}
                    continue
                yield line | {"container": done.record["container"]} | check(done.out, options.sglang, options.limit)


def main() -> int:
    """Parses the options, checks, prints; 1 where a tensor was left out or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--sglang", required=True, metavar="PYTHON", help="interpreter of an environment with sglang")
    parser.add_argument("--outputs", nargs="+", default=list(OUTPUTS), metavar="SCHEME[@CONTAINER]")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one loading")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    query = "from importlib.metadata import version as v; print(v('sglang'))"
    asked = subprocess.run([options.sglang, "-c", query], capture_output=True, text=True, check=True)
    bad = False
    for found in checks(options):
        bad |= bool(found.get("differs") or found.get("unused"))
        line = json.dumps({**found, "sglang": asked.stdout.strip()})
        print(line, flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(line + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
