"""Runs experts that are one module with 3-D parameters expert by expert, so that the inputs of each can be seen.

transformers dispatches such modules by name of an implementation; here ``forward`` of the module itself is replaced,
with the same arithmetic for whichever of its layouts (gate and up in one tensor, transposed, biased) it declares. Llama
4's, which declare nothing, get a run of rows each, one per token, zeros for the tokens of other experts.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ptqpipe.errors import CheckpointError
from ptqpipe.runtime.creating import without_run
from ptqpipe.runtime.stacked_experts import first_stack, in_runs, is_known, is_turned

#: (expert, "up" or "down", rows [tokens, K], which tokens of the batch those are, int64 [tokens]): the inputs of the
#: first and of the second product of an expert. What it returns is what the product gets; None leaves the input as it
#: is.
Observer = Callable[[int, str, torch.Tensor, torch.Tensor], torch.Tensor | None]

#: (expert, "up" or "down", rows [tokens, K], what the product made of them [tokens, N]).
OutputObserver = Callable[[int, str, torch.Tensor, torch.Tensor], None]

LEAST_TOKENS = 16  # an expert with fewer has no statistics of its own
STACKS = ("gate_up_proj", "up_proj", "down_proj")
SIDES = "up", "down"  # the first product of an expert and the second one


def product_name(stack: str, expert: int, side: str) -> str:
    """What a product of a stacked expert is called where linear layers are by their modules."""
    return f"{stack}[{expert}].{side}"


def is_product(place: str) -> bool:
    """Whether a place in a block is the product of a stacked expert, and no module."""
    return "[" in place


def stack_of(place: str) -> str:
    """The module of a place in a block: of the product of a stacked expert the stack, else the place itself."""
    return place.partition("[")[0]


def is_stacked(module: torch.nn.Module) -> bool:
    """Whether a module has its experts as 3-D parameters."""
    return any(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in STACKS)


@contextlib.contextmanager
def attached(handles: Iterable[Any]) -> Iterator[None]:
    """Removes the hooks of torch's handles at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows_of_token(module: Any) -> int:
    """How many rows stacked experts are given for each token."""
    return int(module.num_experts) if in_runs(module) else 1


def check_known(module: torch.nn.Module, name: str) -> None:
    """CheckpointError for stacked experts that do not declare their layout as transformers 5 does."""
    if not is_known(module):
        raise CheckpointError(
            f"'{name}' holds experts as {type(module).__name__}, whose layout transformers does not declare; "
            f"its experts cannot be calibrated; {without_run()}"
        )


def observe(module: Any, observer: Observer | None, outputs: OutputObserver | None = None) -> None:
    """Replaces how ``module`` runs, with observers of every expert's inputs and outputs or without."""
    expert = partial(_expert, module, observer, outputs)
    module.forward = partial(_runs_forward if in_runs(module) else _tokens_forward, module, expert)


def gate_and_up(module: Any, outputs: int) -> tuple[slice, slice]:
    """Which of so many outputs of an expert's first product are the gate's, and which are not."""
    if getattr(module, "is_concatenated", True):
        return slice(0, outputs // 2), slice(outputs // 2, outputs)
    return slice(0, outputs, 2), slice(1, outputs, 2)


def second_input(module: Any, expert: int, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
    """What the second product of an expert is given for inputs ``x`` [n, K]; with ``first`` as its first matrix, in the
    orientation of the module's, instead of the module's own."""
    return _activated(module, _product(module, first_stack(module), expert, x, first))


def routing(module: Any, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the arguments of ``module`` say of its tokens: the rows of its first argument that are given to experts,
    int64 [n]; the experts of each, int64 [n, k]; and what each of these counts for in the output, [n, k]."""
    hidden = arguments[0]
    if not in_runs(module):
        return torch.arange(len(hidden), device=hidden.device), arguments[1], arguments[2]
    own = hidden.any(dim=-1).nonzero().squeeze(-1)
    experts = (own // (len(hidden) // module.num_experts)).unsqueeze(1)
    return own, experts, torch.ones_like(experts, dtype=hidden.dtype)


_Run = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(expert, rows [tokens, hidden], those tokens of the batch int64 [tokens]) -> rows of the same shape."""


def _runs_forward(module: Any, run: _Run, hidden_states: torch.Tensor) -> torch.Tensor:
    """[E * tokens, hidden] of the same: a run of rows for every expert. A row of zeros stays one."""
    rows, places, outputs = len(hidden_states) // module.num_experts, [], []
    for expert in range(module.num_experts):
        own = expert * rows + hidden_states[expert * rows : (expert + 1) * rows].any(dim=-1).nonzero().squeeze(-1)
        if own.numel():
            places.append(own)
            outputs.append(run(expert, hidden_states[own], own - expert * rows).to(hidden_states.dtype))
    out = torch.zeros_like(hidden_states)
    return out.index_put((torch.cat(places),), torch.cat(outputs)) if outputs else out


def _tokens_forward(
    module: Any,
    run: _Run,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """[tokens, hidden] of rows [tokens, hidden], experts [tokens, k] and their weights [tokens, k]."""
    places, outputs = [], []
    for expert in range(module.num_experts):
        token, place = torch.where(top_k_index == expert)
        if token.numel():
            places.append(token * top_k_index.shape[1] + place)
            outputs.append(run(expert, hidden_states[token], token).to(hidden_states.dtype))
    parts = torch.zeros(
        top_k_index.numel(), hidden_states.shape[-1], dtype=hidden_states.dtype, device=top_k_index.device
    )
    parts = parts.index_put((torch.cat(places),), torch.cat(outputs)) if outputs else parts
    parts = parts.view(*top_k_index.shape, -1)
    return (parts * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _expert(
    module: Any,
    observer: Observer | None,
    outputs: OutputObserver | None,
    expert: int,
    x: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    x = _seen(observer, expert, "up", x, tokens)
    first = _product(module, first_stack(module), expert, x)
    if outputs is not None:
        outputs(expert, "up", x, first)
    inner = _seen(observer, expert, "down", _activated(module, first), tokens)
    out = _product(module, "down_proj", expert, inner)
    if outputs is not None:
        outputs(expert, "down", inner, out)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return out


def _seen(observer: Observer | None, expert: int, side: str, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    changed = None if observer is None else observer(expert, side, x, tokens)
    return x if changed is None else changed


def _activated(module: Any, first: torch.Tensor) -> torch.Tensor:
    if in_runs(module):
        gate, up = first.chunk(2, dim=-1)
        activated: torch.Tensor = up * module.act_fn(gate)
    else:
        activated = module._apply_gate(first) if getattr(module, "has_gate", True) else module.act_fn(first)
    return activated


def _product(module: Any, name: str, expert: int, x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
    w = getattr(module, name)[expert] if w is None else w
    out: torch.Tensor = x @ (w if is_turned(module) else w.t())
    return out + getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else out
