"""Which tensors of a checkpoint could be quantized, decided from names, dtypes, shapes and config alone.

A tensor is a candidate when it is a 2-D float matrix called ``<module>.weight``, or a 3-D stack of experts called
``...experts.<projection>``. Stacks come in both orientations, [E, out, in] and [E, in, out]; the shapes of the two
projections of one MLP tell which. GPT-2's Conv1D keeps weights as [in, out]; its bias betrays it. Must not know the
recipe.
"""

from collections.abc import Mapping
from typing import Any

from ptqpipe.errors import CheckpointError
from ptqpipe.plan.types import FLOAT_DTYPES, Member, Shapes, Slice
from ptqpipe.schemes import Abilities

# Architectures whose fused gate_up_proj alternates gate and up rows instead of stacking them: a fact of the published
# files that no shape shows.
INTERLEAVED_GATE_UP = frozenset({"gpt_oss"})
# Stacks whose module is not called "experts": a gate's and an up part's rows, and what follows them.
_WHOLE_STACKS = ("input_linear", "output_linear")
_PROJECTIONS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def find_candidates(
    tensors: Shapes, config: Mapping[str, Any], *, abilities: Abilities
) -> tuple[dict[str, Member], dict[str, str]]:
    """Matrices that may be quantized, by key (weight name, with the expert where stacks stay whole), in the order of
    the source; and reasons of those that cannot be."""
    conv1d = conv1d_leaves(tensors)
    found: dict[str, Member] = {}
    reasons: dict[str, str] = {}
    for name, (dtype, shape) in tensors.items():
        if 0 in shape:
            reasons[name] = "empty"
        elif len(shape) == 3 and _is_whole_stack(name, tensors) and not (abilities.stacks and abilities.matrices):
            reasons[name] = "a stack of experts that its model's readers know as a whole; use --container ptqpipe"
        elif len(shape) == 3 and ("experts" in name.split(".") or _is_whole_stack(name, tensors)):
            members, reason = _expert_members(name, tensors, config, stacks=abilities.stacks)
            for member in members:
                if member.stack is None and member.weight in tensors:
                    raise CheckpointError(
                        f"{member.weight!r} exists next to the stack {name!r}, which has that weight, too; remove one"
                    )
                found[member.key] = member
            reasons.update({name: reason} if reason else {})
        elif dtype not in FLOAT_DTYPES:
            reasons[name] = f"{dtype} numbers, not weights"
        elif len(shape) != 2 or not name.endswith(".weight"):
            reasons[name] = "not a matrix" if len(shape) != 2 else "not a weight of a linear layer"
        elif not abilities.matrices:
            reasons[name] = "this container stores stacks of experts only"
        elif name.removesuffix(".weight").rpartition(".")[2] not in conv1d:
            found[name] = Member(name, (shape[0], shape[1]), Slice(name))
        elif abilities.transposed:
            found[name] = Member(name, (shape[1], shape[0]), Slice(name, transposed=True))
        else:
            reasons[name] = (
                "Conv1D keeps its weight as [in, out], which no reader of this layout expects; --container ptqpipe"
            )
    return found, reasons


def conv1d_leaves(tensors: Shapes) -> frozenset[str]:
    """Leaf names of modules that are Conv1D: somewhere such a module's bias fits its columns and not its rows."""
    proven = set()
    for name, (_, shape) in tensors.items():
        bias = tensors.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and len(shape) == 2 and bias is not None and len(bias[1]) == 1:
            size = bias[1][0]
            if size == shape[1] and size != shape[0]:
                proven.add(name.removesuffix(".weight").rpartition(".")[2])
    return frozenset(proven)


def _is_whole_stack(name: str, tensors: Shapes) -> bool:
    """Whether a 3-D tensor is one of the two of a layer of Granite's or JetMoE's experts."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    siblings = [tensors.get(f"{parent}.{other}.weight", ("", ()))[1] for other in _WHOLE_STACKS]
    return leaf in _WHOLE_STACKS and all(len(shape) == 3 for shape in siblings)


def _expert_members(name: str, tensors: Shapes, config: Mapping[str, Any], *, stacks: bool) -> tuple[list[Member], str]:
    """The per-expert weights of one 3-D tensor, or why it is kept."""
    dtype, shape = tensors[name]
    base = name.removesuffix(".weight")
    parent, _, leaf = base.rpartition(".")
    if dtype not in FLOAT_DTYPES or leaf not in (*_PROJECTIONS, *_WHOLE_STACKS):
        return [], "a 3-D tensor that is no stack of expert projections"
    transposed = _stack_transposed(parent, leaf, tensors, config)
    if transposed is None:
        return [], "the orientation of this stack of experts cannot be told from the shapes"
    rows, cols = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    experts = range(shape[0])
    if stacks:
        slices = [Slice(name, expert=e, transposed=transposed) for e in experts]
        return [Member(name, (rows, cols), part, stack=shape[0]) for part in slices], ""
    if any(f"{parent}.{projection}_bias" in tensors for projection in _PROJECTIONS):  # of either: they have one reader
        return [], "readers know no names of single experts with biases; use --container gptoss_mxfp4 or ptqpipe"
    if leaf != "gate_up_proj":
        return [
            Member(f"{parent}.{e}.{leaf}.weight", (rows, cols), Slice(name, expert=e, transposed=transposed))
            for e in experts
        ], ""
    if rows % 2:
        return [], "an odd number of rows cannot be gate and up"
    interleaved = str(config.get("model_type")) in INTERLEAVED_GATE_UP
    members = []
    for e in experts:
        for index, part in enumerate(("gate_proj", "up_proj")):
            start, step = (index, 2) if interleaved else (index * rows // 2, 1)
            where = Slice(name, start=start, step=step, expert=e, transposed=transposed)
            members.append(Member(f"{parent}.{e}.{part}.weight", (rows // 2, cols), where))
    return members, ""


def _stack_transposed(parent: str, leaf: str, tensors: Shapes, config: Mapping[str, Any]) -> bool | None:
    """Whether a stack is [E, in, out]; None where its sibling's shape and hidden_size leave it open."""

    def dims(name: str) -> tuple[int, int] | None:
        entry = tensors.get(f"{parent}.{name}") or tensors.get(f"{parent}.{name}.weight")
        return (entry[1][1], entry[1][2]) if entry is not None and len(entry[1]) == 3 else None

    fused, down = dims("gate_up_proj") or dims(_WHOLE_STACKS[0]), dims("down_proj") or dims(_WHOLE_STACKS[1])
    if fused is not None and down is not None:
        # [2I, H] beside [H, I], or [H, 2I] beside [I, H]: the two cannot both hold.
        if fused == (2 * down[1], down[0]):
            return False
        return True if fused == (down[1], 2 * down[0]) else None
    own = dims(leaf)
    text = config.get("text_config")
    hidden = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, Mapping) else None)
    if own is None or (own[0] == hidden) == (own[1] == hidden):
        return None
    return own[1] == hidden if leaf in ("down_proj", "w2") else own[0] == hidden
