"""The simulator against processes: ranks that talk over gloo get the bits that one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labs.allreduce_simulator.codecs import get_rounding
from labs.allreduce_simulator.error import Case, reduced
from labs.allreduce_simulator.inputs import drawn
from labs.allreduce_simulator.schemes import get_scheme

ELEMENTS = 64 * 200 + 37
CASES = (("int8", 64, 0), ("int4", 32, 64), ("nvfp4", 16, 0), ("mxfp8", 32, 0))
RANK = """
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ptqpipe.serving.collectives import QuantAllReduce
from labs.allreduce_simulator.inputs import drawn

folder, rank, ranks, elements = Path(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
x = drawn("t3", elements).partials(ranks, start=0, stop=elements)[rank].bfloat16()
for case in sys.argv[5:]:
    codec, block, rotate, shots = case.split(":")
    reduce = QuantAllReduce(
        codec=codec, block=int(block), hadamard=int(rotate), min_bytes=0, chunk_bytes=8192, one_shot=shots == "1"
    )
    torch.save(reduce.quantized(x), folder / f"{case}-{rank}.pt")
dist.destroy_process_group()
"""


def run_ranks(folder: Path, ranks: int, cases: list[str]) -> None:
    """Starts the processes, on loopback alone, and waits. Their output is shown where one fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), str(ranks), str(ELEMENTS), *cases],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, outputs


def expected(scheme: str, ranks: int, codec: str, block: int, rotate: int) -> torch.Tensor:
    """bfloat16: what the simulator says every rank holds."""
    partials = drawn("t3", ELEMENTS).partials(ranks, start=0, stop=ELEMENTS)
    case = Case(get_scheme(scheme), get_rounding(codec, block, rotate=rotate))
    return reduced(case, partials, start=0, elements=ELEMENTS, node=2).bfloat16()


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_processes_hold_the_bits_of_the_simulated_two_shot(tmp_path: Path) -> None:
    ranks = 3
    cases = {f"{codec}:{block}:{rotate}:2": (codec, block, rotate) for codec, block, rotate in CASES}
    run_ranks(tmp_path, ranks, list(cases))
    for name, case in cases.items():
        for rank in range(ranks):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert torch.equal(found, expected("two-shot", ranks, *case)), (name, rank)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_processes_hold_the_bits_of_the_simulated_one_shot(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, ["int8:64:0:1"])
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"int8:64:0:1-{rank}.pt"), expected("one-shot", 2, "int8", 64, 0))
