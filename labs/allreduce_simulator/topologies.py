"""Machines for the time model, one row each, with the source of every number.

Bandwidths are what programs reach, in 10^9 bytes per second and direction, not what data sheets promise; where only a
data sheet is known the row says so. Must not know schemes.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ptqpipe.errors import UsageError

Shape = Literal["switch", "mesh", "ring"]


@dataclass(frozen=True, slots=True)
class Fabric:
    """What joins ranks.

    shape       switch: every rank has one port to all others; mesh: a link of its own to every other; ring: two
                neighbours (a torus, walked in one closed loop)
    link        GB/s and direction of the port (switch) or of one link (mesh, ring)
    step_us     from sending to having received, size aside
    message_us  of work for every message to another rank
    """

    shape: Shape
    link: float
    step_us: float
    message_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What encodes, adds and decodes on one rank.

    encode, decode  GB/s of bytes read and written
    add             GB/s of received bytes that are decoded and added
    plain_add       the same of bfloat16
    host            GB/s of bytes through its network stack, in each direction; 0 for none of its time
    overlaps        whether it works while the wire does
    """

    encode: float
    add: float
    decode: float
    plain_add: float
    host: float = 0.0
    overlaps: bool = True


@dataclass(frozen=True, slots=True)
class Topology:
    """A kind of machine.

    node, outer         ranks of one machine (0: all), and what joins machines
    start_us            of one call, size aside; quantized_start_us comes on top for a quantized one
    quantized_step_us   on top of a step that quantizes
    multimem            GB/s of the reduction inside the switch; 0 where there is none
    chunk_bytes         of bfloat16 input that move through the pipeline together, at least
    """

    name: str
    title: str
    inner: Fabric
    engine: Rates
    max_ranks: int
    source: str
    start_us: float = 8.0
    quantized_start_us: float = 12.0
    quantized_step_us: float = 0.0
    node: int = 0
    outer: Fabric | None = None
    multimem: float = 0.0
    chunk_bytes: int = 256 << 10


def _gpu(memory: float) -> Rates:
    """A GPU whose codec kernels move bytes at ``memory`` GB/s: four fifths of the data sheet's HBM."""
    return Rates(encode=0.8 * memory, add=0.8 * memory, decode=0.8 * memory, plain_add=0.8 * memory)


# One thread of a CPU with AVX-512: int8 codec in C++, 12.3 GB/s of bfloat16 encoded (3.02 bytes move for every 2), 21.1
# decoded, 8.0 for summing two and encoding again; TCP through a virtual link 0.87 GB/s and core (64 MiB in 77 ms).
_CPU = Rates(encode=18.5, add=23.0, decode=31.8, plain_add=23.0, host=0.87)

_H100 = _gpu(3350)

_ROWS = (
    Topology(
        "nvswitch-h100",
        "8 H100 on NVSwitch, reduction in the switch",
        Fabric("switch", 370, 1.0),
        _H100,
        8,
        "NVIDIA/nccl#1455: ring 365-370 GB/s of 450, NVLS bus bandwidth 420..480 at 5..8 ranks = 307 (1 + 1/k) N; "
        "quantized start: QuickReduce's on MI300X; HBM from the data sheet",
        multimem=307,
    ),
    Topology(
        "nvswitch-h100-nomulti",
        "8 H100 on NVSwitch, reduction in the switch left unused",
        Fabric("switch", 370, 1.0),
        _H100,
        8,
        "as nvswitch-h100",
    ),
    Topology(
        "nvswitch-a100",
        "8 A100 on NVSwitch (no reduction in the switch)",
        Fabric("switch", 240, 1.0),
        _gpu(2039),
        8,
        "nccl-tests figures of a cluster operator: 230-250 GB/s of 300; HBM from the data sheet",
    ),
    Topology(
        "nvl72-b200",
        "72 B200 in one NVLink domain, reduction in the switch",
        Fabric("switch", 740, 1.0),
        _gpu(8000),
        72,
        "data sheet 900 GB/s, HBM 8000; shares of it as measured on H100 (not measured on B200)",
        multimem=614,
    ),
    Topology(
        "h100-cluster",
        "machines of 8 H100 on NVSwitch, one 400 Gbit/s NIC per GPU",
        Fabric("switch", 370, 1.0),
        _H100,
        4096,
        "inside as nvswitch-h100; NVIDIA/nccl-tests#290: 46-48 GB/s per NIC; 5 us per step between them is assumed",
        node=8,
        outer=Fabric("switch", 47, 5.0),
        multimem=307,
    ),
    Topology(
        "xgmi-mi300x",
        "8 MI300X, a link between every two",
        Fabric("mesh", 51, 1.0, 0.74),
        Rates(encode=4240, add=148, decode=4240, plain_add=249, overlaps=False),
        8,
        "fitted to QuickReduce's table (mk1-project/quickreduce) at 2 and 4 ranks; a link has 64 GB/s, HBM 5300",
        start_us=3.8,
        quantized_start_us=12.2,
        chunk_bytes=1 << 40,
    ),
    Topology(
        "pcie5",
        "8 GPUs on PCIe 5.0 x16",
        Fabric("switch", 40, 5.0),
        _gpu(3350),
        8,
        "nccl-tests figures of a cluster operator for H100 PCIe: 35-45 GB/s of 63; 5 us a step is an assumption",
    ),
    Topology(
        "pcie4",
        "8 GPUs on PCIe 4.0 x16",
        Fabric("switch", 20, 5.0),
        _gpu(864),
        8,
        "the share of PCIe 5.0 on 31.5 GB/s (not measured); HBM of an L40S from the data sheet",
    ),
    Topology(
        "tpu-v5e",
        "TPU v5e, a closed loop through the torus",
        Fabric("ring", 50, 1.0),
        _gpu(819),
        256,
        "Google Cloud: 1600 Gbit/s a chip over 4 links; quantized step fitted to EQuARX's 'no gain below 2 MiB'; "
        "1 us a hop is an assumption",
        start_us=2.0,
        quantized_start_us=0.0,
        quantized_step_us=1.2,
        chunk_bytes=32 << 10,
    ),
)

TOPOLOGIES: dict[str, Topology] = {row.name: row for row in _ROWS}
ETHERNET = re.compile(r"ethernet-(\d+(?:\.\d+)?)g")
FASTEST_TCP = 25.0  # Gbit/s beyond which ranks are taken to be GPUs with RDMA
_PAYLOAD = 1448 / 1538  # of a 1500-byte frame with TCP timestamps


def ethernet(gbits: float) -> Topology:
    """One rank a machine behind a port of ``gbits`` Gbit/s: TCP on a CPU up to 25, RDMA and a GPU beyond.

    UsageError outside of 1..400.
    """
    if not 1 <= gbits <= 400:
        raise UsageError(f"ethernet of {gbits:g} Gbit/s is outside of 1..400")
    name, title = f"ethernet-{gbits:g}g", f"{gbits:g} Gbit/s Ethernet, one rank a machine"
    if gbits > FASTEST_TCP:
        link = gbits / 8 * 0.94
        source = "NVIDIA/nccl-tests#290: 46-48 GB/s of 50 with RDMA; 5 us a step is an assumption"
        return Topology(name, f"{title}, GPUs with RDMA", Fabric("switch", link, 5.0), _H100, 512, source)
    return Topology(
        name,
        f"{title}, CPUs with TCP",
        Fabric("switch", gbits / 8 * _PAYLOAD, 60.0, 20.0),
        _CPU,
        512,
        "frames of 1500 bytes; codec, TCP and start as measured with gloo on two shared cores",
        start_us=100.0,
        quantized_start_us=900.0,
        chunk_bytes=2 << 20,
    )


def get_topology(name: str) -> Topology:
    """The row called ``name``, or ``ethernet-<G>g``. UsageError with the known names."""
    match = ETHERNET.fullmatch(name)
    if match is not None:
        return ethernet(float(match[1]))
    if name not in TOPOLOGIES:
        raise UsageError(
            f"unknown topology {name!r}; known are {', '.join(TOPOLOGIES)} and ethernet-1g to ethernet-400g"
        )
    return TOPOLOGIES[name]
