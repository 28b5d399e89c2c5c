"""Error feedback and refinement on CUDA: the claims of ``triton_columns_cases.py`` under the interpreter and on a GPU,
and that what is compiled rounds every product and sum by itself."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.numerics.kernels.test_triton_linear import CASES, ROOT, run

OPTIONS = [
    "-m",
    "pytest",
    "-q",
    "-pno:cacheprovider",
    "-pno:xdist",
    "-ptests.numerics.kernels.quick_interpreter",
    "-Wignore",
]
COMMAND = [*OPTIONS, str(CASES.with_name("triton_columns_cases.py"))]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_steps_equal_the_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(COMMAND, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, timeout=300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_steps_equal_the_reference_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(COMMAND, {"TRITON_INTERPRET": "0"}, timeout=900)


@pytest.mark.slow
@pytest.mark.interpreter
def test_the_compiled_kernels_round_every_float32_operation(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [str(ROOT / "scripts" / "compile_triton.py"), "--capability", "90", "--ptx", "--only", "columns"]
    lines = [json.loads(line) for line in run(command, {"TRITON_CACHE_DIR": str(tmp_path)}, timeout=600).splitlines()]
    assert {line["kernel"] for line in lines} == {"feed_kernel", "descend_kernel", "choose_kernel", "sweep_kernel"}
    for line in lines:
        operations = set(re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]*\.f32(?:x2)?)\b", line["ptx"], re.M))
        assert {"div.rn.f32", "add.rn.f32", "mul.rn.f32"} < operations
        assert not [op for op in operations if re.match(r"(fma|mad)\b", op) or re.search(r"\.(ftz|approx|full)\b", op)]
        assert not [op for op in operations if re.match(r"(add|sub|mul|div)\.(?!rn\.)", op)]
