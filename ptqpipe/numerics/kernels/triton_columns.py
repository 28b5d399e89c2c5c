"""Error feedback and refinement in Triton: a program takes a few rows through all columns of a run, in one launch.

`feed_forward`, `descend` and `choose_block` are the torch references of ``quantization/gptq_steps.py``, bit for bit: a
step is rounded as ``qtensor.encode`` does, and every product and sum by itself, in the order written there.
`enter_rows` and `sweep_block_rows` go through all columns in runs of RUN, with torch's products between them: their
sums come in another order than those of the loops in ``gptq.py`` and ``refine.py``.

Matrices lie as [columns, rows]. What the errors of earlier columns add to later ones stays in registers while single
columns are rounded. Where scales are chosen, one lane tries one scale for one row, and the lane whose scale is best
writes the codes: the program then reads, after a barrier, what it wrote, and adds it to the targets of later blocks.
Every launch must say ``enable_fp_fusion=False``. Knows shapes and codecs; must not know moments or algorithms. Imports
Triton: import it from inside functions.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ptqpipe.numerics.formats import Codec
from ptqpipe.numerics.kernels.cpu_tensors import INTEGERS
from ptqpipe.numerics.kernels.triton import interpreting
from ptqpipe.numerics.kernels.triton_codecs import Minifloat, decode_signed, magic, minifloat_of

RUN = 128  # columns between two updates of all later ones
_MOST_COLUMNS = 256
_BLOCKS = (8, 16, 32)
_ROWS = 8  # of a program that goes column by column
_TRIED = 1024  # numbers of a program that chooses blocks, rows times scales times columns: twice as many spill
_INTERPRETED_ROWS = 64  # the interpreter pays by the operation, not by the lane
_INTEGER = -1  # as mantissa bits
_NUMBERS = ["rows", "columns", "ladder_size", "count", "below", "slack"]


@triton.jit
def nearest(t: tl.tensor, s: tl.tensor, inverse: tl.tensor, ELEMENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(int32 codes nearest to t at the scales s, what they decode to); ``inverse`` is 1 / s. Of integers, ``mant`` is
    _INTEGER and ``emin`` the code of 0."""
    if ELEMENT.mant == -1:
        clipped = tl.maximum(tl.minimum(t * inverse, ELEMENT.max), -ELEMENT.max - 1)
        number = clipped + 12582912.0  # 1.5 * 2^23: it is in the last bits
        code = ((number.to(tl.int32, bitcast=True) & 0xFFFF) + ELEMENT.emin) & 0xFF
        decoded = (number - 12582912.0) * s
    else:
        y = tl.minimum(tl.abs(t) * inverse, ELEMENT.max)
        big = magic(y, ELEMENT)
        total = y + big
        bits = t.to(tl.int32, bitcast=True)
        steps = total.to(tl.int32, bitcast=True) - big.to(tl.int32, bitcast=True)
        exponent = (big.to(tl.int32, bitcast=True) >> 23) - (ELEMENT.emin + 127 + 23 - ELEMENT.mant)
        code = steps + (exponent << ELEMENT.mant) | (((bits >> 31) & 1) << (ELEMENT.bits - 1))
        magnitude = ((total - big) * s).to(tl.int32, bitcast=True)
        decoded = (magnitude | ((bits >> 31) << 31)).to(tl.float32, bitcast=True)
    return code, decoded


@triton.jit
def reciprocal(s: tl.tensor) -> tl.tensor:
    """1 / s, correctly rounded."""
    return tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)


@triton.jit
def column_of(tile: tl.tensor, here: tl.tensor) -> tl.tensor:
    """[R]: the one column of float32 ``tile`` [R, C] where ``here`` [C] is; its bits, so that -0 stays what it is."""
    bits = tl.where(here[None, :], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_NUMBERS)
def feed_kernel(
    exact: tl.tensor, target: tl.tensor, s: tl.tensor, feedback: tl.tensor, codes: tl.tensor, error: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """``columns.feed_forward`` of ROWS rows, ``columns`` columns of at most WIDTH."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    column = tl.arange(0, WIDTH)
    inside = live[:, None] & (column < columns)[None, :]
    near = tl.load(target + column[None, :] * rows + row[:, None], mask=inside, other=0.0)
    scale = tl.load(s + row, mask=live, other=1.0)
    x = tl.load(exact + row, mask=live, other=0.0)
    for i in range(columns):
        at = i * rows + row
        # those of the next column, which come while this one is rounded
        more = live & (row * 0 + (i + 1) < columns)
        next_scale = tl.load(s + at + rows, mask=more, other=1.0)
        next_x = tl.load(exact + at + rows, mask=more, other=0.0)
        added = tl.load(feedback + i * columns + column, mask=column < columns, other=0.0)
        code, decoded = nearest(column_of(near, column == i), scale, reciprocal(scale), ELEMENT)
        e = x - decoded
        tl.store(codes + at, code.to(tl.uint8), mask=live)
        tl.store(error + at, e, mask=live)
        near += added[None, :] * e[:, None]
        scale = next_scale
        x = next_x


@triton.jit(do_not_specialize=_NUMBERS)
def descend_kernel(
    exact: tl.tensor, error: tl.tensor, codes: tl.tensor, slope: tl.tensor, s: tl.tensor, transposed: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """``columns.descend`` of ROWS rows; ``transposed`` is the moment."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    column = tl.arange(0, WIDTH)
    inside = live[:, None] & (column < columns)[None, :]
    where = column[None, :] * rows + row[:, None]
    near = tl.load(slope + where, mask=inside, other=0.0)
    scale = tl.load(s + row, mask=live, other=1.0)
    x = tl.load(exact + row, mask=live, other=0.0)
    before = tl.load(error + row, mask=live, other=0.0)
    for i in range(columns):
        at = i * rows + row
        more = live & (row * 0 + (i + 1) < columns)
        next_scale = tl.load(s + at + rows, mask=more, other=1.0)
        next_x = tl.load(exact + at + rows, mask=more, other=0.0)
        next_before = tl.load(error + at + rows, mask=more, other=0.0)
        added = tl.load(transposed + i * columns + column, mask=column < columns, other=0.0)
        curvature = tl.load(transposed + i * (columns + 1) + row * 0)
        least = (x - before) + column_of(near, column == i) * reciprocal(curvature)
        wanted = tl.where(curvature > 0, least, x)
        code, decoded = nearest(wanted, scale, reciprocal(scale), ELEMENT)
        e = x - decoded
        tl.store(codes + at, code.to(tl.uint8), mask=live)
        tl.store(error + at, e, mask=live)
        near += added[None, :] * (e - before)[:, None]
        scale = next_scale
        x = next_x
        before = next_before
    tl.store(slope + where, near, mask=inside)


@triton.jit
def tried(
    target: tl.tensor, rows: tl.tensor, row: tl.tensor, live: tl.tensor, s: tl.tensor, feedback: tl.tensor,
    columns: tl.tensor, weight: tl.tensor, ELEMENT: tl.constexpr, B: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(int32 codes [L, B], cost [L]) of a block whose target begins at ``target``, at the scale ``s`` of each lane.

    row, live  [L]; ``columns`` is the width of ``feedback``
    """
    inverse = reciprocal(s)
    element = tl.arange(0, B)
    near = tl.load(
        target + element[None, :] * rows + row[:, None], mask=live[:, None] & (element[None, :] < B), other=0.0
    )
    codes = tl.zeros(near.shape, tl.int32)
    cost = tl.zeros(s.shape, tl.float32)
    for k in range(B):
        here = element == k
        t = column_of(near, here)
        code, decoded = nearest(t, s, inverse, ELEMENT)
        left = t - decoded
        cost += left * left * tl.load(weight + k)
        codes = tl.where(here[None, :], code[:, None], codes)
        e = tl.load(target + k * rows + row, mask=live, other=0.0) - decoded
        near += tl.load(feedback + k * columns + element)[None, :] * e[:, None]
    return codes, cost


@triton.jit
def by_lane(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """[R * C]: what each row of x [R] has, for all of its lanes."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], C]), [x.shape[0] * C])


@triton.jit
def best_of(cost: tl.tensor, count: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """bool [R * C]: the first of the least costs of every row among ``count``; NaN is less than all, as in torch."""
    key = tl.reshape(tl.where(cost != cost, float("-inf"), cost), [cost.shape[0] // C, C])
    key = tl.where((tl.arange(0, C) < count)[None, :], key, float("inf"))
    return by_lane(tl.argmin(key, axis=1), C) == tl.arange(0, cost.shape[0]) % C


@triton.jit
def smallest_that_holds(
    amax: tl.tensor, ladder: tl.tensor, ladder_size: tl.tensor, MAX: tl.constexpr, LADDER: tl.constexpr
) -> tl.tensor:
    """int32 [R]: the smallest scale that does not clip, the largest where all clip."""
    place = tl.arange(0, LADDER)
    scale = tl.load(ladder + place, mask=place < ladder_size, other=float("inf"))
    wanted = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    return tl.minimum(tl.sum((scale[None, :] < wanted[:, None]).to(tl.int32), axis=1), ladder_size - 1)


@triton.jit
def add_later(
    target: tl.tensor, moved: tl.tensor, corner: tl.tensor, row: tl.tensor, live: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, end: tl.tensor, B: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Adds to the columns from ``end`` on of ``target`` what ``moved`` [B, rows], of the block before them, does to
    them by the rows of ``corner`` [columns, columns]. Barriers before and after."""
    column = tl.arange(0, WIDTH)
    later = (column >= end) & (column < columns)
    inside = live[:, None] & later[None, :]
    where = target + column[None, :] * rows + row[:, None]
    tl.debug_barrier()
    tile = tl.load(where, mask=inside, other=0.0)
    for k in range(B):
        by = tl.load(moved + k * rows + row, mask=live, other=0.0)
        added = tl.load(corner + (end - B + k) * columns + column, mask=later, other=0.0)
        tile += added[None, :] * by[:, None]
    tl.store(where, tile, mask=inside)
    tl.debug_barrier()


@triton.jit(do_not_specialize=_NUMBERS)
def choose_kernel(
    target: tl.tensor, exact: tl.tensor, ladder: tl.tensor, first: tl.tensor, corner: tl.tensor, weight: tl.tensor,
    codes: tl.tensor, scales: tl.tensor, error: tl.tensor, costs: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    ladder_size: tl.tensor, count: tl.tensor, below: tl.tensor, ELEMENT: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, LADDER: tl.constexpr, ENTER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """``columns.choose_block`` of ROWS rows; with ENTER of all blocks of ``columns`` columns, one after the other.

    ENTER  ``first`` is not read, but ``below`` scales under the smallest that does not clip; ``exact`` is read and
           ``error`` written, ``costs`` are not; ``target`` is overwritten
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    lane = tl.arange(0, ROWS * C)
    at_row = tl.program_id(0) * ROWS + lane // C
    on = at_row < rows
    element = tl.arange(0, B)[None, :]
    for block in range(columns // B):
        at = block * B * rows
        if ENTER:
            inside = live[:, None] & (element < B)
            tile = tl.load(target + at + element * rows + row[:, None], mask=inside, other=0.0)
            amax = tl.max(tl.abs(tile), axis=1)
            begin = by_lane(smallest_that_holds(amax, ladder, ladder_size, ELEMENT.max, LADDER), C)
            begin = tl.maximum(begin - below, 0)
        else:
            begin = tl.load(first + at_row, mask=on, other=0).to(tl.int32)
        index = tl.minimum(tl.maximum(begin + lane % C, 0), ladder_size - 1)
        s = tl.load(ladder + index)
        feedback = corner + block * B * (columns + 1)
        rounded, cost = tried(target + at, rows, at_row, on, s, feedback, columns, weight + block * B, ELEMENT, B)
        mine = best_of(cost, count, C) & on
        where = at + element * rows + at_row[:, None]
        tl.store(scales + block * rows + at_row, index.to(tl.int64), mask=mine)
        tl.store(codes + where, rounded.to(tl.uint8), mask=mine[:, None] & (element < B))
        if ENTER:
            x = tl.load(exact + where, mask=mine[:, None] & (element < B), other=0.0)
            e = x - decode_signed(rounded, ELEMENT) * s[:, None]
            tl.store(error + where, e, mask=mine[:, None] & (element < B))
            end = (block + 1) * B
            if end < columns:
                add_later(target, error + at, corner, row, live, rows, columns, end, B, WIDTH)
        else:
            tl.store(costs + at_row, cost, mask=mine)


@triton.jit(do_not_specialize=_NUMBERS)
def sweep_kernel(
    slope: tl.tensor, exact: tl.tensor, error: tl.tensor, codes: tl.tensor, scales: tl.tensor, ladder: tl.tensor,
    corner: tl.tensor, feedback: tl.tensor, weight: tl.tensor, inverse: tl.tensor, usable: tl.tensor, room: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, ladder_size: tl.tensor, count: tl.tensor, below: tl.tensor, slack: tl.tensor,
    ELEMENT: tl.constexpr, B: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Every usable block of ``columns`` columns in turn: its scale and codes where they are better than what there is.

    ``slope`` of these columns moves with the errors of the blocks before; ``room`` float32 [B, rows] is overwritten.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    lane = tl.arange(0, ROWS * C)
    at_row = tl.program_id(0) * ROWS + lane // C
    on = at_row < rows
    element = tl.arange(0, B)
    tile = element[None, :] * rows + row[:, None]
    there = live[:, None] & (element[None, :] < B)
    for block in range(columns // B):
        if tl.load(usable + block) != 0:
            at = block * B * rows
            metric = feedback + block * B * B
            before = tl.load(error + at + tile, mask=there, other=0.0)
            decoded = tl.load(exact + at + tile, mask=there, other=0.0) - before
            pull = tl.zeros([ROWS, B], tl.float32)
            for j in range(B):
                by = tl.load(slope + at + j * rows + row, mask=live, other=0.0)
                pull += tl.load(inverse + (block * B + j) * B + element)[None, :] * by[:, None]
            wanted = decoded + pull
            tl.store(room + tile, wanted, mask=there)
            tl.debug_barrier()
            left = tl.zeros([ROWS, B], tl.float32)
            for j in range(B):
                here = j * rows + row
                x = tl.load(exact + at + here, mask=live, other=0.0) - tl.load(error + at + here, mask=live, other=0.0)
                by = tl.load(room + here, mask=live, other=0.0) - x
                left += tl.load(metric + j * B + element)[None, :] * by[:, None]
            now = tl.sum(left * left * tl.load(weight + block * B + element)[None, :], axis=1)
            current = tl.load(scales + block * rows + at_row, mask=on, other=0).to(tl.int32)
            index = tl.minimum(tl.maximum(current - below, 0) + lane % C, ladder_size - 1)
            s = tl.load(ladder + index)
            rounded, cost = tried(room, rows, at_row, on, s, metric, B, weight + block * B, ELEMENT, B)
            mine = best_of(cost, count, C) & on & (cost < by_lane(now * slack, C))
            tl.debug_barrier()  # all have read what is now overwritten
            tl.store(scales + block * rows + at_row, index.to(tl.int64), mask=mine)
            where = at + element[None, :] * rows + at_row[:, None]
            taken = mine[:, None] & (element[None, :] < B)
            tl.store(codes + where, rounded.to(tl.uint8), mask=taken)
            x = tl.load(exact + where, mask=taken, other=0.0)
            tl.store(error + where, x - decode_signed(rounded, ELEMENT) * s[:, None], mask=taken)
            end = (block + 1) * B
            if end < columns:
                tl.debug_barrier()
                after = tl.load(error + at + tile, mask=there, other=0.0)
                tl.store(room + tile, after - before, mask=there)
                add_later(slope, room, corner, row, live, rows, columns, end, B, WIDTH)


def feed_forward(
    exact: torch.Tensor, target: torch.Tensor, s: torch.Tensor, feedback: torch.Tensor, element: Codec
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(uint8 codes, float32 errors), each [columns, rows]; float32 inputs, ``target`` is left as it was."""
    if not _fits(element, exact, target, s, feedback):
        return None
    codes, error = torch.empty(exact.shape, dtype=torch.uint8, device=exact.device), torch.empty_like(exact)
    sizes = _by_column(exact, element)
    feed_kernel[_grid(exact, sizes)](
        exact, target, s, feedback, codes, error, exact.shape[1], exact.shape[0], **sizes, **_OPTIONS
    )
    return codes, error


def descend(
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    slope: torch.Tensor,
    s: torch.Tensor,
    moment: torch.Tensor,
    element: Codec,
) -> bool:
    """Updates ``error``, ``codes`` and ``slope`` in place; whether it did."""
    if not _fits(element, exact, error, slope, s, moment) or not codes.is_contiguous():
        return False
    sizes = _by_column(exact, element)
    descend_kernel[_grid(exact, sizes)](
        exact, error, codes, slope, s, moment.t().contiguous(), exact.shape[1], exact.shape[0], **sizes, **_OPTIONS
    )
    return True


def choose_block(
    target: torch.Tensor,
    ladder: torch.Tensor,
    first: torch.Tensor,
    count: int,
    feedback: torch.Tensor,
    weight: torch.Tensor,
    element: Codec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(uint8 codes [columns, rows], int64 scale indices [rows], float32 costs [rows])."""
    block, rows = target.shape
    supported = _chooses(element, block) and _fits(element, target, ladder, feedback, weight)
    if not supported or first.dtype != torch.int64 or not first.is_contiguous():
        return None
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    scales, cost = torch.empty_like(first), torch.empty(rows, device=target.device)
    sizes = _by_block(target, element, block, count)
    choose_kernel[_grid(target, sizes)](
        target, target, ladder, first, feedback, weight, codes, scales, target, cost, rows, block, len(ladder), count,
        0, **sizes, LADDER=1, ENTER=False, **_OPTIONS,
    )  # fmt: skip
    return codes, scales, cost


def enter_rows(
    exact: torch.Tensor,
    ladder: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    block: int,
    below: int,
    count: int,
    element: Codec,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(uint8 codes [K, n], int64 scales [K/block, n] as indices in ``ladder``) of weights ``exact`` [K, n]: of
    ``count`` scales, the first ``below`` under the smallest that does not clip, the best one of every block.

    factor, weight  [K, K] and [K]: the metric
    """
    if not _chooses(element, block) or not _fits(element, exact[:RUN], ladder, weight):
        return None
    columns, rows = exact.shape
    codes = torch.empty(exact.shape, dtype=torch.uint8, device=exact.device)
    scales = torch.empty((columns // block, rows), dtype=torch.int64, device=exact.device)
    error, sizes = torch.empty_like(exact), _by_block(exact[:RUN], element, block, count)
    padded = triton.next_power_of_2(len(ladder))
    for start in range(0, columns, RUN):
        run, blocks = slice(start, min(start + RUN, columns)), slice(start // block, (start + RUN) // block)
        target = torch.addmm(exact[run], factor[:start, run].t(), error[:start])
        choose_kernel[_grid(exact, sizes)](
            target, exact[run], ladder, scales, factor[run, run].contiguous(), weight[run], codes[run], scales[blocks],
            error[run], error, rows, run.stop - start, len(ladder), count, below, **sizes, LADDER=padded, ENTER=True,
            **_OPTIONS,
        )  # fmt: skip
    return codes, scales


def sweep_block_rows(
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    ladder: torch.Tensor,
    moment: torch.Tensor,
    of_blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    how: tuple[int, float, int],
    element: Codec,
) -> bool:
    """Refines ``codes`` uint8 [K, n] and ``scales`` int64 [K/b, n], indices in ``ladder``, in place; whether it did.
    ``error`` is overwritten.

    of_blocks  feedback, weight and inverse of every block, [K/b, b, b] but for the weight [K/b, b], and uint8 [K/b] on
               any device: whether its scale may change
    how        scales tried on either side of a block's own, share of a block's cost that a new one has to be below,
               sweeps
    """
    (feedback, weight, inverse, usable), (window, slack, sweeps) = of_blocks, how
    block = weight.shape[1]
    plain = codes.is_contiguous() and scales.is_contiguous() and _chooses(element, block)
    if not plain or not _fits(element, exact[:RUN], error, ladder, moment, feedback, weight, inverse):
        return False
    (columns, rows), usable = exact.shape, usable.to(exact.device)
    sizes, slope = _by_block(exact[:RUN], element, block, 2 * window + 1), moment @ error
    room = torch.empty((block, rows), device=exact.device)
    runs = [slice(start, min(start + RUN, columns)) for start in range(0, columns, RUN)]
    corners = [moment[run, run].contiguous() for run in runs]
    for _ in range(sweeps):
        for run, corner in zip(runs, corners, strict=True):
            blocks = slice(run.start // block, run.stop // block)
            before, near = error[run].clone(), slope[run].clone()
            sweep_kernel[_grid(exact, sizes)](
                near, exact[run], error[run], codes[run], scales[blocks], ladder, corner, feedback[blocks],
                weight[blocks], inverse[blocks], usable[blocks], room, rows, len(corner), len(ladder), 2 * window + 1,
                window, slack, **sizes, **_OPTIONS,
            )  # fmt: skip
            slope.addmm_(moment[:, run], error[run] - before)
        s = ladder[scales].repeat_interleave(block, 0)
        for run, corner in zip(runs, corners, strict=True):
            before, near = error[run].clone(), slope[run].clone()
            descend(exact[run], error[run], codes[run], near, s[run], corner, element)
            slope.addmm_(moment[:, run], error[run] - before)
    return True


_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def _fits(element: Codec, like: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel takes these float32 tensors, of which the first is [columns, rows]."""
    plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in (like, *others))
    few = 0 < like.shape[0] <= _MOST_COLUMNS and 0 < like.numel() < 1 << 30  # places within it are int32
    return plain and few and (minifloat_of(element) is not None or element.name in INTEGERS)


def _chooses(element: Codec, block: int) -> bool:
    """Whether scales of such blocks are chosen: those of integers are no list."""
    return block in _BLOCKS and element.name not in INTEGERS


def _grid(like: torch.Tensor, sizes: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(like.shape[1], sizes["ROWS"]),)


def _by_column(like: torch.Tensor, element: Codec) -> dict[str, Any]:
    minifloat = minifloat_of(element)
    codec = minifloat or Minifloat(element.bits, element.grid.index(0.0), _INTEGER, element.max)
    width = max(16, triton.next_power_of_2(like.shape[0]))
    return {"ELEMENT": codec, "WIDTH": width, "ROWS": _rows(like.shape[1], _ROWS)}


def _by_block(like: torch.Tensor, element: Codec, block: int, count: int) -> dict[str, Any]:
    """The constants of a kernel that tries ``count`` scales for a block."""
    scales = max(8, triton.next_power_of_2(count))
    return _by_column(like, element) | {
        "B": block,
        "C": scales,
        "ROWS": _rows(like.shape[1], max(1, _TRIED // block // scales)),
    }


def _rows(rows: int, usual: int) -> int:
    return min(_INTERPRETED_ROWS, triton.next_power_of_2(rows)) if interpreting() else usual
