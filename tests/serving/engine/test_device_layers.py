"""Decoder layers on a GPU in few launches: the claims of ``device_layer_cases.py`` under Triton's interpreter and on a
GPU."""

from pathlib import Path

import pytest
import torch

from tests.numerics.kernels.test_triton_attention import OPTIONS
from tests.numerics.kernels.test_triton_linear import run

CASES = str(Path(__file__).with_name("device_layer_cases.py"))


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_steps_are_those_of_separate_operators_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run(["-m", "pytest", *OPTIONS, CASES], environment, timeout=900)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_are_those_of_separate_operators_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(["-m", "pytest", *OPTIONS, CASES], {"TRITON_INTERPRET": "0"}, timeout=900)
