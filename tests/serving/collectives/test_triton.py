"""The claims of ``triton_cases.py``, in a process that interprets Triton, and on a device where there is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(environment: dict[str, str]) -> None:
    options = ["-q", "-pno:cacheprovider", "-pno:xdist", "-ptests.numerics.kernels.quick_interpreter", "-Wignore"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        cwd=CASES.parents[3],
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_messages_equal_the_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ptqpipe.numerics.kernels import triton_messages as t

def ptx(kernel, types, constants):
    source = ASTSource(fn=kernel, signature=types | {name: "constexpr" for name in constants}, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]

common = {"RECIPROCAL": t._RECIPROCAL, "BLOCK": 64, "LANES": 32}
counts = {"n": "i32", "blocks": "i32"}
print(ptx(t.encode_kernel, {"x": "*bf16", "message": "*u8"} | counts, common))
print(ptx(t.decode_kernel, {"message": "*u8", "out": "*bf16"} | counts, {"BLOCK": 64, "LANES": 32}))
types = {"first": "*u8", "own": "*bf16", "message": "*u8", "out": "*bf16", "spacing": "i32"} | counts
print(ptx(t.reduce_kernel, types, common | {"RANKS": 4, "START": 1, "OWN": 0}))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_compiled_for_a_gpu_every_float32_operation_is_rounded_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    result = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=CASES.parents[3],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    operations = set(re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]*\.f32(?:x2)?)\b", result.stdout, re.M))
    assert {"div.rn.f32", "add.rn.f32", "mul.rn.f32"} < operations
    assert not [op for op in operations if re.match(r"(fma|mad)\b", op) or re.search(r"\.(ftz|approx|full)\b", op)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_messages_equal_the_reference_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "0"})
