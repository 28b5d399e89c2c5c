"""Claims about damage to what a stopped run has finished: --resume finds it, and ends with the same bytes anyhow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ptqpipe
from ptqpipe.check.evaluate.tokenized_text import SAMPLE
from ptqpipe.checkpoint import CheckpointWriter, LayerFolder
from ptqpipe.cli import main
from tests.calibration.models import make_model, make_windows, write_windows
from tests.checkpoint.runs import snapshot
from tests.pipeline.runs import stops

DEMO = Path(ptqpipe.__file__).parent / "demo_model"
WINDOWS = ("--samples", "2", "--seqlen", "16", "--workers", "1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = make_model(folder / "model", "llama", dtype=torch.bfloat16)
    text = write_windows(folder / "text.jsonl", make_windows(samples=3, seqlen=16))
    packed = ptqpipe.convert(model, format="nvfp4", out=folder / "packed", workers=1).path
    return {"MODEL": str(model), "TEXT": str(text), "PACKED": str(packed)}


CALLS = {
    "convert": ("convert", "MODEL", "--format", "nvfp4", "--workers", "1"),
    "dequantize": ("dequantize", "PACKED", "--workers", "1"),
    "relayout": ("relayout", "PACKED", "--container", "modelopt", "--workers", "1"),
    "transform": ("transform", "MODEL", "--transforms", "rotate_residual", "--workers", "1", "--untie"),
    "calibrate": ("calibrate", "MODEL", "--data", "TEXT", *WINDOWS, "--moments", "diagonal,full"),
    "calibrate backwards": ("calibrate", "MODEL", "--data", "TEXT", *WINDOWS, "--moments", "diagonal,kl,full,pairs"),
    "tune": ("tune", "MODEL", "--data", "TEXT", *WINDOWS, "--format", "nvfp4"),
}

REWRITES = ("convert", "dequantize", "relayout", "transform")


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit of the header": lambda raw: flipped(raw, 20),
    "a bit of the last byte": lambda raw: flipped(raw, len(raw) - 1),
    "a bit in the middle": lambda raw: flipped(raw, len(raw) * 2 // 3),
    "an end that is cut off": lambda raw: raw[:-7],
    "an end that is added": lambda raw: raw + b"x",
    "zeros": lambda raw: bytes(len(raw)),
    "nothing of it": lambda raw: b"",
    "no file": lambda raw: None,
}


def run(words: list[str]) -> int:
    done = CliRunner().invoke(main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("command", CALLS)
def test_what_is_damaged_is_done_again(
    command: str, inputs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = [inputs.get(word, word) for word in CALLS[command]]
    assert run([*words, "-o", str(tmp_path / "expected"), "-q"]) == 0
    expected = snapshot(tmp_path / "expected")
    call = [*words, "-o", str(out), "-q"]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "finish", interrupted)
        patch.setattr(LayerFolder, "finish", interrupted)
        assert run(call) == 130
    left = snapshot(tmp_path / ".out.partial")
    files = [name for name in left if name.startswith("out/") and name.endswith(".safetensors")]
    assert files
    redone: list[str] = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def commit(self: Any, unit: str, *args: Any) -> None:
            redone.append(unit)
            real(self, unit, *args)

        return commit

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", noted(CheckpointWriter.commit))
        patch.setattr(LayerFolder, "commit", noted(LayerFolder.commit))
        assert run([*call, "--resume"]) == 0
        assert snapshot(out) == expected
        assert redone == []
        for file in files:
            for kind, change in DAMAGE.items():
                restore(tmp_path / ".out.partial", left)
                changed, path = change(left[file]), tmp_path / ".out.partial" / file
                path.unlink() if changed is None else path.write_bytes(changed)
                out.rename(tmp_path / f"former-{len(list(tmp_path.iterdir()))}")
                assert run([*call, "--resume"]) == 0, (file, kind)
                assert snapshot(out) == expected, (file, kind)
                known = command in REWRITES and kind in ("a bit of the header", "an end that is added")
                assert redone or known, (file, kind)
                redone.clear()


def restore(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.slow
def test_a_damaged_file_of_the_reverse_pass_is_made_again(
    inputs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides the codes of the layers that are still to be done."""
    call = [*(inputs.get(word, word) for word in CALLS["tune"]), "-q", "-o"]
    assert run([*call, str(tmp_path / "expected")]) == 0
    for kind, change in DAMAGE.items():
        with monkeypatch.context() as patch:
            patch.setattr(LayerFolder, "commit", stops(LayerFolder.commit, at=2))
            assert run([*call, str(tmp_path / kind)]) == 130
        for file in sorted((tmp_path / f".{kind}.partial" / "gradients").iterdir()):
            changed = change(file.read_bytes())
            file.unlink() if changed is None else file.write_bytes(changed)
        assert run([*call, str(tmp_path / kind), "--resume"]) == 0, kind
        assert snapshot(tmp_path / kind) == snapshot(tmp_path / "expected"), kind


@pytest.mark.slow
def test_codes_that_others_are_learned_from_and_the_state_of_learning_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE.read_text(encoding="utf-8")[:30000], encoding="utf-8")
    call = ["tune", str(DEMO), "--data", str(text), "--samples", "40", "--seqlen", "64", "--steps", "4"]
    call += ["--format", "nvfp4", "--method", "kl", "--workers", "1", "-q", "-o"]
    assert run([*call, str(tmp_path / "expected")]) == 0
    partial = tmp_path / ".out.partial"
    with monkeypatch.context() as patch:
        patch.setattr(LayerFolder, "finish", interrupted)
        assert run([*call, str(tmp_path / "out")]) == 130
        left = [name for name in snapshot(partial) if name.endswith(".safetensors")]
        assert {name.partition("/")[0] for name in left} >= {"out", "start", "found", "state of codes"}
        for name in left:
            raw = (partial / name).read_bytes()
            (partial / name).write_bytes(DAMAGE["a bit in the middle"](raw) or b"")
            assert run([*call, str(tmp_path / "out"), "--resume"]) == 130
    assert run([*call, str(tmp_path / "out"), "--resume"]) == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")
