"""Log probabilities in OpenAI's two shapes. Minus infinity, which JSON has not, is -9999."""

from collections.abc import Sequence
from typing import Any

from ptqpipe.engine.sequence import TokenLogprob

_LEAST = -9999.0


class TokenNames:
    """What single tokens are called: their text, and where that is not text, their bytes or number."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found = f"token_id:{token}" if "\ufffd" in text else text
            self._known[token] = found
        return found


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
    return {"token": name, "logprob": max(value, _LEAST), "bytes": list(name.encode("utf-8", "replace"))}
