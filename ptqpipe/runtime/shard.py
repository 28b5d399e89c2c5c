"""Which part of each parameter a rank gets, decided from a model on the meta device before anything is read.

The rules are transformers' tensor-parallel plan of the model (``base_model_tp_plan`` and the head's), executed by
shapes and hooks (``parallel.py``) instead of DTensors: a packed weight is no parameter, and a local forward needs no
more. Layers that may as well be whole stay whole where they do not divide (heads of odd vocabularies); everything else
that does not divide is refused. Key-value heads fewer than ranks are repeated, as vLLM does.
Must not know files or how weights are stored; its caller gives the number of columns that stay together.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ptqpipe.errors import UsageError, arg
from ptqpipe.runtime.parallel import (
    TensorParallel,
    gather_output,
    reduce_output,
    split_input,
    use_rows,
)

Axis = Literal["out", "in"]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of an axis: of each of ``pieces`` equal runs, the ``index``-th of ``parts`` equal ones."""

    axis: Axis
    index: int
    parts: int
    pieces: int = 1

    def ranges(self, extent: int) -> Ranges:
        """The [start, stop) of the part, ascending."""
        run = extent // self.pieces
        part = run // self.parts
        starts = (piece * run + self.index * part for piece in range(self.pieces))
        return tuple((start, start + part) for start in starts)

    def local(self, extent: int) -> int:
        """Length of this rank's part of the axis."""
        return extent // self.parts


@dataclass(frozen=True, slots=True)
class _Style:
    """A style of a tensor-parallel plan (such as "colwise"): the sharded axis, the collectives around the forward."""

    axis: Axis | None = None
    pieces: int = 1
    reduce: bool = False
    gather: bool = False
    split: bool = False


_WHOLE = _Style()
STYLES: Mapping[str, _Style] = {
    "colwise": _Style("out"),
    "colwise_gather_output": _Style("out", gather=True),
    "colwise_rep": _Style("out", gather=True),
    "rowwise": _Style("in", reduce=True),
    "rowwise_split_input": _Style("in", reduce=True, split=True),
    "rowwise_rep": _Style("in", reduce=True, split=True),
    "packed_colwise": _Style("out", pieces=2),
    "moe_tp_experts": _Style(reduce=True),
    "all_reduce": _Style(reduce=True),
    # Nothing to do in inference, or kept whole on every rank: embeddings are not worth a reduction.
    "replicated_with_grad_allreduce": _WHOLE,
    "replicate": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "local_params": _WHOLE,
    "embedding_rowwise": _WHOLE,
    "embedding_colwise": _WHOLE,
}

# Plans of models for which transformers 5.23 has none, by model_type. A row goes when transformers has its own.
_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise", "sinks": "colwise"}
OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt_oss": {
        **{f"model.layers.*.self_attn.{name}": style for name, style in _ATTENTION.items()},
        "model.layers.*.mlp.experts.gate_up_proj": "colwise",  # gate and up rows alternate
        "model.layers.*.mlp.experts.gate_up_proj_bias": "colwise",
        "model.layers.*.mlp.experts.down_proj": "rowwise",
        "model.layers.*.mlp.experts": "moe_tp_experts",
        "lm_head": "colwise_gather_output",
    }
}


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One rank's shards and collectives. Names are the model's.

    rules       the plan in transformers' words
    cuts        parameters of which it holds a part
    reduce      modules whose outputs are summed; gather: joined; split: whose inputs are cut
    tied_rows   modules with a tied weight of which this rank computes some rows
    kv_groups   attention modules whose query heads per key-value head change
    once        parameters added before a sum, which rank 0 alone adds
    """

    ranks: TensorParallel
    rules: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    reduce: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    split: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tied_rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kv_groups: Mapping[str, int] = field(default_factory=dict)
    once: tuple[str, ...] = ()


def make_plan(model: Any, ranks: TensorParallel, *, columns: Callable[[str], int]) -> ShardPlan:
    """The part of ``model`` (on the meta device, whole) that this rank holds.

    columns  how many columns of a parameter stay together: the block of its format (1 for floats)

    UsageError, before anything is read, for a model without a plan, and for heads, columns or experts that the number
    of ranks does not divide; it says which numbers do.
    """
    if ranks.size == 1:
        return ShardPlan(ranks)
    try:
        return _plan(model, ranks, columns)
    except _DoesNotDivide as error:
        sizes = [size for size in range(2, 65) if _divides(model, size, columns)]
        remedy = f"{arg('tp')} can be 1{''.join(f', {size}' for size in sizes)}"
        raise UsageError(f"{arg('tp', ranks.size)} does not divide {error}; {remedy}") from None


class _DoesNotDivide(Exception):
    """Carries what does not."""


def _divides(model: Any, size: int, columns: Callable[[str], int]) -> bool:
    try:
        _plan(model, TensorParallel(size), columns)
    except _DoesNotDivide:
        return False
    return True


def _plan(model: Any, ranks: TensorParallel, columns: Callable[[str], int]) -> ShardPlan:
    rules = _rules(model)
    styles = dict(_styles(model, rules))
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    kv_groups, kv_cuts = _heads(model, ranks, styles)
    cuts: dict[str, Cut] = {}
    tied_rows: dict[str, tuple[int, int]] = {}
    split: dict[str, tuple[int, int]] = {}
    whole: set[str] = set()
    once: list[str] = []
    for name, module, leaf, parameter in _parameters(model):
        owner, _, _ = name.rpartition(".")
        style = styles.get(name) or styles.get(owner) or _WHOLE
        if leaf.endswith("_bias") and name not in styles:  # of a stack of experts
            style = styles.get(name.removesuffix("_bias"), style)
            once += [name] if style.axis == "in" else []
        if style.axis is None or owner in whole or (leaf.endswith("bias") and style.axis == "in"):
            continue
        cut = kv_cuts.get(owner) or Cut(style.axis, ranks.rank, ranks.size, style.pieces)
        extent = parameter.shape[axis_of(parameter.dim(), cut.axis, transposed=is_transposed(module), leaf=leaf)]
        why = _misfit(name, module, cut, extent, columns)
        if why is not None and (style.gather or style.split):
            whole.add(owner)
        elif why is not None:
            raise _DoesNotDivide(why)
        elif name in tied:
            tied_rows[owner] = cut.ranges(extent)[0]
        else:
            cuts[name] = cut
        if style.split and owner not in whole:
            split[owner] = cut.ranges(extent)[0]
    modules = [(name, styles[name]) for name, _ in model.named_modules() if name in styles and name not in whole]
    cut_modules = {name.rpartition(".")[0] for name in cuts} | set(tied_rows)
    return ShardPlan(
        ranks,
        rules=rules,
        cuts=cuts,
        reduce=tuple(name for name, style in modules if style.reduce),
        gather=tuple(name for name, style in modules if style.gather and name in cut_modules),
        split=split,
        tied_rows=tied_rows,
        kv_groups=kv_groups,
        once=tuple(once),
    )


def _rules(model: Any) -> dict[str, str]:
    """The plan: transformers' own, else ours. UsageError where there is none."""
    kind, prefix = model.config.get_text_config().model_type, model.base_model_prefix
    rules = dict(model.tp_plan or {})
    # Without rules for the body there is no plan: a head alone is not worth ranks.
    if not any(name.startswith(prefix) and style != "embedding_rowwise" for name, style in rules.items()):
        rules = dict(OWN_PLANS.get(kind, {}))
    if not rules:
        raise UsageError(f"transformers has no tensor-parallel plan for {kind!r} models; use tp=1")
    unknown = next((f"{style!r} for {name}" for name, style in rules.items() if style not in STYLES), None)
    if unknown is not None:
        raise UsageError(f"the tensor-parallel plan of {kind!r} models has {unknown}, which ptqpipe lacks; use tp=1")
    return rules


def _styles(model: Any, rules: Mapping[str, str]) -> Iterator[tuple[str, _Style]]:
    names = [name for name, _ in model.named_modules()] + [name for name, *_ in _parameters(model)]
    for name in names:
        style = rules.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))
        if style is not None:
            yield name, STYLES[style]


def _parameters(model: Any) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """(name, owner, leaf, parameter), tied ones under each of their names."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, parameter


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether a module of stacked experts holds them as [E, in, out]."""
    return bool(getattr(module, "is_transposed", False))


def axis_of(dims: int, axis: Axis, *, transposed: bool, leaf: str) -> int:
    """Which dimension of a parameter, counted from the end, runs over the outputs or inputs of its layer."""
    if dims == 1 or leaf.endswith("bias"):
        return -1
    return -1 if (axis == "in") != transposed else -2


def _misfit(name: str, module: torch.nn.Module, cut: Cut, extent: int, columns: Callable[[str], int]) -> str | None:
    """What does not divide among the ranks ("the 10 rows of NAME"); None where all does."""
    together = columns(name) if cut.axis == "in" else 1
    if getattr(module, "is_concatenated", True) is False and cut.axis == "out" and "gate_up" in name:
        together = 2  # a gate's row and its up row
    if extent % (cut.parts * cut.pieces * together):
        noun = "columns" if cut.axis == "in" else "rows"
        blocks = f" in blocks of {together}" if together > 1 else ""
        return f"the {extent} {noun} of {name}{blocks}"
    return None


def _heads(model: Any, ranks: TensorParallel, styles: Mapping[str, _Style]) -> tuple[dict[str, int], dict[str, Cut]]:
    """Attention modules with another number of query heads per key-value head, and the cuts of repeated heads."""
    config = model.config.get_text_config()
    groups: dict[str, int] = {}
    cuts: dict[str, Cut] = {}
    split = {name.rpartition(".")[0] for name, style in styles.items() if style.axis == "out" and not style.gather}
    for name, module in model.named_modules():
        if name not in split or not hasattr(module, "head_dim"):
            continue
        heads = int(config.num_attention_heads)
        if heads % ranks.size:
            raise _DoesNotDivide(f"the {heads} attention heads")
        key = getattr(module, "k_proj", None)
        if not isinstance(key, torch.nn.Linear):
            continue
        kv = key.out_features // int(module.head_dim)
        if kv % ranks.size and ranks.size % kv:
            raise _DoesNotDivide(f"the {kv} key-value heads of {name}")
        if kv < ranks.size:
            groups[name] = heads // ranks.size
            cut = Cut("out", ranks.rank * kv // ranks.size, kv)
            cuts |= {f"{name}.{leaf}": cut for leaf in ("k_proj", "v_proj")}
    return groups, cuts


def shrink(model: Any, plan: ShardPlan) -> None:
    """Gives the parameters of a model on the meta device this rank's shapes."""
    for name, cut in plan.cuts.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = module._parameters[leaf]
        dim = axis_of(parameter.dim(), cut.axis, transposed=is_transposed(module), leaf=leaf)
        shape = list(parameter.shape)
        shape[dim] = cut.local(shape[dim])
        module._parameters[leaf] = torch.nn.Parameter(parameter.new_empty(shape), requires_grad=False)
        if isinstance(module, torch.nn.Linear) and leaf == "weight":
            module.out_features, module.in_features = shape
    for name, groups in plan.kv_groups.items():
        model.get_submodule(name).num_key_value_groups = groups


def connect(model: Any, plan: ShardPlan) -> None:
    """Hangs the hooks of the plan on a model that has been filled, and tells transformers' caches how it is split."""
    if plan.ranks.size == 1:
        return
    model._tp_size, model._tp_plan = plan.ranks.size, dict(plan.rules)
    for name in plan.once if plan.ranks.rank else ():
        model.get_parameter(name).data.zero_()
    for name, (start, stop) in plan.split.items():
        split_input(model.get_submodule(name), start, stop)
    for name, (start, stop) in plan.tied_rows.items():
        use_rows(model.get_submodule(name), start, stop)
    for name in plan.reduce:
        reduce_output(model.get_submodule(name), plan.ranks)
    for name in plan.gather:
        gather_output(model.get_submodule(name), plan.ranks)
