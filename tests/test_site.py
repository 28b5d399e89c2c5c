"""The site of mkdocs.yml: all pages are there, nothing comes from a network, and a link that leads nowhere ends it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("material", reason="needs the extra docs")
ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "mkdocs.yml",
    "docs",
    "labs",
    "benchmarks/quality.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of everything that the site is made of."""
    for name in PARTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.jsonl", "*.png"))
        else:
            shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet would count no warnings
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tree: Path) -> None:
    done = build(tree)
    assert done.returncode == 0, done.stderr[-2000:]
    pages = {path.relative_to(tree / "site").as_posix() for path in (tree / "site").rglob("*.html")}
    notes = [path.parent.name for path in (tree / "labs").glob("*/NOTES.md")]
    assert {"index.html", "using.html", "models.html", "CONTRIBUTING.html", "benchmarks/quality.html"} <= pages
    assert {f"labs/{name}/NOTES.html" for name in notes} <= pages
    for page in pages:
        text = (tree / "site" / page).read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=.?(?:https?:)?//[^>]*", text) == [], page
    results = (tree / "site" / "results.html").read_text(encoding="utf-8")
    assert "images/cost-light.svg#only-light" in results
    assert "images/cost-dark.svg#only-dark" in results


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](using.md#no-such-part)", "[x](../labs/nothing/NOTES.md)"])
def test_a_link_that_leads_nowhere_ends_the_build(tree: Path, link: str) -> None:
    with open(tree / "docs" / "python.md", "a", encoding="utf-8") as page:
        page.write(f"\n{link}\n")
    done = build(tree)
    assert done.returncode == 1
    assert "python.md" in done.stderr + done.stdout
