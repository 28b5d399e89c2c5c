"""The Python API: what the commands do, as three functions."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from ptqpipe.algorithms import rtn
from ptqpipe.errors import FormatError, UsageError
from ptqpipe.formats import FORMATS, Format, get_format
from ptqpipe.qtensor import QTensor
from ptqpipe.recipe import RecipeOptions
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.common.machine import Machine, default_workers
from ptqpipe.stages.common.rewrite import Done
from ptqpipe.stages.convert import run as stage
from ptqpipe.stages.convert.prepare import best_with, prepare
from ptqpipe.stages.convert.text import missing_config

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def convert(
    model: str | Path,
    *,
    format: str | None = None,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    container: str | None = None,
    search: str | None = None,
    global_scale: str | None = None,
    ignore: Iterable[str] = (),
    stats: str | Path | None = None,
    rounding: str | Path | None = None,
    algorithm: str | None = None,
    weighting: str | None = None,
    damping: float | None = None,
    refine: int | None = None,
    low_rank: int | None = None,
    low_rank_dtype: str | None = None,
    input_amax: float | None = None,
    input_scale: str | None = None,
    headroom: float | None = None,
    kv_cache: str | None = None,
    bias_correction: bool = False,
    shard_bytes: int | None = None,
    workers: int | None = None,
    device: str = "cpu",
    max_memory_bytes: int = 2 << 30,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> Done:
    """Converts a checkpoint; the arguments mean what the options of ``ptqpipe convert`` mean.

    Returns where the checkpoint lies and its record (the content of ptqpipe.json). Raises a kind of PtqError;
    AlreadyComplete where ``resume`` finds nothing left to do.
    """
    if resume and overwrite:
        raise UsageError("resume and overwrite contradict each other; give one of them")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown; use cpu, cuda or cuda:N") from None
    options = RecipeOptions(
        scheme=format,
        container=container,
        search=search,
        global_scale=global_scale,
        ignore=tuple(ignore),
        input_amax=input_amax,
        shard_bytes=shard_bytes,
        algorithm=algorithm,
        weighting=weighting,
        damping=damping,
        refine=refine,
        input_scale=input_scale,
        headroom=headroom,
        kv_cache=kv_cache,
        bias_correction=bias_correction or None,
        low_rank=low_rank,
        low_rank_dtype=low_rank_dtype,
    )
    given = {"recipe": recipe, "out": out, "stats": stats, "rounding": rounding}
    paths = {name: None if path is None else Path(path) for name, path in given.items()}
    prepared = prepare(
        model,
        options=best_with(options, stats=paths["stats"], recipe_path=paths["recipe"], rounding=paths["rounding"]),
        recipe_path=paths["recipe"],
        out=paths["out"],
        stats=paths["stats"],
        rounding=paths["rounding"],
    )
    machine = Machine(
        workers=default_workers() if workers is None else workers,
        device=where,
        memory_bytes=max_memory_bytes,
        progress=progress,
    )
    with prepared:
        no_config = missing_config(prepared)
        if no_config is not None:
            warnings.warn(no_config, stacklevel=2)
        done = stage.convert(
            prepared, mode="resume" if resume else "overwrite" if overwrite else "new", machine=machine
        )
    if done is None:
        raise AssertionError("rank 0 always has a result")
    return done


def quantize(
    w: torch.Tensor, format: str | Format = "nvfp4", *, search: str = "exact", search_global_scale: bool = True
) -> QTensor:
    """Quantizes one ``[N, K]`` float matrix exactly as ``convert`` would quantize it in a unit of its own.

    format  as `convert` takes it, whatever it says of activations, or the name of a weight format alone

    Raises FormatError for what is no dense float matrix with numbers in it and for shapes that do not divide,
    NumericsError for NaN, inf and what the format rounds to inf.
    """
    fmt = _format_of(format) if isinstance(format, str) else format
    _check_matrix(w)
    fmt.scale_shape((w.shape[0], w.shape[1]))
    runs: dict[tuple[int, int], QTensor] = {}
    result = rtn.quantize(
        [rtn.Matrix(w.detach())],
        fmt,
        names=["the tensor"],
        search=search,
        search_global=search_global_scale,
        sink=lambda member, row, q: runs.__setitem__((member, row), q),
        device=w.device,
    )
    rtn.check_decode(["the tensor"], result.errors, fmt)
    return rtn.joined(runs, 0)


def _check_matrix(w: torch.Tensor) -> None:
    """FormatError unless the memory of ``w`` holds floats that the kernels can be given."""
    if not isinstance(w, torch.Tensor):
        raise FormatError(f"quantize takes a torch tensor, got {type(w).__name__}; use torch.as_tensor")
    got = f"{str(w.dtype).removeprefix('torch.')} {list(w.shape) if w.layout == torch.strided else w.layout}"
    if w.layout != torch.strided or w.dim() != 2 or w.dtype not in _FLOATS:
        raise FormatError(f"quantize takes a dense matrix [N, K] of bf16, fp16, fp32 or fp64, got {got}")
    if w.device.type == "meta" or type(w).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise FormatError(f"quantize takes a tensor whose numbers are in memory, got {got} without them")
    if not w.numel():
        raise FormatError(f"quantize takes a matrix with numbers in it, got {got}")


def _format_of(name: str) -> Format:
    """A weight format by its own name, or by that of a scheme that has it. FormatError with the known names."""
    if "/" in name or name.lower().replace("-", "_") in FORMATS:
        return get_format(name)
    return get_scheme(name).fmt


class LoadedTensors(Mapping[str, QTensor | torch.Tensor]):
    """A checkpoint's weights by logical name, read when asked for: QTensors where stored quantized, tensors elsewhere.

    A stack of experts appears as one entry per expert, ``name[e]``. A QTensor is always [out, in]; ``transposed`` names
    the entries that the float model holds as [in, out]. A context manager; or call ``close``.
    """

    def __init__(self, path: str | Path) -> None:
        self._source = Source.open(Path(path))
        self._names: dict[str, tuple[str, int | None]] = {}
        for name in self._source.tensors:
            stored = self._source.stored.get(name)
            if stored is None or stored.experts is None:
                self._names[name] = (name, None)
            else:
                self._names.update({f"{name}[{e}]": (name, e) for e in range(stored.experts)})

    @property
    def transposed(self) -> frozenset[str]:
        """Entries whose float tensor is [in, out] (GPT-2's Conv1D, some stacks of experts)."""
        return frozenset(
            name
            for name, (w, _) in self._names.items()
            if w in self._source.stored and self._source.stored[w].transposed
        )

    def __getitem__(self, name: str) -> QTensor | torch.Tensor:
        weight, expert = self._names[name]
        if weight in self._source.stored:
            return self._source.quantized(weight, expert=expert)
        return self._source.reader.read(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> "LoadedTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._source.close()


def load_tensors(ckpt: str | Path) -> LoadedTensors:
    """The weights of a checkpoint in any layout that ptqpipe reads. CheckpointError for anything damaged."""
    return LoadedTensors(ckpt)
