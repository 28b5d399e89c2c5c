"""What runtimes fuse must agree: one global scale, one scheme and one input scale over q/k/v, gate/up and experts."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from ptqpipe.containers import Role, StoredWeight
from ptqpipe.formats import WHOLE
from ptqpipe.recipe import DEFAULT_FUSE
from ptqpipe.source import Source
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.structure import plain_tensors
from ptqpipe.stages.verify.weights import scalar_fault

_EXPERT = re.compile(r"(^|\.)experts\.(\d+)\.")
_GLOBALS = (Role.GLOBAL, Role.GLOBAL_DIVISOR)
_INPUTS = (Role.INPUT_GLOBAL, Role.INPUT_GLOBAL_DIVISOR)


def check_scalars(ckpt: Source, findings: Findings) -> None:
    """Global and input scales are finite and positive."""
    for stored in ckpt.stored.values():
        for part in stored.parts:
            if part.role not in (*_GLOBALS, *_INPUTS):
                continue
            values = ckpt.reader.read(part.name).float().flatten()
            for index, value in enumerate(values):
                problem = scalar_fault(value)
                if problem is not None:
                    findings.fault("scales", part.name, f"{f'[{index}] ' if len(values) > 1 else ''}{problem}")


def fused_groups(ckpt: Source, fuse: Sequence[Sequence[str]] = DEFAULT_FUSE) -> list[list[str]]:
    """Names of stored weights that runtimes make one matrix of, in the order of the fuse table."""
    place = {leaf: (number, index) for number, leaves in enumerate(fuse) for index, leaf in enumerate(leaves)}
    groups: dict[tuple[str, int, int], list[tuple[int, str]]] = defaultdict(list)
    for name, stored in ckpt.stored.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in place and stored.experts is None:
            groups[(parent, place[leaf][0], stored.shape[1])].append((place[leaf][1], name))
    return [[name for _, name in sorted(group)] for group in groups.values()]


def check_groups(ckpt: Source, findings: Findings, fuse: Sequence[Sequence[str]] = DEFAULT_FUSE) -> None:
    """Fused weights share scheme and scales, and none of them is left unquantized."""
    table = {leaf: leaves for leaves in fuse for leaf in leaves}
    plain = set(plain_tensors(ckpt))
    entries = ckpt.reader.entries
    for group in fused_groups(ckpt, fuse):
        first = ckpt.stored[group[0]]
        parent, _, leaf = first.weight.removesuffix(".weight").rpartition(".")
        siblings = [f"{parent}.{other}.weight" if parent else f"{other}.weight" for other in table[leaf]]
        for name in siblings:
            if name in plain and entries[name].shape[1:] == (first.shape[1],):
                findings.choice(
                    "groups", name, f"is kept, but {first.weight} is quantized; vLLM fuses them and refuses this"
                )
        for name in group[1:]:
            _compare(ckpt, first, ckpt.stored[name], findings)
    _check_expert_inputs(ckpt, findings)


def _compare(ckpt: Source, a: StoredWeight, b: StoredWeight, findings: Findings) -> None:
    if (a.scheme.fmt.name, a.scheme.activation) != (b.scheme.fmt.name, b.scheme.activation):
        findings.choice(
            "groups", b.weight, f"is {b.scheme.name}, but {a.weight} is {a.scheme.name}; runtimes fuse them"
        )
        return
    for roles, what in ((_GLOBALS, "global scale"), (_INPUTS, "input scale")):
        left, right = _scalar(ckpt, a, roles), _scalar(ckpt, b, roles)
        if (left is None) != (right is None) or (
            left is not None and right is not None and not torch.equal(left, right)
        ):
            report = findings.fault if a.scheme.fmt.has_global else findings.choice
            report(
                "groups",
                b.weight,
                f"has {what} {_shown(right)}, but {a.weight} has {_shown(left)}; runtimes fuse them and keep one",
            )
    if a.scheme.fmt.block == (WHOLE, WHOLE):
        left, right = (ckpt.reader.read(_part(w, Role.SCALES)).float().flatten() for w in (a, b))
        if not torch.equal(left, right):
            message = (
                f"has scale {_shown(right)}, but {a.weight} has {_shown(left)}; vLLM quantizes them again to one scale"
            )
            findings.choice("groups", b.weight, message)


def _part(stored: StoredWeight, role: Role) -> str:
    part = stored.part(role)
    return part.name if part is not None else ""


def _scalar(ckpt: Source, stored: StoredWeight, roles: Sequence[Role]) -> torch.Tensor | None:
    part = next((part for part in stored.parts if part.role in roles), None)
    return None if part is None else ckpt.reader.read(part.name).float().flatten()


def _shown(value: torch.Tensor | None) -> str:
    return "none" if value is None else f"{float(value[0]):.9g}"


def _check_expert_inputs(ckpt: Source, findings: Findings) -> None:
    """Fused experts have one input scale for the first projections of all of them."""
    layers: dict[str, dict[str, float]] = defaultdict(dict)
    for name, stored in ckpt.stored.items():
        match = _EXPERT.search(name)
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if match is None or leaf in ("down_proj", "w2"):
            continue
        value = _scalar(ckpt, stored, _INPUTS)
        if value is not None:
            layers[name[: match.start()] + ".experts"][name] = float(value[0])
    for layer, values in layers.items():
        if len(set(values.values())) > 1:
            low, high = min(values.values()), max(values.values())
            findings.choice(
                "groups",
                layer,
                f"input scales of gate and up differ among the experts ({low:.9g} to {high:.9g}); share them",
            )


def note_rounded_globals(ckpt: Source, findings: Findings) -> None:
    """Other tools compute global scales in bfloat16: legal, and up to 0.4 % from the intended one."""
    rounded, total = 0, 0
    example: Mapping[str, float] = {}
    for stored in ckpt.stored.values():
        value = _scalar(ckpt, stored, _GLOBALS)
        if value is not None:
            total += 1
            exact = bool((value.view(torch.int32) & 0xFFFF == 0).all())
            rounded += exact
            example = {stored.weight: float(value[0])} if exact else example
    if total and rounded == total and not findings.chosen:
        name, number = next(iter(example.items()))
        findings.note(
            "scales", name, f"all {total} global scales are bfloat16 numbers ({number:g} here): computed in bfloat16"
        )
