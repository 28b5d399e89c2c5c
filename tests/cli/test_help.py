"""Claims about help: commands and options stand in groups, each once, and nothing is left without one."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.cli.help import COMMANDS, FIRST, MOST, OPTIONS, Command, in_groups


def shown(*call: str, option: str = "--help") -> str:
    return CliRunner().invoke(main, [*call, option], terminal_width=80).output


def shown_whole(*call: str) -> str:
    """With --help-all where there is one."""
    brief = shown(*call)
    return shown(*call, option="--help-all") if "--help-all" in brief else brief


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words on the command line."""
    for name, command in main.commands.items():
        if isinstance(command, click.Group):
            yield from (((name, sub), one) for sub, one in command.commands.items())
        else:
            yield (name,), command


def test_the_commands_stand_in_four_groups_and_none_is_left() -> None:
    listed = shown()
    assert re.findall(r"^(\S.*):$", listed, re.MULTILINE) == ["Options", *COMMANDS]
    for names in COMMANDS.values():
        rows = [name for name in names if name in main.commands]
        places = [listed.index(f"\n  {name} ") for name in rows]
        assert places == sorted(places)
    assert in_groups(dict.fromkeys(main.commands), COMMANDS).keys() == COMMANDS.keys()


@pytest.mark.parametrize(("call", "command"), list(commands()), ids=[" ".join(call) for call, _ in commands()])
def test_every_option_is_shown_once_below_the_heading_of_a_group(call: tuple[str, ...], command: click.Command) -> None:
    text = shown_whole(*call)
    with command.make_context(call[-1], [], resilient_parsing=True) as context:
        assert isinstance(command, Command)
        placed = [one.name for options in command.sections(context).values() for one in options]
    visible = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    own = [name for name in placed if name not in ("help", "_click_default_help", "help_all")]
    assert sorted(own) == sorted(one.name for one in visible)
    assert all(f"\n  {one.opts[0]}" in text for one in visible)
    assert "\nMore:" not in text, "name the new options in OPTIONS of ptqpipe/cli/help.py"


def test_the_options_of_a_long_command_stand_with_their_kind() -> None:
    sections = dict(re.findall(r"^(\S.*):\n((?:  .*\n)+)", shown_whole("convert"), re.MULTILINE))
    assert "--container" in sections["What to write"]
    assert "--damping" in sections["Quality"]
    assert "--kv-cache" in sections["Activations and key-value cache"]
    assert "--workers" in sections["Machine"]
    assert "--help" in sections["Run"]
    assert "Options:" in shown("inspect")


@pytest.mark.parametrize(("call", "command"), list(commands()), ids=[" ".join(call) for call, _ in commands()])
def test_help_is_short_and_says_where_the_rest_is(call: tuple[str, ...], command: click.Command) -> None:
    brief, whole = shown(*call), shown_whole(*call)
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", brief, re.MULTILINE)
    assert len(options) <= MOST
    assert brief.count("\n") <= 80, "two screens"
    assert set(options) <= set(re.findall(r"--[\w-]+", whole))
    if whole == brief:
        assert "--help-all" not in whole
        assert len([one for one in command.params if isinstance(one, click.Option) and not one.hidden]) < MOST


def test_every_name_that_help_shows_first_is_an_option() -> None:
    names = {one.name for _, command in commands() for one in command.params}
    assert FIRST - names == {"help", "_click_default_help", "help_all"}


def test_a_name_stands_in_one_group() -> None:
    for groups in (COMMANDS, OPTIONS):
        names = [name for group in groups.values() for name in group]
        assert len(names) == len(set(names))


def test_help_has_no_colour_where_it_does_not_go_to_a_terminal() -> None:
    assert "\x1b" not in shown("convert")


def test_no_value_is_called_by_its_type_in_click() -> None:
    """`--seed N` in every command, not INTEGER in one of them."""
    for call, _ in commands():
        found = re.findall(r"^  (-.*? (?:INTEGER|FLOAT)(?: RANGE)?)\b", shown_whole(*call), re.MULTILINE)
        assert not found, (call, found)
