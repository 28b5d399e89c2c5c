"""Claims about what the compiled kernels answer: a kernel without memory is an error, never a slower way in silence."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import cpu, cpu_library
from ptqpipe.numerics.qtensor import QTensor
from tests import tiny

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no compiled kernels here")

W = torch.ones(128, 128, dtype=torch.bfloat16)
E2M1 = get_format("mxfp4").element
FORMAT, ROWS = get_format("mxfp4"), get_format("fp8_channel")
F = torch.ones(128, 128)
CODES = QTensor(
    FORMAT, (128, 128), torch.zeros(128, 64, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8)
)
OF_BLOCKS = (torch.ones(8, 16, 16), torch.ones(8, 16), torch.ones(8, 16, 16), torch.ones(8, dtype=torch.uint8))


class Answering:
    """The extension, every kernel of which (or one) gives one answer and does nothing."""

    def __init__(self, status: int, only: str | None = None) -> None:
        self._real, self._status, self._only = cpu_library.library(), status, only

    def __getattr__(self, name: str) -> Any:
        if self._only in (None, name):
            return lambda *_: self._status
        return getattr(self._real, name)


def answer(monkeypatch: pytest.MonkeyPatch, status: int, only: str | None = None) -> None:
    answering = Answering(status, only)
    monkeypatch.setattr(cpu_library, "library", lambda: answering)


CALLS: dict[str, Callable[[], Any]] = {
    "block_quantize": lambda: cpu.block_quantize(W, FORMAT),
    "block_quantize of rows": lambda: cpu.block_quantize(W, ROWS),
    "score_total": lambda: cpu.score_total(W, FORMAT),
    "fp8_encode": lambda: cpu.fp8_encode(W, torch.ones(128, 1, dtype=torch.bfloat16), ROWS),
    "amax": lambda: cpu.amax(W),
    "decode_error": lambda: cpu.decode_error(
        torch.zeros(128, 64, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8), FORMAT, W
    ),
    "dequantize": lambda: cpu.dequantize(
        torch.zeros(128, 64, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8), FORMAT
    ),
    "code_difference": lambda: cpu.code_difference(CODES, CODES),
    "fp4_places": lambda: cpu.fp4_places(CODES),
    "fp4_to_nvfp4": lambda: cpu.fp4_to_nvfp4(CODES, 0),
    "fp4_to_e4m3": lambda: cpu.fp4_to_e4m3(CODES, torch.zeros(128, 1, dtype=torch.int16), ROWS),
    "feed_forward": lambda: cpu.feed_forward(F, F, F, F, E2M1),
    "descend": lambda: cpu.descend(F, F, torch.zeros(128, 128, dtype=torch.uint8), F, F, F, E2M1),
    "feed_rows": lambda: cpu.feed_rows(F, F, F.t(), E2M1),
    "enter_rows": lambda: cpu.enter_rows(F, F[0], F.t(), F[0], 16, 6, 15, E2M1),
    "sweep_rows": lambda: cpu.sweep_rows(F, F, torch.zeros(128, 128, dtype=torch.uint8), F, F, 1, E2M1),
    "sweep_block_rows": lambda: cpu.sweep_block_rows(
        F, F, F.to(torch.uint8), F[:8].long(), F[0], F, OF_BLOCKS, (2, 0.5, 1), E2M1
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_kernel_without_memory_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, cpu_library.NO_MEMORY)
    with pytest.raises(MemoryError, match="no memory for the working space of the compiled ptq_"):
        CALLS[name]()


@pytest.mark.parametrize("name", list(CALLS))
def test_a_combination_without_a_kernel_is_left_to_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, cpu_library.UNSUPPORTED)
    assert not CALLS[name]()


def test_an_answer_that_nobody_knows_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 77)
    with pytest.raises(AssertionError, match="returned 77"):
        cpu.amax(W)


def test_the_answers_are_those_of_the_interface() -> None:
    header = (Path(cpu_library.__file__).parent / "csrc" / "api.h").read_text()
    found = dict(re.findall(r"\bPTQ_(OK|NOT_FINITE|UNSUPPORTED|NO_MEMORY) = (\d+)", header))
    assert {name: int(value) for name, value in found.items()} == {
        name: getattr(cpu_library, name) for name in ("OK", "NOT_FINITE", "UNSUPPORTED", "NO_MEMORY")
    }
    assert isinstance(cpu_library.library(), ctypes.CDLL)


def test_a_conversion_without_memory_ends_in_one_line_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    command = ["convert", str(model), "-o", str(tmp_path / "out"), "--format", "mxfp4", "-q"]
    with monkeypatch.context() as patched:
        answer(patched, cpu_library.NO_MEMORY, only="ptq_quantize_blocks")
        done = CliRunner().invoke(main, command)
    assert done.exit_code == 1
    assert "out of memory (the system has no memory for the working space of the compiled" in done.output
    assert "lower --workers or --max-memory, or raise the limit of this process" in done.output
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(main, [*command, "--resume"]).exit_code == 0
