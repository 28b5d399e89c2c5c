"""The value of a row whose fields are known: of one field, of a conversation, of a question with its answer."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ptqpipe.calibration.rows.chats import Messages, is_turn, messages_of, spoken, turns_of
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.images import has_image

CHATS = ("messages", "conversations", "conversation")
TEXTS = ("text", "content")
ASKS = ("instruction", "prompt", "question", "query", "problem", "input")
_CONTEXTS = ("context", "input")
_ANSWERS = ("output", "response", "completion", "answer", "answers", "solution", "chosen")
_SYSTEMS = ("system", "system_prompt")
_SHOWN = ("images", "image", "videos", "audios")
_STARTS = ("user", "human", "system")  # roles that a whole conversation begins with
TOKENS = "input_ids"
_OBJECTS = re.compile(r"\s*(\[\s*)?\{")  # how a text begins that is objects, of JSON, of Python or of NumPy
FIELDS = (*CHATS, *TEXTS, *ASKS, "chosen", TOKENS)

Value = tuple[str, "str | Messages | list[int] | None"]
"""What a row's form is called, and a text, messages or token ids; None for a row without text."""


def nothing(value: Any) -> bool:
    """Whether a value is null, or empty."""
    return value is None or (isinstance(value, str | list | dict) and not value) or _blank(value)


def _blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def one_field(row: Mapping[Any, Any], key: str, where: str) -> Value:
    """Of one field of a row. UsageError for what is neither text nor messages nor token ids."""
    value = row[key]
    if nothing(value):
        return "text", None
    value = turns_of(value) if key in CHATS or not isinstance(value, str) else spoken(value)
    if key in CHATS and isinstance(value, str) and _OBJECTS.match(value):
        raise UsageError(
            f"{where}, {key!r} is a text of objects that is no JSON list, expected messages; write the list itself, or "
            "its json.dumps(...)"
        )
    if key == TOKENS and isinstance(value, str):
        value = _token_list(value, where)
    if isinstance(value, str):
        left = [name for name in (*ASKS, *_ANSWERS) if key in TEXTS and not nothing(row.get(name)) and name != key]
        return f"{key!r} alone ({_names(left)} left out)" if left else "text", value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return _masked(value, row.get("attention_mask") if key == TOKENS else None)
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return conversation(value, row if key in (*CHATS, *ASKS) else {}, where)
    kinds = sorted({type(part).__name__ for part in value}) if isinstance(value, list) else []
    what = f"a list of {' and '.join(kinds)}" if kinds else type(value).__name__
    raise UsageError(
        f"{where}, {key!r} is {what}, expected a text, a list of messages or a list of token ids; name another field "
        f"with {arg('text_field')}, or leave such rows out"
    )


def _token_list(value: str, where: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UsageError(
            f"{where}, {TOKENS!r} is a text, expected a list of token ids; tokenize the data again"
        ) from None


def _masked(tokens: list[int], mask: Any) -> Value:
    if not isinstance(mask, list) or len(mask) != len(tokens) or all(mask):
        return "token ids", tokens
    used = [token for token, use in zip(tokens, mask, strict=True) if use]
    return "token ids that attention_mask leaves in", used or None


def conversation(turns: Sequence[Any], row: Mapping[Any, Any], where: str) -> Value:
    """Of turns, and what else a row says about them: its system prompt, its tools.

    UsageError for turns whose keys nobody knows, and for images beside them, which no message shows.
    """
    form, messages = messages_of(turns, where)
    others = []
    system = next((key for key in _SYSTEMS if isinstance(row.get(key), str) and not _blank(row[key])), None)
    if system is not None and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row[system]})
        others.append(system)
    tools = turns_of(row.get("tools"))
    if nothing(tools) and isinstance(functions := turns_of(row.get("functions")), list):  # of OpenAI's older messages
        tools = [{"type": "function", "function": function} for function in functions]
    if not nothing(tools):
        if not isinstance(tools, list):
            raise UsageError(f"{where}, 'tools' is {type(tools).__name__}, expected a list of objects; leave it out")
        messages.tools = tools
        others.append("tools")
    if not any(has_image(message["content"]) for message in messages):
        _check_no_images(row, "messages", where)
    if not any(not nothing(message["content"]) or message.get("tool_calls") for message in messages):
        return form, None
    return f"{form} with {' and '.join(others)}" if others else form, messages


def _check_no_images(row: Mapping[Any, Any], beside: str, where: str) -> None:
    """UsageError for a row that has images elsewhere than in messages, where nothing shows them."""
    shown = next((key for key in _SHOWN if not nothing(row.get(key))), None)
    if shown is not None:
        raise UsageError(
            f"{where} has {shown!r} beside its {beside}; put them into content as parts "
            '{"type": "image", "image": "a.png"}, or leave such rows out'
        )


def asked(row: Mapping[Any, Any], ask: str, where: str) -> Value:
    """Of a row with an instruction, a prompt or a question in its field ``ask``: with the answer where it has one."""
    first, answer = spoken(row[ask]), next((key for key in _ANSWERS if _reply(row.get(key)) is not None), None)
    reply = None if answer is None else _reply(row[answer])
    if not isinstance(first, str):
        if reply is None or not isinstance(first, list):
            form, messages = one_field(row, ask, where)
            return f"{form}{_left_out(row, [ask])}", messages
        turns = reply if isinstance(reply, list) else [{"role": "assistant", "content": reply}]
        form, messages = conversation([*first, *turns], row, where)
        return f"{form} in {ask!r} and {answer!r}{_left_out(row, [ask, str(answer)])}", messages
    if isinstance(reply, list):  # the chosen one of two conversations: mostly the prompt is its beginning
        whole = reply[0].get("role", reply[0].get("from")) in _STARTS
        form, messages = conversation(reply if whole else [{"role": "user", "content": first}, *reply], row, where)
        return f"{form} in {answer!r}{_left_out(row, [ask, str(answer)])}", messages
    _check_no_images(row, "text", where)
    context = next(
        (key for key in _CONTEXTS if key != ask and isinstance(row.get(key), str) and not _blank(row[key])), None
    )
    texts = [first] if context is None else [row[context], first] if context == "context" else [first, row[context]]
    used = [ask, *([context] if context is not None else []), *([str(answer)] if answer is not None else [])]
    form, question = f"{' and '.join(map(repr, used))}{_left_out(row, used)}", "\n\n".join(texts)
    if reply is None:
        plain = used == [ask] and form == repr(ask)
        return ("text" if plain else form), question
    if answer == "completion":  # it goes on where the prompt ends
        return form, question + ("" if question[-1].isspace() or reply[0].isspace() else "\n") + reply
    turns = [*_history(row, where), {"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    _, messages = conversation(turns, {key: row.get(key) for key in _SYSTEMS}, where)
    if isinstance(messages, Messages):
        messages.plain = True
    return form, messages


def _reply(value: Any) -> Any:
    """An answer: a text, or turns; of several texts the first. None for what is neither."""
    if isinstance(value, Mapping):  # as SQuAD has it
        value = value.get("text")
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        value = value[0]
    value = spoken(value)
    if isinstance(value, list) and value and all(is_turn(turn) for turn in value):
        return value
    return None if not isinstance(value, str) or _blank(value) else value


def _history(row: Mapping[Any, Any], where: str) -> list[Any]:
    """Earlier turns of a row, [[question, answer], ...] or messages. UsageError for what is neither."""
    pairs = turns_of(row.get("history"))
    if nothing(pairs):
        return []
    if isinstance(pairs, list) and all(map(is_turn, pairs)):
        return pairs
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UsageError(
            f"{where} has a 'history' that is no list of [question, answer]; write it so, or leave it out of the rows"
        )
    roles = ("user", "assistant")
    return [{"role": roles[side], "content": pair[side]} for pair in pairs for side in (0, 1)]


def _left_out(row: Mapping[Any, Any], used: Sequence[str]) -> str:
    """Which other fields of a row have sentences or lists, or are answers, in words; empty for none. Names, places and
    labels have no space in them."""
    fields = {*used, *_SYSTEMS, "history", "tools"}
    left = [
        key
        for key, value in row.items()
        if key not in fields and not nothing(value) and (_says(value) or key in _ANSWERS)
    ]
    return f" ({_names(left)} left out)" if left else ""


def _says(value: Any) -> bool:
    return isinstance(value, list | dict) or (isinstance(value, str) and any(letter.isspace() for letter in value))


def _names(keys: Sequence[Any]) -> str:
    return ", ".join(map(str, keys[:4])) + (", ..." if len(keys) > 4 else "")
