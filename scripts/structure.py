"""How much there is to know in this tree, as numbers, each beside its goal. Prints a markdown table, or JSON.

    python scripts/structure.py [--json] [--details]

Counted from the sources; the options are those that ``ptqpipe convert --help`` prints. ``--details`` lists below the
table what makes each number: the largest importers, the names that occur twice, lines and files.

- own modules: of ``ptqpipe``, that a module imports anywhere, inside functions and under TYPE_CHECKING, too
- packages: folders and files at the root of ``ptqpipe``; a package's number is how many others its modules import
- lines that spell a flag: with a piece of a string that has ``--name``, outside of cli/ and api/, docstrings aside
- words in docs/: of the pages that no script writes
"""

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ptqpipe"
FACES = ("cli", "api")  # that spell options
GENERATED = ("cli.md", "models.md")  # by cli_docs.py and models_docs.py
FLAG = re.compile(r"(?<![\w-])--[a-z]")


@dataclass(frozen=True, slots=True)
class Row:
    """One number: ``value`` is to be at most ``goal``."""

    name: str
    value: float
    goal: float
    details: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal


@cache
def modules() -> dict[str, ast.Module]:
    """The package's modules, by their names."""
    trees = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(file.read_text(encoding="utf-8"))
    return trees


@cache
def imported(name: str) -> frozenset[str]:
    """The own modules that one imports."""
    known, names = modules(), set()
    for node in ast.walk(known[name]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {one if one in known else str(node.module) for one in inner}
    return frozenset(names - {name})


def package_of(name: str) -> str:
    """The name at the package's root below which a module is."""
    return [*name.split("."), ""][1]


def root_names() -> Row:
    """Files and folders that a reader of the package sees first."""
    names = sorted(
        path.name
        for path in PACKAGE.iterdir()
        if not path.name.startswith(("_", ".")) and path.name != "py.typed" and path.suffix not in (".so", ".pyc")
    )
    return Row("names at the root of the package", len(names), 16, tuple(names))


def lines() -> Row:
    """Lines of Python."""
    files = {file: file.read_text(encoding="utf-8").count("\n") for file in PACKAGE.rglob("*.py")}
    largest = sorted(files, key=lambda file: -files[file])[:10]
    shown = tuple(f"{file.relative_to(ROOT)}: {files[file]}" for file in largest)
    return Row("lines of Python in the package", sum(files.values()), 61_000, shown)


def most_imports() -> Row:
    """The module that needs most others."""
    counts = Counter({name: len(imported(name)) for name in modules()})
    shown = tuple(f"{name}: {count}" for name, count in counts.most_common(10))
    return Row("own modules that any one module imports, most", max(counts.values()), 15, shown)


def repeated_names() -> Row:
    """File names that say nothing without their folder."""
    counts = Counter(file.name for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    shown = tuple(f"{name}: {count}" for name, count in counts.most_common() if count > 1)
    return Row("file names that occur twice or more", len(shown), 12, shown)


def package_imports() -> Row:
    """Other packages that one needs."""
    needs: dict[str, set[str]] = {}
    for name in modules():
        if own := package_of(name):
            needs.setdefault(own, set()).update({package_of(other) for other in imported(name)} - {own, ""})
    shown = tuple(f"{own}: {len(others)}" for own, others in sorted(needs.items(), key=lambda item: -len(item[1])))
    median = statistics.median(len(others) for others in needs.values())
    return Row("packages that one package imports, median", median, 4, shown)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Where docstrings begin."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, documented))
    return {body[0].lineno for body in bodies if body and isinstance(body[0], ast.Expr)}


def flag_lines(file: Path) -> set[int]:
    """Lines of a module with a piece of a string that spells a flag."""
    kinds = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # a token of its own from 3.12 on
    docs, lines = docstring_lines(ast.parse(file.read_text(encoding="utf-8"))), set()
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type in kinds and token.start[0] not in docs:
                pieces = enumerate(token.string.split("\n"), token.start[0])
                lines |= {number for number, piece in pieces if FLAG.search(piece)}
    return lines


def spelled_flags() -> Row:
    """Where a library speaks its shell's language."""
    counts: Counter[str] = Counter()
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in FACES:
            counts[str(file.relative_to(ROOT))] = len(flag_lines(file))
    shown = tuple(f"{name}: {count}" for name, count in counts.most_common() if count)
    return Row("lines below cli/ and api/ that spell a --flag in a string", counts.total(), 0, shown)


def options_shown() -> Row:
    """What a stranger meets first."""
    command = [sys.executable, "-m", "ptqpipe", "convert", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    groups = dropwhile(lambda line: not re.fullmatch(r"\S[^:]*:", line), text.splitlines())  # below the description
    flags = (match[1] for line in groups if (match := re.match(r"  (?:-\w, )?(--[\w-]+)", line)))
    shown = tuple(flag for flag in flags if flag != "--help")
    return Row("options of convert shown by --help", len(shown), 20, shown)


def script_files() -> Row:
    """Files in scripts/."""
    files = sorted(path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return Row("files in scripts/", len(files), 34, tuple(str(path.relative_to(ROOT)) for path in files))


def words(*files: Path) -> dict[str, int]:
    """Words of texts."""
    return {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").split()) for file in files}


def docs_words() -> Row:
    """Pages that people wrote."""
    counts = words(*(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED))
    shown = tuple(f"{name}: {count}" for name, count in counts.items())
    return Row("words in docs/ beside generated pages", sum(counts.values()), 22_000, shown)


def changelog_words() -> Row:
    """Words in CHANGELOG.md."""
    return Row("words in CHANGELOG.md", sum(words(ROOT / "CHANGELOG.md").values()), 400)


def called_found() -> Row:
    """Variables that do not say what they hold."""
    counts: Counter[str] = Counter()
    for name, tree in modules().items():
        counts[name] = sum(
            isinstance(node, ast.Name) and node.id == "found" and isinstance(node.ctx, ast.Store)
            for node in ast.walk(tree)
        )
    shown = tuple(f"{name}: {count}" for name, count in counts.most_common() if count)
    return Row("assignments to a variable called found", counts.total(), 50, shown)


ROWS: tuple[Callable[[], Row], ...] = (
    root_names, lines, most_imports, repeated_names, package_imports, spelled_flags, options_shown, script_files,
    docs_words, changelog_words, called_found,
)  # fmt: skip


def main() -> int:
    """Prints the table; 1 where a goal is not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for each row, with what makes the number")
    parser.add_argument("--details", action="store_true", help="what makes each number, below the table")
    args = parser.parse_args()
    rows = [row() for row in ROWS]
    if args.json:
        for row in rows:
            print(json.dumps(asdict(row) | {"holds": row.holds}))
    else:
        print("| | now | goal |\n|---|---|---|")
        for row in rows:
            print(f"| {row.name} | {row.value:,g}{'' if row.holds else ' (not yet)'} | {row.goal:,g} |")
        for row in rows if args.details else ():
            print(f"\n{row.name}:", *row.details, sep="\n    ")
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
