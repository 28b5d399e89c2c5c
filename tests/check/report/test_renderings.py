"""The two renderings of a report: what the page and the markdown show, and what names in them cannot do."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ptqpipe.check.report import error_charts as errors, roles
from ptqpipe.check.report.content import Report
from ptqpipe.check.report.gather import gather
from ptqpipe.check.report.rendering import render_html, render_markdown
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine
from tests.check.report.pages import NASTY, Page


def test_names_from_files_stay_text_in_the_page(pair: tuple[Path, Path], sourced: Report) -> None:
    text = render_html(sourced)
    page = Page(text)
    assert len(page.scripts) == 3  # the theme, the data, the page's own
    assert all("alert(1)" not in script for script in (page.scripts[0], page.scripts[2]))
    data = json.loads(page.scripts[1])
    assert NASTY in {row[0] for row in data["rows"]}
    assert "<" not in page.scripts[1]
    assert not any(name.lower().startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert" in "".join(page.text) or "<script>alert" in "".join(str(a) for _, a in page.tags)


def test_the_page_loads_nothing(sourced: Report) -> None:
    page = Page(render_html(sourced))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        href = attributes.get("href")
        assert href is None or href.startswith("#")
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_the_policys_hashes_are_those_of_the_scripts(sourced: Report) -> None:
    import base64
    import hashlib

    page = Page(render_html(sourced))
    allowed = set(
        re.findall(r"sha256-([A-Za-z0-9+/=]+)", next(str(a["content"]) for t, a in page.tags if "http-equiv" in a))
    )
    ran = {base64.b64encode(hashlib.sha256(page.scripts[i].encode()).digest()).decode() for i in (0, 2)}
    assert allowed == ran


def test_markdown_names_cannot_break_out_of_tables(sourced: Report) -> None:
    text = render_markdown(sourced)
    assert "<script>" not in text
    widths: dict[str, int] = {}
    header = ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert widths.setdefault(header, cells) == cells, line
        else:
            header = line if line.startswith("#") else header


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to run the page in")
def test_the_page_runs_in_a_browser(sourced: Report, tmp_path: Path) -> None:
    """The script runs under the page's policy, fills the table, and nothing is reported to the console."""
    (tmp_path / "page.html").write_text(render_html(sourced), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "CONSOLE" not in done.stderr
    tables = done.stdout[done.stdout.index('<table id="all">') :]
    rows = tables[: tables.index("</table>")].count("<tr")
    assert rows == 1 + len(sourced.weights) + len(sourced.kept)
    assert "&lt;script&gt;" in tables


def test_every_tensor_is_in_the_table_once(pair: tuple[Path, Path], sourced: Report) -> None:
    rows = json.loads(Page(render_html(sourced)).scripts[1])["rows"]
    with Source.open(pair[0]) as source:
        assert sorted(row[0] for row in rows) == sorted(source.tensors)


def test_a_report_is_the_same_bytes_for_any_number_of_workers(pair: tuple[Path, Path]) -> None:
    one, three = (render_html(gather(pair[1], source=pair[0], machine=Machine(workers=n))) for n in (1, 3))
    assert one == three


def test_a_role_has_one_colour_everywhere_and_formats_share_an_axis(pair: tuple[Path, Path]) -> None:
    report = gather(pair[1])
    mixed = replace(
        report,
        weights=tuple(replace(w, format="mxfp8") if w.layer == 1 and "attn" in w.name else w for w in report.weights),
    )
    rows = roles.by_role(mixed)
    colours = {row.role: row.index for row in rows}
    assert len(set(colours.values())) == len(colours)
    assert all(row.index == colours[row.role] for row in rows)
    drawn = errors.error_lines(rows)
    assert drawn is not None
    assert drawn[0].count("<polyline") == len(colours)
    assert "mxfp8" in drawn[0]
    assert 'class="mark ring' in drawn[0]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to run the page in")
@pytest.mark.slow
def test_on_a_narrow_page_sections_fold_and_what_is_cut_can_be_scrolled_and_says_so(
    sourced: Report, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    import asyncio

    from tests.serving.server import browser

    (tmp_path / "page.html").write_text(render_html(sourced), encoding="utf-8")

    async def main() -> None:
        async with browser.opened(f"file://{tmp_path}/page.html", width=400, height=800, dark=False) as page:
            await page.until("document.readyState === 'complete'")
            folds = "[...document.querySelectorAll('details.fold')]"
            assert await page.value(f"{folds}.length") >= 5
            assert await page.value(f"{folds}.every(x => !x.open)")
            await page.value("document.querySelector('.links a[href=\"#tensors\"]').click()")
            await page.until("document.querySelector('#tensors .fold').open")
            await page.value(f"{folds}.forEach(x => {{ x.open = true }})")
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
            wide = "[...document.querySelectorAll('table, .links')].filter(x => x.getClientRects().length)"
            held = f"{wide}.map(x => x.closest('.scroll, .links')).filter(x => x.scrollWidth > x.clientWidth)"
            assert await page.value(f"{held}.length") > 3
            assert await page.value(f"{held}.every(x => getComputedStyle(x).overflowX === 'auto')")
            assert await page.value(f"{held}.every(x => getComputedStyle(x).backgroundImage.includes('gradient'))")

    asyncio.run(main())
