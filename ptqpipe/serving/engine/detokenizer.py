"""Tokens in, text out, piece by piece; and the strings that end it.

A token need not be whole characters (bytes of a UTF-8 sequence) and may depend on the one before it (the space that
some tokenizers put in front of a word), so text is the difference of two decodings that begin at the same place: where
the piece before the last one ended. A place inside a character would not do: tokenizers that fall back to bytes make
signs of replacement of a whole run of bytes that begins with half a character. Must not know where tokens come from.
"""

from collections.abc import Sequence
from typing import Any

UNDECODABLE = "\ufffd"
_KEEP = 6  # tokens of the prompt: more than what any tokenizer's decoding of the next one depends on
_CHARACTER = 4  # tokens, at most, of one that the prompt's last tokens may begin inside of
_HELD = 64  # tokens after which bytes that make no character go out as they are


class Detokenizer:
    """Text of one sequence's generated tokens, without special ones. All pieces together are the tokens' decoding.

    prompt  the tokens in front, for what the first piece depends on
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._context(prompt)  # tokens whose text is out, then those whose text is not
        self._out = len(self._window)

    def push(self, token: int) -> str:
        """The text that is complete after one more token: empty while a character is incomplete."""
        self._window.append(token)
        before, now = self._decode(self._window[: self._out]), self._decode(self._window)
        if (now.endswith(UNDECODABLE) or len(now) < len(before)) and len(self._window) < self._out + _HELD:
            return ""
        self._window = self._window[self._out :]
        self._out = len(self._window)
        return now[len(before) :]

    def flush(self) -> str:
        """The rest at the end: an incomplete character as U+FFFD."""
        before, now = self._decode(self._window[: self._out]), self._decode(self._window)
        self._out = len(self._window)
        return now[len(before) :]

    def _context(self, prompt: Sequence[int]) -> list[int]:
        for more in range(_CHARACTER):
            tail = list(prompt[-_KEEP - more :])
            if len(tail) == len(prompt) or not self._decode(tail).startswith(UNDECODABLE):
                break
        return tail

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""

    def push(self, piece: str, *, active: bool = True) -> tuple[str, bool]:
        """(text that may go out, whether a stop string came; it and what follows it are dropped).

        active  False lets stop strings pass (a minimum of tokens is not reached)
        """
        self._held += piece
        if not active:
            return self._release(len(self._held)), False
        ends = [index for index in (self._held.find(stop) for stop in self._stops) if index >= 0]
        if ends:
            return self._release(min(ends), drop=True), True
        return self._release(len(self._held) - self._risky()), False

    def flush(self) -> str:
        """The text that was kept back, when no more follows."""
        return self._release(len(self._held))

    def _risky(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = len(self._held) + 1
        lengths = ((stop, n) for stop in self._stops for n in range(1, min(len(stop), longest)))
        return max((n for stop, n in lengths if self._held.endswith(stop[:n])), default=0)

    def _release(self, n: int, *, drop: bool = False) -> str:
        out, self._held = self._held[:n], "" if drop else self._held[n:]
        return out
