"""Log probabilities in OpenAI's two shapes. Minus infinity, which JSON has not, is -9999."""

import re
from collections.abc import Sequence
from typing import Any

from ptqpipe.serving.engine import TokenLogprob

_LEAST = -9999.0


class TokenNames:
    """Names of single tokens: their text, or their number where that is an incomplete character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        name = self._known.get(token)
        if name is None:
            # Behind itself: in front of a text some tokenizers leave a word's space out.
            once, twice = self._decode([token]), self._decode([token, token])
            name = f"token_id:{token}" if "\ufffd" in twice else twice[len(once) :]
            self._known[token] = name
        return name

    def bytes_of(self, token: int) -> list[int]:
        """The bytes that a token stands for, also where they are no whole character."""
        name = self[token]
        if not name.startswith("token_id:"):
            return list(name.encode("utf-8", "replace"))
        spelled = str(self._tokenizer.convert_ids_to_tokens(token))
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", spelled)
        if byte is not None:
            return [int(byte[1], 16)]
        if all(letter in _BYTES for letter in spelled):
            return [_BYTES[letter] for letter in spelled]
        return list(name.encode())

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters of bytes: printable ones are themselves, the others are counted up from 256."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()


def for_completion(
    entries: Sequence[TokenLogprob | None], tokens: Sequence[int], names: TokenNames, *, offset: int
) -> dict[str, Any]:
    """The lists of /v1/completions. ``entries`` stand beside ``tokens``; None for the first token of a prompt.

    offset  characters of text in front of the first token
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(tokens, entries, strict=True):
        result["tokens"].append(names[token])
        result["token_logprobs"].append(None if entry is None else max(entry.logprob, _LEAST))
        result["top_logprobs"].append(None if entry is None else _best(entry, names))
        result["text_offset"].append(offset)
        offset += len(names[token])
    return result


def _best(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The best tokens by name, and the token itself; of several with one name the best counts."""
    best: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token, entry.logprob)):
        best.setdefault(names[token], max(value, _LEAST))
    return best


def for_chat(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """The list of /v1/chat/completions."""
    content = []
    for entry in entries:
        top = [_named(token, value, names) for token, value in entry.top]
        content.append({**_named(entry.token, entry.logprob, names), "top_logprobs": top})
    return {"content": content}


def _named(token: int, value: float, names: TokenNames) -> dict[str, Any]:
    name = names[token]
    return {"token": name, "logprob": max(value, _LEAST), "bytes": names.bytes_of(token)}
