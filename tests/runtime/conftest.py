"""Sources of the runtime tests, made once."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers

from tests.runtime.models import CONFIGS, save_source


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of seeded bfloat16 models by name."""
    root = tmp_path_factory.mktemp("sources")
    return {name: save_source(name, root / name) for name in CONFIGS}
