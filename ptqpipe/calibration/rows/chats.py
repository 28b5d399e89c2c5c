"""Turns of a conversation as messages with role and content, whatever their keys, roles and parts are called."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ptqpipe.errors import UsageError
from ptqpipe.models.images import has_image

_ROLES, _CONTENTS = ("role", "from"), ("content", "value")
_ROLE_OF = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
    "developer": "system", **{role: role for role in ("user", "assistant", "system", "tool")},
}  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text")


class Messages(list[dict[str, Any]]):
    """Messages with role and content, a text or, with images, a list of parts.

    tools  what the chat template is given as tools; None: nothing
    plain  whether they are no conversation but a pair of texts (instruction and output), which without a chat template
           are plain text
    """

    tools: list[Any] | None = None
    plain: bool = False


def is_turn(value: Any) -> bool:
    """Whether a value is one turn of a conversation."""
    return isinstance(value, Mapping) and any({r, c} <= value.keys() for r in _ROLES for c in _CONTENTS)


def spoken(value: Any) -> Any:
    """The turns that a text holds as JSON; any other value as it is."""
    turns = turns_of(value) if isinstance(value, str) else value
    return turns if isinstance(turns, list) and turns and all(map(is_turn, turns)) else value


def turns_of(value: Any) -> Any:
    """A list of turns as data have it: of JSON in a text, and of columns {"from": [...], "value": [...]} too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, Mapping) and is_turn(value) and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, turn, strict=False)) for turn in zip(*value.values(), strict=False)]
    return value


def messages_of(turns: Sequence[Any], where: str) -> tuple[str, Messages]:
    """(what they are called, the messages) of turns. UsageError for turns whose keys or contents nobody knows."""
    messages, keys, roles = Messages(), ("role", "content"), set[str]()
    for number, turn in enumerate(turns, 1):
        place = f"{where}, message {number}"
        if not isinstance(turn, Mapping):
            raise UsageError(f"{place} is {type(turn).__name__}, expected an object with role and content")
        role = next((key for key in _ROLES if isinstance(turn.get(key), str)), None)
        content = min((key for key in _CONTENTS if key in turn), key=lambda key: turn[key] is None, default=None)
        calls = turns_of(turn.get("tool_calls")) or _calls_of(turn.get("function_call"))
        if role is None or (content is None and not calls):
            named = ", ".join(map(str, list(turn)[:6])) or "no keys"
            raise UsageError(f"{place} has {named}, expected role and content, or from and value; rename its keys")
        keys = (role, content or keys[1])
        name = _ROLE_OF.get(turn[role].lower(), turn[role])
        if name != turn[role]:
            roles.add(f"{turn[role]} as {name}")
        fields = (role, content, "tool_calls", "function_call")
        others = {str(k): v for k, v in turn.items() if k not in fields and v is not None}
        if calls:
            others["tool_calls"] = [_tool_call(call) for call in _objects(calls, f"{place}, 'tool_calls'")]
        messages.append({"role": name, "content": _content(turn.get(content or ""), place), **others})
    called = {("role", "content"): "messages", ("from", "value"): "ShareGPT conversations (from/value)"}
    form = called.get(keys, f"conversations ({'/'.join(keys)})")
    if form == "messages" and roles:
        form = f"messages ({', '.join(sorted(roles))})"
    return form, messages


def _content(value: Any, where: str) -> str | list[Any]:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise UsageError(f"{where} has content that is {type(value).__name__}, expected a text or a list of parts")
    if has_image(value):
        return [{k: v for k, v in p.items() if v is not None} if isinstance(p, Mapping) else p for p in value]
    return "\n".join(_part(part, where) for part in value)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") in _TEXT_PARTS:
        return str(part["text"])
    kind = f"of type {part.get('type')!r}" if isinstance(part, Mapping) and "type" in part else type(part).__name__
    if isinstance(part, Mapping) and "type" not in part:
        kind = f"with {', '.join(map(str, list(part)[:6]))}"
    raise UsageError(f"{where} has a part {kind}, expected text or images; leave such rows out")


def _calls_of(call: Any) -> list[Any]:
    """Calls as messages have them now, of the one in ``function_call``, where OpenAI's older ones have it."""
    return [{"type": "function", "function": call}] if isinstance(call, Mapping) else []


def _objects(value: Any, what: str) -> list[Any]:
    """A list of objects, of one as well. UsageError for anything else."""
    objects = [value] if isinstance(value, Mapping) else value
    if not isinstance(objects, list) or not all(isinstance(one, Mapping) for one in objects):
        raise UsageError(f"{what} is no list of objects; write calls as in OpenAI's messages, or leave such rows out")
    return objects


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as chat templates take it: arguments are an object, where data have its JSON."""
    call = {key: value for key, value in call.items() if value is not None}
    inner = call.get("function")
    if isinstance(inner, Mapping):
        return {**call, "function": _tool_call(inner)}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments if isinstance(arguments, Mapping) else call["arguments"]}


def text_in(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message that a chat template is to show: its content's, and the names of functions it calls."""
    content = message.get("content")
    parts: Iterable[Any] = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    for call in message.get("tool_calls") or ():
        inner = call.get("function", call) if isinstance(call, Mapping) else {}
        texts.append(inner.get("name") if isinstance(inner, Mapping) else None)
    return [text for text in texts if isinstance(text, str) and text.strip()]
