"""Claims: no file that a command reads whole can make it wait or fill the memory, whatever a link leads to."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ptqpipe.calibration.rows import read_rows
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.evaluate.eval_file import read_result
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.check.inspect import inspect
from ptqpipe.checkpoint.files import INDEX_NAME
from ptqpipe.checkpoint.partial import completed_run
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.regular_file import read_regular, read_regular_text
from ptqpipe.errors import PtqError
from ptqpipe.models.source import Source
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.file import load_recipe
from ptqpipe.runtime.loading import load_tokenizer, read_config
from ptqpipe.serving.preflight import read_template
from tests import tiny

SPECIAL = {"pipe": "a pipe", "zero": "a device", "urandom": "a device", "folder": "a folder"}


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    """A reader that waits or swallows is stopped after 60 seconds, or at 4 GB more than there are now."""

    def stop(*_: object) -> None:
        raise AssertionError("it waited for ever")

    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + 4 * 2**30, limits[1]))
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def put(path: Path, kind: str) -> Path:
    """Something in the place of a file: a pipe, a folder, or a link to a device that never ends."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(f"/dev/{kind}")
    return path


def refused(action: Callable[[], Any], name: str) -> str:
    with pytest.raises(PtqError) as error:
        action()
    assert name in str(error.value)
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"it is {SPECIAL[kind]}, expected a file"):
        read_regular(put(tmp_path / "x", kind), limit=10)


def test_no_more_is_read_than_the_limit_whatever_the_size_says(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    sparse.touch()
    os.truncate(sparse, 2**42)
    with pytest.raises(OSError, match="it has more than 100 bytes"):
        read_regular(sparse, limit=100)
    grown = Path("/proc/self/status")  # says that it has 0 bytes
    with pytest.raises(OSError, match="it has more than 100 bytes"):
        read_regular(grown, limit=100)
    assert read_regular(grown, limit=10**6).startswith(b"Name:")


def test_links_to_files_are_followed_and_line_ends_are_those_of_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é\r\nb\rc\n".encode())
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b", limit=8) == "é\r\nb\rc\n".encode()
    assert read_regular_text(tmp_path / "b", limit=8) == (tmp_path / "a").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["pipe", "zero", "urandom"])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "ptqpipe.json", INDEX_NAME])
def test_a_model_whose_json_is_no_file_is_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "m", tiny.llama(layers=1, hidden=32, inner=64), shards=2)
    (model / name).unlink(missing_ok=True)
    put(model / name, kind)
    says = refused(lambda: inspect(model), name)
    assert SPECIAL[kind] in says
    assert refused(lambda: Source.open(model), name)


@pytest.mark.parametrize("kind", ["pipe", "zero"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "config.json"]
)
def test_nothing_is_left_to_other_libraries_that_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    """transformers opens these; each way to it looks first."""
    model = tiny.save(tmp_path / "m", tiny.llama(layers=1, hidden=32, inner=64))
    (model / name).unlink(missing_ok=True)
    put(model / name, kind)
    ways: list[Callable[[Path], Any]] = [read_config, load_tokenizer, CheckpointReader.open]
    for way in ways:
        assert SPECIAL[kind] in refused(lambda way=way: way(model), name)  # type: ignore[misc]


@pytest.mark.parametrize("kind", SPECIAL)
def test_files_of_the_call_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    recipe, text = put(tmp_path / "r.yaml", kind), put(tmp_path / "t.jsonl", kind)
    refused(lambda: load_recipe(recipe), "r.yaml")
    refused(lambda: read_template(recipe), "r.yaml")
    refused(lambda: list(read_rows(str(text))), "t.jsonl")
    refused(lambda: read_text(text, None), "t.jsonl")
    refused(lambda: read_result(text, run_id=None), "t.jsonl")


@pytest.mark.parametrize("kind", SPECIAL)
def test_statistics_and_codes_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    put(tmp_path / "stats.json", kind)
    put(tmp_path / "rounding.json", kind)
    refused(lambda: Statistics.open(tmp_path), "stats.json")
    refused(lambda: LearnedCodes.open(tmp_path), "rounding.json")
    put(tmp_path / "ptqpipe.json", kind)
    assert completed_run(tmp_path) is None
