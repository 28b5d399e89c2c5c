"""The forward of transformers' stacked experts with packed weights, or with quantized inputs, or both.

transformers 5 keeps the experts of a layer as 3-D parameters ``gate_up_proj`` (or ``up_proj``) and ``down_proj``. Its
module stays, with its gate, its activation and its biases; here each expert's two matrices become layers of their own,
each with its own input quantizer, and the stacks go. Llama 4's experts are another module: they get a run of rows each,
one per token, zeros for those that are not theirs. Must not know files or ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from ptqpipe.runtime.input_quantizers import InputQuantizer

Project = Callable[[str, int, torch.Tensor], torch.Tensor]
"""(name of the stack, expert, x [tokens, in]) -> [tokens, out], with the expert's bias."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# Modules of experts that get a run of rows each, with stacks [E, in, out], a gate's columns before the up part's.
_IN_RUNS = frozenset({"Llama4TextExperts"})


# Modules that say nothing of their stacks, which are [E, out, in], and compute as those that do.
_SILENT = frozenset({"Step3p7Experts"})


def is_known(module: Any) -> bool:
    """Whether a module's stacks and forward are known: those that transformers declares, and some by their class."""
    declared = ("is_transposed", "has_bias", "_apply_gate", "num_experts")
    return in_runs(module) or type(module).__name__ in _SILENT or all(hasattr(module, name) for name in declared)


def first_stack(module: Any) -> str:
    """The name of the stack that the experts' inputs meet."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def in_runs(module: Any) -> bool:
    """Whether each expert of a module gets a run of rows, instead of the numbers of its tokens."""
    return type(module).__name__ in _IN_RUNS


def is_experts(module: Any) -> bool:
    """Whether a module is one of transformers' stacked experts, whose parts this file knows."""
    declared = hasattr(module, "has_gate") and hasattr(module, "num_experts")
    return in_runs(module) or type(module).__name__ in _SILENT or declared


def is_turned(module: Any) -> bool:
    """Whether a module of experts has its stacks as [E, in, out]."""
    return in_runs(module) or bool(getattr(module, "is_transposed", False))


def experts_forward(module: Any, project: Project) -> Forward | Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a module of stacked experts: expert by expert, each for its own tokens."""
    return _runs_forward(module, project) if in_runs(module) else _tokens_forward(module, project)


def _runs_forward(module: Any, project: Project) -> Callable[[torch.Tensor], torch.Tensor]:
    """``[E * tokens, hidden]`` to the same. A row of zeros, a token of another expert, stays one."""
    first = first_stack(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        rows = len(x) // module.num_experts
        for start in range(0, len(x), max(rows, 1)):
            own = start + x[start : start + rows].any(dim=-1).nonzero().squeeze(-1)
            if len(own):
                gate, up = project(first, start // rows, x[own]).chunk(2, dim=-1)
                out[own] = project("down_proj", start // rows, up * module.act_fn(gate))
        return out

    return forward


def _tokens_forward(module: Any, project: Project) -> Forward:
    first, gated = first_stack(module), getattr(module, "has_gate", True)

    def forward(x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= module.num_experts:  # no expert: padding of expert parallelism
                continue
            token, place = torch.where(top_k_index == expert)
            hidden = project(first, expert, x[token])
            hidden = module._apply_gate(hidden) if gated else module.act_fn(hidden)
            hidden = project("down_proj", expert, hidden)
            if getattr(module, "has_post_expert_norm", False):  # absent before transformers 5.20
                hidden = module.post_expert_norm(hidden)
            out.index_add_(0, token, (hidden * top_k_weights[token, place, None]).to(out.dtype))
        return out

    return forward


def float_project(module: Any, inner: Sequence[InputQuantizer], outer: Sequence[InputQuantizer]) -> Project:
    """Projections by the module's own float stacks, the inputs quantized.

    inner, outer  quantizers of the experts' inputs and of what ``down_proj`` gets, by expert
    """

    def project(name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        w = getattr(module, name)[expert]
        x = (outer if name == "down_proj" else inner)[expert](x)
        return linear(x, w.t() if is_turned(module) else w, _bias(module, name, expert))

    return project


def use_layers(module: Any, first: Sequence[torch.nn.Module], down: Sequence[torch.nn.Module]) -> None:
    """Puts one layer per expert in the place of the stacks of ``module``. The layers add no bias."""
    layers = {first_stack(module): torch.nn.ModuleList(first), "down_proj": torch.nn.ModuleList(down)}
    for name, members in layers.items():
        stack = module._parameters.pop(name)  # on the meta device: models initialize it, and cannot compute with it
        stack._is_hf_initialized = True
        module.__dict__[name] = stack
        module.add_module(f"{name}_layers", members)

    def project(name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layers[name][expert](x)
        bias = _bias(module, name, expert)
        return y if bias is None else y + bias

    module.forward = experts_forward(module, project)
    module._is_hf_initialized = True  # transformers would initialize the stacks


def _bias(module: Any, name: str, expert: int) -> torch.Tensor | None:
    return getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else None
