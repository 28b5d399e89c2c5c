"""The tokens of a row: of a text, of messages through the chat template of the model, or token ids as they are."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ptqpipe.calibration.rows.chats import Messages, text_in
from ptqpipe.calibration.rows.forms import Notes, shows_images
from ptqpipe.errors import UsageError, arg, tokenizer_errors
from ptqpipe.models.chat_template import TemplateError, render

if TYPE_CHECKING:
    import torch

PIECE = 1 << 18  # characters that are tokenized at once
MAX_TOKEN = 1 << 31


def begin_token(tokenizer: Any) -> int | None:
    """The beginning-of-text token, of an encoder its [CLS], that a tokenizer puts before every text; None for one that
    puts none there."""
    begin = getattr(tokenizer, "bos_token_id", None)
    begin = getattr(tokenizer, "cls_token_id", None) if begin is None else begin
    if begin is None:
        return None
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return int(begin) if list(first) == [begin] else None


def end_token(tokenizer: Any) -> int | None:
    """The token that a tokenizer puts behind every text: [SEP], or the end of text; None for one that puts none
    there."""
    last = tokenizer("a", verbose=False)["input_ids"][-1]
    return (
        int(last) if last in {getattr(tokenizer, f"{name}_token_id", None) for name in ("sep", "eos", "pad")} else None
    )


def has_beginning(value: Any, tokens: Sequence[int], begin: int | None) -> bool:
    """Whether windows of a row begin with ``begin``: those of a text, and of messages whose template begins so."""
    return begin is not None and (isinstance(value, str) or (isinstance(value, Messages) and tokens[:1] == [begin]))


def begun(windows: "torch.Tensor", begin: int | None) -> "torch.Tensor":
    """Windows of text, int64 [n, tokens], as a model reads them: with ``begin`` in the place of each one's first token;
    None: as they are."""
    if begin is None:
        return windows
    windows = windows.clone()
    windows[:, 0] = begin
    return windows


def row_tokens(
    tokenizer: Callable[[], Any], value: Any, where: str, *, begins: bool = True, notes: Notes | None = None
) -> Iterator[Sequence[int]]:
    """The tokens of one row, in pieces: text, messages, or token ids as they are.

    tokenizer  gives transformers' tokenizer of the model; not called for token ids
    where      file and line, for messages
    begins     whether a text is the beginning of its row, where special tokens go, and not one of its later `pieces`
    notes      take what a chat template leaves out

    UsageError for token ids that no model has, and for messages that the model's chat template does not take.
    """
    if isinstance(value, Messages):
        if shows_images(value):
            raise UsageError(
                f"{where} has an image, which only calibrate and tune take, for a model of images; leave such rows out"
            )
        text, plain = row_text(tokenizer(), value, where, notes=notes)
        with tokenizer_errors(where):
            ids = list(tokenizer()(text, add_special_tokens=plain, verbose=False)["input_ids"])
        yield ids
    elif isinstance(value, str):
        for number, piece in enumerate(pieces(value)):
            with tokenizer_errors(where):
                ids = tokenizer()(piece, add_special_tokens=begins and number == 0, verbose=False)["input_ids"]
            yield ids
    else:
        if not all(0 <= token < MAX_TOKEN for token in value):
            worst = next(token for token in value if not 0 <= token < MAX_TOKEN)
            raise UsageError(f"{where} has token id {worst}, expected the model's tokens; tokenize the data again")
        yield value


def pieces(text: str) -> Iterator[str]:
    """A long text cut after line ends: what a tokenizer returns takes many times the text's memory."""
    start = 0
    while len(text) - start > PIECE:
        end = text.find("\n", start + PIECE) + 1
        if not end:
            break
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def row_text(
    tokenizer: Any, messages: Messages, where: str, *, notes: Notes | None = None, template: str | None = None
) -> tuple[str, bool]:
    """(text, whether it is plain text) of messages: what the model's chat template makes of them; of a pair of texts
    these alone, parted by a blank line, for a tokenizer without one.

    UsageError where the template leaves out all text of the row; ``notes`` take the roles of messages that it leaves
    out.
    """
    template = getattr(tokenizer, "chat_template", None) or template
    if not template and messages.plain:
        return "\n\n".join(text for message in messages for text in text_in(message)), True
    text = chat_text(tokenizer, messages, where, template=template)
    lost, all_of_it = _lost(messages, text)
    if lost and any(isinstance(message["content"], str) for message in messages):
        try:  # of models with images some templates look for parts alone
            other = chat_text(tokenizer, _with_parts(messages), where, template=template)
        except UsageError:
            other = text
        text, (lost, all_of_it) = min(
            (text, _lost(messages, text)), (other, _lost(messages, other)), key=lambda one: len(one[1][0])
        )
    if all_of_it:
        raise UsageError(
            f"{where}: the model's chat template leaves out all of its text ({' and '.join(lost)} messages); "
            f"leave such rows out, or give plain text with {arg('text_field')}"
        )
    if notes is not None:
        notes.loses([role if role == "tools" else f"{role} messages" for role in lost], where)
    return text, False


def _lost(messages: Messages, text: str) -> tuple[list[str], bool]:
    """The roles of messages whose text a rendered text does not have, and whether it has none at all."""
    seen, lost, kept = _words(text), list[str](), False
    for message in messages:
        there = [_is_in(own, seen) for own in text_in(message)]
        kept = kept or any(there)
        if not all(there) and str(message["role"]) not in lost:
            lost.append(str(message["role"]))
    if messages.tools and not all(_is_in(name, seen) for name in _names_of(messages.tools)):
        lost.append("tools")
    return lost, bool(lost) and not kept


def _is_in(own: str, seen: str) -> bool:
    """Whether a rendered text has a message's; templates trim it, write it as JSON, and leave out earlier thoughts."""
    shown = own.rpartition("</think>")[2]
    return any(_words(form) in seen for form in (own, json.dumps(own, ensure_ascii=False)[1:-1], shown))


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _names_of(tools: Sequence[Any]) -> list[str]:
    inner = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return [one["name"] for one in inner if isinstance(one, dict) and isinstance(one.get("name"), str)]


def _with_parts(messages: Messages) -> Messages:
    rendered = Messages(
        {
            **one,
            "content": [{"type": "text", "text": one["content"]}]
            if isinstance(one["content"], str)
            else one["content"],
        }
        for one in messages
    )
    rendered.tools = messages.tools
    return rendered


def chat_text(tokenizer: Any, messages: Messages, where: str, *, template: str | None) -> str:
    """What a chat template makes of messages. UsageError without one, and for messages that do not fit it."""
    if not template:
        raise UsageError(
            f"{where} is a list of messages, and the model's tokenizer has no chat template; give plain text with "
            + arg("text_field")
        )
    try:
        return render(tokenizer, list(messages), template, {"tools": messages.tools} if messages.tools else {})
    except TemplateError as error:
        if not error.ends or not error.compiles:
            raise UsageError(f"{where}: the model's chat template is of no use: {error}; give plain text") from None
        raise UsageError(
            f"{where} does not fit the model's chat template: {error}; change the roles and contents of such rows, or "
            "leave them out"
        ) from None
