"""The mixed-precision map: layers by roles, coloured by format."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ptqpipe.report import charts, numbers
from ptqpipe.report.content import Kept, Report, Weight, decibels, pooled_mse
from ptqpipe.report.sections.words import family, shown

_WALK = (
    *("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "router"),
    *("gate_up_proj", "gate_proj", "w1", "up_proj", "w3", "down_proj", "w2"),
)


@dataclass(frozen=True, slots=True)
class Map:
    """The mixed-precision map: the drawing, its legend (class, words), and the matrices outside of layers."""

    drawing: Markup | None
    legend: tuple[tuple[str, str], ...]
    outside: tuple[tuple[str, str, str], ...]  # (class, name, what it is)


def precision_map(report: Report) -> Map:
    """Layers by roles, coloured by format. Kept matrices are squares of their own; vectors are not shown."""
    squares: dict[tuple[str, int], list[Weight | Kept]] = defaultdict(list)
    outside: dict[tuple[str, str, str], int] = defaultdict(int)
    bits: dict[str, list[Weight]] = defaultdict(list)
    for weight in report.weights:
        bits[weight.format].append(weight)
        if weight.layer is None:
            outside[(family(weight.format), shown(weight.name), weight.format)] += 1
        else:
            squares[(shown(weight.role), weight.layer)].append(weight)
    kept_matrices = [k for k in report.kept if len(k.shape) >= 2 and not k.name.endswith("bias")]
    for kept in kept_matrices:
        if kept.layer is None:
            outside[("kept", shown(kept.name), f"{kept.dtype}, {kept.reason or 'kept'}")] += 1
        else:
            squares[(shown(kept.role), kept.layer)].append(kept)
    roles = sorted(dict.fromkeys(role for role, _ in squares), key=_place)
    layers = sorted({layer for _, layer in squares})
    cells = [
        _cell(layers.index(layer), roles.index(role), role, layer, found) for (role, layer), found in squares.items()
    ]
    drawing = None
    if cells:
        drawing = charts.map_chart(cells, layers=layers, rows=roles, label="format of every weight, layers by roles")
    legend = []
    for fmt, members in bits.items():
        elements = sum(w.elements for w in members)
        size = 8 * sum(w.nbytes for w in members) / max(1, elements)
        legend.append((family(fmt), f"{fmt}  {size:.2f} bits, {len(members)} weights, {numbers.count(elements)}"))
    if kept_matrices:
        legend.append(("kept", f"kept  {len(kept_matrices)} matrices"))
    return Map(drawing, tuple(legend), tuple(outside)[:40])


def _place(role: str) -> int:
    """The order of a decoder layer's walk; unknown roles last, in the order of the files."""
    leaf = role.rpartition(".")[2]
    return _WALK.index(leaf) if leaf in _WALK else len(_WALK)


def _cell(column: int, row: int, role: str, layer: int, found: Sequence[Weight | Kept]) -> charts.Cell:
    names = list(dict.fromkeys(w.format if isinstance(w, Weight) else "kept" for w in found))
    first = found[0]
    kind = "mixed" if len(names) > 1 else family(names[0]) if isinstance(first, Weight) else "kept"
    tip = f"layer {layer}  {role}: {', '.join(names)}"
    weights = [w for w in found if isinstance(w, Weight)]
    if not weights:
        held = found[0].nbytes * 8 // max(1, math.prod(found[0].shape))
        return charts.Cell(column, row, kind, f"{tip} ({first.dtype})" if isinstance(first, Kept) else tip, f"{held}")
    size = 8 * sum(w.nbytes for w in weights) / max(1, sum(w.elements for w in weights))
    error = decibels(pooled_mse(weights))
    tip += f", {size:.2f} bits" + (f", {error:.2f} dB" if error is not None else "")
    return charts.Cell(column, row, kind, tip + (f", {len(found)} weights" if len(found) > 1 else ""), f"{int(size)}")
