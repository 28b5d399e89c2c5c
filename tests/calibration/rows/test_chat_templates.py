"""Claims of messages and templates: the text of a row is in what the template makes of it, or that is said."""

from typing import Any

import pytest

from ptqpipe.calibration.rows import Messages, Notes, row_tokens
from ptqpipe.errors import UsageError

WORDS = [
    "<unk>",
    "<s>",
    "<user>",
    "<assistant>",
    "<system>",
    "<tool>",
    "why",
    "so",
    "be",
    "kind",
    "f",
    "4",
    "None",
    "helper",
]
LENIENT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}> {{ m.content }} {% endfor %}"
QWEN = (
    "<system> helper {% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}> {{ m.content }} "
    "{% endif %}{% endfor %}"
)
PARTS = "{% for m in messages %}<{{ m.role }}> {% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
JSON = "{% for m in messages %}<{{ m.role }}> {{ m.content | tojson }} {% endfor %}"
CALLS = (
    "{% for t in tools %}{{ t.function.name }} {% endfor %}{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for c in m.tool_calls %} {{ c.function.name }}{% endfor %} {% endfor %}"
)
STRICT = "{{ raise_exception('System role not supported') if messages[0].role == 'system' else 'why' }}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def chat(*turns: tuple[str, str], **more: Any) -> Messages:
    messages = Messages({"role": role, "content": content} for role, content in turns)
    for name, value in more.items():
        setattr(messages, name, value)
    return messages


def words(tokenizer: Any, template: str | None, messages: Messages) -> tuple[str, list[str]]:
    """The words of a row's tokens, and what is said of them."""
    tokenizer.chat_template, notes = template, Notes(rows=1)
    tokens = [
        token for part in row_tokens(lambda: tokenizer, messages, "a.jsonl, line 7", notes=notes) for token in part
    ]
    return " ".join(WORDS[token] for token in tokens), notes.lines()


TWO = chat(("user", "why"), ("assistant", "so"))


@pytest.mark.parametrize("template", [LENIENT, NO_SYSTEM, PARTS])
def test_a_conversation_is_what_its_template_makes_of_it(template: str, tokenizer: Any) -> None:
    assert words(tokenizer, template, TWO) == ("<user> why <assistant> so", [])


@pytest.mark.parametrize("template", [NO_SYSTEM, QWEN])
def test_a_message_that_a_template_leaves_out_is_a_warning_with_its_row(template: str, tokenizer: Any) -> None:
    got, said = words(tokenizer, template, chat(("system", "be kind"), *[(m["role"], m["content"]) for m in TWO]))
    assert got.endswith("<user> why <assistant> so")
    assert said == [
        "warning: the model's chat template leaves out system messages of 1 rows (first: a.jsonl, line 7); check that "
        "it is the model's own, or leave them out of the data"
    ]


@pytest.mark.parametrize("role", ["human", "tool"])
def test_a_row_of_which_a_template_leaves_out_everything_is_refused(role: str, tokenizer: Any) -> None:
    message = f"a.jsonl, line 7: the model's chat template leaves out all of its text .{role} messages"
    with pytest.raises(UsageError, match=message):
        words(tokenizer, QWEN, chat((role, "why so")))


def test_text_that_a_template_changes_in_form_is_there(tokenizer: Any) -> None:
    for content in ('why "so"', "why\nso", "  why  ", "why <think>be</think> so"):
        assert words(tokenizer, JSON, chat(("user", content)))[1] == []
    thoughts = "{% for m in messages %}{{ m.content.split('</think>')[-1].strip() }} {% endfor %}"
    assert words(tokenizer, thoughts, chat(("user", "<think> be </think> so"))) == ("so", [])


def test_calls_and_tools_are_there_or_said_to_be_left_out(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = chat(("user", "why"), ("assistant", ""), ("tool", "4"), tools=tools)
    calls[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert words(tokenizer, CALLS, calls) == ("f <user> why <assistant> f <tool> 4", [])
    got, said = words(tokenizer, LENIENT, calls)
    assert got == "<user> why <assistant> <tool> 4"
    assert [line.partition(" of ")[0].rpartition("leaves out ")[2] for line in said] == ["assistant messages", "tools"]


def test_a_pair_of_texts_is_plain_text_without_a_template_and_a_conversation_is_refused(tokenizer: Any) -> None:
    pair = chat(("user", "why"), ("assistant", "so"), plain=True)
    assert words(tokenizer, None, pair) == ("<s> why so", [])
    assert words(tokenizer, LENIENT, pair) == ("<user> why <assistant> so", [])
    with pytest.raises(UsageError, match="is a list of messages, and the model's tokenizer has no chat template"):
        words(tokenizer, None, TWO)


def test_a_template_that_refuses_a_row_says_why(tokenizer: Any) -> None:
    with pytest.raises(
        UsageError, match="does not fit the model's chat template: System role not supported; change the"
    ):
        words(tokenizer, STRICT, chat(("system", "be")))
