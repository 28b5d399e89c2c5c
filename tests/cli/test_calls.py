"""The command line: paths, spellings and defaults that it takes, and how it prints long lines."""

import json
import os
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import click
import pytest

from ptqpipe.cli import main
from ptqpipe.cli.lines import wrapped
from tests import tiny
from tests.cli.calls import refused, run


@pytest.mark.parametrize(
    "out", ["größe 层/with spaces", "missing/parents/out", "a\nb", "-o", "~", "x.partial", ".hidden"]
)
def test_any_path_can_be_the_output(here: Path, out: str) -> None:
    assert run("convert", "model", f"--out={here / out}", "-q").exit_code == 0
    assert run("verify", here / out, "--source", "model").exit_code == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [("model/", "model"), ("./model", "model"), ("link", "link"), ("link/", "link"), ("empty/../model//", "model")],
)
def test_the_derived_name_is_the_last_part_of_the_path_however_it_is_spelled(here: Path, model: str, name: str) -> None:
    (here / "link").symlink_to("model")
    assert run("convert", model, "-q").exit_code == 0
    assert (here / f"{name}-NVFP4A16" / "config.json").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "model", "-o", "out", "-q"),
        ("relayout", "good", "--container", "modelopt", "-o", "out"),
        ("dequantize", "good", "-o", "out"),
    ],
)
def test_resuming_what_is_complete_says_so_and_is_no_failure(here: Path, command: tuple[str, ...]) -> None:
    assert run("convert", "model", "-o", "good", "-q").exit_code == 0
    assert run(*command).exit_code == 0
    before = tiny.bytes_of(here)
    again = run(*command, "--resume")
    assert again.exit_code == 0
    assert "already complete" in again.stdout
    assert tiny.bytes_of(here) == before


def test_one_tensor_a_file_is_a_legal_wish(here: Path) -> None:
    assert run("convert", "model", "-o", "out", "--shard-size", "1", "-q").exit_code == 0
    assert run("verify", "out", "--source", "model").exit_code == 0


def test_a_pattern_of_a_recipe_without_a_match_is_a_warning(here: Path) -> None:
    (here / "recipe.yaml").write_text(
        "version: 1\nrules:\n- {match: '*.gaet_proj', format: nvfp4}\n- {match: '*', format: mxfp4}\n"
    )
    shown = run("convert", "model", "--recipe", "recipe.yaml", "--dry-run").stdout
    warnings = [line.strip() for line in shown.splitlines() if "matches no tensor" in line]
    assert [line.split("'")[1::2] for line in warnings] == [["*.gaet_proj", "*.gate_proj"]]
    plan = json.loads(run("convert", "model", "--recipe", "recipe.yaml", "--dry-run", "--json").stdout)
    assert sum("matches no tensor" in line for line in plan["warnings"]) == 1


def test_a_name_that_is_not_unicode_is_printed_escaped(here: Path) -> None:
    os.rename("model", os.fsencode("m") + b"\xff")
    model = os.fsdecode(b"m\xff")
    done = run("convert", model, "-o", "out", "-q")
    assert done.exit_code == 0
    assert "m\\udcff" in done.stdout
    assert run("verify", "out", "--source", model).exit_code == 0


def test_every_example_of_the_help_is_a_call_that_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("CKPT", "OTHER", "MODEL"):
        (tmp_path / folder).mkdir()
    (tmp_path / "CKPT.eval.json").touch()
    for name, command in main.commands.items():
        for one in command.commands.values() if isinstance(command, click.Group) else [command]:
            examples = re.findall(r"ptqpipe .*", one.epilog or "")
            assert examples, name
            for words in (shlex.split(call.partition(" > ")[0]) for call in examples):
                assert words[:2] == ["ptqpipe", name], name
                one.make_context(name, words[3 if isinstance(command, click.Group) else 2 :])


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "model", "-o", "out"),
        ("eval", "model", "--data", "file"),
        ("calibrate", "model", "--data", "file", "-o", "out"),
        ("dequantize", "model"),
        ("transform", "model", "--transforms", "rotate", "-o", "out"),
    ],
)
def test_float_types_have_one_spelling_and_take_the_other(here: Path, command: tuple[str, ...]) -> None:
    (name, *arguments) = command
    for word in ("bf16", "bfloat16", "BF16"):
        parsed = main.commands[name].make_context(name, [*arguments, "--dtype", word])
        assert parsed.params["dtype"] == ("bf16" if name in ("dequantize", "transform") else "bfloat16")
    assert "'int3' is unknown; use" in refused(*command, "--dtype", "int3")
    assert run(*command, "--dtype", "int3").exit_code == 2


def test_overwrite_replaces_what_is_of_its_kind_alone(here: Path) -> None:
    assert run("convert", "model", "-o", "packed", "-q").exit_code == 0
    (here / "stats").mkdir()
    (here / "stats" / "model.layers.0.safetensors").write_bytes(b"x")
    shutil.copytree(here / "stats", here / "codes")
    (here / "stats" / "stats.json").write_text("{}")
    (here / "codes" / "rounding.json").write_text("{}")
    text = ("--data", "file.jsonl", "--samples", "1", "--seqlen", "2", "--holdout", "0")
    before = tiny.bytes_of(here)
    for command, kinds in (
        (("convert", "model"), ("stats", "codes", "pickled")),
        (("relayout", "packed", "--container", "modelopt"), ("stats", "codes")),
        (("dequantize", "packed"), ("stats", "codes")),
        (("calibrate", "model", *text), ("packed", "codes", "pickled")),
        (("tune", "model", *text[:-2]), ("packed", "stats", "pickled")),
    ):
        for kind in kinds:
            assert "that --overwrite may replace" in refused(*command, "-o", kind, "--overwrite"), (command, kind)
    assert tiny.bytes_of(here) == before
    assert run("convert", "model", "-o", "packed", "--overwrite", "-q").exit_code == 0


def test_the_demo_writes_into_no_folder_of_someone_else(here: Path) -> None:
    before = tiny.bytes_of(here)
    assert "which no demo has written" in refused("demo", "-o", "model")
    (here / "mine").mkdir()
    assert run("convert", "model", "-o", "mine/nvfp4", "-q").exit_code == 0
    assert "which no demo has written" in refused("demo", "-o", "mine")
    shutil.rmtree(here / "mine")
    assert tiny.bytes_of(here) == before


AUTOMATIC = ("format", "algorithm", "objective", "scale_search")  # told in words: other options decide


def test_the_defaults_that_the_help_of_convert_tells_are_those_of_a_recipe() -> None:
    from ptqpipe.recipe.recipe import Recipe, Rule

    every = {field.name: field.default for kind in (Rule, Recipe) for field in fields(kind)}
    known = {name: default for name, default in every.items() if default is not None}  # None: decided later
    told = {}
    for option in main.commands["convert"].params:
        found = re.search(r"\[default: ([^\]]+)\]", getattr(option, "help", None) or "")
        if found is not None and option.name in known and option.name not in AUTOMATIC:
            told[option.name] = found[1]
    assert {"damping", "refine_passes", "headroom", "kv_cache"} <= told.keys()
    for name, text in told.items():
        assert text in (str(known[name]), f"{known[name]:g}" if isinstance(known[name], float) else ""), name


def test_a_gpu_that_is_found_and_not_used_is_said_once_unless_a_device_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny.save(model, tiny.llama(layers=1, hidden=32, inner=64))
    line = "A GPU was found (NVIDIA X1) and is not used; to use it, add --device cuda."
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: "NVIDIA X1")

    def said(*options: str, available: bool = True) -> int:
        monkeypatch.setattr("torch.cuda.is_available", lambda: available)
        done = run("convert", model, "--format", "mxfp4", "--out", tmp_path / "out", "--overwrite", *options)
        assert done.exit_code == 0, done.output
        assert line not in done.stdout
        return done.stderr.splitlines().count(line)

    assert said() == 1
    assert [said("--device", "cpu"), said("--quiet"), said("--json"), said(available=False)] == [0, 0, 0, 0]


def test_long_lines_go_on_at_a_word_and_rows_of_tables_stay() -> None:
    """Of a terminal only: `Given.show` asks it first. What a word is too long for stays whole."""
    row, path = f"{'role':30}  {'format':30}  {'weights':30}", "/a" * 50
    text = f"  {'word ' * 20}end\n{row}\nto {path}, then\nshort"
    first, *middle, last = wrapped(text, 60).split("\n")
    assert (first[:6], last) == ("  word", "short")
    assert all(len(line) <= 60 or line in (row, f"  {path},") for line in [first, *middle])
    assert middle[0].startswith("    word")
    assert " ".join(wrapped(text, 60).split()) == " ".join(text.split())


LONG_ERRORS = [
    ("convert", "model", "--algorithm", "awq", "-o", "out"),  # click's own
    ("convert", "model", "--budget", "1GB", "--reader", "nothing"),
    ("recipes", "nothing"),
    ("--owerwrite-what-lies-there-already-and-say-nothing-about-what-was-there-before", "model"),
]


@pytest.mark.parametrize("args", LONG_ERRORS, ids=" ".join)
def test_a_long_error_is_one_line_that_a_terminal_shows_in_several(
    here: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    said = refused(*args)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((60, 24)))
    monkeypatch.setattr("ptqpipe.cli.lines._is_terminal", lambda stream: True)
    lines = run(*args).stderr.splitlines()
    error = lines[next(i for i, line in enumerate(lines) if line.startswith("Error")) :]
    assert len(error) > 1
    assert all(len(line) <= 60 or " " not in line.strip() for line in error)
    assert " ".join(line.strip() for line in error) == said
