"""A working folder with the model and the text that examples name, made once."""

import shutil
from pathlib import Path

import pytest

from ptqpipe.pipeline.demo import MODEL


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MODEL, a small model of its own kind, and TEXT.txt."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(MODEL, folder / "MODEL")
    shutil.copyfile(MODEL / "heldout.txt", folder / "TEXT.txt")
    return folder


@pytest.fixture
def there(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder is `workplace` meanwhile."""
    monkeypatch.chdir(workplace)
    return workplace
