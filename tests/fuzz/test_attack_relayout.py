"""attack_relayout.py: it finds nothing where there is nothing, and a verify that believes anything."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ptqpipe
from tests import tiny
from tests.conversion import damage
from tests.fuzz import attack_relayout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attack")
    model = tiny.save(folder / "model", tiny.llama(layers=1))
    damage.disown(ptqpipe.convert(model, format="fp8_block", out=folder / "all" / "block", workers=1).out)
    return folder / "all"


def lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[dict[str, object]]]:
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: printed.append(text))
    monkeypatch.setattr(sys, "argv", ["attack_relayout.py", str(folder), "--work", str(folder.parent / "work")])
    status = attack_relayout.main()
    return status, [json.loads(line) for line in printed]


@pytest.mark.slow
def test_nothing_is_wrong_with_a_sound_checkpoint(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = lines(checkpoints, monkeypatch)
    assert status == 0, found
    outcomes = {line["container"]: line["outcome"] for line in found[:-1]}
    assert outcomes["deepseek_fp8"] == "its own layout"
    assert {name for name, outcome in outcomes.items() if outcome == "written"} == {
        "compressed_tensors", "modelopt", "ptqpipe",
    }  # fmt: skip
    assert found[-1]["back byte for byte"] == 3


def test_a_verify_that_believes_anything_is_found(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack_relayout, "verify", lambda *_, **__: SimpleNamespace(faults=(), ok=True))
    status, found = lines(checkpoints, monkeypatch)
    assert status == 1
    assert found[-1]["wrong"] == 3 * len(attack_relayout.DAMAGES)
