"""Claims about completion by the shell: its script, the values it offers, and that it does not dawdle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from ptqpipe.checkpoint.layouts import container_names
from ptqpipe.cli import main
from ptqpipe.numerics.schemes import SCHEMES
from ptqpipe.numerics.search import SEARCHES
from ptqpipe.recipe.file import named_recipes


def offered(*words: str) -> list[tuple[str, str]]:
    """(kind, value) of what the shell offers for the last of these words."""
    shell = ShellComplete(main, {}, "ptqpipe", "_PTQPIPE_COMPLETE")
    return [(item.type, str(item.value)) for item in shell.get_completions(list(words[:-1]), words[-1])]


def values(*words: str) -> list[str]:
    return [value for kind, value in offered(*words) if kind == "plain"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("convert", "m", "--format", ""), set(SCHEMES) | {"fp8", "nvfp4a16"}),
        (("convert", "m", "--container", ""), set(container_names())),
        (("relayout", "c", "--container", "mod"), {"modelopt"}),
        (("convert", "m", "--recipe", ""), set(named_recipes())),
        (("convert", "m", "--scale-search", ""), set(SEARCHES)),
        (("convert", "m", "--algorithm", ""), {"rtn", "gptq"}),
        (("plan", "m", "--formats", "nvfp4,mxfp4a"), {"nvfp4,mxfp4a16"}),
        (("transform", "m", "--transforms", "smoothq"), {"smoothquant"}),
        (("insp",), {"inspect"}),
        (("convert", "m", "--bias"), {"--bias-correction"}),
    ],
)
def test_values_that_can_be_named_are_offered(words: tuple[str, ...], expected: set[str]) -> None:
    found = values(*words)
    assert set(found) >= expected if "--format" in words else set(found) == expected


@pytest.mark.parametrize("words", [("convert", "mo"), ("verify", "c", "--source", "mo"), ("diff", "a", "mo")])
def test_models_and_checkpoints_are_offered_as_folders(words: tuple[str, ...]) -> None:
    assert offered(*words) == [("dir", "mo")]


def test_a_recipe_may_be_a_file() -> None:
    assert offered("convert", "m", "--recipe", "mine.y") == [("file", "mine.y")]


def test_an_installation_without_recipes_offers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptqpipe.recipe.listing.named_recipes", lambda: named_recipes(tmp_path / "ptqpipe"))
    assert offered("convert", "m", "--recipe", "") == [("file", "")]


def test_what_is_completed_is_converted_as_before(tmp_path: Path) -> None:
    parsed = main.commands["convert"].make_context("convert", ["m", "--recipe", "r.yaml", "--format", "fp8"]).params
    assert (parsed["recipe"], parsed["format"], parsed["model"]) == (Path("r.yaml"), "fp8", "m")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_click_prints_the_script_of_a_shell(shell: str) -> None:
    done = CliRunner().invoke(main, prog_name="ptqpipe", env={"_PTQPIPE_COMPLETE": f"{shell}_source"})
    assert done.exit_code == 0
    assert f"_PTQPIPE_COMPLETE={shell}_complete" in done.output


def test_bash_gets_its_answer_without_torch(tmp_path: Path) -> None:
    """The whole way that the script goes: words in the environment, an answer of lines."""
    script = (
        "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from ptqpipe.cli import main; main(prog_name='ptqpipe')"
    )
    words = {"COMP_WORDS": "ptqpipe convert m --format nvf", "COMP_CWORD": "4", "_PTQPIPE_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **words}, capture_output=True, text=True, timeout=240
    )
    names = ("nvfp4", "nvfp4a16", "nvfp4_w4a16", "nvfp4_w4a4", "nvfp4a4")
    assert done.stdout.splitlines() == [f"plain,{name}" for name in names]
    assert {"torch", "numpy"} & set(done.stderr.split()) == set()
