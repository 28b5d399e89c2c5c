"""Claims about a source that changes: between a killed run and its resume, and under a run, in every command that
writes what can be resumed. A file that only looks the same is noticed; the same files are not refused."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.checkpoint.fingerprint import pages
from ptqpipe.checkpoint.header import parse_file
from ptqpipe.checkpoint.layer_folder import LayerFolder
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import CheckpointError, OutputError
from ptqpipe.pipeline.tune.command import tune
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.run.machine import Machine
from tests.calibration.models import make_model, make_windows, write_windows

ONE = Machine(workers=1)


def _convert(source: Path, out: Path, mode: Mode) -> None:
    ptqpipe.convert(source, out=out, format="mxfp4", workers=1, resume=mode == "resume")


def _calibrate(source: Path, out: Path, mode: Mode) -> None:
    options = CalibrateOptions(samples=8, seqlen=24)
    calibrate(source, [str(source.parent / "data.jsonl")], out, options=options, mode=mode, machine=ONE)


def _tune(source: Path, out: Path, mode: Mode) -> None:
    options = TuneOptions(samples=8, seqlen=24, method="gptq")
    tune(source, [str(source.parent / "data.jsonl")], out, options=options, mode=mode, machine=ONE)


COMMANDS: dict[str, Callable[[Path, Path, Mode], Any]] = {
    "convert": _convert,
    "calibrate": _calibrate,
    "tune": _tune,
    "transform": lambda s, o, m: transform(
        s, o, options=TransformOptions("rotate", rotation_size=16), mode=m, machine=ONE
    ),
    "relayout": lambda s, o, m: relayout(s, o, container="ptqpipe", mode=m, machine=ONE),
    "dequantize": lambda s, o, m: dequantize(s, o, mode=m, machine=ONE),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A float model with rows to calibrate it on, and what convert makes of it."""
    root = tmp_path_factory.mktemp("models")
    make_model(root / "plain", "llama")
    write_windows(root / "data.jsonl", make_windows(24))
    ptqpipe.convert(root / "plain", format="nvfp4", out=root / "packed")
    return {"plain": root / "plain", "packed": root / "packed"}


def source_for(command: str, models: dict[str, Path], tmp_path: Path) -> Path:
    """A source of this test's own."""
    kind = "packed" if command in ("relayout", "dequantize") else "plain"
    shutil.copyfile(models["plain"].parent / "data.jsonl", tmp_path / "data.jsonl")
    return shutil.copytree(models[kind], tmp_path / "source")


def interrupted(command: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends with its first unit on disk."""
    with monkeypatch.context() as patch:
        for kind in (CheckpointWriter, LayerFolder):
            whole = kind.commit

            def once(self: Any, unit: str, record: Any, whole: Any = whole) -> None:
                whole(self, unit, record)
                raise KeyboardInterrupt

            patch.setattr(kind, "commit", once)
        with pytest.raises(KeyboardInterrupt):
            COMMANDS[command](source, out, "new")
    assert (out.parent / f".{out.name}.partial" / "journal-0.jsonl").is_file()


def unseen_byte(path: Path) -> int:
    """The place of a byte of a weight that the fingerprint does not read."""
    header = parse_file(path)
    seen = [(e.offset + start, e.offset + stop) for e, start, stop in pages(header)]
    first = min(entry.offset for entry in header.entries)
    return next(at for at in range(first, header.file_bytes) if not any(a <= at < b for a, b in seen))


def _in_place(path: Path) -> None:
    before, at = path.stat(), unseen_byte(path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _renamed_over(path: Path) -> None:
    other = shutil.copy2(path, path.with_name("other"))
    _in_place(Path(other))
    os.replace(other, path)


CHANGES: dict[str, Callable[[Path], None]] = {"a byte in place": _in_place, "a file renamed over it": _renamed_over}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_resume_notices_a_source_that_only_looks_the_same(
    command: str, change: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte that is not sampled; size, header and modification time are as before."""
    source, out = source_for(command, models, tmp_path), tmp_path / "out"
    interrupted(command, source, out, monkeypatch)
    weights = next(source.glob("*.safetensors"))
    before = weights.stat()
    with CheckpointReader.open(source) as reader:
        fingerprint = reader.fingerprint()
    CHANGES[change](weights)
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with CheckpointReader.open(source) as reader:
        assert reader.fingerprint() == fingerprint
    changed = rf"source's '{weights.name}' was written to, replaced .*(--overwrite|overwrite=True) starts over"
    with pytest.raises(OutputError, match=changed):
        COMMANDS[command](source, out, "resume")
    assert not out.exists()
    assert (tmp_path / ".out.partial" / "journal-0.jsonl").is_file()  # nothing is thrown away unasked


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_untouched_source_is_resumed_though_its_folder_moved(
    command: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = source_for(command, models, tmp_path), tmp_path / "out"
    COMMANDS[command](source, tmp_path / "whole", "new")
    interrupted(command, source, out, monkeypatch)
    (tmp_path / "moved").mkdir()
    shutil.copyfile(tmp_path / "data.jsonl", tmp_path / "moved" / "data.jsonl")
    moved = source.rename(tmp_path / "moved" / "source")
    (moved / "README.md").write_text("read since")
    (moved / "README.md").unlink()
    COMMANDS[command](moved, out, "resume")
    for path in (tmp_path / "whole").iterdir():
        if path.suffix == ".safetensors":
            assert path.read_bytes() == (out / path.name).read_bytes()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_source_written_to_under_a_run_is_noticed_at_its_end(
    command: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = source_for(command, models, tmp_path), tmp_path / "out"
    weights = next(source.glob("*.safetensors"))
    for kind in (CheckpointWriter, LayerFolder):

        def touching(self: Any, unit: str, record: Any, whole: Any = kind.commit) -> None:
            whole(self, unit, record)
            os.utime(weights, ns=(7, 7))

        monkeypatch.setattr(kind, "commit", touching)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        COMMANDS[command](source, out, "new")
    assert not out.exists()


def test_other_rights_or_a_hard_link_under_a_run_are_no_change_and_sampled_bytes_are(
    models: dict[str, Path], tmp_path: Path
) -> None:
    source = source_for("convert", models, tmp_path)
    weights = next(source.glob("*.safetensors"))
    with CheckpointReader.open(source) as reader:
        reader.fingerprint()
        os.link(weights, tmp_path / "link")
        weights.chmod(0o600)
        reader.check_unchanged()
        before = weights.stat()
        raw = bytearray(weights.read_bytes())
        for at in range(len(raw) // 2, len(raw)):
            raw[at] ^= 1
        with open(weights, "r+b") as file:
            file.write(raw)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(CheckpointError, match="has changed since it was opened"):
            reader.check_unchanged()
