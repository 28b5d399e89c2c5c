"""Claims about chat templates, programs of a checkpoint's author: each text comes in time, or one error does."""

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ptqpipe.calibration.rows import Messages, row_tokens
from ptqpipe.errors import UsageError
from ptqpipe.models import chat_template
from ptqpipe.models.chat_template import TemplateError, compile_template, render
from ptqpipe.serving.preflight import read_template, try_template
from tests.serving.engine.models import own_tokenizer, tokenizer

CHAT = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "Hi \u00e9\U0001f600\ud83d"},
]
SHORT_S = 0.5
LOOPS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls that double": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a number in one step": "{% set a = messages|length %}{{ (3 ** (10 ** 8 + a)) % 7 }}",
    "a number of constants, computed when it is compiled": "{{ (3 ** (10 ** 8)) % 7 }}",
    "a text in small steps": "{% for i in range(99999) %}{{ ('a' * (i + 99999))|upper|length }}{% endfor %}",
}
BOMBS = {
    "a text": "{{ ('a' * 10 ** 11)|length }}",
    "a list": "{{ (range(99999)|list * 99999)|length }}",
    "texts of texts": "{% set n = namespace(x='ab') %}{% for i in range(9) %}{% set n.x = n.x * 999 %}{% endfor %}",
}


@pytest.fixture(scope="module", autouse=True)
def _one_process_for_all() -> Iterator[None]:
    yield
    chat_template._renderer._end()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_template("x")  # started, whatever that takes
    monkeypatch.setattr(chat_template, "RENDER_S", SHORT_S)


TEMPLATES = {
    "messages": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.name }}\n{% endfor %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}",
    "arguments": "{{ add_generation_prompt }} {{ tools }} {{ documents }} {{ thinking }}",
    "transformers' own filter": "{{ messages|tojson }}",
    "tags": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "a prompt": {"add_generation_prompt": True},
    "variables": {"thinking": False, "bos_token": "<mine>"},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}], "documents": [{"text": "x"}]},
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_text_is_that_of_transformers(template: str, options: dict[str, Any]) -> None:
    words = tokenizer()
    wanted = words.apply_chat_template(CHAT, chat_template=template, tokenize=False, **options)
    assert render(words, CHAT, template, options) == wanted


def test_of_several_templates_the_tokenizers_rule_chooses() -> None:
    words = own_tokenizer()
    words.chat_template = several = {"default": "plain", "tool_use": "tools"}
    assert render(words, CHAT, several, {}) == "plain"
    assert render(words, CHAT, several, {"tools": [{"a": 1}]}) == "tools"
    words.chat_template = without = {"a": "x"}
    with pytest.raises(TemplateError, match="no default"):
        render(words, CHAT, without, {})


def test_a_tokenizer_of_another_library_renders_by_itself() -> None:
    class Words:
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            if options["tokenize"]:
                raise AssertionError
            return f"{len(messages)} {options['thinking']}"

    assert render(Words(), CHAT, "", {"thinking": True}) == "2 True"
    with pytest.raises(TemplateError, match="thinking"):
        render(Words(), CHAT, "", {})


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "conversation", "self", "sanitize_control_tokens"]
)
def test_a_variable_cannot_take_the_place_of_an_argument(name: str) -> None:
    with pytest.raises(TemplateError):
        render(tokenizer(), CHAT, "{{ messages }}", {name: "x"})


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("template", LOOPS.values(), ids=list(LOOPS))
def test_what_does_not_end_is_ended_and_the_next_text_comes(template: str) -> None:
    with pytest.raises(TemplateError, match="does not end within") as error:
        render(tokenizer(), CHAT, template, {})
    assert not error.value.ends
    chat_template.RENDER_S = 60.0  # the fixture resets it
    assert render(tokenizer(), CHAT, "next", {}) == "next"


@pytest.mark.parametrize("template", BOMBS.values(), ids=list(BOMBS))
def test_what_takes_all_memory_gets_little(template: str) -> None:
    with pytest.raises(TemplateError, match="too much memory"):
        render(tokenizer(), CHAT, template, {})
    assert render(tokenizer(), CHAT, "next", {}) == "next"


@pytest.mark.parametrize(
    ("template", "says", "compiles"),
    [
        ("{% for m in", "end of template", False),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate", True),
        ("{{ messages[0].role.x.y }}", "no attribute", True),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", True),
        ("{{ ''.__class__.__mro__ }}", "unsafe", True),
    ],
)
def test_what_goes_wrong_in_a_template_is_its_message(template: str, says: str, compiles: bool) -> None:
    with pytest.raises(TemplateError, match=says) as error:
        render(tokenizer(), CHAT, template, {})
    assert (error.value.ends, error.value.compiles) == (True, compiles)


def test_a_process_that_was_killed_is_replaced() -> None:
    compile_template("x")
    process = chat_template._renderer._process
    assert process is not None
    assert psutil.Process(process.pid).cwd() == os.getcwd()
    process.kill()
    process.wait()
    assert render(tokenizer(), CHAT, "next", {}) == "next"


def test_threads_take_turns() -> None:
    found: dict[int, str] = {}
    words = tokenizer()

    def work(at: int) -> None:
        found[at] = render(words, [{"role": "user", "content": str(at)}] * 50, "{{ messages[0].content }}", {})

    threads = [threading.Thread(target=partial(work, at)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {at: str(at) for at in range(8)}


@pytest.mark.usefixtures("short")
def test_rows_and_the_start_of_a_service_have_the_same_limit(tmp_path: Path) -> None:
    words = own_tokenizer()
    words.chat_template = LOOPS["loops in loops"]
    with pytest.raises(UsageError, match=r"^data, line 3: the model's chat template .* does not end within 0.5 s"):
        list(row_tokens(lambda: words, Messages(CHAT), "data, line 3"))
    with pytest.raises(UsageError, match=r"does not end within 0.5 s; give another one with chat_template"):
        try_template(words, words.chat_template)
    (tmp_path / "template.jinja").write_text(LOOPS["a number of constants, computed when it is compiled"])
    with pytest.raises(UsageError, match="does not end within"):
        read_template(tmp_path / "template.jinja")


def test_a_template_that_refuses_the_chat_of_the_start_is_no_fault() -> None:
    try_template(tokenizer(), "{{ raise_exception('a system message must come first') }}")
    with pytest.raises(UsageError, match=r"no Jinja template: .*chat_template"):
        try_template(tokenizer(), "{% for")


@pytest.mark.parametrize(
    ("template", "remedy"),
    [
        ("{{ raise_exception('roles must alternate') }}", "change the roles and contents of such rows, or leave them"),
        ("{% for", "is of no use: .*; give plain text"),
    ],
)
def test_a_row_that_does_not_fit_has_the_remedy_of_its_reason(template: str, remedy: str) -> None:
    words = own_tokenizer()
    words.chat_template = template
    with pytest.raises(UsageError, match=f"^data, line 3.*{remedy}"):
        list(row_tokens(lambda: words, Messages(CHAT), "data, line 3"))
