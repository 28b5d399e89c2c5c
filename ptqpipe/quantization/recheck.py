"""Checks a sample of every weight's blocks by brute force, while the weight is quantized.

A kernel chooses scales and codes a thousand times faster than the definition is evaluated, and a fault of one would be
recorded as a proof. So `Recheck` stands between an algorithm and its sink: it keeps a few blocks of what goes by, and
`check` finds their scales and codes again (``search/least.py``), with numpy on the CPU.
Which blocks these are depends on a weight's name and shape alone: of a few rows (the first, the last, and one from each
equal part between) a few blocks spread in the same way. Changes no byte.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ptqpipe.errors import NumericsError, arg
from ptqpipe.numerics.formats import Format, unpack
from ptqpipe.numerics.kernels.cpu_tensors import normalize_importance
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search.least import best_scales, nearest_codes
from ptqpipe.quantization.unit import Promise, RowWriter, Weight, kernels_of

SHORT_BLOCKS = 12  # of a weight whose scales have codes, at most
SHORT_ROWS = 4  # of the weight in which these lie, or more where a row has fewer of them
LONG_ELEMENTS = 1 << 25  # weights to each further long block: a row or tile whose scale is a number
LONG_BLOCKS = 8  # at most
EVERY = 16  # only each 16th scale of a long block is tried, and the neighbours of its own
LONG_CODES = 1 << 9  # codes of a long block that are checked
JOINT_ELEMENTS = 1 << 16  # of a unit with one scale for all, up to which that scale is found again

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Sent:
    """Some blocks of one weight as they were sent to the sink.

    positions  row and column of each in the grid of scales, ascending
    codes   uint8 ``[blocks, elements]``, or their packed bytes
    scales  ``[blocks]``
    """

    positions: list[tuple[int, int]]
    codes: Array
    scales: torch.Tensor


class Recheck:
    """A sink that passes the rows of a unit on and keeps a sample of their blocks for `check`."""

    def __init__(self, weights: Sequence[Weight], fmt: Format, *, names: Sequence[str], sink: RowWriter) -> None:
        self._weights, self._fmt, self._names, self._sink = weights, fmt, names, sink
        self._joint = fmt.one_scale
        pairs = zip(names, weights, strict=True)
        plain = fmt.element.symmetric or not fmt.scale.enumerable  # others are searched by brute force already
        self._places = [_places(name, w.shape, fmt) if plain else {} for name, w in pairs]
        self._kept: dict[tuple[int, int], list[_Sent]] = {}
        self._global_scale: torch.Tensor | None = None
        self._device = torch.device("cpu")

    def take(self, member: int, row: int, q: QTensor) -> None:
        """As `RowWriter`."""
        self._sink(member, row, q)
        height = 1 if self._joint else self._fmt.block_extent(q.shape)[0]
        places = {r: c for r, c in self._places[member].items() if row <= r * height < row + q.shape[0]}
        self._device = q.data.device
        self._global_scale = None if q.global_scale is None else q.global_scale.cpu()
        if not places:
            self._kept[(member, row)] = []
        elif height == 1 and self._fmt.scale.enumerable:
            self._kept[(member, row)] = [self._short(row, q, places)]
        else:
            self._kept[(member, row)] = [
                self._long(member, row, q, r, c) for r, columns in places.items() for c in columns
            ]

    def _short(self, row: int, q: QTensor, places: dict[int, list[int]]) -> _Sent:
        bits, codes, scales = self._fmt.element.bits, [], []
        packed = self._fmt.block[1] * bits % 8 == 0
        for r, columns in places.items():
            data = q.data[r - row]
            codes.append(_array(data if packed else unpack(data, bits)).reshape(q.scales.shape[1], -1)[columns])
            scales.append(_array(q.scales[r - row])[columns])
        positions = [(r, c) for r, columns in places.items() for c in columns]
        return _Sent(positions, np.concatenate(codes), torch.from_numpy(np.concatenate(scales)))

    def _long(self, member: int, row: int, q: QTensor, r: int, c: int) -> _Sent:
        """One block, padded as in ``to_blocks``; a row of it where all weights share one scale."""
        top, left, height, width = self._extent(member, r, c)
        data = q.data[top - row : top - row + height]
        codes = _padded(unpack(data, self._fmt.element.bits)[:, left : left + width], height, width)
        return _Sent([(r, c)], codes, q.scales[0 if self._joint else r - row // height, c].reshape(1).cpu())

    def _extent(self, member: int, r: int, c: int) -> tuple[int, int, int, int]:
        """First row, first column, height and width of a block."""
        shape = self._weights[member].shape
        height, width = (1, shape[1]) if self._joint else self._fmt.block_extent(shape)
        return r * height, c * width, height, width

    def _weights_at(self, member: int, positions: Sequence[tuple[int, int]]) -> Array:
        """float32 ``[blocks, elements]``: the weights of these blocks of one weight, as in ``to_blocks``."""
        weight, blocks, rows = self._weights[member], [], {}
        for r, c in positions:
            top, left, height, width = self._extent(member, r, c)
            if top not in rows:
                rows[top] = weight.rows(top, min(top + height, weight.shape[0]))
            blocks.append(_padded(rows[top][:, left : left + width].float(), height, width))
        return np.concatenate(blocks)

    def check(self, promises: Sequence[Promise]) -> list[int]:
        """How many blocks of each weight are what was promised; 0 where one scale of too many weights has no check.

        Raises NumericsError naming the weight and the first block that is not.
        """
        kept = [(place[0], part) for place in sorted(self._kept) for part in self._kept[place]]
        counted = [sum(len(part.positions) for i, part in kept if i == member) for member in range(len(promises))]
        if self._joint and kept:
            counted = [int(self._check_joint(promises[0], kept[0][1].scales))] * len(promises)
        together = self._fmt.scale.enumerable  # short blocks, all of one size: one call for all costs as one
        for group in [kept] if together and kept else [[one] for one in kept]:
            self._check(group, promises)
        return [n if promise.scales or promise.codes else 0 for n, promise in zip(counted, promises, strict=True)]

    def _check(self, group: Sequence[tuple[int, _Sent]], promises: Sequence[Promise]) -> None:
        scales = [one for one in group if promises[one[0]].scales and not self._joint]
        codes = [one for one in group if promises[one[0]].codes]
        if not scales and not codes:
            return
        w = self._rounded(scales or codes, promises)
        if scales:
            self._check_scales(scales, w, promises)
        if codes:
            same = not scales or [i for i, _ in scales] == [i for i, _ in codes]
            self._check_codes(codes, w if same else self._rounded(codes, promises))

    def _rounded(self, group: Sequence[tuple[int, _Sent]], promises: Sequence[Promise]) -> Array:
        """float32 ``[blocks, elements]``: what was rounded in these blocks, weights times a factor."""
        w = np.concatenate([self._weights_at(i, part.positions) for i, part in group])
        factors = [promises[i].factor for i, part in group for _ in part.positions]
        return w * np.array(factors, np.float32)[:, None] if max(factors) > 1 else w

    def _check_scales(self, group: Sequence[tuple[int, _Sent]], w: Array, promises: Sequence[Promise]) -> None:
        h = None
        if any(promises[i].importance is not None for i, _ in group):
            h = np.concatenate(
                [self._importance(i, part.positions, promises[i].importance, w.shape[1]) for i, part in group]
            )
        first = zlib.crc32(f"{self._names[group[0][0]]} {group[0][1].positions[0]}".encode())
        x, scales = np.abs(w) if self._fmt.element.symmetric else w, torch.cat([part.scales for _, part in group])
        best = best_scales(x, scales, fmt=self._fmt, global_scale=self._global_scale, h=h, every=EVERY, first=first)
        if torch.equal(best, scales):
            return
        k = int((best != scales).nonzero()[0])
        word = "scale code" if self._fmt.scale.enumerable else "scale"
        self._fail(group, k, f"has the {word} {float(scales[k]):.9g}", f"brute force gives {float(best[k]):.9g}")

    def _check_codes(self, group: Sequence[tuple[int, _Sent]], w: Array) -> None:
        codes, scales = np.concatenate([part.codes for _, part in group]), torch.cat([part.scales for _, part in group])
        if codes.shape != w.shape:
            codes = unpack(torch.from_numpy(codes), self._fmt.element.bits).numpy()
        step = max(1, w.shape[1] // LONG_CODES) | 1  # odd: no multiple of a vector's width
        w, codes = w[:, ::step], codes[:, ::step]
        nearest = nearest_codes(w, scales, fmt=self._fmt, global_scale=self._global_scale)
        if np.array_equal(nearest, codes):
            return
        k, column = (int(i[0]) for i in (nearest != codes).nonzero())
        where = f"has the code {codes[k, column]} for its weight number {column * step}"
        self._fail(group, k, where, f"the nearest is {nearest[k, column]}")

    def _check_joint(self, promise: Promise, scale: torch.Tensor) -> bool:
        """Finds the one scale of all weights again where they are few; whether it did."""
        count = sum(weight.shape[0] * weight.shape[1] for weight in self._weights)
        if not promise.scales or count > JOINT_ELEMENTS:
            return False
        w = [_array(weight.rows(0, weight.shape[0]).float()).reshape(1, -1) for weight in self._weights]
        sent = _Sent([(0, 0)], np.empty((1, 0), np.uint8), scale[:1])
        self._check_scales([(0, sent)], np.concatenate(w, axis=1), [promise])
        return True

    def _importance(
        self, member: int, positions: Sequence[tuple[int, int]], importance: torch.Tensor | None, elements: int
    ) -> Array:
        """float32 ``[blocks, elements]``: the columns' weights as the objective takes them, ones without any."""
        if importance is None:
            return np.ones((len(positions), elements), np.float32)
        width = self._fmt.block_extent(self._weights[member].shape)[1]
        h = normalize_importance(importance)
        h = torch.nn.functional.pad(h, (0, -len(h) % width)).reshape(-1, width)[[c for _, c in positions]]
        return _array(h.repeat(1, elements // width))

    def _fail(self, group: Sequence[tuple[int, _Sent]], k: int, actual: str, wanted: str) -> None:
        member, (r, c) = [(i, position) for i, part in group for position in part.positions][k]
        name = self._names[member]
        height, width = (1, 1) if self._joint else self._fmt.block_extent(self._weights[member].shape)
        remedy = f"convert with {arg('scale_search', 'brute_force')}, which is slow and uses none"
        if not self._fmt.scale.enumerable:
            remedy = f"keep the weight: {arg('ignore', name.removesuffix('.weight'))}"
        raise NumericsError(
            f"{name}: the {self._fmt.name} block at row {r * height}, column {c * width} {actual}, {wanted}: a bug in "
            f"ptqpipe ({kernels_of(self._device)}), not of the model; please report it with the command that you ran, "
            f"and {remedy}",
            weight=name,
        )


def _array(tensor: torch.Tensor) -> Array:
    """A tensor of any device for numpy, which begins an operation in a fraction of torch's time."""
    array: Array = tensor.cpu().numpy()
    return array


def _padded(block: torch.Tensor, height: int, width: int) -> Array:
    """``[1, height * width]``: a block, with zeros where the weight ends before it does."""
    array = _array(block)
    if array.shape != (height, width):
        array = np.pad(array, ((0, height - array.shape[0]), (0, width - array.shape[1])))
    return array.reshape(1, -1)


def _places(name: str, shape: tuple[int, int], fmt: Format) -> dict[int, list[int]]:
    """Row of the grid of scales -> its columns, ascending: what is kept of a weight."""
    rows, columns = (shape[0], 1) if fmt.one_scale else fmt.scale_shape(shape)
    seed = zlib.crc32(f"{name} {shape[0]}x{shape[1]}".encode())
    columns_by_row: dict[int, list[int]] = {}
    if fmt.scale.enumerable:  # several of a row, since a row may have to be read
        few = min(rows, max(SHORT_ROWS, -(-SHORT_BLOCKS // columns)))
        for i, row in enumerate(_spread(rows, few, seed)):
            columns_by_row[row] = _spread(columns, -(-SHORT_BLOCKS // few), seed + i)
        return columns_by_row
    for flat in _spread(rows * columns, min(LONG_BLOCKS, 1 + shape[0] * shape[1] // LONG_ELEMENTS), seed):
        columns_by_row.setdefault(flat // columns, []).append(flat % columns)
    return columns_by_row


def _spread(total: int, count: int, seed: int) -> list[int]:
    """Up to ``count`` different numbers below ``total``, ascending: one from each of as many equal parts.

    Of three or more the first is the first of all, and the last the last.
    """
    if total <= count:
        return list(range(total))
    shares = [((seed + k * 0x9E3779B1) & 0xFFFFFFFF) / 2**32 for k in range(1, count + 1)]
    numbers = [int((k + share) * total / count) for k, share in enumerate(shares)]
    return numbers if count < 3 else [0, *numbers[1:-1], total - 1]
