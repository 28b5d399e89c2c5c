"""What the tests of reports share: checkpoints to report on, and pages taken apart."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from ptqpipe.check.report.content import Report, ReportedWeight
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.prepare import prepare
from ptqpipe.recipe.options import RecipeOptions
from tests.tiny import save

NASTY = "model.layers.0.mlp.<script>alert(1)</script>&\"'`|.weight"


def converted(folder: Path, tensors: dict[str, torch.Tensor], fmt: str, **options: str) -> tuple[Path, Path]:
    """(source, checkpoint) folders."""
    source = save(folder / "source", tensors)
    out = folder / "out"
    prepared = prepare(source, options=RecipeOptions(format=fmt, **options), out=out)
    try:
        convert(prepared)
    finally:
        prepared.close()
    return source, out


def by_name(report: Report) -> dict[str, ReportedWeight]:
    return {weight.name: weight for weight in report.weights}


class Page(HTMLParser):
    """Tags, script texts and the text of a page, by the standard library's parser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text.append(data)


def titles(page: str) -> list[str]:
    """The texts of h2, in order."""
    return [re.sub(r"<[^>]+>", "", text) for text in re.findall(r"<h2>(.*?)</h2>", page)]


EVAL: dict[str, Any] = {
    "version": 1,
    "ptqpipe": "0",
    "checkpoint": {"name": "out", "path": "/p", "run_id": None},
    "baseline": {"name": "<b>base</b>", "path": "/q"},
    "settings": {"dtype": "float32", "activations": "simulated"},
    "perplexity": [
        {"data": "held.txt", "sha256": "0", "tokens": 1000, "window": 64, "stride": 32, "checkpoint": 12.5,
         "baseline": 12.25, "nll": 2.5, "nll_baseline": 2.4, "difference": 0.25, "interval": [0.125, 0.375]}
    ],
    "kl": [
        {"data": "/some/folder/held.txt", "tokens": 1000, "mean": 0.0175, "standard_error": 0.001,
         "interval": [0.016, 0.019],
         "percentiles": {"50": 0.01, "99": 0.2}, "max": 1.5, "top1_agreement": 0.925}
    ],
    "tasks": [
        {"task": "arc", "metric": "acc", "higher_is_better": True, "samples": 100, "checkpoint": 0.41, "stderr": 0.05,
         "baseline": 0.42, "baseline_stderr": 0.05, "recovery": 97.62, "difference": -0.01, "interval": None}
    ],
}  # fmt: skip


def measured(folder: Path, mean: float, **kl: Any) -> None:
    """An eval file beside a checkpoint, of that checkpoint's run."""
    run_id = json.loads((folder / "ptqpipe.json").read_text())["run_id"]
    row = EVAL["kl"][0] | {"mean": mean, "interval": [0.9 * mean, 1.1 * mean], "top1_agreement": 0.965} | kl
    content = EVAL | {"checkpoint": {"name": folder.name, "run_id": run_id}, "kl": [row]}
    (folder.parent / f"{folder.name}.eval.json").write_text(json.dumps(content))


WHERE: dict[str, Any] = {
    "histogram": {"first": 1e-8, "per_decade": 4, "counts": [3, *(41 * [0]), 7]},
    "positions": [
        {"first": 1, "last": 1, "tokens": 4, "mean": 0.25, "standard_error": 0.125},
        {"first": 2, "last": 3, "tokens": 8, "mean": 0.0625, "standard_error": None},
    ],
    "worst": [
        {"kl": 1.25, "context": 3, "before": "the <b>cat</b> sat", "token": " onx", "checkpoint": 0.5, "baseline": 0.25,
         "checkpoint_top": "xA", "baseline_top": "xB"}
    ],
}  # fmt: skip
