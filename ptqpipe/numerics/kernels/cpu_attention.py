"""Attention over pages, compiled: what ``engine/attention.py`` does in torch for other cases.

Reads the pages where they are: nothing is gathered, no head is repeated. `paged_attention` has one query a sequence and
float32 scores, weights and sums. `paged_prefill` has any number of them, for pages of bfloat16 numbers or E4M3 codes
on AVX-512 with BF16, where it does the decode steps, too; it rounds the weights to bfloat16. The order of a sum depends
on its sequence alone, so neither threads nor the other sequences change a bit. Knows addresses; must not know
schedulers or models.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ptqpipe.numerics.kernels import cpu_library as lib

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_KINDS = {torch.float32: 0, torch.float8_e4m3fn: 1, torch.bfloat16: 2}
_WORTH_A_THREAD = 1 << 16  # numbers read, below which waking another thread costs more than it brings
_PRODUCTS_WORTH_A_THREAD = 1 << 21  # the same for products of several queries, a quarter for one: it reads more


_Attention = lib.struct(
    "ptq_attention",
    q=_POINTER, keys=_POINTER, values=_POINTER, key_table=_POINTER, value_table=_POINTER, tables=_POINTER,
    totals=_POINTER, sinks=_POINTER, out=_POINTER, spans=_LONG, heads=_LONG, kv_heads=_LONG, key_dim=_LONG,
    value_dim=_LONG, block_size=_LONG, table_stride=_LONG, table_heads=_LONG, window=_LONG, threads=_LONG,
    scaling=_FLOAT, softcap=_FLOAT, kind=_INT, unused=_INT,
)  # fmt: skip
_Prefill = lib.struct(
    "ptq_prefill",
    q=_POINTER, keys=_POINTER, values=_POINTER, key_table=_POINTER, value_table=_POINTER, tables=_POINTER,
    starts=_POINTER, totals=_POINTER, sinks=_POINTER, out=_POINTER, spans=_LONG, heads=_LONG, kv_heads=_LONG,
    key_dim=_LONG, value_dim=_LONG, block_size=_LONG, table_stride=_LONG, q_token=_LONG, q_head=_LONG,
    table_heads=_LONG, window=_LONG, threads=_LONG, scaling=_FLOAT, softcap=_FLOAT,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """Which pages each of several single queries sees. ``tables`` int64 [n, most blocks], ``totals`` int64 [n] tokens.

    tokens  the sum of ``totals``
    """

    tables: torch.Tensor
    totals: torch.Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """Spans of queries that lie one after the other. ``tables`` int64 [n, most blocks], ``totals`` int64 [n] tokens.

    starts  int64 [n + 1]: where each span's queries begin, which are the last of its tokens, and where all end
    pairs   of queries and keys that they see, about: the sum of queries times tokens
    """

    tables: torch.Tensor
    totals: torch.Tensor
    starts: torch.Tensor
    pairs: int


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: PagedQueries,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """``[n, heads, value_dim]`` in the query's dtype, of queries ``[n, heads, key_dim]``.

    keys, values  pages [blocks, block_size, kv heads, dim]: float32, bfloat16, or E4M3 codes
    numbers       what the codes of keys and of values stand for, float32 [1 or kv heads, 256] each
    window        how many tokens a query sees, itself included
    sinks         float32 [heads]: scores of a token that is not there

    None for what has no kernel: other dtypes and devices, no compiler.
    """
    kind = _KINDS.get(keys.dtype)
    if kind is None or keys.device.type != "cpu" or (kind == 1) != (numbers is not None):
        return None
    if not exports("ptq_paged_attention"):
        return None
    if not keys.is_contiguous() or not values.is_contiguous():
        return None
    q = query.float().contiguous()
    out = torch.empty(*query.shape[:2], values.shape[3])
    job = attention_job(
        (query.shape[1], query.shape[2]), keys, values, where, scaling=scaling, window=window, softcap=softcap,
        sinks=sinks, numbers=numbers,
    )  # fmt: skip
    job.q, job.out = q.data_ptr(), out.data_ptr()
    if lib.call("ptq_paged_attention", ctypes.byref(job)) != lib.OK:
        return None
    return out.to(query.dtype)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: PagedSpans,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Causal attention ``[T, heads, value_dim]`` of queries ``[T, heads, key_dim]``, in bfloat16.

    keys, values  pages [blocks, block_size, kv heads, dim] that hold the spans' own tokens too: bfloat16, or E4M3 codes
    numbers       what the codes of keys and of values stand for, float32 [1 or kv heads, 256] each; bfloat16 numbers
    window        how many tokens a query sees, itself included
    sinks         float32 [heads]: scores of a token that is not there

    A query's result is the same bits however its sequence was cut into spans. None for what has no kernel: other
    dtypes and devices, CPUs without BF16 products, dimensions above 512.
    """
    stored = torch.bfloat16 if numbers is None else torch.float8_e4m3fn
    tensors = ((query, torch.bfloat16), (keys, stored), (values, stored))
    if not lib.multiplies_bf16() or not exports("ptq_paged_prefill"):
        return None
    if any(x.dtype != dtype or x.device.type != "cpu" for x, dtype in tensors):
        return None
    if not keys.is_contiguous() or not values.is_contiguous():
        return None
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(*query.shape[:2], values.shape[3], dtype=torch.bfloat16)
    job = prefill_job(
        query.shape, keys, values, where, scaling=scaling, window=window, softcap=softcap, sinks=sinks, numbers=numbers
    )
    job.q, job.q_token, job.q_head, job.out = query.data_ptr(), query.stride(0), query.stride(1), out.data_ptr()
    return out if lib.call("ptq_paged_prefill", ctypes.byref(job)) == lib.OK else None


def attention_job(
    heads_and_dim: tuple[int, int],
    keys: torch.Tensor,
    values: torch.Tensor,
    where: PagedQueries,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> ctypes.Structure:
    """The job of `paged_attention` but for q and out. Points into the tensors, of which it keeps the sinks' numbers."""
    (heads, key_dim), value_dim = heads_and_dim, values.shape[3]
    extra = None if sinks is None else sinks.float().contiguous()
    work = where.tokens * keys.shape[2] * (key_dim + value_dim)
    job = _Attention(
        keys=keys.data_ptr(), values=values.data_ptr(), tables=where.tables.data_ptr(),
        totals=where.totals.data_ptr(), sinks=None if extra is None else extra.data_ptr(),
        spans=where.totals.shape[0], heads=heads, kv_heads=keys.shape[2], key_dim=key_dim, value_dim=value_dim,
        block_size=keys.shape[1], table_stride=where.tables.shape[1], window=window or 0,
        threads=min(torch.get_num_threads(), 1 + work // _WORTH_A_THREAD),
        scaling=scaling, softcap=softcap or 0.0, kind=_KINDS[keys.dtype],
    )  # fmt: skip
    job.kept = extra
    if numbers is not None:
        _check_numbers(numbers, keys.shape[2])
        job.key_table, job.value_table, job.table_heads = *(x.data_ptr() for x in numbers), numbers[0].shape[0]
    return job


def prefill_job(
    shape: Sequence[int],
    keys: torch.Tensor,
    values: torch.Tensor,
    where: PagedSpans,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> ctypes.Structure:
    """The job of `paged_prefill` for dense queries of a shape, but for q and out. Points into the tensors, of which it
    keeps the sinks' numbers."""
    (count, heads, key_dim), value_dim, spans = shape, values.shape[3], where.totals.shape[0]
    extra = None if sinks is None else sinks.float().contiguous()
    work = where.pairs * heads * (key_dim + value_dim) // 2
    worth = _PRODUCTS_WORTH_A_THREAD if count > spans else _PRODUCTS_WORTH_A_THREAD // 4
    job = _Prefill(
        keys=keys.data_ptr(), values=values.data_ptr(), tables=where.tables.data_ptr(),
        starts=where.starts.data_ptr(), totals=where.totals.data_ptr(),
        sinks=None if extra is None else extra.data_ptr(), spans=spans, heads=heads, kv_heads=keys.shape[2],
        key_dim=key_dim, value_dim=value_dim, block_size=keys.shape[1], table_stride=where.tables.shape[1],
        q_token=heads * key_dim, q_head=key_dim, window=window or 0,
        threads=min(torch.get_num_threads(), 1 + work // worth), scaling=scaling, softcap=softcap or 0.0,
    )  # fmt: skip
    job.kept = extra
    if numbers is not None:
        _check_numbers(numbers, keys.shape[2])
        job.key_table, job.value_table, job.table_heads = *(x.data_ptr() for x in numbers), numbers[0].shape[0]
    return job


def _check_numbers(numbers: tuple[torch.Tensor, torch.Tensor], kv_heads: int) -> None:
    """The kernels read as many rows of one table as of the other."""
    shapes = {tuple(x.shape) for x in numbers}
    assert shapes in ({(1, 256)}, {(kv_heads, 256)}), f"tables of codes {shapes} for {kv_heads} heads"


@cache
def exports(function: str) -> bool:
    """Whether the extension was built, and with this kernel."""
    return bool(lib.known_isas()) and hasattr(lib.library(), function)
