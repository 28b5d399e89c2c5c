"""Claims: files and pages that the documents name are there, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from ptqpipe.readers import READERS, evidence
from ptqpipe.schemes import get_scheme

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
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


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name} links to {file}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name} links to {file}#{anchor}"


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1000
    assert text.index("docs/images/pipeline") < text.index("docs/images/kl") < text.index("scripts/demo.sh")


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
    section = text.partition("## Twenty words")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| .* \| `([\w/.]+)` \|$", section, re.MULTILINE)
    assert len(rows) == section.count("\n|") - 2 == 20  # beside the head and its line
    for word, file in rows:
        code = (ROOT / "ptqpipe" / file).read_text(encoding="utf-8")
        assert re.search(rf"^class {word}\b", code, re.MULTILINE), f"{file} does not define {word}"
