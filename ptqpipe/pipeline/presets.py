"""What each quality does for each kind of format: one table, by the measurements in benchmarks/quality.md.

``best`` has the lowest divergence there; ``good`` costs no more than the usual GPTQ; ``fast`` runs the model once and
chooses scales alone. docs/calibration.md shows the table (`markdown`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ptqpipe.numerics.schemes import Activation, Scheme


class QualityPreset(NamedTuple):
    """How codes are found.

    rotations  which are learned and folded into the float model first (``transforms`` of `transform`); empty: none
    steps      number of steps in which they are learned (``learn`` of `transform`)
    transform  which transform is folded in after that (``transforms`` of `transform`); empty: none
    method     of ``tune``; empty: nearest codes, at scales that are weighted by the second moments of the inputs
    own_text   whether text that the model generates is added to the data, as with ``data="self"``
    without    reasons why a part of the table's entry is left out of this run
    """

    rotations: str = ""
    steps: int = 0
    transform: str = ""
    method: str = ""
    own_text: bool = False
    without: tuple[str, ...] = ()


WEIGHTS, INT8, FP8 = "weights alone", "INT8 activations", "FP8 activations"
MXFP4, NVFP4 = "MXFP4 activations", "NVFP4 activations"
_KINDS = {
    Activation.NONE: WEIGHTS,
    Activation.INT8_TOKEN: INT8,
    Activation.MXFP4: MXFP4,
    Activation.NVFP4_STATIC_GLOBAL: NVFP4,
}  # the others are in FP8


def _row(best: QualityPreset) -> dict[str, QualityPreset]:
    return {"fast": QualityPreset(), "good": QualityPreset(method="layerwise"), "best": best}


TABLE: dict[str, dict[str, QualityPreset]] = {
    WEIGHTS: _row(QualityPreset(method="gptq")),
    INT8: _row(QualityPreset(method="gptq")),
    FP8: _row(QualityPreset("rotate", 200, method="gptq")),
    # With 4-bit inputs the codes also compensate for the error of the inputs. Learned from one kind of text, that
    # raises the error on other kinds; so text that the model generates is added.
    MXFP4: _row(QualityPreset("rotate", 200, "aqas", "gptq", own_text=True)),
    NVFP4: _row(QualityPreset("rotate", 50, "aqas", "gptq", own_text=True)),  # more steps raise the loss of the model
}

_WORDS = {
    "": "scales weighted by the inputs, rounding to nearest",
    "layerwise": "GPTQ on each layer independently",
    "gptq": "GPTQ layer after layer, minimizing the model's {loss}",
}


def kind_of(schemes: Sequence[Scheme]) -> str:
    """The row of the table for these schemes together: of several, weights alone, which every format gains by."""
    return WEIGHTS if len(schemes) != 1 else _KINDS.get(schemes[0].activation, FP8)


def describe(preset: QualityPreset, loss: str = "KL divergence") -> str:
    """In words. ``loss``: what is minimized where the method goes by the model's output."""
    before = [*(["learned rotations"] if preset.rotations else []), *([preset.transform] if preset.transform else [])]
    text = ", on the data and on text that the model generates" if preset.own_text else ""
    return (f"{', '.join(before)}, then " if before else "") + _WORDS[preset.method].format(loss=loss) + text


def markdown() -> str:
    qualities = list(TABLE[WEIGHTS])
    lines = [f"| format | {' | '.join(qualities)} |", "|---" * (len(qualities) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(describe(row[q]) for q in qualities)} |" for kind, row in TABLE.items()]
    return "\n".join(lines)
