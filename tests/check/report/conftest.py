"""A tiny model and its checkpoint, and the report on it, once for all tests of reports."""

from pathlib import Path

import pytest

from ptqpipe.check.report.content import Report
from ptqpipe.check.report.gather import gather
from tests.check.report.pages import NASTY, converted
from tests.tiny import Tensors, llama


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tensors = llama()
    t = Tensors(5)
    t.add(NASTY, 32, 128)
    return converted(tmp_path_factory.mktemp("report"), tensors | t.made, "nvfp4")


@pytest.fixture(scope="session")
def sourced(pair: tuple[Path, Path]) -> Report:
    return gather(pair[1], source=pair[0])
