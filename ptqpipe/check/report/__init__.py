"""Reports for people: numbers and names in (``content.py``), one HTML or markdown file out.

``gather.py`` gathers. jinja2 is imported when a report is rendered.
"""

from collections.abc import Sequence
from pathlib import Path

from ptqpipe.check.report.content import (
    Codes,
    Histogram,
    KeptTensor,
    Proof,
    Report,
    ReportedWeight,
    ScaleChoice,
    WorstBlock,
    pooled_mse,
)
from ptqpipe.errors import UsageError, arg, missing_package

FORMATS = ("html", "md")
# What tells a report from other files, so that an earlier one may be replaced and nothing else: it says so itself.
HTML_MARK = '<meta name="generator" content="ptqpipe report">'
MARKDOWN_MARK = "<!-- ptqpipe report -->"


def check_kind(kind: str) -> None:
    """UsageError for an unknown kind, and where what renders it is not installed."""
    if kind not in FORMATS:
        raise UsageError(f"{arg('kind', kind)} is unknown; use {' or '.join(FORMATS)}")
    try:
        import jinja2
    except ImportError:
        raise missing_package("ptqpipe report", "jinja2", "ptqpipe[report]") from None


def render(report: Report, *, kind: str) -> str:
    """The report as ``html`` or ``md``. UsageError as :func:`check_kind`."""
    check_kind(kind)
    from ptqpipe.check.report import rendering

    return rendering.render_html(report) if kind == "html" else rendering.render_markdown(report)


def render_comparison(reports: Sequence[Report], *, kind: str, notes: Sequence[str] = ()) -> str:
    """Several checkpoints of one model beside each other; ``notes``: what keeps their numbers from being compared."""
    check_kind(kind)
    from ptqpipe.check.report import compare

    return compare.render_comparison(reports, kind=kind, notes=notes)


def default_path(name: str, *, kind: str) -> Path:
    """``<checkpoint>.report.html`` in the working directory."""
    return Path(f"{name}.report.{kind}")


def is_report(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is one that ptqpipe wrote."""
    return any(mark.encode() in head for mark in (HTML_MARK, MARKDOWN_MARK))
