"""Claims about the table of options: a line adds an option, a file and a row an algorithm; help that is whole."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import click
import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import UsageError
from ptqpipe.quantization import quantizer
from ptqpipe.quantization.activation_scale import POLICIES
from ptqpipe.recipe.options import ALGORITHMS, CheckpointOptions, CodeOptions, RecipeOptions, described
from ptqpipe.run.options import options_of
from tests import tiny

SOURCE = Path(ptqpipe.__file__).parent / "recipe" / "options.py"
FIELD = "    refine_passes: int = option("  # a line of the table, before which another is added


def in_python(script: str, *arguments: object) -> str:
    """What a script prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(script), *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_an_option_is_one_line_of_the_table(tmp_path: Path) -> None:
    """With that line in a copy of the table the option is on the command line, in Python, in recipe files and in the
    record; with bounds, and a default."""
    text = SOURCE.read_text()
    assert text.count(FIELD) == 1
    line = '    warmth: float = option(0.25, "How warm codes are.", metavar="W", bounds=(0, 1))\n'
    copy = tmp_path / "options.py"
    copy.write_text(text.replace(FIELD, line + FIELD))
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=32, inner=64))
    (tmp_path / "r.yaml").write_text("version: 1\nrules: [{match: '*', format: nvfp4, warmth: 0.5}]\n")
    printed = in_python(
        """
        import importlib.util, inspect, json, sys
        from click.testing import CliRunner

        copy, model, folder = sys.argv[1:]
        spec = importlib.util.spec_from_file_location("ptqpipe.recipe.options", copy)
        sys.modules["ptqpipe.recipe.options"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        import ptqpipe
        from ptqpipe.cli import main

        def warmth(path):
            return json.load(open(f"{path}/ptqpipe.json"))["recipe"]["rules"][0]["warmth"]

        def call(*arguments):
            done = CliRunner().invoke(main, ["convert", *arguments])
            return done.exit_code, done.output

        assert "How warm codes are.  [default: 0.25]" in " ".join(call("--help-all")[1].split()).replace(". [", ".  [")
        assert call(model, "-o", f"{folder}/a", "--warmth", "0.75", "-q")[0] == 0
        assert call(model, "-o", f"{folder}/b", "--recipe", f"{folder}/r.yaml", "-q")[0] == 0
        assert "warmth" in inspect.signature(ptqpipe.convert).parameters
        ptqpipe.convert(model, out=f"{folder}/c", warmth=1.0)
        ptqpipe.convert(model, out=f"{folder}/d")
        code, output = call(model, "-o", f"{folder}/e", "--warmth", "2")
        assert code == 2 and "warmth 2.0 is out of range; use 0 to 1" in output, output
        print(json.dumps([warmth(f"{folder}/{name}") for name in "abcd"]))
        """,
        copy,
        model,
        tmp_path,
    )
    assert json.loads(printed) == [0.75, 0.5, 1.0, 0.25]


ALGORITHM = '''
"""Round to nearest that asks for the full moments and does not read them."""

from dataclasses import replace

from ptqpipe.quantization import rtn


def quantize(task):
    assert all(known.full_moment is not None for known in task.inputs)
    done = rtn.quantize(replace(task, inputs=None))
    fields = {"algorithm": "mine", "weighting": "diagonal"}
    return replace(done, proven=False, record_fields=(fields,) * len(task.names))
'''


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_an_algorithm_is_a_file_and_a_row(tmp_path: Path) -> None:
    """The command line offers it, a conversion with statistics runs it and records it, verify repeats it; and where
    statistics have its moment, the last row is what convert takes by itself."""
    from tests.quantization.inputs import inputs_of_llama, write_statistics

    (tmp_path / "mine.py").write_text(ALGORITHM)
    model = tiny.save(tmp_path / "model", tiny.llama())
    stats = write_statistics(tmp_path / "stats", model, inputs_of_llama(tiny.llama()))
    printed = in_python(
        """
        import json, sys
        from click.testing import CliRunner

        folder, model, stats = sys.argv[1:]
        sys.path.insert(0, folder)

        from ptqpipe.recipe.options import ALGORITHMS, Algorithm
        ALGORITHMS["mine"] = Algorithm("mine", moment="full_moment", objective="diagonal")
        from ptqpipe.cli import main

        def call(*arguments):
            done = CliRunner().invoke(main, list(arguments))
            assert done.exit_code == 0, done.output
            return done.output

        assert "[rtn|gptq|mine]" in call("convert", "--help-all")
        call("convert", model, "--stats", stats, "--algorithm", "mine", "-o", f"{folder}/asked", "-q")
        call("convert", model, "--stats", stats, "-o", f"{folder}/best", "-q")
        call("verify", f"{folder}/asked", "--source", model, "--stats", stats)
        for name in ("asked", "best"):
            record = json.load(open(f"{folder}/{name}/ptqpipe.json"))
            assert record["recipe"]["rules"][0]["algorithm"] == "mine"
            print(*{entry["algorithm"] for entry in record["weights"].values()})
        """,
        tmp_path,
        model,
        stats,
    )
    assert printed.split() == ["mine", "mine"]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_row_names_its_file_and_options_of_the_table(name: str) -> None:
    row = ALGORITHMS[name]
    assert callable(quantizer(row))
    assert set(row.options) <= {one.name for one in fields(CodeOptions)}
    assert CodeOptions(algorithm=name, objective=row.objective).objective == row.objective


def test_choices_of_the_table_are_those_of_what_takes_them() -> None:
    """The table imports no torch, so it cannot import these."""
    about = next(described(one) for one in fields(CheckpointOptions) if one.name == "input_scale")
    assert about is not None
    assert tuple(about.choices) == tuple(POLICIES)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("scale_seach", "'scale_seach'; did you mean scale_search?"), ("dampening", "did you mean damping?")],
)
def test_a_wrong_keyword_names_the_nearest(wrong: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        ptqpipe.convert("model", out="out", **{wrong: 1})
    with pytest.raises(UsageError, match=re.escape(words)):
        RecipeOptions(**{wrong: 1})


def test_options_that_were_not_stated_have_defaults_and_override_nothing() -> None:
    given = RecipeOptions(format="nvfp4", damping=0.0, bias_correction=False)
    assert (given.format, given.damping, given.bias_correction, given.ignore) == ("nvfp4", 0.0, False, ())
    assert given.stated == {"damping"}
    assert (given.but(damping=0.5).format, given.but(damping=0.5).overrides) == ("nvfp4", {"damping": 0.5})


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command, those of groups too."""
    for name, command in main.commands.items():
        yield name, command
        if isinstance(command, click.Group):
            yield from command.commands.items()


def test_the_list_of_commands_is_not_cut_at_80_columns() -> None:
    listed = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in listed.partition("Options:")[2]
    assert max(map(len, listed.splitlines())) <= 80
    for name, command in commands():
        summary = (command.help or "").split("\n\n")[0]
        assert 0 < len(summary) <= 55, name
        assert summary.endswith("."), name


def test_the_help_of_every_option_is_a_whole_sentence() -> None:
    for name, command in commands():
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden and option.name != "help":
                about = f"{name} {option.opts[0]}"
                text = re.sub(r"\s*\[(default: .*|required)\]$", "", option.help or "")
                assert re.fullmatch(r"[A-Z0-9].*[^ ]\.", text, re.DOTALL), about
                assert len(text.split()) >= 3, about


def test_a_call_takes_every_option_of_the_table_by_its_flag() -> None:
    names = {option.name for option in main.commands["convert"].params}
    assert {one.name for one in options_of(RecipeOptions)} <= names


def test_one_thing_has_one_name_in_every_command() -> None:
    """An option that several commands have is explained by the same first words."""
    words: dict[str, set[str]] = {}
    for _, command in commands():
        for one in command.params:
            for flag in {"--workers", "--max-memory", "--source", "--seqlen", "--format"} & {*one.opts}:
                assert isinstance(one, click.Option)
                words.setdefault(flag, set()).add(" ".join((one.help or "").replace(":", "").split()[:2]))
    assert {flag: len(found) for flag, found in words.items()} == dict.fromkeys(words, 1), words
    assert len(words) == 5
