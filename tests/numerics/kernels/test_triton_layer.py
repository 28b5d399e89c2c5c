"""Norms, rotary embedding and gates on CUDA: the claims of ``triton_layer_cases.py`` under the interpreter and on a
GPU, and that what is compiled rounds every product and sum by itself."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.numerics.kernels.test_triton_attention import OPTIONS
from tests.numerics.kernels.test_triton_linear import CASES, ROOT, run

FILE = str(CASES.with_name("triton_layer_cases.py"))


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_results_are_those_of_torch_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run(["-m", "pytest", *OPTIONS, FILE], environment, timeout=600)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_results_are_those_of_torch_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(["-m", "pytest", *OPTIONS, FILE], {"TRITON_INTERPRET": "0"}, timeout=900)


@pytest.mark.slow
@pytest.mark.interpreter
def test_the_compiled_kernels_fuse_no_product_with_a_sum(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [str(ROOT / "scripts" / "compile_triton.py"), "--capability", "90", "--ptx", "--only", "layer"]
    lines = [json.loads(line) for line in run(command, {"TRITON_CACHE_DIR": str(tmp_path)}, timeout=600).splitlines()]
    assert {line["kernel"] for line in lines} == {"norm_kernel", "rotary_kernel", "gate_kernel"}
    for line in lines:
        operations = re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]*\.f32(?:x2)?)\b", line["ptx"], re.M)
        assert operations
        assert not [op for op in operations if re.match(r"(fma|mad)\b", op)]
