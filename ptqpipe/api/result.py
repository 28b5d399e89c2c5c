"""What a function of the Python API returns: one line as its repr, a small table in a notebook, and the data."""

from collections.abc import Callable, Mapping
from html import escape
from math import prod
from pathlib import Path
from typing import Any

from ptqpipe.check.evaluate.verdict import Verdict, verdict
from ptqpipe.checkpoint import Finished
from ptqpipe.conversion.job import WriteResult
from ptqpipe.run.quantities import disk_size

_COLOURS = {
    "near-lossless": ("#17794a", "\u2713"),
    "good": ("#8a6100", "~"),
    "damaged": ("#a4231b", "!"),
}  # the report's


class Result:
    """What a command did: ``repr`` is one line, ``print`` shows what the command line prints.

    command     the function's name
    path        what was written, or looked at; None where neither is a file or folder
    record      the result as data, of JSON's types: for a checkpoint the content of its ptqpipe.json
    facts       the few numbers that matter, by name, as text
    evaluation  the content of the eval file where something was measured; None elsewhere

    Every field of the stage's own report is an attribute, too: ``verify(...).faults``, ``convert(...).written_bytes``.
    """

    def __init__(
        self,
        command: str,
        report: Any,
        *,
        path: Path | None,
        record: Mapping[str, Any],
        facts: Mapping[str, str],
        text: Callable[[], str],
        evaluation: Mapping[str, Any] | None = None,
    ) -> None:
        """``report``: what the stage returned; ``text``: gives what the command line prints."""
        self.command, self.path, self.record, self.evaluation = command, path, record, evaluation
        self.facts = {**facts, **_measured(evaluation)}
        self._report, self._text = report, text

    @property
    def verdict(self) -> Verdict | None:
        """How near the measured checkpoint is to its original, in words; None where that was not measured."""
        return None if self.evaluation is None else verdict(self.evaluation)

    @property
    def kl(self) -> float | None:
        """Mean KL divergence from the original model, nats per token, on the text with the largest; None where it was
        not measured."""
        rows = [row["mean"] for row in (self.evaluation or {}).get("kl") or () if row.get("mean") is not None]
        return max(map(float, rows), default=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._report, name):
            raise AttributeError(f"the result of {self.command} has no {name!r}")
        return getattr(self._report, name)

    def __dir__(self) -> list[str]:
        own = ["command", "path", "record", "facts", "evaluation", "verdict", "kl"]
        return sorted({*own, *(name for name in dir(self._report) if not name.startswith("_"))})

    def __repr__(self) -> str:
        where = "" if self.path is None else f" {self.path}"
        return f"<{self.command}{where}: {', '.join(f'{name} {value}' for name, value in self.facts.items())}>"

    def __str__(self) -> str:
        return self._text()

    def _repr_html_(self) -> str:
        rows = {"path": str(self.path), **self.facts} if self.path is not None else self.facts
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
        table = f"<table><caption>ptqpipe {escape(self.command)}</caption><tbody>{cells}</tbody></table>"
        judged = self.verdict
        if judged is not None:  # the level stands in the words, too: colour alone tells nobody
            colour, sign = _COLOURS[judged.level]
            table = f'<p style="color: {colour}"><b>{sign} {judged.level}</b></p>{table}'
        return f"{table}<details><summary>as printed</summary><pre>{escape(str(self))}</pre></details>"


def _measured(evaluation: Mapping[str, Any] | None) -> dict[str, str]:
    judged = None if evaluation is None else verdict(evaluation)
    return {} if judged is None else {"quality": str(judged)}


def of_checkpoint(name: str, done: WriteResult | None, text: Callable[[WriteResult], str], **more: Any) -> Result:
    """The result of a command that wrote a checkpoint. ``more``: of `Result`."""
    assert done is not None  # rank 0 always has a result
    facts = {**weight_facts(done.record), "size": disk_size(done.written_bytes), "time": f"{done.seconds:.1f} s"}
    return Result(name, done, path=done.out, record=done.record, facts=facts, text=lambda: text(done), **more)


def weight_facts(record: Mapping[str, Any]) -> dict[str, str]:
    """How many weights a checkpoint has, and in which formats where they are quantized, from its record."""
    weights = (record.get("weights") or {}).values()
    if not all("scheme" in entry for entry in weights):
        return {"weights": str(len(weights))}
    sizes = [(prod(entry["shape"]), entry["bits_per_weight"]) for entry in weights]
    bits = sum(count * each for count, each in sizes) / sum(count for count, _ in sizes)
    return {
        "format": ", ".join(sorted({entry["scheme"] for entry in weights})),
        "weights": f"{len(weights)} at {bits:.2f} bits",
    }


def of_folder(name: str, done: Finished, text: Callable[[Finished], str], facts: Mapping[str, str]) -> Result:
    """The result of a command that wrote a folder or file of its own kind."""
    facts = {**facts, "time": f"{done.seconds:.1f} s"}
    return Result(name, done, path=done.out, record=done.content, facts=facts, text=lambda: text(done))
