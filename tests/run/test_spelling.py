"""Claims about how messages name options: as who made the call would write them."""

import threading
from pathlib import Path

import pytest

from ptqpipe.errors import arg, argv, shell_messages, usage


@pytest.mark.parametrize(
    ("name", "value", "python", "shell"),
    [
        ("max_memory", None, "max_memory", "--max-memory"),
        ("samples", 8, "samples=8", "--samples 8"),
        ("dtype", "fp32", 'dtype="fp32"', "--dtype fp32"),
        ("resume", True, "resume=True", "--resume"),
        ("overlap", False, "overlap=False", "--no-overlap"),
        ("ignore", "re:.*experts.*", 'ignore="re:.*experts.*"', "--ignore 're:.*experts.*'"),
        ("out", Path("a b"), 'out="a b"', "--out 'a b'"),
    ],
)
def test_an_option_is_spelled_for_who_reads_it(name: str, value: object, python: str, shell: str) -> None:
    assert arg(name, value) == python
    with shell_messages():
        assert arg(name, value) == shell
    assert arg(name, value) == python


def test_a_call_is_one_that_can_be_pasted() -> None:
    assert usage("eval", "OUT", source="MODEL", limit=None) == 'ptqpipe.evaluate("OUT", source="MODEL")'
    with shell_messages():
        assert usage("eval", "OUT", source="my model") == "ptqpipe eval OUT --source 'my model'"


def test_threads_of_a_command_spell_as_it_does() -> None:
    spelled: list[str] = []
    with shell_messages():
        thread = threading.Thread(target=lambda: spelled.append(arg("resume", True)))
        thread.start()
        thread.join()
    assert spelled == ["--resume"]


def test_words_of_a_command_line_repeat_an_option_for_each_of_its_values() -> None:
    assert argv(tag=("a", "b"), max_len=8, headless=True, port=None) == [
        "--tag", "a", "--tag", "b", "--max-len", "8", "--headless",
    ]  # fmt: skip
