"""QuantAllReduce: the sum of a tensor over the ranks of a process group, quantized while it is sent.

    reduce = QuantAllReduce(group)          # all ranks; measures once where quantizing pays
    y = reduce(x)                           # plain below ``min_bytes``, quantized from there on
    reduce(x, x)                            # in place
    handle = reduce.start(x); ...; y = handle.wait()

Every rank gets the same bits. The method depends on a message's size, dtype and the number of ranks alone, so the
ranks cannot disagree. Meant for the partial sums of prefill; tokens, embeddings and logits are better left plain.

A call goes down these steps, none of which calls one above it:

    __call__      checks the tensors
    method_for    own, one_shot, two_shot or quantized, by the size (thresholds of ``gate.py``)
    _sum_by       that method: the group's own sum, or an exchange of plain or quantized messages (``wire.py``)
    _exchange     cuts the tensor into stripes and chunks (``wire.cut``)
    Transports    moves their messages (``transports.py``), which asks the wire to encode, sum and decode them
    wire          the compiled kernel of a CPU, the Triton kernel of a GPU, or the reference
"""

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from ptqpipe.errors import UsageError
from ptqpipe.serving.collectives.codecs import DTYPES, WireCodec, get_wire_codec
from ptqpipe.serving.collectives.gate import NEVER, Sum, SumMethod, Thresholds, measure
from ptqpipe.serving.collectives.symmetric import SymmetricMemory, Transport
from ptqpipe.serving.collectives.transports import Transports
from ptqpipe.serving.collectives.wire import Layout, Plain, Quantized, Stats, Wire, cut

LEAST_CHUNK = 1 << 20  # bytes of values in a chunk, below which a message's fixed cost outweighs what overlaps
LEAST_CHUNKS = 2  # of messages that are large enough for it
ONE_SHOT_BYTES = 4 << 20  # that a rank sends in the largest plain one-shot that is tried: it moves more than others

_users: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


class Pending:
    """A sum in the background."""

    def __init__(self, future: "Future[torch.Tensor]") -> None:
        self._future = future

    def done(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._future.done()

    def wait(self) -> torch.Tensor:
        """The sum; raises what the call raised."""
        return self._future.result()


class QuantAllReduce:
    """The quantized all-reduce of one process group.

    group        None is the default group; every rank of it makes one, with the same arguments, in the same order
    codec, block, hadamard  see ``get_wire_codec``
    min_bytes    smallest tensor that is quantized; "auto" measures it now, together with all other ranks
    plain        the sum to beat, and what small tensors get: x to the sum of x, may write to x. None is the group's own
    chunk_bytes  of values that move through the pipeline together
    transport    "p2p": messages between pairs of ranks; "collectives": an all-to-all and an all-gather a chunk;
                 "symmetric": one kernel over the memory of all GPUs of a node on NVLink, for int8 without rotation; a
                 ``SymmetricMemory``: the same over that. "auto": p2p for CPU tensors; for CUDA tensors symmetric where
                 it has been found to work, else collectives
    own_exact    two-shot: the owner of a stripe adds its own partial unrounded. Off, a row's result does not depend on
                 which rank owns it
    one_shot     every rank gets every partial: one rounding instead of two. For two ranks, where it costs no byte
    Raises UsageError for what makes no sense.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        codec: str = "int8",
        *,
        block: int = 64,
        hadamard: int = 0,
        min_bytes: int | Literal["auto"] = "auto",
        chunk_bytes: int = 4 << 20,
        transport: Transport | SymmetricMemory = "auto",
        own_exact: bool = True,
        one_shot: bool = False,
        plain: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.group = _group(group)
        self.world: int = self.group.size()
        self._devices = {device.type for device in self.group._device_types}
        self.codec: WireCodec = get_wire_codec(codec, block, hadamard=hadamard)
        self.chunk_bytes = _positive("chunk_bytes", chunk_bytes)
        self.one_shot = one_shot
        if one_shot and self.world > 2:
            raise UsageError(f"one_shot is for two ranks, not {self.world}: it would move more bytes than plain sums")
        instance = _users.get(self.group, 0)
        memory_codec = self.codec if min_bytes != NEVER and not one_shot else None
        self.transports = Transports(self.group, transport, memory_codec, instance, own_exact=own_exact)
        _users[self.group] = instance + 1
        self.name = register(self, f"{self.group.group_name}/{instance}")
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[torch.Tensor] | None = None
        self._stats = Stats()
        self._plain_calls = 0
        self._own = self._group_sum if plain is None else plain
        self.thresholds = Thresholds(NEVER if min_bytes == "auto" else min_bytes)
        if min_bytes == "auto" and self.world > 1:
            self.thresholds = self._measured()

    @property
    def min_bytes(self) -> int:
        """The smallest tensor that is quantized, in bytes."""
        return self.thresholds.quantized

    @min_bytes.setter
    def min_bytes(self, value: int) -> None:
        """Overrides the measured threshold; must be the same on all ranks."""
        self.thresholds = replace(self.thresholds, quantized=value)

    def should_use(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether a tensor of ``numel`` elements of ``dtype`` is quantized: the same answer on every rank."""
        return self.world > 1 and dtype in DTYPES and numel > 0 and numel * dtype.itemsize >= self.min_bytes

    def method_for(self, numel: int, dtype: torch.dtype) -> SumMethod:
        """The sum method for such a tensor, the same on every rank. "own" is ``plain``, or the group's own sum."""
        if self.world == 1 or dtype not in DTYPES or not numel:
            return "own"
        nbytes = numel * dtype.itemsize
        return "quantized" if nbytes >= self.thresholds.quantized else self.thresholds.plain_method(nbytes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of ``x`` over the ranks, into ``out`` (may be ``x``) or a new contiguous tensor.

        UsageError, before anything is sent, for what is no dense tensor on a device of the group, and for an ``out``
        that does not fit ``x``, overlaps it in part, or has one number in several places.
        """
        if torch.compiler.is_compiling():
            y = quant_all_reduce(x, self.name)
            return y if out is None else out.copy_(y)
        self._check(x, out)
        if self._last is not None:
            self._settle()
        method = self.method_for(x.numel(), x.dtype)
        if method == "own" and out is x and self.world > 1 and x.numel() and x.is_contiguous():
            self._plain_calls += 1  # fast path: for small sums Python overhead dominates
            return _deliver(self._own(x), out)
        return self._sum_by(method, x, out)

    def start(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Pending:
        """The same in the background, in the order of calls. ``x`` must not change before it is done.

        A plain sum is a collective of the group's: meanwhile the ranks may call others only in one order.
        """
        self._check(x, out)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="ptqpipe-allreduce")
        self.transports.background = True
        self._last = self._worker.submit(self._sum_by, self.method_for(x.numel(), x.dtype), x, out)
        return Pending(self._last)

    def quantized(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The quantized sum whatever the size. UsageError for dtypes that have no codec."""
        self._check(x, out)
        if x.dtype not in DTYPES:
            raise UsageError(f"{x.dtype} cannot be quantized; expected bfloat16, float16 or float32")
        self._settle()
        return self._sum_by("quantized", x, out)

    def plain(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The plain sum: the group's own or, where that was measured to be faster, one of our schedules."""
        self._check(x, out)
        self._settle()
        return self._sum_by("own" if x.dtype not in DTYPES else self.thresholds.plain_method(x.nbytes), x, out)

    def plain_two_shot(self, x: torch.Tensor) -> torch.Tensor:
        """The plain sum by the schedule of the quantized one, in place: what the codec alone has to beat."""
        self._check(x, x)
        self._settle()
        return self._exchange(x, x, Plain())

    def plain_one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """The same sum, bit by bit, in place: every rank gets every partial. UsageError for CUDA tensors."""
        self._check(x, x)
        self._settle()
        return self._exchange(x, x, Plain(), one_shot=True)

    def stats(self) -> Stats:
        """Counters since this was created."""
        return replace(self._stats, plain_calls=self._plain_calls)

    def _check(self, x: torch.Tensor, out: torch.Tensor | None) -> None:
        """UsageError for tensors that cannot be summed. Few steps for the usual ones: small sums take no longer."""
        _check_tensor("x", x, self._devices)
        if out is None or (out is x and x.is_contiguous()):
            return
        _check_tensor("out", out, self._devices)
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            wanted = f"{list(x.shape)} {x.dtype} on {x.device}"
            raise UsageError(f"out is {list(out.shape)} {out.dtype} on {out.device}; expected {wanted}")
        if _overlaps_itself(out):
            raise UsageError(
                f"out is {list(out.shape)} with strides {list(out.stride())}, which has one number in several places; "
                "give a contiguous tensor"
            )
        if _same(x, out) or not (x.is_contiguous() and out.is_contiguous()):
            return  # what lies between the other's rows is written when the sum is complete
        if _meet(x, out):
            raise UsageError("out overlaps x in part; give x itself, or memory of its own")

    def _settle(self) -> None:
        """Waits for what :meth:`start` began: messages of two calls must not mix."""
        if self._last is not None:
            self._last.result()
            self._last = None
            self.transports.background = False

    def _sum_by(self, method: SumMethod, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if method == "quantized":
            return self._exchange(x, out, Quantized(self.codec), one_shot=self.one_shot)
        self._plain_calls += 1
        if method == "two_shot" or (method == "one_shot" and not x.is_cuda):  # measured on the CPU, in groups of both
            return self._exchange(x, out, Plain(), one_shot=method == "one_shot")
        y = _result(x, out)
        if y is not x:
            y.copy_(x)
        if self.world > 1 and y.numel():
            y = self._own(y)
        return _deliver(y, out)

    def _group_sum(self, x: torch.Tensor) -> torch.Tensor:
        self.group.allreduce(x).wait()  # what dist.all_reduce comes to, without what it checks
        return x

    def _exchange(
        self, x: torch.Tensor, out: torch.Tensor | None, wire: Wire, *, one_shot: bool = False
    ) -> torch.Tensor:
        y = _result(x, out)
        if self.world == 1 or not x.numel():
            return _deliver(y.copy_(x), out)
        stats = Stats()
        layout = self.layout(x.numel(), x.dtype, wire, one_shot=one_shot)
        self.transports.run(x.contiguous().view(-1), y.view(-1), layout, wire, stats, one_shot=one_shot)
        if isinstance(wire, Quantized):
            self._stats += Stats(calls=1, value_bytes=x.nbytes) + stats
        return _deliver(y, out)

    def _measured(self) -> Thresholds:
        device = _device_of(self.group)
        messages = self.transports.kind != "collectives" and device.type == "cpu"

        def sums(nbytes: int) -> Mapping[SumMethod, Sum]:
            by_method: dict[SumMethod, Sum] = {"own": self._own, "two_shot": lambda x: self._exchange(x, x, Plain())}
            if messages and nbytes * (self.world - 1) <= ONE_SHOT_BYTES:
                by_method["one_shot"] = lambda x: self._exchange(x, x, Plain(), one_shot=True)
            return by_method | {"quantized": lambda x: self._sum_by("quantized", x, x)}

        thresholds = measure(self.group, device, sums)
        self._stats = Stats()
        return thresholds

    def layout(self, numel: int, dtype: torch.dtype, wire: Wire, *, one_shot: bool = False) -> Layout:
        """How a message is split among ranks and chunks."""
        return cut(
            numel,
            1 if one_shot else self.world,
            unit=wire.unit,
            chunk_elements=self.chunk_bytes // dtype.itemsize,
            least_chunks=LEAST_CHUNKS,
            least=min(LEAST_CHUNK, self.chunk_bytes) // dtype.itemsize,
        )


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("a quantized all-reduce needs torch.distributed; call init_process_group first")
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise UsageError("this process is not in the group that was given for the quantized all-reduce")
    return chosen


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of a group's tensors: the GPU for NCCL, the CPU for gloo and for groups of both."""
    if torch.device("cpu") in group._device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{name} {value}; expected a positive number")
    return value


def _result(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """A contiguous tensor for the sum: ``out`` where it can be."""
    if out is not None and out.is_contiguous() and (out is x or _same(x, out) or not _meet(x, out)):
        return out
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check_tensor(name: str, x: torch.Tensor, devices: set[str]) -> None:
    """UsageError for what is no dense tensor on one of the devices."""
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"{name} is {type(x).__name__}, expected a torch tensor; use torch.as_tensor")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise UsageError(f"{name} is a {kind} tensor, expected a dense one")
    if x.device.type not in devices:
        raise UsageError(f"{name} is on {x.device}; this group sums tensors on {' and '.join(sorted(devices))}")


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two of a tensor's numbers may be one in memory: as of an expanded tensor, or of windows that slide."""
    reach = 0  # of the dimensions so far, in elements
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _same(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether two tensors of one shape are the same memory in the same order."""
    return x.data_ptr() == out.data_ptr() and x.stride() == out.stride()


def _meet(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the memory from the first to the last number of one has a byte of the other's."""

    def ends(one: torch.Tensor) -> tuple[int, int]:
        reach = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        return one.data_ptr(), one.data_ptr() + (reach + 1) * one.element_size()

    if not x.numel() or x.device != out.device:
        return False
    (first, last), (other_first, other_last) = ends(x), ends(out)
    return first < other_last and other_first < last


def _deliver(y: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return y if out is None or out is y else out.copy_(y)


# ``ptqpipe::quant_all_reduce``: one operator that torch.compile treats as opaque, and the registry behind it. It takes
# a tensor and the name of a reducer, since a graph holds strings but no process groups.

Reducer = Callable[[torch.Tensor], torch.Tensor]
"""``x`` to its sum over the ranks, a new tensor."""

_reducers: "weakref.WeakValueDictionary[str, Reducer]" = weakref.WeakValueDictionary()


def register(reducer: Reducer, name: str) -> str:
    """Registers ``reducer`` under ``name``, for as long as it lives. Returns the name."""
    _reducers[name] = reducer
    return name


@torch.library.custom_op("ptqpipe::quant_all_reduce", mutates_args=())
def quant_all_reduce(x: torch.Tensor, name: str) -> torch.Tensor:
    """The sum of ``x`` over the ranks of the reducer called ``name``. UsageError when it is gone."""
    reducer = _reducers.get(name)
    if reducer is None:
        raise UsageError(f"no all-reduce {name!r}; keep the QuantAllReduce as long as the compiled model runs")
    return reducer(x)


@quant_all_reduce.register_fake
def _shape(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
