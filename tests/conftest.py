"""What all tests share: the assets outside the repository, and no network."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any test imports huggingface_hub or transformers, which read it once.
os.environ["HF_HUB_OFFLINE"] = "1"

_REPOSITORY = Path(__file__).resolve().parent.parent


def shared_folder() -> Path:
    """Where the shared assets would be."""
    return Path(os.environ.get("PTQPIPE_SHARED", _REPOSITORY.parent / "shared"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked ``shared`` where the shared folder is not."""
    if shared_folder().is_dir():
        return
    skip = pytest.mark.skip(reason=f"no shared assets at {shared_folder()} (PTQPIPE_SHARED names another place)")
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with ``golden/`` and ``assets/``; the test is skipped where there is none."""
    path = shared_folder()
    if not path.is_dir():
        pytest.skip(f"no shared assets at {path} (PTQPIPE_SHARED names another place)")
    return path


@pytest.fixture(autouse=True)
def _signal_handlers_stay() -> Iterator[None]:
    """What a test leaves behind for a signal reaches every later test of its process, and their children."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before
