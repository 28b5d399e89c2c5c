"""Experts that are one module with 3-D parameters, run expert by expert so that each one's inputs can be seen.

transformers dispatches such modules by name of an implementation; here ``forward`` of the module itself is replaced,
with the same arithmetic for whichever of its layouts (gate and up in one tensor, transposed, biased) it declares.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ptqpipe.errors import CheckpointError

#: (expert, "up" or "down", rows [tokens, K]): the inputs of the first and of the second product of an expert. What it
#: returns is what the product gets; None leaves the input as it is.
Observer = Callable[[int, str, torch.Tensor], torch.Tensor | None]

STACKS = ("gate_up_proj", "up_proj", "down_proj")


def is_stacked(module: torch.nn.Module) -> bool:
    """Whether a module holds experts as 3-D parameters."""
    return any(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in STACKS)


def check_known(module: torch.nn.Module, name: str) -> None:
    """CheckpointError for stacked experts that do not declare their layout as transformers 5 does."""
    if not all(hasattr(module, name) for name in ("is_transposed", "has_bias", "_apply_gate", "num_experts")):
        raise CheckpointError(
            f"'{name}' holds experts as {type(module).__name__}, whose layout transformers does not declare; "
            "its experts cannot be calibrated"
        )


def observe(module: Any, observer: Observer | None) -> None:
    """Replaces how ``module`` runs, with an observer of every expert's inputs or without."""
    module.forward = partial(_forward, module, observer)


def _forward(
    module: Any,
    observer: Observer | None,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """[tokens, hidden] of rows [tokens, hidden], experts [tokens, k] and their weights [tokens, k]."""
    parts = torch.zeros(
        *top_k_index.shape, hidden_states.shape[-1], dtype=hidden_states.dtype, device=top_k_index.device
    )
    for expert in range(module.num_experts):
        token, place = torch.where(top_k_index == expert)
        if token.numel():
            x = hidden_states[token]
            parts = parts.index_put((token, place), _expert(module, expert, x, observer).to(parts.dtype))
    return (parts * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _expert(module: Any, expert: int, x: torch.Tensor, observer: Observer | None) -> torch.Tensor:
    gated = getattr(module, "has_gate", True)
    x = _seen(observer, expert, "up", x)
    inner = _product(module, "gate_up_proj" if gated else "up_proj", expert, x)
    inner = module._apply_gate(inner) if gated else module.act_fn(inner)
    inner = _seen(observer, expert, "down", inner)
    out = _product(module, "down_proj", expert, inner)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return out


def _seen(observer: Observer | None, expert: int, side: str, x: torch.Tensor) -> torch.Tensor:
    changed = None if observer is None else observer(expert, side, x)
    return x if changed is None else changed


def _product(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    w = getattr(module, name)[expert]
    out: torch.Tensor = x @ (w if module.is_transposed else w.t())
    return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out
