"""Texts to tune on, and codes of runs that nobody stopped."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from ptqpipe.check.evaluate.tokenized_text import SAMPLE
from ptqpipe.pipeline.tune import command as tune
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.runtime.loading import load_tokenizer
from tests.calibration.models import write_windows
from tests.pipeline.tune.tune_runs import DEMO, ONE, of_method


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SAMPLE.read_text(encoding="utf-8")[:20000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def rows(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many windows as `OPTIONS` has samples: none is left to be held out."""
    ids = load_tokenizer(DEMO)(text.read_text()[:20000])["input_ids"][: 16 * 32]
    return write_windows(tmp_path_factory.mktemp("rows") / "rows.jsonl", torch.tensor(ids).view(16, 32))


@pytest.fixture(scope="session")
def codes_of_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Codes of a run that nobody stopped, made once for each scheme and method."""

    @cache
    def of(scheme: str, method: str) -> Path:
        out, recipe = tmp_path_factory.mktemp("tuned") / "codes", RecipeOptions(format=scheme)
        tune.tune(DEMO, [str(text)], out, recipe=recipe, options=of_method(method), machine=ONE)
        return out

    return of
