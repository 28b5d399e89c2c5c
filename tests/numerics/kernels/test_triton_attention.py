"""Attention over pages on CUDA: the claims of ``triton_attention_cases.py`` under the interpreter and on a GPU."""

import pytest
import torch

from ptqpipe.numerics.kernels import triton_attention
from ptqpipe.numerics.kernels.cpu_attention import PagedSpans
from tests.numerics.kernels.test_triton_linear import CASES, run

OPTIONS = ["-q", "-pno:cacheprovider", "-pno:xdist", "-ptests.numerics.kernels.quick_interpreter", "-Wignore"]
FILE = str(CASES.with_name("triton_attention_cases.py"))


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_results_are_those_of_each_sequence_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run(["-m", "pytest", *OPTIONS, FILE], environment, timeout=600)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_results_are_those_of_each_sequence_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run(["-m", "pytest", *OPTIONS, FILE], {"TRITON_INTERPRET": "0"}, timeout=1800)


def test_a_cpu_has_other_kernels() -> None:
    one = torch.tensor([1])
    where = PagedSpans(one[None], one, torch.tensor([0, 1]), 1)
    assert triton_attention.place(where, one, torch.device("cpu")) is None
