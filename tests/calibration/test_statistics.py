"""Claims of reading a statistics folder: what is asked for and is not there is one line that says how to get it."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.errors import CheckpointError, UsageError


def write(folder: Path, **changes: Any) -> Path:
    """A folder with one module and one attention, by the safetensors library."""
    folder.mkdir(exist_ok=True)
    tensors = {"m.amax": torch.ones(16), "m.mean": torch.zeros(16), "m.second_moment": torch.full((16,), 2.0)}
    tensors |= {"a.k_amax": torch.tensor([3.0]), "a.v_amax": torch.tensor([4.0])}
    save_file(tensors, folder / "b.safetensors")
    entry = {"file": "b.safetensors", "key": "m", "tokens": 7, "measured": True, "quantiles": {"0.99": 0.5}}
    content = {
        "version": 1,
        "digest": "d",
        "model": {"name": "n", "fingerprint": "f"},
        "modules": {"m": entry, "sibling": entry},
        "attention": {"a": {"heads": 1}},
    }
    (folder / "stats.json").write_text(json.dumps(content | changes))
    return folder


def test_siblings_read_the_entry_that_they_share(tmp_path: Path) -> None:
    with Statistics.open(write(tmp_path / "s")) as statistics:
        assert list(statistics.modules) == ["m", "sibling"]
        for name in statistics.modules:
            found = statistics.of(name)
            assert (found.tokens, found.measured, dict(found.quantiles)) == (7, True, {0.99: 0.5})
            assert torch.equal(found.second_moment, torch.full((16,), 2.0))
        assert float(statistics.attention("a")[1]) == 4.0
        assert (statistics.digest, statistics.model_fingerprint, statistics.attentions) == ("d", "f", ("a",))


def test_what_was_not_collected_says_how_to_collect_it(tmp_path: Path) -> None:
    with Statistics.open(write(tmp_path / "s")) as statistics:
        assert statistics.has("m", "amax")
        assert not statistics.has("m", "full_moment")
        assert not statistics.has("x", "amax")
        with pytest.raises(UsageError, match=r"no full_moment of 'm'; calibrate again with moments=.full"):
            statistics.of("m", full=True)
        with pytest.raises(UsageError, match=r"no block_moment of 'm'; calibrate again with moments=.block"):
            statistics.of("m", block=True)
        with pytest.raises(UsageError, match=r"no mean of 'm'; calibrate again$"):
            statistics._moment({"key": "other"}, "m", "mean")
        with pytest.raises(UsageError, match="no statistics of 'x'"):
            statistics.of("x")
        with pytest.raises(UsageError, match="no key and value statistics of 'x'"):
            statistics.attention("x")


def test_a_folder_that_is_no_statistics_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no stats\.json; give the folder that this wrote: ptqpipe\.calibrate"):
        Statistics.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"version": 1}', "[" * 100_000])
def test_a_damaged_file_is_one_line(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    (folder / "stats.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"stats\.json"):
        Statistics.open(folder)


def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "s")

    def refuses(*_: object, **__: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("ptqpipe.checkpoint.fields.read_regular", refuses)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied; make it, and the folders above it"):
        Statistics.open(folder)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """Not taken for statistics of other shapes."""
    folder = write(tmp_path / "s", files={"b.safetensors": "0", "c.safetensors": "0"})
    with pytest.raises(CheckpointError, match=r"s/c\.safetensors is missing; copy the whole folder"):
        Statistics.open(folder)


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has version 2, expected 1; calibrate again"):
        Statistics.open(write(tmp_path / "s", version=2))


def test_a_flipped_bit_among_the_moments_is_an_error_not_other_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    file = folder / "b.safetensors"
    write(folder, files={file.name: hashlib.sha256(file.read_bytes()).hexdigest()})
    with Statistics.open(folder) as statistics:
        assert float(statistics.of("m").second_moment.sum()) == 32.0
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with Statistics.open(folder) as statistics, pytest.raises(CheckpointError, match=r"b\.safetensors' is damaged"):
        statistics.attention("a")
    with Statistics.open(folder) as statistics, pytest.raises(CheckpointError, match=r"b\.safetensors' is damaged"):
        statistics.of("m")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"modules": {"m": {"tokens": 7, "measured": True, "quantiles": {}}}},
            "modules.m has no 'key'; calibrate again",
        ),
        ({"modules": {"m": {"key": "m", "tokens": "7"}}}, "modules.m.tokens is '7', expected a count"),
        ({"model": {"name": "n"}}, "model has no 'fingerprint'"),
        ({"digest": 7}, "digest is 7, expected text"),
    ],
)
def test_damage_names_the_field_and_what_was_expected(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        Statistics.open(write(tmp_path / "s", **changes))


def test_moments_of_other_shapes_are_refused_where_they_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    tensors = {"m.amax": torch.ones(17), "m.mean": torch.zeros(16), "m.second_moment": torch.ones(16)}
    save_file(tensors, folder / "b.safetensors")
    with Statistics.open(folder) as statistics, pytest.raises(CheckpointError, match=r"amax of 'm' as F32 \[17\]"):
        statistics.of("m")
