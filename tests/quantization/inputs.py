"""Correlated inputs, and statistics folders made of them by the definition: with the safetensors library alone."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ptqpipe.checkpoint.reader import CheckpointReader

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def correlated(tokens: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    """float32 [tokens, columns] with columns of unlike size, neighbours correlated, and a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    size = torch.exp(torch.randn(columns, generator=generator))
    return (x + 2.0 * x @ mix + 0.3) * size


def second_moment(x: torch.Tensor) -> torch.Tensor:
    """float32 [columns, columns]: E[x x^T]."""
    exact = x.double()
    return (exact.t() @ exact / len(x)).float()


def write_statistics(
    folder: Path,
    model: Path,
    inputs: Mapping[str, torch.Tensor],
    *,
    attention: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    moments: tuple[str, ...] = ("block", "full"),
    held: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """A statistics folder of ``model`` with the inputs [tokens, K] of its modules; fused ones share the first's.

    held  inputs of the same modules on samples that are held out
    """
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    modules = {}
    for module, x in inputs.items():
        parent, _, leaf = module.rpartition(".")
        first = next((leaves[0] for leaves in FUSED if leaf in leaves), leaf)
        key = f"{parent}.{first}"
        modules[module] = {
            "key": key,
            "tokens": len(x),
            "measured": True,
            "quantiles": {str(p): float(x.abs().flatten().quantile(p)) for p in (0.99, 0.999, 0.9999)},
        }
        if held is not None:
            modules[module]["held_tokens"] = len(held[module])
        if f"{key}.amax" in tensors:
            continue
        full = second_moment(x)
        tensors[f"{key}.amax"] = x.abs().amax(dim=0)
        tensors[f"{key}.mean"] = x.double().mean(dim=0).float()
        tensors[f"{key}.second_moment"] = full.diagonal().clone()
        tensors |= _outer(f"{key}.", full, moments)
        if held is not None:
            other = second_moment(held[module])
            tensors[f"{key}.held_second_moment"] = other.diagonal().clone()
            tensors |= _outer(f"{key}.held_", other, moments)
    for module, (k_amax, v_amax) in (attention or {}).items():
        tensors |= {f"{module}.k_amax": k_amax, f"{module}.v_amax": v_amax}
    save_file(tensors, folder / "inputs.safetensors")
    with CheckpointReader.open(model) as reader:
        fingerprint = reader.fingerprint()
    content = {
        "version": 1,
        "digest": hashlib.sha256((folder / "inputs.safetensors").read_bytes()).hexdigest(),
        "model": {"name": model.name, "fingerprint": fingerprint},
        "modules": modules,
        "attention": {name: {} for name in attention or {}},
    }
    (folder / "stats.json").write_text(json.dumps(content))
    return folder


def _outer(prefix: str, full: torch.Tensor, moments: tuple[str, ...]) -> dict[str, torch.Tensor]:
    found = {}
    if "full" in moments:
        found[f"{prefix}full_moment"] = full
    if "block" in moments:
        found[f"{prefix}block_moment"] = torch.stack([full[i : i + 16, i : i + 16] for i in range(0, len(full), 16)])
    return found


def inputs_of_llama(
    tensors: Mapping[str, torch.Tensor], *, tokens: int = 512, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs for every linear module of ``tests.tiny.llama``; fused modules get the same."""
    found: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    for name, w in tensors.items():
        module = name.removesuffix(".weight")
        parent, _, leaf = module.rpartition(".")
        if w.dim() != 2 or not leaf.endswith("_proj"):
            continue
        first = next((leaves[0] for leaves in FUSED if leaf in leaves), leaf)
        key = f"{parent}.{first}"
        if key not in shared:
            shared[key] = correlated(tokens, w.shape[1], seed=seed + len(shared))
        found[module] = shared[key]
    return found
