"""The all-reduce transport for GPUs that write into each other's memory (one node on NVLink): two-shot, one kernel per
call.

Every rank owns a buffer that all have mapped. ``kernels/triton_symmetric.py`` has the kernel and why calls may follow
one another at once; here are the buffers, which groups can have them, and a check that they work. Same bits as the
other transports: stripes are those of `Layout`. Longer messages than the buffers take more launches, which cut
every stripe at the same places and so change no bit. A launch goes to the caller's stream, keeps nothing on the host,
and can be captured in a CUDA graph. All sums over one memory must be on one stream, in the same order on all ranks.

Never run on several GPUs. Tested under Triton's interpreter, one process per rank in shared memory; its kernel on one
H100, whose streams were the ranks.
``scripts/check_symmetric.py`` is what to run first on a GPU. The buffers come from ``torch.distributed
._symmetric_memory``, which torch calls a prototype; its API as of torch 2.13.
"""

import ctypes
import socket
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from ptqpipe.errors import PtqWarning, UsageError, first_line
from ptqpipe.numerics.kernels import triton
from ptqpipe.serving.collectives.by_collectives import CollectiveExchange
from ptqpipe.serving.collectives.codecs import WireCodec
from ptqpipe.serving.collectives.wire import Layout, Quantized, Stats, cut

Transport = Literal["auto", "p2p", "collectives", "symmetric"]

MESSAGE_BYTES = 32 << 20  # of a launch: what 62 MiB of bfloat16 become
LOOKS = 20_000_000  # at a counter before the check gives up: some ten seconds at half a microsecond each
CHECKED = (1 << 20, 100_003, 70)  # elements: sizes that differ, so that programs and rooms do

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, of cuda.h


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """The buffers of all ranks, as one of them sees them.

    buffers   uint8, one per rank, of equal size (:func:`buffer_bytes`), at multiples of 16 bytes; zero before the first
              sum of any rank
    rank      whose view this is
    programs  most programs of a launch, the same on all ranks; all must be on the device together
    looks     at a counter before a program gives up waiting, and the sum is wrong: for checks. 0: it waits for ever
    """

    buffers: tuple[torch.Tensor, ...]
    rank: int
    programs: int
    looks: int = 0
    room_bytes: int = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        from ptqpipe.numerics.kernels.triton_symmetric import HEADER, MOST_PROGRAMS

        rooms = self.buffers[0].numel() - HEADER
        room_bytes = rooms // (2 * self.world) // 64 * 64
        if room_bytes <= 0 or room_bytes >= 1 << 31:
            raise UsageError(
                f"symmetric buffers of {rooms + HEADER} bytes; expected room for a block per rank, and 2 GiB at most"
            )
        if not 1 <= self.programs <= MOST_PROGRAMS:
            raise UsageError(f"{self.programs} programs; expected 1 to {MOST_PROGRAMS}")
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        object.__setattr__(self, "room_bytes", room_bytes)
        object.__setattr__(self, "table", torch.tensor(addresses, dtype=torch.int64, device=self.buffers[0].device))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.buffers)

    def gave_up(self) -> bool:
        """Whether a program of this rank has stopped waiting (see ``looks``): from then on the memory is of no use."""
        from ptqpipe.numerics.kernels.triton_symmetric import HEADER, MOST_PROGRAMS

        return bool(self.buffers[self.rank][:HEADER].view(torch.int32)[2 * MOST_PROGRAMS].item())


def buffer_bytes(world: int, message_bytes: int = MESSAGE_BYTES) -> int:
    """Bytes of a rank's buffer that takes messages of ``message_bytes`` (all stripes together) in one launch."""
    from ptqpipe.numerics.kernels.triton_symmetric import HEADER

    return HEADER + 2 * world * (-(-message_bytes // (64 * world)) * 64)


def fits(codec: WireCodec) -> bool:
    """Whether the kernel knows the codec: int8 with bfloat16 scales, not rotated."""
    return codec.element == "int8" and codec.scale == "bf16" and not codec.hadamard


@dataclass(slots=True)
class SymmetricExchange:
    """One call on one rank. ``x`` and ``out`` contiguous, 1-d, of one dtype and size; ``out`` may be ``x``."""

    memory: SymmetricMemory
    codec: WireCodec
    layout: Layout
    x: torch.Tensor
    out: torch.Tensor
    stats: Stats
    own_exact: bool = True

    def two_shot(self) -> None:
        """Runs it, or on CUDA queues it on the current stream."""
        from ptqpipe.numerics.kernels.triton_symmetric import Launch

        memory, stripe = self.memory, self.layout.stripe
        launch = Launch(memory.table, memory.rank, memory.world, memory.room_bytes, memory.programs, memory.looks)
        most = memory.room_bytes // self.codec.unit_bytes
        device = torch.cuda.device_of(self.x)
        with device:  # a thread of its own starts with another one
            for begin in range(0, stripe, most):
                launch(
                    self.x,
                    self.out,
                    stripe=stripe,
                    begin=begin,
                    blocks=min(most, stripe - begin),
                    block=self.codec.block,
                    own_exact=self.own_exact,
                )
        self.stats.wire_bytes += self._sent()

    def _sent(self) -> int:
        """Bytes that go to other ranks: their parts, and the sum of this rank's stripe."""
        whole = replace(self.layout, chunk=self.layout.stripe)
        sizes = [self.codec.nbytes(len(whole.span(rank, 0))) for rank in range(self.memory.world)]
        return sum(sizes) + (self.memory.world - 2) * sizes[self.memory.rank]


def choose(
    transport: Transport | SymmetricMemory, group: dist.ProcessGroup, codec: WireCodec
) -> SymmetricMemory | None:
    """The memory that quantized sums go through, or None where they take another way. Collective.

    "auto" takes it for NCCL groups whose GPUs are on one node and on NVLink, once it has given the right bits; where it
    has not, it warns and does without. "symmetric" raises UsageError instead, as does a memory of another group.
    """
    if isinstance(transport, SymmetricMemory):
        if (transport.rank, transport.world) != (group.rank(), group.size()):
            raise UsageError(
                f"symmetric memory of rank {transport.rank} of {transport.world}, expected rank {group.rank()} of "
                f"{group.size()}: make it from the group that sums over it"
            )
        if not fits(codec):
            raise UsageError(f"codec {codec.name} (hadamard {codec.hadamard}) over symmetric memory; expected int8, 0")
        return transport
    wanted = transport == "symmetric"
    if not wanted and (transport != "auto" or group.size() == 1 or not fits(codec) or not _on_gpus(group)):
        return None
    if wanted and not fits(codec):
        raise UsageError(f"codec {codec.name} (hadamard {codec.hadamard}) over symmetric memory; expected int8, 0")
    reason = obstacle(group)
    if reason is not None:
        if wanted:
            raise UsageError(f"no symmetric memory: {reason}; leave transport out")
        return None
    return _checked(group, codec, wanted=wanted)


def _checked(group: dist.ProcessGroup, codec: WireCodec, *, wanted: bool) -> SymmetricMemory | None:
    """The memory, if all ranks can make it and it works; else UsageError where it was asked for, a warning if not."""
    buffers: tuple[torch.Tensor, ...] | None = None
    reason = "another rank could not map it"
    try:
        buffers = _buffers(group, MESSAGE_BYTES)
    except (RuntimeError, UsageError) as error:
        reason = first_line(error)
    if _all(group, buffers is not None):
        assert buffers is not None
        memory = SymmetricMemory(buffers, group.rank(), _programs(group))
        if _all(group, works(memory, group, codec)):
            return memory
        reason = "its sums differ from those of collectives, or a rank waited in vain"
    line = f"quantized all-reduce without symmetric memory: {reason}"
    if wanted:
        raise UsageError(f"{line}; leave transport out")
    warnings.warn(f"{line}; it goes through collectives", PtqWarning, stacklevel=4)
    return None


def rendezvous(group: dist.ProcessGroup, *, message_bytes: int = MESSAGE_BYTES) -> SymmetricMemory:
    """Makes the buffers of a group of GPUs and maps them into all ranks. Collective; RuntimeError from torch."""
    return SymmetricMemory(_buffers(group, message_bytes), group.rank(), _programs(group))


def _buffers(group: dist.ProcessGroup, message_bytes: int) -> tuple[torch.Tensor, ...]:
    """Every rank's, this one's zeroed."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    own = symmetric.empty(buffer_bytes(group.size(), message_bytes), dtype=torch.uint8, device=device)
    own.zero_()
    handle = symmetric.rendezvous(own, group)
    buffers = [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(group.size())]
    if buffers[group.rank()].data_ptr() != own.data_ptr():
        raise UsageError("torch's symmetric memory does not start where its tensor does; expected the same address")
    buffers[group.rank()] = own  # which owns the memory; the others are views that keep the mapping
    return tuple(buffers)


def _programs(group: dist.ProcessGroup) -> int:
    """As many as the smallest device has room for. Nobody has this number before all have zeroed their buffers."""
    from ptqpipe.numerics.kernels.triton_symmetric import MOST_PROGRAMS, PROGRAMS_A_PROCESSOR

    device = torch.device("cuda", torch.cuda.current_device())
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = torch.tensor(min(PROGRAMS_A_PROCESSOR * processors, MOST_PROGRAMS), device=device)
    dist.all_reduce(programs, dist.ReduceOp.MIN, group=group)
    return int(programs.item())


def works(memory: SymmetricMemory, group: dist.ProcessGroup, codec: WireCodec) -> bool:
    """Whether this rank gets the bits that collectives give, call after call. Collective; waits are limited."""
    careful, device = replace(memory, looks=LOOKS), memory.table.device
    good = True
    for turn, elements in enumerate(CHECKED * 3):
        seeded = torch.Generator().manual_seed(turn * memory.world + memory.rank)
        x = torch.randn(elements, generator=seeded).to(device, torch.bfloat16)
        layout = cut(elements, memory.world, unit=codec.unit, chunk_elements=elements)
        ours, theirs = torch.empty_like(x), torch.empty_like(x)
        try:
            SymmetricExchange(careful, codec, layout, x, ours, Stats()).two_shot()
        except Exception:  # whatever a kernel's compiler or driver says, the others must not be left waiting below
            good = False
        CollectiveExchange(group, Quantized(codec), layout, x, theirs, None, Stats()).two_shot()
        good = good and torch.equal(ours, theirs)
    return good and not careful.gave_up()


def obstacle(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of a group cannot write into each other's memory; the same answer on all. Collective."""
    if not _on_gpus(group):
        return "the group's tensors are not on CUDA devices"
    if not triton.available():
        return "Triton is not installed"
    device = torch.cuda.current_device()
    here = (socket.gethostname(), _boot(), str(torch.cuda.get_device_properties(device).uuid))
    places: list[tuple[str, str, str]] = [("", "", "")] * group.size()
    dist.all_gather_object(places, here, group=group)
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, _between(places, group.rank(), device), group=group)
    return next((reason for reason in reasons if reason is not None), None)


def _between(places: list[tuple[str, str, str]], rank: int, device: int) -> str | None:
    """The reason why a rank's device cannot write to the others' memory, if there is one."""
    gpus = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    for peer, place in enumerate(places):
        if place[:2] != places[rank][:2]:
            return f"ranks {rank} and {peer} are on different nodes"
        if peer == rank:
            continue
        if place[2] == places[rank][2]:
            return f"ranks {rank} and {peer} share a GPU"
        if place[2] not in gpus:
            return f"rank {rank} does not see the GPU of rank {peer} (CUDA_VISIBLE_DEVICES)"
        if not native_atomics(device, gpus[place[2]]):
            return f"the GPUs of ranks {rank} and {peer} are not on NVLink"
    return None


def native_atomics(device: int, peer: int) -> bool:
    """Whether a GPU's atomics reach another one's memory, which is so on NVLink and not on PCIe."""
    value = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return (
            driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer) == 0 and value.value > 0
        )
    except (OSError, AttributeError):
        return False


def _on_gpus(group: dist.ProcessGroup) -> bool:
    return torch.cuda.is_available() and torch.device("cpu") not in group._device_types


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _all(group: dist.ProcessGroup, good: bool) -> bool:
    answer = torch.tensor(int(good), device=torch.device("cuda", torch.cuda.current_device()))
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer.item())
