"""Triton kernels: the claims of ``triton_cases.py`` under the interpreter and on a GPU, the code that they compile to.

Bit equality on a real device rests on two things that the interpreter cannot show: no fused multiply-add and no
flushed subnormals. Both are read off the PTX, which needs no device.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import triton

CASES = Path(__file__).with_name("triton_cases.py")
ROOT = CASES.parents[3]


def run_cases(environment: dict[str, str], *, timeout: int) -> None:
    """``triton_cases.py`` in a process of its own: whether Triton interprets is decided when it is imported."""
    options = ["-q", "-pno:cacheprovider", "-pno:xdist", "-ptests.numerics.kernels.quick_interpreter", "-Wignore"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_kernels_equal_the_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, timeout=600)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernels_equal_the_reference_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "0"}, timeout=1800)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import triton_block, triton_rows

def ptx(kernel, types, constants, capability):
    source = ASTSource(
        fn=kernel, signature=types | {name: "constexpr" for name in constants}, constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*"},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]

capability = int(sys.argv[1])
for name in sys.argv[2:]:
    plan = triton_block.plan_of(get_format(name))
    search = dict(PLAN=plan, ABSMAX=False, TOTALS=False, LANES=128)
    types = {
        "w": "*bf16", "h": "*fp32", "g": "*fp32", "words": "*i32", "scales": "*u8", "totals": "*fp64",
        "damaged": "*i32", "blocks": "i32", "blocks_per_row": "i32",
    }
    for extra in (dict(WEIGHTED=False), dict(WEIGHTED=True), dict(WEIGHTED=False, TOTALS=True),
                  dict(WEIGHTED=False, ABSMAX=True)):
        print(ptx(triton_block.block_quantize_kernel, types, search | extra, capability))
    rows = triton_rows.plan_of(get_format(name), global_divides=name == "nvfp4")
    decode = dict(PLAN=rows, LANES=1024)
    shape = {"count": "i32", "geometry": triton_rows.Geometry("i32", "i32", "i32", "i32")}
    types = {"out": "*i16", "data": "*u8", "scales": "*u8", "g": "*fp32"} | shape
    print(ptx(triton_rows.dequantize_kernel, types, decode | dict(BFLOAT16=True), capability))
    types = {"sums": "*fp64", "w": "*bf16", "data": "*u8", "scales": "*u8", "g": "*fp32"} | shape
    print(ptx(triton_rows.decode_error_kernel, types, decode, capability))
types = {"data": "*u8", "damaged": "*i32", "w": "*bf16", "scales": "*bf16"} | shape
print(ptx(triton_rows.fp8_encode_kernel, types, dict(ELEMENT=rows.element, LANES=1024), capability))
print(ptx(triton_rows.amax_kernel, {"highest": "*i32", "w": "*bf16", "count": "i32"}, dict(LANES=1024), capability))
"""


@pytest.mark.slow
# MXFP8 and MXFP4 with blocks of 8: a kernel repeats itself for every element of a block, so those of 32 are four times
# the code and no other operation.
@pytest.mark.parametrize(("capability", "formats"), [(90, ["nvfp4", "e4m3/8/e8m0"]), (100, ["e2m1/8/e8m0"])])
@pytest.mark.usefixtures("forks")
def test_the_compiled_kernels_round_every_float32_operation(
    capability: int, formats: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), *formats],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    operations = set(re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]*\.f32(?:x2)?)\b", result.stdout, re.M))
    assert {"div.rn.f32", "min.f32"} < operations
    assert not [op for op in operations if re.match(r"(fma|mad)\b", op) or re.search(r"\.(ftz|approx|full)\b", op)]
    # "add.rn" may not be contracted by the assembler, a bare "add" may.
    assert not [op for op in operations if re.match(r"(add|sub|mul|div)\.(?!rn\.)", op)]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout.strip()


def test_kernels_start_on_the_gpu_where_their_tensor_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        entered.append(where)
        yield
        entered.pop()

    def runs(where: torch.device) -> bool:
        assert entered == [torch.device("cuda:1")]
        return False

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(triton, "_runs", lambda w: runs(w.device))
    monkeypatch.setattr(triton, "_runs_on", runs)
    w, fmt = SimpleNamespace(device=torch.device("cuda:1")), get_format("mxfp4")
    calls = [
        lambda: triton.block_quantize(w, fmt),
        lambda: triton.score_total(w, fmt),
        lambda: triton.dequantize(w, w, fmt),
        lambda: triton.decode_error(w, w, fmt, w),
        lambda: triton.fp8_encode(w, w, fmt),
        lambda: triton.amax(w),
        lambda: triton.feed_forward(w, w, w, w, fmt.element),
    ]
    assert [call() for call in calls] == [None] * 7
    assert entered == []


@pytest.mark.slow
def test_triton_is_imported_on_first_use_only() -> None:
    assert python("import sys; from ptqpipe.numerics.kernels import triton; print('triton' in sys.modules)") == "False"


@pytest.mark.usefixtures("forks")
def test_without_triton_there_is_one_line_that_names_it() -> None:
    code = """
import importlib.util
from ptqpipe.numerics.kernels import triton
triton.find_spec = lambda name: None if name == "triton" else importlib.util.find_spec(name)
import torch
from ptqpipe.numerics.formats import get_format
print(triton.available(), triton.block_quantize(torch.ones(1, 32), get_format("mxfp4")))
"""
    code += "\ntry:\n    triton.require()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    first, line = python(code).splitlines()
    assert first == "False None"
    assert line.startswith("UsageError device 'cuda' needs Triton")
    assert "pip install triton" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.usefixtures("forks")
def test_without_a_device_nothing_is_offered() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    code = """
import torch
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import triton
print(triton.available(), triton.block_quantize(torch.ones(1, 32), get_format("mxfp4")))
try:
    triton.require()
except Exception as error:
    print(type(error).__name__, error)
"""
    first, second = python(code).splitlines()
    assert first == "False None"
    assert second.startswith("UsageError")
    assert "no CUDA device" in second
