"""What each quality does for each kind of format: one table, by the measurements in docs/quality.md.

``best`` has the lowest divergence there; ``good`` costs no more than the usual GPTQ; ``fast`` runs the model once and
chooses scales alone. docs/calibration.md shows the table (`markdown`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ptqpipe.schemes import Activation, Scheme


class Way(NamedTuple):
    """How codes are found.

    rotations  which are learned and folded into the float model first (``transform --apply --learn``); empty: none
    transform  what is folded in then (``transform --apply``); empty: nothing
    method     of ``tune``; empty: nearest codes, at scales that are weighted by the second moments of the inputs
    without    why something that the table has is left out of this run
    """

    rotations: str = ""
    transform: str = ""
    method: str = ""
    without: tuple[str, ...] = ()


LEARN_STEPS = 200
WEIGHTS, BYTES, NIBBLES = "weights alone", "8-bit activations", "4-bit activations"

TABLE: dict[str, dict[str, Way]] = {
    WEIGHTS: {"fast": Way(), "good": Way(method="layerwise"), "best": Way(method="gptq")},
    BYTES: {"fast": Way(), "good": Way(method="layerwise"), "best": Way("rotate", method="gptq")},
    NIBBLES: {"fast": Way(), "good": Way(method="layerwise"), "best": Way("rotate", "aqas", "gptq")},
}

_WORDS = {
    "": "scales weighted by the inputs, nearest codes",
    "layerwise": "GPTQ of each layer by itself",
    "gptq": "GPTQ in the order of the model, by its KL divergence",
}


def kind_of(schemes: Sequence[Scheme]) -> str:
    """The row of the table for these schemes together: of several, weights alone, which every format gains by."""
    if len(schemes) != 1 or schemes[0].activation is Activation.NONE:
        return WEIGHTS
    return NIBBLES if schemes[0].activation.four_bits else BYTES


def words_of(way: Way) -> str:
    """What a way does, in words."""
    before = [*(["learned rotations"] if way.rotations else []), *([way.transform] if way.transform else [])]
    return (f"{', '.join(before)}, then " if before else "") + _WORDS[way.method]


def markdown() -> str:
    """The table for the docs."""
    qualities = list(TABLE[WEIGHTS])
    lines = [f"| format | {' | '.join(qualities)} |", "|---" * (len(qualities) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(words_of(row[q]) for q in qualities)} |" for kind, row in TABLE.items()]
    return "\n".join(lines)
