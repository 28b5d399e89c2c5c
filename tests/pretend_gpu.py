"""A GPU that is not there: within `pretended` torch has one, and refuses to mix its tensors with those of the CPU.

What runs on a GPU alone no test of a CPU sees: a tensor that was left behind there ends a run on a GPU, and nothing
else. So here the memory of some tensors counts as a GPU's (a mark on the storage); all numbers are the CPU's, and so
are the results. The rules are CUDA's:

* what is made on "cuda" or moved there is there, and so is what is computed from it;
* an operation whose inputs are in both places raises torch's own RuntimeError. Allowed are copies between them, indices
  on the CPU of a tensor on the GPU, and 0-dimensional CPU tensors where operations go by the element;
* numpy gets nothing that is on the GPU, and no CPU kernel a pointer there.

In the place of Triton's kernels are the CPU's, or torch, for what Triton's have a kernel for and for tensors on the GPU
alone. Not shown are the kernels, times, and how much memory there is.

Operations are seen by a dispatch mode that takes the place of torch's fake tensors, so that nothing looks for CUDA when
"cuda" is named. What an operation made of others creates for itself, at one instruction of a caller outside of torch,
is where its inputs are.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels import (
    cpu,
    triton,
    triton_attention,
    triton_block,
    triton_codecs,
    triton_linear,
    triton_rows,
)
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.serving.engine.model_runner import ModelRunner

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_COPIES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_BY_ELEMENT = {aten.where.self, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor}
_GB = 1 << 30
_torch = {name: getattr(torch._C.TensorBase, name) for name in ("device", "to", "numpy", "data_ptr")}
_tensor, _as_tensor = torch.tensor, torch.as_tensor
_thread = threading.local()


def on_gpu(x: Any) -> bool:
    """Whether this is a tensor on the pretended GPU."""
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and hasattr(x.untyped_storage(), "pretended")


def _put(x: torch.Tensor) -> None:
    x.untyped_storage().pretended = True  # type: ignore[attr-defined]


def _is_cpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and _torch["device"].__get__(x).type == "cpu" and not on_gpu(x)


@contextlib.contextmanager
def _all_is_memory() -> Iterator[None]:
    """Within it, on this thread, no tensor is on the GPU: for what stands in for its kernels."""
    before = getattr(_thread, "all_is_memory", False)
    _thread.all_is_memory = True
    try:
        yield
    finally:
        _thread.all_is_memory = before


def _caller() -> tuple[int, int]:
    """The instruction outside of torch that the present operation belongs to."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return id(frame), frame.f_lasti


def _joins(x: torch.Tensor) -> bool:
    """Whether an operation that is made of others has created this CPU tensor for itself; it is on the GPU then."""
    if getattr(x.untyped_storage(), "made_by", None) != _caller():
        return False
    _put(x)
    return True


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """torch's RuntimeError for inputs of an operation in both places."""
    if func in _COPIES:
        return
    if func in _INDEXED:
        if not on_gpu(args[0]) and not _joins(args[0]):
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({CPU})")
        left, scalars = tree_leaves(args[2:]), True
    else:
        left, scalars = tree_leaves((args, kwargs)), func in _BY_ELEMENT or torch.Tag.pointwise in func.tags
    written = args[0] if func._schema.is_mutable and args else None
    for x in left:
        if _is_cpu(x) and not (scalars and x.dim() == 0 and x is not written) and not _joins(x):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {CUDA} and {CPU}! "
                f"({func})"
            )


class _Devices(TorchDispatchMode):
    """Runs every operation on the CPU, and knows where its results are."""

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(_thread, "all_is_memory", False):
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(on_gpu(x) for x in given)
        if there:
            _check(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            there = torch.device(device).type == "cuda"
            kwargs |= {"device": CPU, "pin_memory": False} if there else {}
        elif func is aten.copy_.default:
            there = on_gpu(args[0])
        if func is aten._to_copy.default:
            kwargs.pop("pin_memory", None)
        integers = func is aten.histc.default and not args[0].is_floating_point()  # which a CPU does not count
        out = func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype) if integers else func(*args, **kwargs)
        old = {x.untyped_storage()._cdata for x in given}
        for x in tree_leaves(out):
            if _is_cpu(x) and x.untyped_storage()._cdata not in old:
                if there:
                    _put(x)
                elif device is not None and func is not aten._to_copy.default:
                    x.untyped_storage().made_by = _caller()
        return out


class _Moved(torch.autograd.Function):
    """A copy on another device; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ctx.device, ctx.dtype = x.device, x.dtype
        return aten._to_copy.default(x, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return aten._to_copy.default(g, dtype=ctx.dtype, device=ctx.device), None, None


def _device(x: torch.Tensor) -> torch.device:
    return CUDA if not getattr(_thread, "all_is_memory", False) and on_gpu(x) else _torch["device"].__get__(x)


def _to(x: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """Tensor.to, by the pretended devices."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype)
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    wanted, here = CUDA if device is not None and device.type == "cuda" else device, x.device
    if wanted is None or wanted == here:
        more = {} if layout is None else {"memory_format": layout}
        return _torch["to"](x, dtype or x.dtype, copy=copy, **more)
    if "meta" in (wanted.type, here.type):
        return _torch["to"](x, *args, copy=copy, **kwargs)
    return _Moved.apply(x, wanted, dtype or x.dtype)


def _numpy(x: torch.Tensor, **options: Any) -> Any:
    if x.device.type == "cuda":
        raise TypeError(f"can't convert {CUDA} device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")
    return _torch["numpy"](x, **options)


def _data_ptr(x: torch.Tensor) -> int:
    """The address, which is the name of a tensor for some; a CPU kernel would read what is there."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.startswith(("ptqpipe.numerics.kernels.cpu_", "ptqpipe.checkpoint.")) and x.device.type == "cuda":
        raise RuntimeError(f"{caller} was given a tensor on {CUDA}")
    return _torch["data_ptr"](x)


def _new(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **ignored: Any) -> Any:
    """torch.tensor, which makes tensors on "cuda" where no mode sees it."""
    made = _tensor(data, dtype=dtype)
    return (made if device is None else made.to(device)).requires_grad_(requires_grad)


def _as_new(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    made = _as_tensor(data, dtype=dtype)
    return made if device is None else made.to(device)


_TENSOR: Mapping[str, Any] = {
    "device": property(_device),
    "is_cuda": property(lambda x: x.device.type == "cuda"),
    "is_cpu": property(lambda x: x.device.type == "cpu"),
    "get_device": lambda x: 0 if x.device.type == "cuda" else -1,
    "to": _to,
    "type_as": lambda x, other: x.to(other),
    "cpu": lambda x, **options: x.to(CPU),
    "cuda": lambda x, *place, **options: x.to(CUDA),
    "numpy": _numpy,
    "data_ptr": _data_ptr,
    "new_tensor": lambda x, data, **given: _new(data, **{"dtype": x.dtype, "device": x.device, **given}),
}
_H100 = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 * _GB)
_TORCH_CUDA: Mapping[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda *place: _H100,
    "get_device_name": lambda *place: _H100.name,
    "get_device_capability": lambda *place: (_H100.major, _H100.minor),
    "mem_get_info": lambda *place: (70 * _GB, _H100.total_memory),
    "memory_reserved": lambda *place: 0,
    "memory_allocated": lambda *place: 0,
    "synchronize": lambda *place: None,
    "empty_cache": lambda: None,
    "set_device": lambda place: None,
    "device": lambda place: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: False,
}


def _launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for a kernel: its tensors must be on the GPU, and its results are."""

    def run(*args: Any, on_either: tuple[torch.Tensor | None, ...] = (), **kwargs: Any) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and not on_gpu(x):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        with _all_is_memory():
            out = function(*args, *on_either, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                _put(x)
        return out

    return run


def _searched(kernel: Callable[..., Any], rules: tuple[str, ...]) -> Callable[..., Any]:
    """A search of scales, where Triton has that rule for the format."""

    def run(
        w: torch.Tensor, fmt: Format, *, rule: str = "exact", global_scale: Any = None, importance: Any = None
    ) -> Any:
        if rule not in rules or triton_block.plan_of(fmt) is None:
            return None
        weights = importance if rule == "exact" else None

        def search(w: torch.Tensor, global_scale: Any, importance: Any) -> Any:
            return kernel(w, fmt, rule=rule, global_scale=global_scale, importance=importance)

        return _launched(search)(w, on_either=(global_scale, weights))

    return run


def _decoded(
    data: torch.Tensor, scales: torch.Tensor, fmt: Format, g: Any = None, dtype: Any = torch.float32, **divides: bool
) -> Any:
    if triton_rows.plan_of(fmt, **{"global_divides": False, **divides}) is None or not data.numel():
        return None
    return _launched(lambda data, scales, g: cpu.dequantize(data, scales, fmt, g, dtype, **divides))(
        data, scales, on_either=(g,)
    )


def _decode_error(
    data: torch.Tensor, scales: torch.Tensor, fmt: Format, w: torch.Tensor, g: Any = None, **divides: bool
) -> Any:
    if triton_rows.plan_of(fmt, **{"global_divides": False, **divides}) is None:
        return None
    return _launched(lambda data, scales, w, g: cpu.decode_error(data, scales, fmt, w, g, **divides))(
        data, scales, w, on_either=(g,)
    )


def _fp8_encoded(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> Any:
    known = fmt.element.bits == 8 and not fmt.scale.enumerable and not fmt.has_global
    if not known or triton_codecs.minifloat_of(fmt.element) is None:
        return None
    return _launched(lambda w, scales: cpu.fp8_encode(w, scales, fmt))(w, scales)


def _product(
    x: torch.Tensor, data: torch.Tensor, scales: Any, factor: Any, fmt: Format, shape: tuple[int, int], bias: Any = None
) -> Any:
    halves = x.dtype in (torch.bfloat16, torch.float16)
    taken = halves and 0 < x.shape[0] <= triton_linear.MANY and x.numel() and data.numel()
    if triton_linear.plan_of(fmt, scales) is None or not taken:
        return None

    def linear(x: torch.Tensor, data: torch.Tensor, scales: Any, factor: Any, bias: Any) -> torch.Tensor:
        one = torch.ones(()) if fmt.has_global else None
        codes = data.view(torch.float8_e4m3fn).float()
        w = codes if scales is None else QTensor(fmt, shape, data, scales, one).dequantize()
        y = x.float() @ w.t() * (1.0 if factor is None else factor) + (0.0 if bias is None else bias.float())
        return y.to(x.dtype)

    return _launched(linear)(x, data, scales, factor, bias)


def _unpacked(data: torch.Tensor, scales: Any, fmt: Format, shape: tuple[int, int]) -> Any:
    if triton_linear.plan_of(fmt, scales) is None or not data.numel():
        return None

    def unpacked(data: torch.Tensor, scales: Any) -> torch.Tensor:
        one = torch.ones(()) if fmt.has_global else None
        codes = data.view(torch.float8_e4m3fn).float()
        return (codes if scales is None else QTensor(fmt, shape, data, scales, one).dequantize()).bfloat16()

    return _launched(unpacked)(data, scales)


def _swept(*given: Any) -> Any:
    """`sweep_block_rows`, which is told on the CPU what blocks are usable."""
    *plain, (feedback, weight, inverse, usable), how, element = given

    def sweep(*given: Any) -> Any:
        *plain, feedback, weight, inverse, usable = given
        return cpu.sweep_block_rows(*plain, (feedback, weight, inverse, usable), how, element)

    return _launched(sweep)(*plain, feedback, weight, inverse, on_either=(usable,))


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "block_quantize": _searched(cpu.block_quantize, ("exact", "absmax")),
    "score_total": _searched(cpu.score_total, ("exact", "absmax")),
    "dequantize": _decoded,
    "decode_error": _decode_error,
    "fp8_encode": _fp8_encoded,
    "amax": _launched(cpu.amax),
    "feed_forward": _launched(cpu.feed_forward),
    "descend": _launched(cpu.descend),
    "choose_block": _launched(cpu.choose_block),
    "enter_rows": _launched(cpu.enter_rows),
    "sweep_block_rows": _swept,
}


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Within it there is a GPU, on every thread that starts."""
    run = threading.Thread.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with _Devices():
            run(thread)

    places: list[tuple[Any, Mapping[str, Any]]] = [
        (torch.Tensor, _TENSOR),
        (torch.cuda, _TORCH_CUDA),
        (torch.version, {"cuda": "13.0"}),
        (torch, {"tensor": _new, "as_tensor": _as_new}),
        (threading.Thread, {"run": run_with_gpu}),
        (triton, {**_KERNELS, "available": lambda: True, "interpreting": lambda: False}),
        (triton_linear, {"linear": _product, "unpacked": _unpacked}),
        (triton_attention, {"place": lambda *given: None}),  # so that torch's own attention runs, sequence by sequence
        (ModelRunner, {"_step_graphs": lambda runner, longest: None}),
    ]
    with contextlib.ExitStack() as stack:
        for place, names in places:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(place, name, value, create=True))
        stack.enter_context(_Devices())
        yield
