"""Hooks of mkdocs.yml: the site has pages that lie outside of docs/, and links between all of them.

A link to a file that is no page of the site (a script, a results file) becomes its text; one to a file that does not
exist stays as it is, and ends `mkdocs build --strict`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/quality.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>', re.DOTALL
)


def lab_notes() -> list[str]:
    """The pages of the studies, relative to the repository."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("labs/*/*.md"))


def on_config(config: Any) -> Any:
    """Lists the lab notes behind the other pages."""
    config.nav.append({"Lab notes": lab_notes()})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside of docs/ under their path in the repository."""
    for name in (*OUTSIDE, *lab_notes()):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Writes links for the site's tree, pictures for its two themes, and pipes in the code of tables as they are."""
    uri = page.file.src_uri
    here = (DOCS if (DOCS / uri).exists() else ROOT) / uri

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = (here.parent / target).resolve()
        base = DOCS if path.is_relative_to(DOCS) else ROOT
        there = files.get_file_from_path(path.relative_to(base).as_posix()) if path.is_relative_to(base) else None
        if there is None:
            return match[0] if image or not path.exists() else text
        return f"{image}[{text}]({posixpath.relpath(there.src_uri, posixpath.dirname(uri))}{anchor or ''})"

    def cells(match: re.Match[str]) -> str:
        return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), match[0])

    markdown = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return LINK.sub(link, re.sub(r"^\|.*$", cells, markdown, flags=re.MULTILINE))
