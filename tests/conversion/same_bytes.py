"""Conversions whose bytes are recorded: two models, every format and container, with and without statistics.

Usage: python -m tests.conversion.same_bytes > tests/conversion/same_bytes.json

Weights and moments are made of whole numbers, and statistics are given as files, so that no machine's float sums are in
them. Recorded anew only with a change that is meant to change bytes; its commit says which and why.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.cli import main as command
from tests import tiny

DEMO = Path(ptqpipe.__file__).parent / "demo_model"
RECORDED = Path(__file__).with_suffix(".json")

CONTAINERS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("compressed_tensors", "modelopt", "ptqpipe"),
    "nvfp4_w4a4": ("compressed_tensors", "modelopt"),
    "mxfp4": ("compressed_tensors",),
    "mxfp4a16": ("compressed_tensors", "ptqpipe"),
    "mxfp6": ("compressed_tensors",),
    "mxfp6_e3m2": ("ptqpipe",),
    "mxfp8": ("compressed_tensors", "modelopt", "mxfp8_hf"),
    "mxfp8a16": ("compressed_tensors",),
    "fp8_dynamic": ("compressed_tensors", "modelopt"),
    "fp8_tensor": ("compressed_tensors",),
    "fp8_static": ("compressed_tensors", "modelopt"),
    "fp8_block": ("deepseek_fp8", "compressed_tensors", "modelopt"),
    "e2m1/8/ue5m3": ("ptqpipe",),
}
WITHOUT = ("", "--scale-search absmax --global-scale absmax")
EXACT = {
    "mxfp4": ("--scale-search exact",),
    "mxfp4a16": ("--scale-search exact",),
}  # where the default is another search
WITH = (
    "--algorithm rtn --objective block",
    "--algorithm rtn --objective diagonal",
    "--algorithm gptq",
)  # FP8: no blocks
CALIBRATED = ("nvfp4", "nvfp4_w4a4", "mxfp4", "fp8_dynamic", "fp8_static", "fp8_block")


def whole_numbers(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """Bell-shaped whole numbers from -1020 to 1020, the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(-255, 256, (4, *shape)).sum(0)


def moe(folder: Path) -> Path:
    """A checkpoint whose experts are 3-D stacks."""
    made = {
        name: torch.from_numpy(whole_numbers(name, *tensor.shape)).float().mul_(2.0**-14).to(tensor.dtype)
        for name, tensor in tiny.fused_moe().items()
    }
    return tiny.save(folder, made)


def trained(folder: Path) -> Path:
    """The first of the demo model's decoder layers, with its embedding: the others would be the same work again."""
    shutil.copytree(DEMO, folder, copy_function=shutil.copyfile)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(DEMO / "model.safetensors").items()
    first = {name: tensor for name, tensor in tensors if ".layers." not in name or ".layers.0." in name}
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def statistics(model: Path, folder: Path) -> Path:
    """Statistics of a model: the folder as calibrate writes it, its numbers replaced by those of whole ones."""
    data = f"--data {DEMO}/heldout.txt --samples 8 --seqlen 16 --moments diagonal,block,full"
    _run(f"calibrate {model} {data} -o {folder}")
    stats = folder / "stats.json"
    content = json.loads(stats.read_text())
    for file in content["files"]:
        made = {name: _moment(name, tensor) for name, tensor in load_file(folder / file).items()}
        save_file(made, folder / file)
        content["files"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    for entry in content["modules"].values():
        entry["quantiles"] = {"0.99": 2.5, "0.999": 3.25, "0.9999": 3.75}
    stats.write_text(json.dumps(content))
    return folder


def _moment(name: str, like: torch.Tensor) -> torch.Tensor:
    """One tensor of statistics, exact in float64 before it is rounded once."""
    key, _, kind = name.rpartition(".")
    held = kind.startswith("held_")
    kind = kind.removeprefix("held_")
    columns = like.shape[0] * (like.shape[1] if kind == "block_moment" else 1) if like.ndim else 1
    x = whole_numbers(f"{key} {held}", 2 * columns, columns).astype(np.float64) / 256
    x[:, :: max(1, columns // 8)] *= 4  # a few loud columns, as real inputs have
    if kind == "full_moment":
        found = x.T @ x / len(x)
    elif kind == "block_moment":
        found = np.einsum("tbi,tbj->bij", *(2 * [x.reshape(len(x), -1, like.shape[1])])) / len(x)
    else:
        found = {"mean": x.mean(0), "second_moment": (x * x).mean(0)}.get(kind, np.abs(x).max(0))
    return torch.from_numpy(found).float().reshape(like.shape).contiguous()


def conversions(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, finished checkpoint), one after another."""
    models = (trained(folder / "demo_model"), moe(folder / "moe"))
    stats = f"--stats {statistics(models[0], folder / 'stats')}"
    for model in models:
        for scheme, containers in CONTAINERS.items():
            for container in containers:
                for options in (*WITHOUT, *EXACT.get(scheme, ())):
                    yield _convert(model, f"--format {scheme} --container {container} {options}", folder)
    for scheme in CALIBRATED:
        for options in WITH[scheme.startswith("fp8") :]:
            yield _convert(models[0], f"--format {scheme} {options}", folder, stats)
    yield _convert(models[1], "--format mxfp4a16 --container gptoss_mxfp4", folder)


def _convert(model: Path, options: str, folder: Path, stats: str = "") -> tuple[str, Path]:
    out = folder / f"out-{len(list(folder.iterdir()))}"
    _run(f"convert {model} {options} {stats} -o {out}")
    return f"{model.name} {options}".strip(), out


def _run(line: str) -> None:
    done = CliRunner().invoke(command, line.split())
    assert done.exit_code == 0, f"{line}: {done.output}"


def digest(checkpoint: Path) -> str:
    """sha256 of the weights and of the config files; ptqpipe.json, which tells of the run, is left out."""
    whole = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        if file.name.endswith((".safetensors", "config.json", ".index.json")):
            whole.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def main() -> int:
    """Prints every conversion's digest as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: digest(made) for name, made in conversions(Path(folder))}
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
