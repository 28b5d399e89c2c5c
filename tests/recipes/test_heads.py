"""Claims about the recipes for series of models: a dry run on published headers decides what their heads say."""

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from ptqpipe.cli import main
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import PtqError, UsageError
from ptqpipe.models.families import in_mtp_layers
from ptqpipe.models.reader_facts import READERS
from ptqpipe.numerics.schemes import SCHEMES
from ptqpipe.pipeline.validate import for_reader
from ptqpipe.recipe.file import load_recipe, named_recipes
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.recipe import matches
from tests.recipes.published import PUBLISHED, Published

ROOT = Path(__file__).resolve().parents[2]
MODELS = {name: path for name, path in named_recipes().items() if path.parent.name == "models"}
KEPT = "kept"
MTP = "MTP"  # the layer of multi-token prediction, which is numbered like the others
_MOST_COLUMNS = 120


class Head(NamedTuple):
    """What the comments at the top of a recipe say."""

    commands: list[list[str]]
    fates: list[tuple[str, list[str]]]
    readers: set[str]
    refused: set[str]


@cache
def head_of(name: str) -> Head:
    lines = MODELS[name].read_text(encoding="utf-8").partition("version:")[0].splitlines()
    rows = [match for line in lines if (match := re.fullmatch(r"# (\w+) +(\S+(?:, \S+)*): .+", line))]
    return Head(
        commands=[shlex.split(line.removeprefix("#     ")) for line in lines if line.startswith("#     ptqpipe ")],
        fates=[(match[1], match[2].split(", ")) for match in rows if match[1] in (KEPT, *SCHEMES)],
        readers={one for line in lines if line.startswith("# readers: ") for one in line[11:].split(", ")},
        refused={match[2] for match in rows if match[1] == "not"},
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Writes the headers of a recipe's models, once."""

    @cache
    def of(name: str) -> list[Path]:
        folder = tmp_path_factory.mktemp(name)
        makers = [one.write if isinstance(one, Published) else one for one in PUBLISHED[name]]
        return [make(folder / str(number)) for number, make in enumerate(makers)]

    return of


def planned(model: Path, call: list[str], *, reader: str | None = None) -> Conversion:
    """The dry run of a command, ``ptqpipe convert MODEL ...``, on another model and for another reader."""
    given = main.commands["convert"].make_context("convert", call[2:]).params
    reader = reader or given["reader"]
    options = RecipeOptions(format=given["format"], mtp=given["mtp"] if "--mtp" in call else None)
    if reader is not None:
        options = for_reader(reader, options, given["recipe"])
    recipe = given["recipe"]
    return prepare(model, options=options, recipe_path=recipe, out=model.with_name("out"), reader=reader, dry=True)


def test_every_series_has_a_recipe_and_models_that_it_is_tried_with() -> None:
    assert sorted(MODELS) == sorted(PUBLISHED)
    assert len(MODELS) >= 25


@pytest.mark.parametrize("name", MODELS)
def test_a_head_is_short_and_its_commands_parse(name: str) -> None:
    head, recipe = head_of(name), load_recipe(MODELS[name])
    text = MODELS[name].read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= _MOST_COLUMNS
    assert recipe.description
    assert head.readers | head.refused <= set(READERS)
    assert {scheme.name for scheme in recipe.schemes()} == {fate for fate, _ in head.fates} - {KEPT}
    own, *others = head.commands
    assert own[:2] + own[3:5] == ["ptqpipe", "convert", "--recipe", name]
    for call in head.commands:
        given = main.commands["convert"].make_context("convert", call[2:]).params
        assert (given["reader"] is None) == (not head.readers)
        assert given["reader"] in {None, *head.readers}
        assert call[2] == own[2]
    assert all("--format" in call for call in others)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_head_names_is_what_becomes_of_the_weights(name: str, models: Callable[[str], list[Path]]) -> None:
    head, used = head_of(name), set()
    for model in models(name):
        with planned(model, head.commands[0]) as decided:
            fates = {m.weight: unit.scheme.name for unit in decided.outputs.plan.units for m in unit.members}
            kept = [one.name for one in decided.outputs.plan.kept]
            fates |= {one: KEPT for one in kept if len(decided.source.tensors[one][1]) > 1 and not one.endswith("bias")}
            warnings, drafts = decided.doubts, in_mtp_layers(decided.source.reader.config)
        assert not warnings
        for weight, fate in fates.items():
            module = weight.removesuffix(".weight")
            rows = [
                (said, glob)
                for said, globs in head.fates
                for glob in globs
                if (drafts(module) if glob == MTP else matches(glob, module))
            ]
            assert rows, module
            assert rows[0][0] == fate, module
            used.add(rows[0][1])
    assert used == {glob for _, globs in head.fates for glob in globs}


@pytest.mark.parametrize("name", MODELS)
def test_the_readers_that_a_head_names_take_the_result_and_no_others_of_the_two(
    name: str, models: Callable[[str], list[Path]]
) -> None:
    head = head_of(name)
    for model in models(name):
        for reader in head.readers:
            for call in head.commands if reader == "vllm" else head.commands[:1]:
                planned(model, call, reader=reader).close()
        for reader in head.refused:
            with pytest.raises(UsageError, match=f'reader="{reader}"'):
                planned(model, head.commands[0], reader=reader)
    if head.readers:
        assert head.readers | head.refused == {"vllm", "sglang"}
    else:
        with pytest.raises(PtqError):
            planned(models(name)[0], head.commands[0], reader="vllm")


def test_the_page_of_the_folder_shows_a_head_as_it_is_and_commands_that_parse() -> None:
    lines = [line.removeprefix("    ") for line in (ROOT / "recipes/README.md").read_text().splitlines()]
    shown = [line for line in lines if line.startswith("# ") and ":" in line]
    assert len(shown) == 4
    assert set(shown) <= set(MODELS["qwen3_moe"].read_text().splitlines())
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("ptqpipe convert ")]
    assert len(commands) == 3
    for call in commands:
        main.commands["convert"].make_context("convert", call[2:])
