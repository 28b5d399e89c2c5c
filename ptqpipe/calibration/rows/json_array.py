"""The elements of a JSON array one after another, without all of its text in memory."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")
_PART = 1 << 18  # characters that are read at once


def elements(text: str, read: Callable[[int], str], *, most: int) -> Iterator[Any]:
    """The elements of an array, of which ``text`` is the beginning, behind its bracket.

    read  gives so many of the characters behind ``text``, fewer at the end
    most  characters of an element

    ValueError for what is no array, or has a larger element; RecursionError for one that is nested too deeply.
    """
    decoder, at, expected, more = json.JSONDecoder(), 0, "value or end", _PART
    while True:
        at = _end_of_space(text, at)
        if at == len(text):
            text, at = read(_PART), 0
            if not text:
                raise ValueError("the array has no end")
        elif text[at] == "]" and expected != "value":
            if (text[at + 1 :] + read(_PART)).strip():
                raise ValueError("there is more behind the array")
            return
        elif expected == "comma or end":
            if text[at] != ",":
                raise ValueError("expected a comma or the end of the array")
            at, expected = at + 1, "value"
        else:
            try:
                value, end = decoder.raw_decode(text, at)
                # a number at the end of what is read may go on behind it
                part = "" if end < len(text) else read(_PART)
            except ValueError:
                part = read(more)
                if not part:
                    raise
                if len(text) - at > most:
                    raise ValueError(f"an element has more than {most} characters") from None
                more *= 2  # so that a long element is not decoded from its beginning too often
            if part:
                text, at = text[at:] + part, 0
                continue
            yield value
            at, expected, more = end, "comma or end", _PART


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
