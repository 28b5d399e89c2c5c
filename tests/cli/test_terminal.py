"""What names in files do to a terminal: nothing. Control characters and direction marks are printed as escapes."""

import json
import subprocess
import unicodedata
from pathlib import Path

import pytest
import torch

from ptqpipe.cli import next_steps
from ptqpipe.run.quantities import table
from tests import tiny
from tests.cli.calls import run

STEERING = "\x1b[2J\x1b[Hsound\x1b]0;title\x07\x9b8m\u202e\u2066\r\x08"


def steering_in(text: str) -> set[str]:
    """The characters of a text that a terminal would obey or that change the order of what it shows."""
    return {sign for sign in text if sign != "\n" and unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with such names: of its folder, of tensors, of files, and in its config."""
    folder = tmp_path_factory.mktemp("hostile") / f"m{STEERING}"
    weights = tiny.llama(layers=1, hidden=32, inner=64)
    weights[f"model.layers.0.mlp.{STEERING}.weight"] = torch.randn(64, 64)
    weights[f"model.{STEERING}.norm"] = torch.ones(64)
    tiny.save(folder, weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [STEERING]}))
    (folder / f"{STEERING}.txt").write_text("text")
    return folder


@pytest.mark.parametrize(
    "call",
    ["inspect M", "convert M -o {0} --dry-run", "convert M -o {0}", "plan M -o {0}.yaml --budget 5bits",
     "diff M M", "verify M", "dequantize M -o {0}"],
)  # fmt: skip
def test_no_command_prints_what_a_terminal_obeys(hostile: Path, tmp_path: Path, call: str) -> None:
    words = [str(hostile) if word == "M" else word.format(tmp_path / "out") for word in call.split()]
    done = run(*words)
    assert not steering_in(done.stdout + done.stderr), done.stdout + done.stderr
    assert r"\x1b[2J" in done.stdout + done.stderr


def test_nor_do_commands_on_what_was_made_of_such_names(hostile: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert run("convert", hostile, "-o", made).exit_code == 0
    for call in (("verify", made, "--source", hostile), ("inspect", made), ("diff", made, hostile), ("verify", made)):
        done = run(*call)
        assert r"\x1b[2J" in done.stdout, call
        assert not steering_in(done.stdout + done.stderr), call


def test_a_cell_of_a_table_stays_one_line() -> None:
    shown = table(["name", "n"], [["a\nb\x1b[0m", "1"], ["c", "2"]])
    assert shown.splitlines()[2] == r"a\nb\x1b[0m  1"


@pytest.mark.parametrize("word", ["m\x1b[2J", "it's \u202e", "back\\slash\x07"])
def test_a_call_that_comes_next_can_be_pasted_whatever_the_name(word: str) -> None:
    shown = next_steps._in_lines(["printf", "%s", word], None)
    assert not steering_in(shown)
    assert subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout.decode() == word
