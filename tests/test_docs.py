"""Claims: files and pages that the documents name are there, links lead somewhere, and the pages stay few and short."""

import re
from pathlib import Path

import pytest

from ptqpipe.models.reader_facts import READERS, evidence
from ptqpipe.numerics.schemes import get_scheme

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LINKED = [
    *DOCUMENTS, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/quality.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "labs").glob("*/*.md"))),
]  # fmt: skip
GENERATED = {"cli.md", "models.md"}
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|cpp|toml|jsonl|yaml|sh))`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_a_page_names_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    places = (ROOT, ROOT / "ptqpipe", ROOT / "ptqpipe" / "kernels", ROOT / "ptqpipe" / "kernels" / "csrc")
    named = {found for found in FILE.findall(text) if "/" in found}
    assert [file for file in sorted(named) if not any((place / file).exists() for place in places)] == []


@pytest.mark.parametrize("name", LINKED)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name} links to {file}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name} links to {file}#{anchor}"


def test_the_pages_are_few_and_short() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    written = {name: text for name, text in pages.items() if name not in GENERATED}
    assert pages.keys() >= GENERATED
    assert len(written) <= 10
    assert sum(len(text.split()) for text in written.values()) <= 22_000


def test_the_changelog_begins_with_the_first_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-1] == "0.1.0: first release"
    assert len(text.partition("## 0.1.0: first release")[2].split()) <= 400


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1000
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections[:3] == ["Quick start", "Which command?", "Results"]
    start = text.partition("## Quick start")[2].partition("\n## ")[0]
    order = [start.index(f"ptqpipe {command}") for command in ("convert", "eval", "serve")]
    assert order == sorted(order)


def test_the_readme_says_how_it_is_known_that_readers_take_a_format() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Formats and readers")[2].partition("\n## ")[0]
    head, *rows = re.findall(r"^\| (format|\w+)(?: \(\w+\))? \| [^|]+ \| [^|]+ \| (.+) \|$", section, re.MULTILINE)
    assert head == ("format", "vLLM | SGLang | TensorRT-LLM | transformers")
    assert len(rows) == 6
    for name, marks in rows:
        scheme = get_scheme(name).name
        known = [evidence(reader, scheme) if scheme in READERS[reader] else None for reader in READERS]
        assert marks.split(" | ") == [one.mark if one else "-" for one in known], name
        assert all(one.version in section and one.date in section for one in known if one and one.mark != "read"), name


def test_the_words_to_know_before_changing_convert_are_few_and_defined_where_the_page_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Words to know")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| .* \| `([\w/.]+)` \|$", section, re.MULTILINE)
    assert 20 <= len(rows) <= 35
    assert len(rows) == section.count("\n|") - 2  # beside the head and its line
    code = {path.relative_to(ROOT / "ptqpipe"): path.read_text("utf-8") for path in (ROOT / "ptqpipe").rglob("*.py")}
    for word, package in rows:
        homes = [path for path, lines in code.items() if re.search(rf"^class {word}\b", lines, re.MULTILINE)]
        assert homes, f"no class {word}"
        assert any(path.is_relative_to(package) for path in homes), f"{package} does not define {word}"


def test_the_packages_of_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+)`", text))
    assert len(named) > 15
    places = (ROOT, ROOT / "ptqpipe")
    assert [name for name in sorted(named) if not any((place / name).is_dir() for place in places)] == []
