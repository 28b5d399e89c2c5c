"""Symmetric memory: the claims of ``symmetric_cases.py`` in a process that interprets Triton, which groups may have it,
and on a GPU ``scripts/check_symmetric.py``, where ranks are streams of one device."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptqpipe.errors import UsageError
from ptqpipe.serving.collectives import QuantAllReduce, symmetric
from ptqpipe.serving.collectives.codecs import get_wire_codec
from tests.serving.collectives.ranks import on_ranks

CASES = Path(__file__).with_name("symmetric_cases.py")
ROOT = CASES.parents[3]
CHECK = ROOT / "scripts" / "check_symmetric.py"


def run(arguments: list[str], environment: dict[str, str], *, timeout: int) -> subprocess.CompletedProcess[str]:
    """A process of its own: whether Triton interprets is decided when it is imported."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_kernel_gives_the_references_bits_on_every_rank_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run(["-m", "pytest", *options, str(CASES)], environment, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ranks_on_streams_of_one_device_get_the_references_bits() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = run([str(CHECK), "--calls", "2000", "--ranks", "2,4,8"], {"TRITON_INTERPRET": "0"}, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.usefixtures("forks")
def test_without_a_device_the_check_says_so_in_one_line_and_fails() -> None:
    done = run([str(CHECK)], {"TRITON_INTERPRET": "0"}, timeout=120)
    assert done.returncode != 0
    assert "CUDA" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def refused(rank: int, world: int) -> tuple[str, bool]:
    try:
        QuantAllReduce(min_bytes=0, transport="symmetric")
    except UsageError as error:
        return str(error), QuantAllReduce(min_bytes=0).transports.memory is None
    return "", False


def test_a_group_of_cpus_has_none() -> None:
    assert (
        on_ranks(2, refused)
        == [("no symmetric memory: the group's tensors are not on CUDA devices; leave transport out", True)] * 2
    )


PLACES = [("a", "boot", f"gpu{index}") for index in range(4)]


@pytest.mark.parametrize(
    ("places", "linked", "reason"),
    [
        (PLACES, True, None),
        ([*PLACES[:3], ("b", "boot", "gpu3")], True, "ranks 0 and 3 are on different nodes"),
        ([*PLACES[:3], ("a", "another", "gpu3")], True, "ranks 0 and 3 are on different nodes"),
        ([*PLACES[:3], ("a", "boot", "gpu9")], True, "rank 0 does not see the GPU of rank 3 (CUDA_VISIBLE_DEVICES)"),
        ([*PLACES[:2], PLACES[0], PLACES[3]], True, "ranks 0 and 2 share a GPU"),
        (PLACES, False, "the GPUs of ranks 0 and 1 are not on NVLink"),
    ],
)
def test_it_is_for_gpus_of_one_node_that_are_linked(
    places: list[tuple[str, str, str]], linked: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu{index}"))
    monkeypatch.setattr(symmetric, "native_atomics", lambda device, peer: linked)
    assert symmetric._between(places, 0, 0) == reason


@pytest.mark.parametrize("good", ["nothing", "memory"])
def test_where_it_does_not_work_auto_warns_and_symmetric_raises(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def buffers(group: object, message_bytes: int) -> tuple[torch.Tensor, ...]:
        if good == "nothing":
            raise RuntimeError("no peers\nand a long trace")
        return (torch.zeros(1 << 16, dtype=torch.uint8),) * 2

    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(symmetric, "_on_gpus", lambda group: True)
    monkeypatch.setattr(symmetric, "obstacle", lambda group: None)
    monkeypatch.setattr(symmetric, "_all", lambda group, answer: answer)
    monkeypatch.setattr(symmetric, "_buffers", buffers)
    monkeypatch.setattr(symmetric, "_programs", lambda group: 1)
    monkeypatch.setattr(symmetric, "works", lambda memory, group, codec: False)
    wanted = {"nothing": "no peers$", "memory": "differ from those of collectives"}[good]
    with pytest.raises(UsageError, match=wanted.replace("$", "; leave transport out")):
        symmetric.choose("symmetric", group, get_wire_codec("int8"))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match=wanted.replace("$", "; it goes through collectives")):
        assert symmetric.choose("auto", group, get_wire_codec("int8")) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "hadamard"), [("int4", 0), ("fp8", 0), ("nvfp4", 0), ("int8", 64)])
def test_codecs_without_a_kernel_take_another_way(name: str, hadamard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "_on_gpus", lambda group: True)
    group, codec = SimpleNamespace(size=lambda: 2), get_wire_codec(name, hadamard=hadamard)
    assert symmetric.choose("auto", group, codec) is None  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected int8"):
        symmetric.choose("symmetric", group, codec)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3), (0, 1)])
def test_a_memory_of_another_group_is_refused(rank: int, size: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    memory = symmetric.SymmetricMemory((torch.zeros(1 << 16, dtype=torch.uint8),) * 2, 0, 1)
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    with pytest.raises(UsageError, match=f"rank 0 of 2, expected rank {rank} of {size}"):
        symmetric.choose(memory, group, get_wire_codec("int8"))  # type: ignore[arg-type]
    own = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    assert symmetric.choose(memory, own, get_wire_codec("int8")) is memory  # type: ignore[arg-type]
