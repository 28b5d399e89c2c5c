"""A report as one HTML file (no network, no external fonts, scripts bound by their hash), or as compact markdown for
model cards: two templates for one content.

In HTML every name is escaped: by jinja2 in the page, by ``svg.py`` in drawings, by ``_json`` in the table's data, which
the script shows as text only. The page's policy forbids any script but its own, so that an escape too few stays text.
In markdown the filters ``md`` and ``code`` escape names.
"""

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ptqpipe.check.report import (
    HTML_MARK,
    MARKDOWN_MARK,
    charts,
    error_charts as errors,
    numbers,
    quality,
    roles,
    sections,
)
from ptqpipe.check.report.content import Report, pooled_mse
from ptqpipe.check.report.svg import colour, marker
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.run.quantities import decibels, disk_size, three_digits

TEMPLATES = Path(__file__).parent / "templates"

OUTPUT_ERROR = 9
COLUMNS = (
    (0, "tensor", ""),
    (1, "fate", ""),
    (2, "shape", "num"),
    (3, "size", "num"),
    (4, "bits", "num"),
    (OUTPUT_ERROR, "output error", "num"),
    (5, "SQNR dB", "num"),
    (6, "vs abs-max", "num"),
    (7, "at largest", "num"),
    (8, "how or why", ""),
)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        n=numbers,
        block_chart=charts.block_chart,
        disk_size=disk_size,
        three_digits=three_digits,
        pooled_mse=pooled_mse,
        family=roles.family,
        marker=lambda index, ring: marker(
            index, 0, 0, kind=f"ring {colour(index)}" if ring else colour(index), radius=5
        ),
    )
    environment.filters.update(shown=roles.shown, breakable=roles.breakable, md=_escaped, code=_code)
    return environment


def page(name: str, *, kind: str, **content: object) -> str:
    """A template with its content: in ``html`` with the style and the scripts of all pages."""
    template = _environment().get_template(f"{name}.{kind}.jinja")
    if kind == "md":
        return template.render(mark=MARKDOWN_MARK, **content).rstrip("\n") + "\n"
    script, early = (_text(file) for file in ("page.js", "theme.js"))
    policy = _policy(script, early)
    return template.render(
        mark=HTML_MARK, style=_text("style.css"), script=script, early=early, policy=policy, **content
    )


def _text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def render_markdown(report: Report) -> str:
    kept: dict[tuple[str, str, str], list[int]] = {}
    for one in report.kept:
        kept.setdefault((one.role, one.dtype, one.reason), []).append(one.nbytes)
    return page("report", kind="md", kept=kept, **_numbers(report))


def _numbers(report: Report) -> dict[str, Any]:
    return {
        "r": report,
        "rows": roles.by_role(report),
        "worst": errors.worst_weights(report),
        "tuned_ratio": mean_known(block.ratio for block in report.blocks),
        "overall_mse": pooled_mse(report.weights),
        "overall_db": decibels(pooled_mse(report.weights)),
    }


def render_html(report: Report) -> str:
    content = _numbers(report)
    rows = content["rows"]
    gains = [row for row in rows if row.gains]
    drawing, legend, outside = sections.precision_map(report)
    return page(
        "report",
        kind="html",
        described=f"{report.verdict[1]}: {report.verdict[0]}" if report.verdict else "",
        card=quality.facts(report),
        texts=quality.drawn_texts(report),
        samples=quality.sample_texts(report),
        recovery=sections.recovery(report),
        recovery_words=sections.recovery_words(report),
        proof_words=proof_words(report),
        error_lines=errors.error_lines(rows),
        error_strips=errors.error_strips(rows),
        by_data=report.by_data,
        calibrated=errors.calibrated(rows),
        calibrated_count=sum(len(row.gains) for row in gains),
        gains=gains,
        reverted=sum(row.reverted for row in gains),
        tuned=errors.tuned(report),
        choice_dots=errors.choice_dots(report, rows),
        choice_lines=errors.choice_lines(report),
        choice_colour=errors.CHOICE_COLOUR,
        panels=sections.scale_panels(report),
        map_drawing=drawing,
        map_legend=legend,
        map_outside=outside,
        same_format=sections.same_everywhere(report),
        how_all=sections.how_all(report),
        formats_drawn=list(dict.fromkeys(row.format for row in rows)),
        data=_json(sections.table_data(report)),
        columns=COLUMNS if gains else [column for column in COLUMNS if column[0] != OUTPUT_ERROR],
        label=lambda row: roles.row_label(row, rows),
        saved_by_global_scale=errors.saved_by_global_scale,
        **content,
    )


def proof_words(report: Report) -> str:
    """The line below the count of weights whose scales are claimed optimal, where brute force checked none."""
    if any(weight.provable and not weight.plain for weight in report.weights):
        return "as recorded: optimal for the error that the statistics of the inputs weight"
    if report.provable < len(report.weights):
        return "as recorded, of the weights with nearest codes; data chose the codes of the others"
    if not report.proof.claimed:
        return "as recorded: no search that proves it chose them"
    if report.errors_from == "source":
        return "as recorded; brute force can check none of them here"
    return "as recorded; a report with the source checks it by brute force"


def _policy(*scripts: str) -> str:
    """The content security policy: the page's own style and scripts, nothing remote."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _json(content: object) -> str:
    """JSON that no HTML parser can take for anything else: ASCII, without <, > and &."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")


def _escaped(text: str) -> str:
    text = _SPECIAL.sub(r"\\\1", roles.shown(text))
    return text.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def _code(text: str) -> str:
    """A name in code style; where it holds a backtick or a bar, which would end it, escaped text instead."""
    name = roles.shown(text)
    return f"`{name}`" if name and not set(name) & set("`|<>&\\") else _escaped(name)
