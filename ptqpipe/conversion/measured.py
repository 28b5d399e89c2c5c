"""How far weights that a source stores below 8 bits differ from what they were: counted while they are converted, and
found again by the reference when the checkpoint is verified."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ptqpipe.models.source import SourceRows
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels.cpu_decode import decoded, same_numbers
from ptqpipe.numerics.qtensor import QTensor, to_blocks

CHANGES = "changed"  # the record's key of `Changes`, of each weight that its source stores below 8 bits


class Changes(NamedTuple):
    """How far a weight that was stored below 8 bits differs from what it was.

    weights        numbers that are others than before (zero and its negative are one)
    blocks         blocks with such a number
    largest_error  the largest difference of a number
    """

    weights: int = 0
    blocks: int = 0
    largest_error: float = 0.0

    @classmethod
    def of(cls, values: torch.Tensor, w: torch.Tensor, fmt: Format) -> "Changes":
        """Those of the decoded ``values`` of rows in ``fmt`` against the rows ``w`` that they stand for, exactly."""
        if torch.equal(values, w):  # the usual case, without float64
            return cls()
        error = to_blocks((values.double() - w.double()).abs(), fmt)
        changed = error != 0
        return cls(int(changed.sum()), int(changed.any(dim=1).sum()), float(error.max()))

    @classmethod
    def sum(cls, parts: Iterable["Changes"], fmt: Format | None = None) -> "Changes":
        """Of all parts together; of runs of the rows of one weight where ``fmt`` has one scale for all rows."""
        weights, blocks, errors = zip(cls(), *parts, strict=True)
        return cls(sum(weights), int(any(blocks)) if fmt is not None and fmt.one_scale else sum(blocks), max(errors))


def counting(
    weights: Sequence[SourceRows], sink: Callable[[int, int, QTensor], None], changed: dict[tuple[int, int], Changes]
) -> Callable[[int, int, QTensor], None]:
    """A sink that passes rows on, and puts into ``changed`` what becomes of weights that are stored below 8 bits."""

    def write_rows(member: int, row: int, q: QTensor) -> None:
        sink(member, row, q)
        if weights[member].below_8_bits:
            run = row, row + q.shape[0]
            source = weights[member].quantized(*run)
            same = source is not None and same_numbers(q, source)
            changed[member, row] = (
                Changes() if same else Changes.of(decoded(q).cpu(), weights[member].rows(*run), q.fmt)
            )

    return write_rows if any(weight.below_8_bits for weight in weights) else sink


def changes_of(
    weights: Sequence[SourceRows], fmt: Format, changed: Mapping[tuple[int, int], Changes]
) -> list[dict[str, Any]]:
    """What the record says of the changes of each weight, from what `counting` found."""
    by_member = [[changes for (member, _), changes in changed.items() if member == i] for i in range(len(weights))]
    return [
        {CHANGES: Changes.sum(changes, fmt)._asdict()} if w.below_8_bits else {}
        for w, changes in zip(weights, by_member, strict=True)
    ]


def certificate(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """What the record certifies of all weights that were stored below 8 bits; empty where none was."""
    changes = [Changes(**entry[CHANGES]) for entry in entries.values() if CHANGES in entry]
    total = Changes.sum(changes)
    text = f"{total.weights} weights changed; {total.blocks} blocks requantized, largest error {total.largest_error:g}"
    return text if changes else ""
