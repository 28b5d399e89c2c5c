"""Checks scales that readers rely on: of weights that they fuse (q/k/v, gate/up, experts), which must agree, and KV
caches.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from ptqpipe.check.verify.findings import Findings
from ptqpipe.checkpoint.layouts import (
    HF_QUANT_CONFIG,
    PartKind,
    StoredWeight,
    announces_kv_cache,
    is_kv_scale,
    kv_scale_place,
)
from ptqpipe.checkpoint.tensor_names import expert_of, experts_of
from ptqpipe.models.families import DEFAULT_FUSE, UNLIKE_EXPERTS, output_rows
from ptqpipe.models.source import Source

_GLOBALS = (PartKind.GLOBAL, PartKind.GLOBAL_DIVISOR)
_INPUTS = (PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR)


def scalar_fault(value: torch.Tensor) -> str | None:
    """The fault of a global scale; None if it and its reciprocal are finite and positive."""
    number = float(value.float().reshape(()))
    if math.isfinite(number) and number > 0 and math.isfinite(float(1.0 / value.float())):
        return None
    return f"is {number}, expected a finite positive number"


def check_scalars(ckpt: Source, findings: Findings) -> None:
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
    """Names of stored weights that runtimes make one matrix of, in the order of the fuse table. Found without the plan
    that convert groups by, so that a mistake there is a fault here."""
    place = {leaf: (number, index) for number, leaves in enumerate(fuse) for index, leaf in enumerate(leaves)}
    groups: dict[tuple[str, int, int], list[tuple[int, str]]] = defaultdict(list)
    for name, stored in ckpt.stored.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in place and stored.experts is None:
            groups[(parent, place[leaf][0], stored.shape[1])].append((place[leaf][1], name))
    return [[name for _, name in sorted(group)] for group in groups.values()]


def check_groups(ckpt: Source, findings: Findings, fuse: Sequence[Sequence[str]] = DEFAULT_FUSE) -> None:
    """Fused weights share scheme and scales, none of them is left unquantized, and no block lies in two outputs."""
    _check_blocks(ckpt, findings, fuse)
    _check_experts_alike(ckpt, findings)
    table = {leaf: leaves for leaves in fuse for leaf in leaves}
    plain = set(ckpt.plain)
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


def _check_blocks(ckpt: Source, findings: Findings, fuse: Sequence[Sequence[str]]) -> None:
    """Where readers concatenate weights, or outputs of one weight, by rows, only the last may end within a block."""
    rows_of = output_rows(ckpt.reader.config)
    last = {name for group in fused_groups(ckpt, fuse) for name in group[-1:]}
    fused = {name for group in fused_groups(ckpt, fuse) for name in group}
    for name, stored in ckpt.stored.items():
        block = stored.scheme.fmt.step(0)
        if block == 1 or stored.experts is not None:
            continue
        outputs = rows_of(name.removesuffix(".weight"), stored.shape[0])
        uneven = [rows for rows in (outputs if name in fused and name not in last else outputs[:-1]) if rows % block]
        if uneven:
            findings.choice(
                "groups",
                name,
                f"is {stored.scheme.name}, and {uneven[0]} rows of it with other rows below them do not divide into "
                f"blocks of {block}; vLLM and SGLang refuse this",
            )


def _check_experts_alike(ckpt: Source, findings: Findings) -> None:
    """Readers build all experts of a layer in one format."""
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    for name, stored in ckpt.stored.items():
        if layer := experts_of(name):
            layers[layer].setdefault(stored.scheme.name, name)
    for name in ckpt.plain:
        layer = "" if name.endswith("bias") else experts_of(name)
        if layer in layers and len(ckpt.reader.entries[name].shape) > 1:
            layers[layer].setdefault("not quantized", name)
    for layer, names in layers.items():
        if len(names) > 1:
            (a, first), (b, other), *_ = names.items()
            findings.note("groups", layer, f"{other} is {b}, but {first} is {a}; {UNLIKE_EXPERTS.symptom}")


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
    if a.scheme.fmt.one_scale:
        left, right = (ckpt.reader.read(_part(w, PartKind.SCALES)).float().flatten() for w in (a, b))
        if not torch.equal(left, right):
            message = (
                f"has scale {_shown(right)}, but {a.weight} has {_shown(left)}; vLLM quantizes them again to one scale"
            )
            findings.choice("groups", b.weight, message)


def _part(stored: StoredWeight, role: PartKind) -> str:
    part = stored.part(role)
    return part.name if part is not None else ""


def _scalar(ckpt: Source, stored: StoredWeight, roles: Sequence[PartKind]) -> torch.Tensor | None:
    part = next((part for part in stored.parts if part.role in roles), None)
    return None if part is None else ckpt.reader.read(part.name).float().flatten()


def _shown(value: torch.Tensor | None) -> str:
    return "none" if value is None else f"{float(value[0]):.9g}"


def _check_expert_inputs(ckpt: Source, findings: Findings) -> None:
    """Fused experts have one input scale for the first projections of all of them."""
    layers: dict[str, dict[str, float]] = defaultdict(dict)
    for name, stored in ckpt.stored.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if expert_of(name) is None or leaf in ("down_proj", "w2"):
            continue
        value = _scalar(ckpt, stored, _INPUTS)
        if value is not None:
            layers[experts_of(name)][name] = float(value[0])
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


def check_kv_scales(ckpt: Source, findings: Findings) -> None:
    """Scales of a quantized kv cache are finite, positive, announced by the config, and there for k and v alike."""
    layers: dict[str, set[str]] = defaultdict(set)
    names = [name for name in ckpt.plain if is_kv_scale(name)]
    for name, place in ((name, kv_scale_place(name)) for name in names):
        values = ckpt.reader.read(name).float()
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            findings.fault("scales", name, f"is {values.flatten().tolist()[:4]}, expected finite positive numbers")
        if place is not None:
            layers[place[0]].add(place[1])
    for layer, kinds in layers.items():
        if not {"k", "v"} <= kinds:
            findings.fault("scales", layer, f"has a kv-cache scale for {sorted(kinds)} only, expected k and v")
    reader = ckpt.reader
    announced = announces_kv_cache({"config.json": reader.config, HF_QUANT_CONFIG: reader.read_json(HF_QUANT_CONFIG)})
    if names and not announced:
        able = ckpt.container is not None and ckpt.container.CAPABILITIES.kv_cache is not None
        report = findings.choice if able else findings.note
        report("config", "kv_cache_scheme", f"{len(names)} kv-cache scales are stored, but no config announces them")
    if announced and not names and ckpt.container is not None:
        findings.choice("config", "kv_cache_scheme", "is announced, but there are no kv-cache scales; readers use 1.0")
