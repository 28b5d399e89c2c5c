"""Sources of the runtime tests, each made once, when a test asks for it."""

from collections import UserDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers

from tests.runtime.models import save_source


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class Sources(UserDict[str, Path]):
    """Folders of models by their names in `CONFIGS`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        self[name] = save_source(name, self.root / name)
        return self[name]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of seeded bfloat16 models by name."""
    return Sources(tmp_path_factory.mktemp("sources"))
