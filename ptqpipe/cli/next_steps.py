"""What to do after each command: its last lines, calls of real paths that can be pasted into a shell.

One function for each command, called as it is. Nothing is printed with --json or --quiet.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from ptqpipe.cli.common import Given
from ptqpipe.errors import printable

Call = Sequence[object]


def say_next(given: Given, steps: Callable[..., Iterator[Call]], *facts: object) -> None:
    """Prints the calls that ``steps`` gives for the call ``given``, one a line, the likeliest first."""
    if given.silent:
        return
    head = "Next: "
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for call in _possible(steps(given, *facts)):
        click.echo(head + _in_lines([_word(word) for word in call], columns))
        head = " " * len(head)


# Commands that need packages which a first install, by `scripts/demo.sh`, does not bring; and the extra that does.
_EXTRAS = {"serve": ("fastapi", "ptqpipe[serve]"), "report": ("jinja2", "ptqpipe[report]")}


def _possible(calls: Iterator[Call]) -> Iterator[Call]:
    """The calls; before one whose packages are missing, the call that installs them."""
    for call in calls:
        package, extra = _EXTRAS.get(str(call[1]) if call[0] == "ptqpipe" else "", ("", ""))
        if package and find_spec(package) is None:
            yield "pip", "install", extra
        yield call


def _word(value: object) -> str:
    """A word of a call; a path that begins with a dash would be taken for an option."""
    return f"./{value}" if isinstance(value, Path) and str(value).startswith("-") else str(value)


def _quoted(word: str) -> str:
    """A word as a shell takes it; what would steer a terminal as an escape that bash, zsh and ksh undo."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{printable(escaped)}'"


def _in_lines(words: list[str], columns: int | None) -> str:
    """A call as a shell reads it; one that a terminal of ``columns`` would break is broken before options, where a
    shell takes it, too."""
    lines, room = [""], sys.maxsize if columns is None else columns - len("Next: ") - len(" \\")
    parts: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not parts:
            parts.append([])
        parts[-1].append(word)
    for part in (" ".join(map(_quoted, words)) for words in parts):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > room:
            lines.append(f"          {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)


def convert(
    given: Given, out: Path, elsewhere: bool = True, measured: bool = False, page: Path | None = None
) -> Iterator[Call]:
    """Measure it, or see what was measured, and serve it; verify what continues no text.

    elsewhere  whether vLLM reads the layout, and computes what it says
    measured   whether this call has measured it; page: the report that it made
    """
    if page is not None:
        yield from report(given, page)
    elif measured or _continues_text(out):
        yield "ptqpipe", "report" if measured else "eval", out, "--source", given.model
    else:
        yield "ptqpipe", "verify", out, "--source", given.model
    yield from _serve(out, elsewhere)


def relayout(given: Given, out: Path, elsewhere: bool) -> Iterator[Call]:
    """Make sure that nothing was lost, and serve it."""
    yield "ptqpipe", "diff", given.ckpt, out
    yield from _serve(out, elsewhere)


def dequantize(given: Given, out: Path) -> Iterator[Call]:
    """It is a plain model again."""
    yield "ptqpipe", "diff", given.ckpt, out
    if _continues_text(out):
        yield "vllm", "serve", out


def _serve(out: Path, elsewhere: bool) -> Iterator[Call]:
    """Serve what continues text, here and where vLLM reads it."""
    if _continues_text(out):
        yield "ptqpipe", "serve", out
        if elsewhere:
            yield "vllm", "serve", out


def _continues_text(path: str | Path) -> bool:
    from ptqpipe.models.model_kind import continues_text

    return continues_text(Path(path))


def generate(given: Given, windows: Call) -> Iterator[Call]:
    """Quantize with its text at once, or by way of statistics."""
    yield "ptqpipe", "convert", given.model, "--data", given.out, *windows
    stats = given.out.with_name(f"{given.out.stem}-stats")
    yield "ptqpipe", "calibrate", given.model, "--data", given.out, *windows, "-o", stats


def _statistics(given: Given) -> Call:
    return () if given.stats is None else ("--stats", given.stats)


def calibrate(given: Given) -> Iterator[Call]:
    """Quantize with the statistics."""
    yield "ptqpipe", "convert", given.model, "--stats", given.out


def tune(given: Given) -> Iterator[Call]:
    """Write the codes; they bring their format along."""
    yield "ptqpipe", "convert", given.model, "--rounding", given.out, *_statistics(given)


def plan(given: Given) -> Iterator[Call]:
    """Quantize by the recipe."""
    yield "ptqpipe", "convert", given.model, "--recipe", given.out, *_statistics(given)


def transform(given: Given) -> Iterator[Call]:
    """Quantize what was transformed."""
    yield "ptqpipe", "convert", given.out, "--format", given.format


def verify(given: Given, sound: bool) -> Iterator[Call]:
    """Check a sound checkpoint against its model, measure and serve it; of a fault the fault itself says what to do."""
    if not sound:
        return
    if given.source is not None and _continues_text(given.ckpt):
        yield "ptqpipe", "eval", given.ckpt, "--source", given.source
    elif given.source is None and (original := _original(given.ckpt)):
        yield "ptqpipe", "verify", given.ckpt, *original
    yield from _serve(given.ckpt, elsewhere=False)


def inspect(given: Given, quantized: bool) -> Iterator[Call]:
    """Check a quantized checkpoint, quantize a plain model; nothing of statistics and codes, which have no config."""
    if quantized:
        yield "ptqpipe", "verify", given.ckpt, *_original(given.ckpt)
    elif not Path(given.ckpt).is_dir() or Path(given.ckpt, "config.json").is_file():
        yield "ptqpipe", "convert", given.ckpt


def _original(ckpt: str | Path) -> Call:
    """The model that a checkpoint was made from, where it is found, as an option."""
    from ptqpipe.check.report.find import find_source

    source = find_source(Path(ckpt))
    return () if source is None else ("--source", source)


def diff(given: Given, equal: bool, backwards: bool = False) -> Iterator[Call]:
    """How much a difference is; nothing for none. ``backwards``: A is what was made, B what it was made from."""
    derived, source = (given.a, given.b) if backwards else (given.b, given.a)
    if equal or not _continues_text(derived):
        return
    if not _is_quantized(source):
        yield "ptqpipe", "eval", derived, "--source", source
    elif original := _original(source) or _original(derived):  # of two quantized ones neither is the other's measure
        yield "ptqpipe", "eval", source, *original
        yield "ptqpipe", "eval", derived, *original


def _is_quantized(path: str | Path) -> bool:
    from ptqpipe.models.model_kind import is_quantized

    return is_quantized(Path(path))


def doctor(given: Given) -> Iterator[Call]:
    """See it work."""
    yield "ptqpipe", "demo"


def evaluate(given: Given, target: Path, quantized: bool) -> Iterator[Call]:
    """The verdict, which needs the model that it was made from, and a page of it all; nothing for a plain model, about
    which there is no report."""
    if not quantized:
        return
    source = () if given.source is None else ("--source", given.source)
    if not source and not given.tasks and (original := _original(given.ckpt)):
        yield "ptqpipe", "eval", given.ckpt, *original, *(word for text in given.data for word in ("--data", text))
    yield "ptqpipe", "report", given.ckpt, *source, "--eval", target


def report(given: Given, path: Path) -> Iterator[Call]:
    """Look at it."""
    opener = "open" if sys.platform == "darwin" else "xdg-open"
    yield opener if path.suffix == ".html" else "less", path


def demo(given: Given, first: str) -> Iterator[Call]:
    """Look into a checkpoint, and chat with it."""
    yield "ptqpipe", "inspect", given.out / first
    yield "ptqpipe", "serve", given.out / first
