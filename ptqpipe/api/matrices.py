"""One matrix quantized as `convert` would, and the weights of a checkpoint by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ptqpipe.api.calls import command, folder_of
from ptqpipe.errors import FormatError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import FORMATS, Format, get_format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.quantization import LoadedWeight, Task, check_decode, joined, rtn
from ptqpipe.recipe.options import AUTO, CodeOptions

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@command()
def quantize(
    w: torch.Tensor, format: str | Format = "nvfp4", *, scale_search: str = AUTO, global_scale: str = "search"
) -> QTensor:
    """Quantizes one ``[N, K]`` float matrix exactly as ``convert`` would quantize it in a unit of its own.

    format  as `convert` takes it, whatever it says of activations, or the name of a weight format alone

    Raises FormatError for what is no dense float matrix with numbers in it and for shapes that do not divide,
    NumericsError for NaN, inf and what the format rounds to inf.

    >>> ptqpipe.quantize(torch.ones(16, 32), "nvfp4")
    <QTensor nvfp4 16x32, 292 bytes>
    """
    fmt = _format_of(format) if isinstance(format, str) else format
    if not isinstance(fmt, Format):
        raise FormatError(
            f"quantize takes a format by its name, got {type(fmt).__name__}; `ptqpipe formats` lists them"
        )
    if global_scale not in ("search", "absmax"):
        raise UsageError(f"global_scale is {global_scale!r}, expected search or absmax")
    _check_matrix(w)
    fmt.scale_shape((w.shape[0], w.shape[1]))
    runs: dict[tuple[int, int], QTensor] = {}
    task = Task(
        [LoadedWeight(w.detach())],
        fmt,
        ["the tensor"],
        lambda member, row, q: runs.__setitem__((member, row), q),
        options=CodeOptions(scale_search=scale_search, global_scale=global_scale),
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
    if w.device.type != "meta" and type(w).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise FormatError(f"quantize takes a plain tensor, got a {type(w).__name__}; give its numbers as one")
    if w.device.type == "meta":
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

    def __repr__(self) -> str:
        return f"<load_tensors {self._source.reader.path}: {len(self)} tensors, {len(self._source.stored)} quantized>"

    def __enter__(self) -> "LoadedTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._source.close()


@command()
def load_tensors(ckpt: str | Path) -> LoadedTensors:
    """The weights of a checkpoint in any layout that ptqpipe reads, by name. CheckpointError for anything damaged.

    ckpt  a folder, or a name on the hub

    >>> with ptqpipe.load_tensors("OUT") as weights:
    ...     weights["model.layers.0.mlp.up_proj.weight"]
    <QTensor nvfp4 256x256, 36868 bytes>
    """
    return LoadedTensors(folder_of(ckpt))
