"""PTQPIPE_ALLREDUCE: the sums after row-parallel layers and experts go through ``ptqpipe.serving.collectives``.

The hook is one name, ``tensor_model_parallel_all_reduce``, in the two modules of vLLM that add up partial products of
prefill size: ``RowParallelLinear`` and the runner of the experts. Embeddings (one owner per row: exact as they are),
logits and everything else keep vLLM's own. What stands in its place is one operator that torch.compile cannot look
into; below it a `Reducer` decides per message, by shape and dtype alone, so that the ranks cannot disagree.

The first message starts the `Reducer`: it builds the quantized all-reduce, which measures against vLLM's own sum where
it pays, compares the two on random data, and asks all ranks for their verdict. Unless all agree that it works,
everything stays plain, and the log says so.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ptqpipe.errors import UsageError
from ptqpipe.serving.vllm_plugin import ops
from ptqpipe.serving.vllm_plugin.settings import PluginSettings

if TYPE_CHECKING:
    from ptqpipe.serving.collectives import QuantAllReduce

log = logging.getLogger("vllm.ptqpipe")
T = TypeVar("T")

NAME = "tensor_model_parallel_all_reduce"
# Relative error of a sum of Gaussians over two to eight ranks, twice what was measured for the codec with blocks of 64.
TOLERANCE = {"int8": 0.02, "int6": 0.08, "fp8": 0.08, "mxfp8": 0.1}
COARSE = 0.4  # four bits and whatever else: only that it is the sum and not something else
CHECK_SHAPE = (64, 1024)
CHUNK_OF_LOG = 10  # a line after 1, 10, 100, ... quantized messages

_reducers: dict[str, "Reducer"] = {}
_settings: PluginSettings | None = None


def install(settings: PluginSettings) -> None:
    """Defines the operator and puts it where `RowParallelLinear` and the experts look. UsageError if they do not."""
    global _settings
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.platforms import current_platform

    if NAME not in linear.RowParallelLinear.forward.__code__.co_names:
        raise UsageError(f"RowParallelLinear.forward of this vLLM does not call {NAME}")
    ops.define(
        "vllm_all_reduce(Tensor x, str group) -> Tensor",
        _all_reduce,
        shape=lambda x, _: torch.empty_like(x),
        dispatch_key=current_platform.dispatch_key,
    )
    _settings = settings
    _replace(linear)
    if NAME in vars(moe_runner):
        _replace(moe_runner)


def _replace(module: ModuleType) -> None:
    assert inspect.isfunction(getattr(module, NAME)), module.__name__
    setattr(module, NAME, sum_over_ranks)


def sum_over_ranks(partial: torch.Tensor) -> torch.Tensor:
    """The sum of ``partial`` over the tensor-parallel group. Traced by torch.compile, hence no more than this."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return partial
    return torch.ops.ptqpipe.vllm_all_reduce(partial, group.unique_name)


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    reducer = _reducers.get(group)
    if reducer is None:
        assert _settings is not None
        reducer = _reducers[group] = start(group, _settings)
    return reducer(x)


@dataclass(slots=True)
class Reducer:
    """The all-reduce of one group of vLLM. ``quantized`` is None when everything stays plain."""

    group: Any
    quantized: "QuantAllReduce | None" = None
    calls: int = 0
    plain_calls: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum over the group."""
        if self.quantized is None or _capturing(x):
            self.plain_calls += 1
            return self.plain(x)
        result = self.quantized(x)
        if not self.quantized.should_use(x.numel(), x.dtype):
            self.plain_calls += 1
            return result
        self.calls += 1
        if _is_power(self.calls):
            self.report(tuple(x.shape))
        return result

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """vLLM's own, out of place: an operator must not return its input, and the CPU's works in place."""
        return self.group._all_reduce_out_place(x.clone(memory_format=torch.contiguous_format))

    def report(self, shape: tuple[int, ...]) -> None:
        assert self.quantized is not None
        log.info(
            "ptqpipe: %s: %d quantized all-reduces (the last %s), %d plain; %d bytes sent for %d bytes of values",
            self.group.unique_name,
            self.calls,
            list(shape),
            self.plain_calls,
            self.quantized.stats().wire_bytes,
            self.quantized.stats().value_bytes,
        )


def start(name: str, settings: PluginSettings) -> Reducer:
    """The reducer of the group ``name``, checked. All ranks of the group come here with their first message."""
    from vllm.distributed import parallel_state

    group = parallel_state._groups[name]()
    assert group is not None, name
    return checked(group, settings)


def checked(group: Any, settings: PluginSettings) -> Reducer:
    """A reducer of a group of vLLM, quantized where a test worked on all ranks. Collective."""
    reducer = Reducer(group)
    built: QuantAllReduce | None = None
    _, problem = _attempt(lambda: _known(settings))  # before any rank waits for the others in the measurement
    if _all_agree(group, not problem):
        built, problem = _attempt(lambda: _build(group, settings))
        built = built if _all_agree(group, not problem) else None
    if built is None:
        log.error("ptqpipe: %s stays PLAIN: %s", group.unique_name, problem or "another rank could not build it")
        return reducer
    problem = _check(built, reducer, settings)
    if not _all_agree(group, not problem):
        log.error("ptqpipe: %s stays PLAIN: %s", group.unique_name, problem or "the check failed on another rank")
        return reducer
    reducer.quantized = built
    _announce(group, built, settings)
    return reducer


def _known(settings: PluginSettings) -> None:
    """UsageError for a codec or a block that does not exist."""
    from ptqpipe.serving.collectives import get_wire_codec

    assert settings.codec is not None
    get_wire_codec(settings.codec, settings.block)


def _build(group: Any, settings: PluginSettings) -> "QuantAllReduce":
    """With "auto" it measures, against vLLM's own sum: shared memory on one machine, the network on several."""
    from ptqpipe.serving.collectives import QuantAllReduce

    assert settings.codec is not None
    return QuantAllReduce(
        group.device_group,
        settings.codec,
        block=settings.block,
        min_bytes=settings.min_bytes,
        plain=group._all_reduce_out_place,
    )


def _attempt(step: Callable[[], T]) -> tuple[T | None, str]:
    """(what it gave, what went wrong or nothing)."""
    try:
        return step(), ""
    except Exception as error:
        log.exception("ptqpipe: the quantized all-reduce cannot be built")
        return None, f"{type(error).__name__}: {error}"


def _announce(group: Any, built: "QuantAllReduce", settings: PluginSettings) -> None:
    from ptqpipe.serving.collectives import NEVER

    log.info(
        "ptqpipe: %s, %d ranks: %s all-reduce in blocks of %d %s; below: %s",
        group.unique_name,
        group.world_size,
        settings.codec,
        settings.block,
        "never pays here and stays off" if built.min_bytes >= NEVER else f"from {built.min_bytes} bytes on",
        ", ".join(method for _, method in built.thresholds.plain) or "own",
    )


def _all_agree(group: Any, mine: bool) -> bool:
    """Whether all ranks agree. Over the group's CPU side, which every backend has."""
    vote = torch.tensor([int(mine)], dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())


def _check(quantized: "QuantAllReduce", reducer: Reducer, settings: PluginSettings) -> str:
    """One message both ways; what is wrong with it, or nothing. The same calls on every rank, whatever it finds."""
    group = reducer.group
    generator = torch.Generator().manual_seed(1000 + group.rank_in_group)
    x = torch.randn(CHECK_SHAPE, generator=generator).to(torch.bfloat16).to(group.device)
    wanted = reducer.plain(x).float()
    actual = quantized.quantized(x).float()
    error = float((actual - wanted).norm() / wanted.norm())
    extremes = torch.tensor([actual.double().sum().item()] * 2, dtype=torch.float64) * torch.tensor([1.0, -1.0])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group.cpu_group)
    if not error <= TOLERANCE.get(settings.codec or "", COARSE):
        return f"its sums are off by {error:.3g} of the plain ones"
    if float(extremes[0]) != -float(extremes[1]):
        return "the ranks hold different sums"
    log.info("ptqpipe: %s: check passed, relative error %.4f", group.unique_name, error)
    return ""


def _capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being recorded. Point-to-point messages of ours cannot be part of one."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_power(count: int) -> bool:
    """1, 10, 100, ..."""
    while count % CHUNK_OF_LOG == 0:
        count //= CHUNK_OF_LOG
    return count == 1


def numbers() -> dict[str, dict[str, Any]]:
    """Counters of the groups of this process. ``min_bytes`` is None where everything stays plain."""
    return {
        name: {
            "quantized_calls": reducer.calls,
            "plain_calls": reducer.plain_calls,
            "min_bytes": reducer.quantized.min_bytes if reducer.quantized is not None else None,
            "stats": asdict(reducer.quantized.stats()) if reducer.quantized is not None else {},
        }
        for name, reducer in _reducers.items()
    }
