"""Attention over pages on a CUDA device: the Triton kernels behind ``engine/attention.py``, one launch for a batch.

Products of bfloat16 or float16 are exact, those of float32 three of TensorFloat-32 (off by 2^-20); sums are float32,
the weights are rounded to the dtype of the queries before they multiply values, and a result once more. With u = 2^-9,
2^-12 or 2^-24 for bfloat16, float16 or float32, and scores that are off by d (dim 2^-24 of the magnitudes' sum for the
sum of dim products, 2^-22 of the score itself), a result is off by (u + 2 d + 2^-20) times the weighted mean distance
of the values to it, by 2^-24 of their mean magnitude for each token, and by u of itself.

A sequence's result depends on its own tokens and span alone: keys are summed in steps at multiples of the same number,
and those of a span of at most FEW queries in parts whose number its own tokens decide, so that few sequences, too, keep
a device busy. Under Triton's interpreter CPU tensors are taken, which is how the kernels are tested without a GPU.
Must not know schedulers or models. Triton is imported on first use only.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from ptqpipe.numerics.kernels.cpu_attention import PagedSpans
from ptqpipe.numerics.kernels.triton import available, interpreting

FEW = 8  # queries of a span up to which its keys are cut into parts
PARTS = 32  # at most
LEAST = 256  # tokens of a part: below, its start costs more than another multiprocessor brings
_STEP = 64  # keys at most
_LARGEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}  # dim of a head: more does not fit registers
_STORE_LANES = 1024  # numbers that a program of store_kernel copies
_NO_WINDOW = 1 << 30
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """`PagedSpans` where the pages are, with the slots of the new keys, int64 ``[T]``, and what sizes launches need.

    places    int64 ``[n]``: of spans of at most FEW queries, where theirs stand among those of all such spans ...
    few       ... which are so many queries in all
    most      queries of the longest such span; 0 without one
    longest   tokens of the one that sees most
    many      queries of the longest other span; 0 without one
    """

    slots: torch.Tensor
    starts: torch.Tensor
    totals: torch.Tensor
    places: torch.Tensor
    tables: torch.Tensor
    few: int
    most: int
    longest: int
    many: int


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` of queries and heads of a program, ``keys`` a step."""

    rows: int
    keys: int
    warps: int
    stages: int


def place(where: PagedSpans, slots: torch.Tensor, device: torch.device) -> DeviceSpans | None:
    """Spans and slots on the device, by one copy; None for a device without these kernels."""
    if not available() or (device.type == "cuda") == interpreting():
        return None
    starts, totals = where.starts.tolist(), where.totals.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    few = [count if count <= FEW else 0 for count in counts]
    places = torch.tensor([0, *itertools.accumulate(few)])[:-1]
    parts = (slots, where.starts, where.totals, places, where.tables.flatten())
    moved = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
    return DeviceSpans(
        moved[0], moved[1], moved[2], moved[3], moved[4].view(where.tables.shape), sum(few), max(few),
        max((total for total, count in zip(totals, few, strict=True) if count), default=0),
        max((count for count in counts if count > FEW), default=0),
    )  # fmt: skip


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: DeviceSpans,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Causal attention ``[T, heads, value_dim]`` of queries ``[T, heads, key_dim]``, in their dtype.

    keys, values  pages [blocks, block_size, kv heads, dim] that hold the spans' own tokens too: numbers of the queries'
                  dtype, or E4M3 codes
    scales        of codes of keys and of values, float32 [1 or kv heads, 1] each
    window        how many tokens a query sees, itself included
    sinks         [heads]: scores of a token that is not there

    None for what has no kernel: other dtypes, dimensions above 256 (128 in float32).
    """
    if not _fits(keys, values, query.dtype, scales):
        return None
    if query.stride(2) != 1:
        query = query.contiguous()
    call = _Call(query, keys, values, where, scales, scaling, window or _NO_WINDOW, softcap, sinks)
    if interpreting():
        return call.run()
    with torch.cuda.device(query.device):
        return call.run()


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> bool:
    """Puts new keys and values ``[T, kv heads, dim]`` into the slots of pages; whether there is a kernel for them.

    slots   int64 ``[T]``
    With scales as E4M3 codes of the quotients, saturating, the bits that torch gives. Others as in `attention`.
    """
    if not _fits(keys, values, key.dtype, scales) or key.dtype != value.dtype:
        return False
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    if interpreting():
        _store(keys, values, key, value, slots, scales)
    else:
        with torch.cuda.device(key.device):
            _store(keys, values, key, value, slots, scales)
    return True


def tile_of(dtype: torch.dtype, dims: tuple[int, int], *, split: bool) -> Tile:
    """The sizes for queries of a dtype and for padded dimensions of keys and values."""
    wide, whole = max(dims) > 128, dtype == torch.float32
    if whole:  # 16 rows, as few as a product takes
        return Tile(16, 32, 4, 2)
    if split:
        return Tile(16, 32 if wide else 64, 4, 5)  # the pages' numbers take two stages of five
    return Tile(64, 64, 8, 2) if wide else Tile(128, 64, 8, 3)


def _fits(
    keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, scales: tuple[torch.Tensor, torch.Tensor] | None
) -> bool:
    """Whether the kernels read and write such pages.

    Pages of codes have torch's attention on a GPU: what Triton 3.6 makes of their products for an H100 reads beyond its
    shared memory where values have 16 columns (compute-sanitizer). With 32 it was right; more was not tried.
    """
    if scales is not None and not interpreting():
        return False
    held = dtype if scales is None else torch.float8_e4m3fn
    if keys.dtype != held or values.dtype != held or max(keys.shape[3], values.shape[3]) > _LARGEST.get(dtype, 0):
        return False
    return keys.is_contiguous() and values.is_contiguous()


def _padded(dim: int) -> int:
    """A power of two of lanes, as many as a product takes at least."""
    return max(16, 1 << (dim - 1).bit_length())


def _over(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def _by_head(scales: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, bool]:
    keys, values = (False, False) if scales is None else (len(scale) > 1 for scale in scales)
    return {"CODES": scales is not None, "KEY_SCALES": keys, "VALUE_SCALES": values}


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of `attention`, with ``window`` a number."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    where: DeviceSpans
    scales: tuple[torch.Tensor, torch.Tensor] | None
    scaling: float
    window: int = _NO_WINDOW
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        """Launches of the spans with few queries, and of the others."""
        out = torch.empty(*self.query.shape[:2], self.values.shape[3], dtype=self.query.dtype, device=self.query.device)
        if self.where.many:
            self._spans(out, 0, 0)
        if self.where.most:
            seen = min(self.where.longest, self.window + self.where.most - 1 + _STEP)  # from where a step begins
            parts = min(PARTS, _over(seen, LEAST))
            if parts == 1:
                self._spans(out, 1, 0)
            else:
                heads, dim = self.query.shape[1], self.values.shape[3]
                sums = torch.empty(self.where.few * heads * parts * (dim + 2), device=out.device)
                self._spans(sums, parts, parts)
                self._parts(out, sums, parts)
        return out

    def _spans(self, out: torch.Tensor, parts: int, kept: int) -> None:
        """Attends spans with many queries if ``parts`` is 0, else the others; stores ``kept`` partial sums of each."""
        from ptqpipe.numerics.kernels import triton_pages

        where, (heads, dims) = self.where, (self.keys.shape[2], (self.keys.shape[3], self.values.shape[3]))
        group, tile = self.query.shape[1] // heads, tile_of(self.query.dtype, self._dims(), split=parts > 0)
        tiles = _over((where.most if parts else where.many) * group, tile.rows)
        cap = 0.0 if self.softcap is None else self.softcap * _LOG2E
        factor = self.scaling * (_LOG2E if self.softcap is None else 2 * _LOG2E / self.softcap)
        key_scale, value_scale = self.scales or (self.query, self.query)
        triton_pages.spans_kernel[(len(where.totals) * heads * tiles, max(parts, 1))](
            out if kept else _bits(out), self.query, _codes(self.keys), _codes(self.values), key_scale, value_scale,
            self.query if self.sinks is None else self.sinks, where.starts, where.totals, where.places, where.tables,
            self.query.stride(0), self.query.stride(1), where.tables.shape[1], self.window, tiles, where.few, kept,
            factor, cap,
            EXACT=interpreting(), FEW=FEW, SPLIT=parts > 0, HEADS=heads, GROUP=group, KEY_DIM=dims[0],
            VALUE_DIM=dims[1], BLOCK=self.keys.shape[1], **_by_head(self.scales), CAP=self.softcap is not None,
            SINKS=self.sinks is not None, BM=tile.rows, BN=tile.keys, KD=self._dims()[0], VD=self._dims()[1],
            PARTS=PARTS, LEAST=LEAST, DIRECT=not kept, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _parts(self, out: torch.Tensor, sums: torch.Tensor, parts: int) -> None:
        from ptqpipe.numerics.kernels import triton_pages

        where, heads, kernel_scales = self.where, self.keys.shape[2], _by_head(self.scales)
        triton_pages.parts_kernel[(len(where.totals) * where.most, self.query.shape[1])](
            _bits(out), sums, self.query if self.scales is None else self.scales[1],
            self.query if self.sinks is None else self.sinks, where.starts, where.totals, where.places, self.window,
            where.most, where.few, parts,
            FEW=FEW, HEADS=heads, GROUP=self.query.shape[1] // heads, VALUE_DIM=self.values.shape[3],
            CODES=kernel_scales["CODES"], VALUE_SCALES=kernel_scales["VALUE_SCALES"], SINKS=self.sinks is not None,
            BN=tile_of(self.query.dtype, self._dims(), split=True).keys, VD=self._dims()[1], PARTS=PARTS, LEAST=LEAST,
            num_warps=4,
        )  # fmt: skip

    def _dims(self) -> tuple[int, int]:
        """Padded head sizes of keys and of values."""
        return _padded(self.keys.shape[3]), _padded(self.values.shape[3])


def _store(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    from ptqpipe.numerics.kernels import triton_pages
    from ptqpipe.numerics.kernels.triton_codecs import Minifloat

    heads, dims = keys.shape[2], (keys.shape[3], values.shape[3])
    lanes = min(_STORE_LANES, 1 << (heads * max(dims) - 1).bit_length())
    triton_pages.store_kernel[(len(slots), _over(heads * max(dims), lanes))](
        _codes(keys), _codes(values), key, value, *(scales or (key, value)), slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=heads, KEY_DIM=dims[0], VALUE_DIM=dims[1], **_by_head(scales),
        CODEC=Minifloat(8, -6, 3, 448.0), LANES=lanes, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _codes(pages: torch.Tensor) -> torch.Tensor:
    """Bytes of codes, numbers as they are."""
    return pages.view(torch.uint8) if pages.element_size() == 1 else pages


def _bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out
