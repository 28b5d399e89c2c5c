"""Claims about what a model that cannot be run layer by layer, or a machine without memory, is refused with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.calibration.runner import Runner
from ptqpipe.errors import CheckpointError, PtqError
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import creating
from ptqpipe.runtime.skeleton import Skeleton
from tests.calibration.models import make_model, make_windows

NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
)
WITHOUT = "convert it without data and stats, which does not run the model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    path: Path = tmp_path_factory.mktemp("models") / "llama"
    make_model(path, "llama")
    return path


def run(path: Path, forward: Any = None) -> None:
    """The first pass; ``forward`` replaces the model's own."""
    with Source.open(path) as source:
        skeleton = Skeleton.of(source, dtype=torch.float32)
        if forward is not None:
            skeleton.model.forward = forward
        with Runner.open(skeleton, make_windows()):
            pass


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_no_memory_is_no_fault_of_the_model(model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    with pytest.raises(RuntimeError, match="memory"), creating(model):
        fails()
    with pytest.raises(RuntimeError, match="memory"):
        run(model, fails)
    monkeypatch.setattr("transformers.core_model_loading.convert_and_load_state_dict_in_model", fails)
    with pytest.raises(RuntimeError, match="memory"):
        run(model)


def test_other_errors_of_a_model_are_one_line_with_what_needs_no_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_more(**_: object) -> None:
        raise ValueError("You have to specify decoder_input_ids")

    with pytest.raises(CheckpointError, match=f"cannot be run on tokens alone .*decoder_input_ids.*{WITHOUT}"):
        run(model, needs_more)
    with pytest.raises(CheckpointError, match=f"ran 0 of 2 decoder layers; it cannot be run layer by layer.*{WITHOUT}"):
        run(model, lambda **_: None)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("size mismatch for q_proj")

    monkeypatch.setattr("transformers.core_model_loading.convert_and_load_state_dict_in_model", fails)
    with pytest.raises(PtqError, match=r"do not fit config.json: size mismatch"):
        run(model)
