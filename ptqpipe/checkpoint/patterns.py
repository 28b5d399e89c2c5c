"""Regular expressions of files that somebody else wrote, matched in bounded time.

The lists of a config.json (``ignore``, ``targets``) and of a recipe hold expressions in Python's syntax, and Python's
own ``re`` needs for ever for some of them: ``(.*)*(.*)*(.*)*!$`` on a name of 40 letters. The package ``regex`` says
the same and takes a time limit. Nothing is known here of what is named, or of the files.
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import lru_cache

import regex

MAX_REPEATS = 100_000  # that the counts of one expression make together: compiling it takes as many steps
MAX_LETTERS = 32768  # of one expression; those of 256 experts times 60 layers, all listed, have fewer
# An expression may take a second, and every name adds a little: in use they take some microseconds a name.
_SECONDS = 1.0
_SECONDS_A_NAME = 1e-4
_TOKEN = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|\{(?P<count>\d+(?:,\d*)?|,\d+)\}|.", regex.DOTALL)


class Expression:
    """A regular expression that is matched from the beginning of a name, as ``re.match`` does.

    Raises ValueError, in one line without the expression, for what is no expression or is too long.
    """

    __slots__ = ("_pattern", "_seconds_left")

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LETTERS:
            raise ValueError(f"it has {len(text)} letters, expected at most {MAX_LETTERS}")
        if _repeats(text) > MAX_REPEATS:
            raise ValueError(f"its counts make more than {MAX_REPEATS} repeats; write it simpler")
        try:
            self._pattern = regex.compile(text)
        except (RecursionError, MemoryError):
            raise ValueError("its groups are nested too deeply") from None
        except (regex.error, OverflowError) as error:
            raise ValueError(str(error)) from None
        self._seconds_left = _SECONDS

    def match(self, name: str) -> bool:
        """Whether the expression matches a beginning of ``name``.

        Raises ValueError, in one line, if that takes more than a second, or a tenth of a millisecond a name over many.
        """
        try:
            matched, seconds = self._timed(name)
        except (RecursionError, MemoryError):
            raise ValueError(f"it needs too much memory on a name of {len(name)} letters; write it simpler") from None
        self._seconds_left = min(_SECONDS, self._seconds_left + _SECONDS_A_NAME - seconds)
        if self._seconds_left < 0:
            self._seconds_left = _SECONDS  # the next model starts anew
            raise ValueError(f"it takes too long on a name of {len(name)} letters; write it simpler")
        return matched

    def _timed(self, name: str) -> tuple[bool, float]:
        """Whether it matches, and the seconds of this thread that it took: other threads, and a machine that does other
        work, must not make an expression too long. The timeout of ``regex`` counts both."""
        started, seconds = time.thread_time(), 0.0
        while seconds <= _SECONDS:
            try:
                matched = self._pattern.match(name, timeout=_SECONDS) is not None
                return matched, time.thread_time() - started
            except TimeoutError:
                seconds = time.thread_time() - started
        return False, math.inf


def _repeats(text: str) -> int:
    """Upper bound of counted repetitions in an expression; nested ones multiply."""
    groups, last = [0], 0  # what the open groups hold so far, the outermost first; what the last part holds
    for token in _TOKEN.finditer(text):
        if token["count"]:
            count = max(int(number) for number in token["count"].split(",") if number)
            groups[-1] += max(1, last) * count - last
            last = max(1, last) * count
        elif token[0] == "(":
            groups.append(0)
        elif token[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = 0
    return sum(groups)


# What patterns are made of that `alike` understands. Digits in them match whole components between dots, or stand
# beside letters; no counts, single "." or "?", or classes of digits tell 7 from 61 by its length.
_WORDS = r"[A-Za-z_]|(?<=[A-Za-z_])(?:\d+|\[\d+\])|\d+(?=[A-Za-z_])"
_PLAIN = regex.compile(
    rf"re:(?:{_WORDS}|\\\.(?:\\d\+|\d+)(?=\\\.|\$)|\\\.\(\d+(?:\|\d+)*\)(?=\\\.|\$)|\\\.|\\b|\.\*|\\d\*|\)[?*]|[|()$]"
    r"|\[[a-z]+\]|\[a-z_\]\*|\[A-Za-z_\]\\w\*)*"
)
_PLAIN_GLOB = regex.compile(rf"(?:{_WORDS}|\.|\*|(?<=\.)\d+(?=\.|$))*")


def alike(patterns: Iterable[str]) -> Callable[[str], str]:
    """A function that gives all names that no one of these patterns (globs, or ``re:`` expressions) tells apart one
    name, which they match as they match these: numbers between dots that no pattern has are replaced. Each name itself
    where a pattern may ask for more.

    A model has tens of thousands of names of some thirty kinds.
    """
    numbers: set[str] = set()
    for pattern in patterns:
        if not (_PLAIN if pattern.startswith("re:") else _PLAIN_GLOB).fullmatch(pattern):
            return lambda name: name
        numbers.update(regex.findall(r"(?<![A-Za-z_\[\d])\d+(?![A-Za-z_\d\]])", pattern))
    other = "0" * (1 + max(map(len, numbers), default=0))

    def kind(name: str) -> str:
        first, *rest = name.split(".")
        return ".".join([first, *[other if part.isdecimal() and part not in numbers else part for part in rest]])

    return kind


@lru_cache(maxsize=4096)
def expression(text: str) -> Expression:
    """`Expression` of ``text``, compiled once. Raises ValueError."""
    return Expression(text)
