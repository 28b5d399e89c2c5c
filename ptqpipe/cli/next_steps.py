"""What to do after each command: its last lines, calls of real paths that can be pasted into a shell.

One function for each command, which yields the calls. Nothing is printed with --json or --quiet.
"""

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptqpipe.cli.common import Terminal
from ptqpipe.errors import argv, printable

if TYPE_CHECKING:  # a command imports its own alone
    from ptqpipe.calibration.options import CalibrateCommand, GenerateCommand
    from ptqpipe.check.options import DiffCommand, EvalCommand, InspectCommand, VerifyCommand
    from ptqpipe.conversion.options import DequantizeCommand, RelayoutCommand, TransformCommand
    from ptqpipe.pipeline.options import ConvertCommand, DemoCommand, PlanCommand
    from ptqpipe.pipeline.tune.options import TuneCommand

Call = Sequence[object]


def say_next(terminal: Terminal, calls: Iterator[Call]) -> None:
    """Prints the calls, one a line, the likeliest first."""
    if terminal.silent:
        return
    head = "Next: "
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for call in _possible(calls):
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
    options: "ConvertCommand", out: Path, elsewhere: bool = True, measured: bool = False, page: Path | None = None
) -> Iterator[Call]:
    """Measure it, or see what was measured, and serve it; verify what continues no text.

    elsewhere  whether vLLM reads the layout, and computes what it says
    measured   whether this call has measured it; page: the report that it made
    """
    if page is not None:
        yield from report(page)
    elif measured or _is_measured(out):
        yield "ptqpipe", "report" if measured else "eval", out, "--source", options.model
    else:
        yield "ptqpipe", "verify", out, "--source", options.model
    yield from _serve(out, elsewhere)


def relayout(options: "RelayoutCommand", out: Path, elsewhere: bool) -> Iterator[Call]:
    """Make sure that nothing was lost, and serve it."""
    yield "ptqpipe", "diff", options.ckpt, out
    yield from _serve(out, elsewhere)


def dequantize(options: "DequantizeCommand", out: Path) -> Iterator[Call]:
    """It is a plain model again."""
    yield "ptqpipe", "diff", options.ckpt, out
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


def _is_measured(path: str | Path) -> bool:
    from ptqpipe.models.model_kind import is_measured

    return is_measured(Path(path))


def generate(options: "GenerateCommand", windows: Call) -> Iterator[Call]:
    """Quantize with its text at once, or by way of statistics."""
    yield "ptqpipe", "convert", options.model, "--data", options.out, *windows
    stats = options.out.with_name(f"{options.out.stem}-stats")
    yield "ptqpipe", "calibrate", options.model, "--data", options.out, *windows, "-o", stats


def calibrate(options: "CalibrateCommand") -> Iterator[Call]:
    """Quantize with the statistics."""
    yield "ptqpipe", "convert", options.model, "--stats", options.out


def tune(options: "TuneCommand") -> Iterator[Call]:
    """Write the codes; they bring their format along."""
    yield "ptqpipe", "convert", options.model, "--codes", options.out, *argv(stats=options.stats)


def plan(options: "PlanCommand") -> Iterator[Call]:
    """Quantize by the recipe."""
    yield "ptqpipe", "convert", options.model, "--recipe", options.out, *argv(stats=options.stats)


def transform(options: "TransformCommand") -> Iterator[Call]:
    """Quantize what was transformed."""
    yield "ptqpipe", "convert", options.out, "--format", options.format


def verify(options: "VerifyCommand", sound: bool) -> Iterator[Call]:
    """Check a sound checkpoint against its model, measure and serve it; of a fault the fault itself says what to do."""
    if not sound:
        return
    if options.source is not None and _is_measured(options.ckpt):
        yield "ptqpipe", "eval", options.ckpt, "--source", options.source
    elif options.source is None and (original := _original(options.ckpt)):
        yield "ptqpipe", "verify", options.ckpt, *original
    yield from _serve(options.ckpt, elsewhere=False)


def inspect(options: "InspectCommand", quantized: bool) -> Iterator[Call]:
    """Check a quantized checkpoint, quantize a plain model; nothing of statistics and codes, which have no config."""
    if quantized:
        yield "ptqpipe", "verify", options.ckpt, *_original(options.ckpt)
    elif not Path(options.ckpt).is_dir() or Path(options.ckpt, "config.json").is_file():
        yield "ptqpipe", "convert", options.ckpt


def _original(ckpt: str | Path) -> Call:
    """The model that a checkpoint was made from, where it is found, as an option."""
    from ptqpipe.check.report.find import find_source

    source = find_source(Path(ckpt))
    return () if source is None else ("--source", source)


def diff(options: "DiffCommand", equal: bool, backwards: bool = False) -> Iterator[Call]:
    """How much a difference is; nothing for none. ``backwards``: A is what was made, B what it was made from."""
    derived, source = (options.a, options.b) if backwards else (options.b, options.a)
    if equal or not _is_measured(derived):
        return
    if not _is_quantized(source):
        yield "ptqpipe", "eval", derived, "--source", source
    elif original := _original(source) or _original(derived):  # of two quantized ones neither is the other's measure
        yield "ptqpipe", "eval", source, *original
        yield "ptqpipe", "eval", derived, *original


def _is_quantized(path: str | Path) -> bool:
    from ptqpipe.models.model_kind import is_quantized

    return is_quantized(Path(path))


def doctor() -> Iterator[Call]:
    """See it work."""
    yield "ptqpipe", "demo"


def evaluate(options: "EvalCommand", target: Path, quantized: bool) -> Iterator[Call]:
    """The verdict, which needs the model that it was made from, and a page of it all; nothing for a plain model, about
    which there is no report."""
    if not quantized:
        return
    source = () if options.source is None else ("--source", options.source)
    if not source and not options.tasks and (original := _original(options.ckpt)):
        yield "ptqpipe", "eval", options.ckpt, *original, *(word for text in options.data for word in ("--data", text))
    yield "ptqpipe", "report", options.ckpt, *source, "--eval", target


def report(path: Path) -> Iterator[Call]:
    """Look at it."""
    opener = "open" if sys.platform == "darwin" else "xdg-open"
    yield opener if path.suffix == ".html" else "less", path


def demo(options: "DemoCommand", first: str) -> Iterator[Call]:
    """Look into a checkpoint, and chat with it."""
    yield "ptqpipe", "inspect", options.out / first
    yield "ptqpipe", "serve", options.out / first
