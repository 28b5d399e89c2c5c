"""The symmetric-memory kernel: the claims of ``triton_symmetric_cases.py`` under the interpreter and on a GPU, and what
it compiles to. That ranks see what others wrote rests on the order of a few instructions, read off the PTX here."""

import re
from pathlib import Path

import pytest
import torch

from tests.numerics.kernels.test_triton_linear import run

CASES = Path(__file__).with_name("triton_symmetric_cases.py")
OPTIONS = [
    "-m",
    "pytest",
    "-q",
    "-pno:cacheprovider",
    "-pno:xdist",
    "-ptests.numerics.kernels.quick_interpreter",
    "-Wignore",
]
COMMAND = [*OPTIONS, str(CASES)]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_phases_equal_the_reference_and_the_barrier_counts_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(COMMAND, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, timeout=300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_phases_equal_the_reference_and_the_barrier_counts_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(COMMAND, {"TRITON_INTERPRET": "0"}, timeout=900)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ptqpipe.numerics.kernels import triton_symmetric as t

SIZES = ("rank", "stripe", "begin", "blocks", "n", "room_bytes")
ALIGNED = ("x", "out", "table", "n", "room_bytes")

for world in map(int, sys.argv[2:]):
    for limit in (0, 1000):
        types = {"x": "*bf16", "out": "*bf16", "table": "*i64"} | {size: "i32" for size in SIZES}
        constants = dict(
            RECIPROCAL=t._RECIPROCAL, WORLD=world, PADDED=triton.next_power_of_2(world), OWN_EXACT=True, LIMIT=limit,
            BLOCK=64, LANES=t.ELEMENTS // 64,
        )
        attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name in ALIGNED}
        kinds = types | {name: "constexpr" for name in constants}
        source = ASTSource(fn=t.all_reduce_kernel, signature=kinds, constexprs=constants, attrs=attrs)
        options = {"enable_fp_fusion": False, "num_warps": t.WARPS, "maxnreg": t.REGISTERS}
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        print("KERNEL", triton.compile(source, target=target, options=options).asm["ptx"])
"""

KINDS = {
    "arrive": r"(atom|red)\S*\.release\S*",
    "look": r"(atom|ld)\S*\.acquire\S*",
    "barrier": r"bar(rier)?\.sync\S*",
    "write": r"st\.global\S*",
    "read": r"ld\.global\S*",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """PTX for two and eight ranks of sm_90, with and without an end to the waiting."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    return run(["-c", COMPILE, "90", "2", "8"], environment, timeout=300).split("KERNEL")[1:]


def memory_operations(ptx: str) -> list[tuple[str, str]]:
    """(kind, instruction) of what orders memory or goes to global memory, as they follow one another."""
    found = []
    for operation in re.findall(r"^\s+(?:@!?\S+ )?([a-z][a-z0-9_.:]+)\s", ptx, re.M):
        kind = next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, operation)), None)
        if kind is not None:
            found.append((kind, operation))
    return found


def first(kinds: list[str], of: set[str]) -> str:
    return next((kind for kind in kinds if kind in of), "none")


@pytest.mark.slow
def test_what_is_written_is_released_to_the_system_and_read_after_it_was_acquired(compiled: list[str]) -> None:
    """Of all threads of a program: a barrier lies between their writes and the arrival, and between look and reads."""
    assert len(compiled) == 4
    for ptx in compiled:
        operations = memory_operations(ptx)
        kinds = [kind for kind, _ in operations]
        assert kinds.count("arrive") == 2
        looks = [at for at, kind in enumerate(kinds) if kind == "look"]
        assert len(looks) >= 2
        assert all(re.search(r"\.sys\b", operation) for kind, operation in operations if kind in ("arrive", "look"))
        for at in (at for at, kind in enumerate(kinds) if kind == "arrive"):
            assert first(kinds[:at][::-1], {"write", "barrier"}) == "barrier"
            before_next = [kind for kind in kinds[at + 1 :] if kind != "barrier"]
            assert before_next[0] == "look", "nothing is read or written between arriving and looking"
        for at in looks:
            assert first(kinds[at + 1 :], {"read", "barrier"}) == "barrier"
        order = [kind for kind in kinds if kind in ("arrive", "write")]
        assert order[0] == order[-1] == "write"
        arrivals = [at for at, kind in enumerate(order) if kind == "arrive"]
        assert "write" in order[arrivals[0] : arrivals[1]]


@pytest.mark.slow
def test_compiled_every_float32_operation_is_rounded_by_itself_and_values_move_in_16_bytes(compiled: list[str]) -> None:
    for ptx in compiled:
        operations = set(re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]*\.f32(?:x2)?)\b", ptx, re.M))
        assert {"div.rn.f32", "add.rn.f32", "mul.rn.f32"} < operations
        assert not [op for op in operations if re.match(r"(fma|mad)\b", op) or re.search(r"\.(ftz|approx|full)\b", op)]
        moved = {operation for kind, operation in memory_operations(ptx) if kind in ("read", "write")}
        wide = {"ld.global.v4.b32", "st.global.v4.b32"}
        # Besides values: addresses (b64), counters and the word of those who gave up (b32), scales (b16).
        assert (
            wide
            <= moved
            <= wide | {"ld.global.b64", "ld.global.b32", "st.global.b32", "ld.global.b16", "st.global.b16"}
        )
        assert ".local" not in ptx
        assert ".maxnreg 128" in ptx
