"""Checks a sample of every weight's blocks by brute force, while the weight is quantized.

A kernel chooses scales and codes a thousand times faster than the definition is evaluated, and a fault of one would be
recorded as a proof. So `Recheck` stands between an algorithm and its sink: it keeps a few blocks of what goes by, and
`check` finds their scales and codes again (``search/least.py``), with numpy on the CPU.
Which blocks these are depends on a weight's name and shape alone: of a few rows (the first, the last, and one from each
equal part between) a few blocks spread in the same way. Changes no byte.

Knows tensors, formats and what an algorithm promises; must not know recipes or files.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ptqpipe.algorithms.unit import Promise, Sink, Weight, kernels_of
from ptqpipe.errors import NumericsError
from ptqpipe.formats import Codec, Format, unpack
from ptqpipe.kernels.importance import normalize_importance
from ptqpipe.qtensor import QTensor
from ptqpipe.search.enlarged import enlarge
from ptqpipe.search.least import best_scales, nearest_codes

SHORT_BLOCKS = 12  # of a weight whose scales have codes, at most
SHORT_ROWS = 4  # of the weight in which these lie, or more where a row has fewer of them
LONG_ELEMENTS = 1 << 25  # weights to each further long block: a row or tile whose scale is a number
LONG_BLOCKS = 8  # at most
EVERY = 16  # only each 16th scale of a long block is tried, and the neighbours of its own
LONG_CODES = 1 << 9  # codes of a long block that are checked
JOINT_ELEMENTS = 1 << 16  # of a unit with one scale for all, up to which that scale is found again


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Some blocks of one size, in a row of the list for each.

    at      row and column of each in the grid of scales
    w       ``[blocks, elements]`` of the weight's dtype, as in ``to_blocks``
    codes   uint8 ``[blocks, elements]`` as they were sent, or their packed bytes
    scales  ``[blocks]`` as they were sent
    """

    at: list[tuple[int, int]]
    w: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def join(cls, parts: Sequence["_Blocks"], element: Codec) -> "_Blocks":
        """All of them, in order, with the weights as float32 and the codes unpacked."""
        first = parts[0]
        w, codes, scales = first.w, first.codes, first.scales
        if len(parts) > 1:
            w, codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("w", "codes", "scales"))
        codes = codes if codes.shape == w.shape else unpack(codes, element.bits)
        return cls([at for part in parts for at in part.at], w.float(), codes, scales)


class Recheck:
    """A sink that passes the rows of a unit on and keeps a sample of their blocks for `check`."""

    def __init__(self, weights: Sequence[Weight], fmt: Format, *, names: Sequence[str], sink: Sink) -> None:
        self._weights, self._fmt, self._names, self._sink = weights, fmt, names, sink
        self._joint = fmt.one_scale
        pairs = zip(names, weights, strict=True)
        plain = fmt.element.symmetric or not fmt.scale.enumerable  # others are searched by brute force already
        self._places = [_places(name, w.shape, fmt) if plain else {} for name, w in pairs]
        self._kept: dict[tuple[int, int], list[_Blocks]] = {}
        self._global_scale: torch.Tensor | None = None
        self._device = torch.device("cpu")

    def take(self, member: int, row: int, q: QTensor) -> None:
        """As `Sink`."""
        self._sink(member, row, q)
        height = 1 if self._joint else self._fmt.block_extent(q.shape)[0]
        places = {r: c for r, c in self._places[member].items() if row <= r * height < row + q.shape[0]}
        self._device = q.data.device
        self._global_scale = None if q.global_scale is None else q.global_scale.cpu()
        if not places:
            self._kept[(member, row)] = []
        elif height == 1 and self._fmt.scale.enumerable:
            self._kept[(member, row)] = [self._short(member, row, q, places)]
        else:
            self._kept[(member, row)] = [
                self._long(member, row, q, r, c) for r, columns in places.items() for c in columns
            ]

    def _short(self, member: int, row: int, q: QTensor, places: dict[int, list[int]]) -> _Blocks:
        """The blocks at these places; their codes still packed where a block fills whole bytes."""
        size, grid = self._fmt.block[1], q.scales.shape[1]
        at = [(r, c) for r, columns in places.items() for c in columns]
        read = torch.cat([self._weights[member].rows(r, r + 1) for r in places]).reshape(-1, size)
        index = torch.tensor([i * grid + c for i, columns in enumerate(places.values()) for c in columns])
        where = torch.tensor([(r - row) * grid + c for r, c in at]).to(q.data.device)
        codes = q.codes if size * self._fmt.element.bits % 8 else q.data
        codes = codes.reshape(q.scales.numel(), -1)[where]
        return _Blocks(at, read[index.to(read.device)], codes.cpu(), q.scales.reshape(-1)[where].cpu())

    def _long(self, member: int, row: int, q: QTensor, r: int, c: int) -> _Blocks:
        """One block, padded as in ``to_blocks``; a row of it where all weights share one scale."""
        height, width = (1, q.shape[1]) if self._joint else self._fmt.block_extent(self._weights[member].shape)
        top, left = r * height, c * width
        w = self._weights[member].rows(top, min(top + height, row + q.shape[0]))[:, left : left + width]
        codes = unpack(q.data[top - row : top - row + len(w)], self._fmt.element.bits)[:, left : left + width].cpu()
        if w.shape != (height, width):
            pad = (0, width - w.shape[1], 0, height - len(w))
            w, codes = (torch.nn.functional.pad(x, pad) for x in (w, codes))
        scale = q.scales[0 if self._joint else r - row // height, c].reshape(1).cpu()
        return _Blocks([(r, c)], w.reshape(1, -1), codes.reshape(1, -1), scale)

    def check(self, promises: Sequence[Promise]) -> list[int]:
        """How many blocks of each weight are what was promised; 0 where one scale of too many weights has no check.

        Raises NumericsError naming the weight and the first block that is not.
        """
        kept = [(at[0], part) for at in sorted(self._kept) for part in self._kept[at]]
        counted = [sum(len(part.at) for i, part in kept if i == member) for member in range(len(promises))]
        if self._joint and kept:
            counted = [int(self._check_joint(promises[0], kept[0][1].scales))] * len(promises)
        kept = [(i, replace(part, w=enlarge(part.w, promises[i].factor))) for i, part in kept]
        together = self._fmt.scale.enumerable  # short blocks, all of one size: one call for all costs as one
        for group in [kept] if together and kept else [[one] for one in kept]:
            self._check(group, promises)
        return [n if promise.scales or promise.codes else 0 for n, promise in zip(counted, promises, strict=True)]

    def _check(self, group: Sequence[tuple[int, _Blocks]], promises: Sequence[Promise]) -> None:
        """Scales and codes of these blocks, each with the number of its weight."""
        scales = [one for one in group if promises[one[0]].scales and not self._joint]
        codes = [one for one in group if promises[one[0]].codes]
        blocks = _Blocks.join([part for _, part in scales or codes or group], self._fmt.element)
        if scales:
            self._check_scales(scales, blocks, promises)
        if codes:
            same = len(codes) == len(scales) or not scales
            self._check_codes(codes, blocks if same else _Blocks.join([part for _, part in codes], self._fmt.element))

    def _check_scales(self, group: Sequence[tuple[int, _Blocks]], blocks: _Blocks, promises: Sequence[Promise]) -> None:
        h = None
        if any(promises[i].importance is not None for i, _ in group):
            h = torch.cat([self._importance(i, part, promises[i].importance) for i, part in group]).numpy()
        best = best_scales(
            np.abs(blocks.w.numpy()) if self._fmt.element.symmetric else blocks.w.numpy(),
            blocks.scales,
            fmt=self._fmt,
            global_scale=self._global_scale,
            h=h,
            every=EVERY,
            first=zlib.crc32(f"{self._names[group[0][0]]} {blocks.at[0]}".encode()),
        )
        if torch.equal(best, blocks.scales):
            return
        k = int((best != blocks.scales).nonzero()[0])
        found, wanted = (f"{float(scales[k]):.9g}" for scales in (blocks.scales, best))
        word = "scale code" if self._fmt.scale.enumerable else "scale"
        self._fail(group, k, f"has the {word} {found}", f"brute force gives {wanted}")

    def _check_codes(self, group: Sequence[tuple[int, _Blocks]], blocks: _Blocks) -> None:
        step = max(1, blocks.w.shape[1] // LONG_CODES) | 1  # odd: no multiple of a vector's width
        w, codes = blocks.w.numpy()[:, ::step], blocks.codes.numpy()[:, ::step]
        nearest = nearest_codes(w, blocks.scales, fmt=self._fmt, global_scale=self._global_scale)
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
        w = torch.cat([weight.rows(0, weight.shape[0]).float() for weight in self._weights])
        block = _Blocks([(0, 0)], w.reshape(1, -1), torch.empty(1, 0, dtype=torch.uint8), scale[:1])
        self._check_scales([(0, block)], block, [promise])
        return True

    def _importance(self, member: int, blocks: _Blocks, importance: torch.Tensor | None) -> torch.Tensor:
        """float32, the shape of ``blocks.w``: the columns' weights as the objective takes them, ones without any."""
        if importance is None:
            return torch.ones(blocks.w.shape)
        shape = self._weights[member].shape
        width = self._fmt.block_extent(shape)[1]
        h = normalize_importance(importance)
        h = torch.nn.functional.pad(h, (0, -len(h) % width)).reshape(-1, width)[[c for _, c in blocks.at]]
        return h.repeat(1, blocks.w.shape[1] // width)

    def _fail(self, group: Sequence[tuple[int, _Blocks]], k: int, found: str, wanted: str) -> None:
        """Raises NumericsError for block number ``k`` of the group."""
        owners = [i for i, part in group for _ in range(len(part.at))]
        member, (r, c) = owners[k], [at for _, part in group for at in part.at][k]
        name = self._names[member]
        height, width = (1, 1) if self._joint else self._fmt.block_extent(self._weights[member].shape)
        remedy = "convert with --search brute_force, which is slow and uses none"
        if not self._fmt.scale.enumerable:
            remedy = f"keep the weight: --ignore '{name.removesuffix('.weight')}'"
        raise NumericsError(
            f"{name}: the {self._fmt.name} block at row {r * height}, column {c * width} {found}, {wanted}: a fault of "
            f"ptqpipe ({kernels_of(self._device)}), not of the model; please report it with the command that you ran, "
            f"and {remedy}",
            weight=name,
        )


def _places(name: str, shape: tuple[int, int], fmt: Format) -> dict[int, list[int]]:
    """Row of the grid of scales -> its columns, ascending: what is kept of a weight."""
    rows, columns = (shape[0], 1) if fmt.one_scale else fmt.scale_shape(shape)
    seed = zlib.crc32(f"{name} {shape[0]}x{shape[1]}".encode())
    found: dict[int, list[int]] = {}
    if fmt.scale.enumerable:  # several of a row, since a row may have to be read
        few = min(rows, max(SHORT_ROWS, -(-SHORT_BLOCKS // columns)))
        for i, row in enumerate(_spread(rows, few, seed)):
            found[row] = _spread(columns, -(-SHORT_BLOCKS // few), seed + i)
        return found
    for flat in _spread(rows * columns, min(LONG_BLOCKS, 1 + shape[0] * shape[1] // LONG_ELEMENTS), seed):
        found.setdefault(flat // columns, []).append(flat % columns)
    return found


def _spread(total: int, count: int, seed: int) -> list[int]:
    """Up to ``count`` different numbers below ``total``, ascending: one from each of as many equal parts.

    Of three or more the first is the first of all, and the last the last.
    """
    if total <= count:
        return list(range(total))
    shares = [((seed + k * 0x9E3779B1) & 0xFFFFFFFF) / 2**32 for k in range(1, count + 1)]
    found = [int((k + share) * total / count) for k, share in enumerate(shares)]
    return found if count < 3 else [0, *found[1:-1], total - 1]
