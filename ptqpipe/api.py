"""The Python API: what the commands do, as three functions."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

import torch

from ptqpipe.algorithms import Matrix, Task, check_decode, joined, rtn
from ptqpipe.errors import FormatError, UsageError
from ptqpipe.formats import FORMATS, Format, get_format
from ptqpipe.options import (
    CodeOptions,
    PipelineOptions,
    RecipeOptions,
    check_names,
    pipeline_fields,
    recipe_fields,
    type_of,
)
from ptqpipe.qtensor import QTensor
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.common import Done, Machine, default_workers
from ptqpipe.stages.convert import run as stage
from ptqpipe.stages.convert.prepare import best_with, prepare
from ptqpipe.stages.convert.text import missing_config
from ptqpipe.stages.pipeline.call import check_alone, for_reader
from ptqpipe.stages.pipeline.run import Made, pipeline

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


_MACHINE = {"workers": None, "device": "cpu", "max_memory_bytes": 2 << 30, "progress": False}


def convert(
    model: str | Path,
    *,
    format: str | None = None,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    stats: str | Path | None = None,
    rounding: str | Path | None = None,
    ignore: Iterable[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Done | Made:
    """Converts a checkpoint; the arguments mean what the options of ``ptqpipe convert`` mean.

    options  every option of ``ptqpipe.options`` by its name (``damping=0.02``, ``data="text.txt"``, ``reader="vllm"``);
             ``workers``, ``device``, ``max_memory_bytes`` and ``progress``, which decide no byte; ``help`` lists them

    Returns where the checkpoint lies (``out``) and its record (the content of ptqpipe.json); with ``data``, ``budget``,
    ``eval`` or ``report`` also what was measured. Raises a kind of PtqError; AlreadyComplete where ``resume`` finds
    nothing left to do, UsageError with the nearest name for an unknown option.
    """
    if resume and overwrite:
        raise UsageError("resume and overwrite contradict each other; give one of them")
    check_names(options, [*inspect.signature(convert).parameters])
    machine = _machine(**{name: options.pop(name, default) for name, default in _MACHINE.items()})
    work = _work({name: options.pop(name) for name in pipeline_fields() if name in options})
    given = RecipeOptions(format, tuple(ignore), **options)
    mode: Literal["new", "resume", "overwrite"] = "resume" if resume else "overwrite" if overwrite else "new"
    where: dict[str, Any] = {
        name: None if path is None else Path(path)
        for name, path in {"recipe_path": recipe, "stats": stats, "rounding": rounding}.items()
    }
    target = None if out is None else Path(out)
    if work.asked:
        check_alone(stats=stats, rounding=rounding)
        return pipeline(
            model, recipe=given, recipe_path=where["recipe_path"], out=target, work=work, mode=mode, machine=machine
        )
    if work.reader is not None:
        given = for_reader(work.reader, given, where["recipe_path"])
    best = best_with(given, **where)
    with prepare(model, options=best, out=target, **where) as prepared:
        no_config = missing_config(prepared)
        if no_config is not None:
            warnings.warn(no_config, stacklevel=2)
        done = stage.convert(prepared, mode=mode, machine=machine)
    if done is None:
        raise AssertionError("rank 0 always has a result")
    return done


def _work(given: Mapping[str, Any]) -> PipelineOptions:
    """The options of a run of several stages. Of those that may be several values, one may be given alone."""
    several = {one.name for one in pipeline_fields().values() if get_origin(type_of(one)) is tuple or one.default == ()}
    paths: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    made = {
        name: (value,) if isinstance(value, str) else tuple(map(str, value))
        for name, value in paths.items()
        if name in several and value is not None
    }
    return PipelineOptions(**{name: value for name, value in (paths | made).items() if value is not None})


def _machine(*, workers: int | None, device: str, max_memory_bytes: int, progress: bool) -> Machine:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown; use cpu, cuda or cuda:N") from None
    count = default_workers() if workers is None else workers
    return Machine(workers=count, device=where, memory_bytes=max_memory_bytes, progress=progress)


def _keywords() -> dict[str, Any]:
    """The options that `convert` takes besides its own parameters, with their types."""
    table = recipe_fields() | pipeline_fields()
    return {name: type_of(one) for name, one in table.items()} | dict.fromkeys(_MACHINE, Any)


def _signature() -> inspect.Signature:
    """The signature of `convert` with all of its options, for ``help`` and editors."""
    plain = inspect.signature(convert)
    own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_MACHINE.get(name), annotation=kind)
        for name, kind in _keywords().items()
    ]
    return plain.replace(parameters=[*own, *more])


convert.__signature__ = _signature()  # type: ignore[attr-defined]


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
    task = Task(
        [Matrix(w.detach())],
        fmt,
        ["the tensor"],
        lambda member, row, q: runs.__setitem__((member, row), q),
        options=CodeOptions(search=search, global_scale="search" if search_global_scale else "absmax"),
        device=w.device,
    )
    check_decode(task.names, rtn.quantize(task).errors, fmt)
    return joined(runs, 0)


def _check_matrix(w: torch.Tensor) -> None:
    """FormatError unless ``w`` is a matrix of floats in memory that the kernels can read."""
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
    """A weight format by its own name, or by that of a scheme that has it. FormatError that lists the valid names."""
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
