"""How much there is to know in the package, as numbers: files, functions, classes, imports. Prints a markdown table.

Usage: python scripts/structure.py [FOLDER ...] [--json]

Rows are the package, its stages, and any other folders of Python files given (another project, to compare). Counted
with ast, without importing anything; tests and scripts are not part of the package. Below the table: imports a module,
functions with too many parameters or lines, and the packages of ``stages/`` by size.

- parameters: all that a function names, ``self`` and ``cls`` aside
- nesting: blocks (if, for, while, with, try, match) around the deepest statement of a function
- documented, typed: public functions, classes and modules with a docstring; public functions whose every parameter and
  return have a type
- imports: ``from ptqpipe...`` statements, inside functions and under TYPE_CHECKING too
"""

import argparse
import ast
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ptqpipe"
MOST_LINES, MOST_PARAMETERS = 50, 8
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Function:
    """One function. ``kernel``: of Triton, whose parameters are not chosen freely; ``command``: of click."""

    where: str
    lines: int
    parameters: int
    nesting: int
    kernel: bool
    command: bool


@dataclass(slots=True)
class Structure:
    """What a folder holds."""

    files: list[int] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    classes: int = 0
    dataclasses: int = 0
    public: int = 0
    documented: int = 0
    signatures: int = 0
    typed: int = 0
    imports: int = 0


def structure(folder: Path) -> Structure:
    """The numbers of all Python files below ``folder``."""
    found = Structure()
    for file in sorted(folder.rglob("*.py")):
        if any(part.startswith(".") or part in ("tests", "test") for part in file.relative_to(folder).parts):
            continue
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found.files.append(text.count("\n"))
        _count(tree, found, str(file.relative_to(folder.parent)))
    return found


def _count(tree: ast.Module, found: Structure, name: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ptqpipe":
            found.imports += 1
        elif isinstance(node, ast.ClassDef):
            found.classes += 1
            found.dataclasses += any("dataclass" in _name(decorator) for decorator in node.decorator_list)
        elif isinstance(node, FUNCTIONS):
            decorators = [_name(decorator) for decorator in node.decorator_list]
            found.functions.append(
                Function(
                    where=f"{name}:{node.lineno} {node.name}",
                    lines=(node.end_lineno or node.lineno) - node.lineno + 1,
                    parameters=len([one for one in _parameters(node) if one.arg not in ("self", "cls")]),
                    nesting=_nesting(node.body),
                    kernel=any(decorator.startswith("triton.") for decorator in decorators),
                    command=any(decorator.endswith((".command", ".group")) for decorator in decorators),
                )
            )
    for node in _public(tree):
        found.public += 1
        found.documented += ast.get_docstring(node) is not None
        if isinstance(node, FUNCTIONS):
            found.signatures += 1
            given = [one for one in _parameters(node) if one.arg not in ("self", "cls")]
            found.typed += node.returns is not None and all(one.annotation is not None for one in given)


def _public(tree: ast.Module) -> Iterator[Any]:
    """The module, its public classes and functions, and their public methods."""
    yield tree
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (one for one in node.body if isinstance(one, FUNCTIONS) and not one.name.startswith("_"))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    rest = [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *rest]


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _nesting(body: list[ast.stmt]) -> int:
    """The most blocks around a statement; an elif stands beside its if, a nested function is one of its own."""
    deepest = 0
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        inner += [one for kind in ("handlers", "cases") for part in getattr(node, kind, []) for one in part.body]
        if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            inner.remove(node.orelse[0])
            deepest = max(deepest, _nesting([node.orelse[0]]))
        deepest = max(deepest, _nesting(inner) + isinstance(node, BLOCKS))
    return deepest


def _spread(values: list[int]) -> str:
    """median/90th percentile/largest."""
    ordered = sorted(values) or [0]
    return f"{statistics.median(ordered):g}/{ordered[int(0.9 * (len(ordered) - 1))]}/{ordered[-1]}"


def row(name: str, found: Structure) -> list[str]:
    """One line of the table."""
    functions = found.functions
    many = [f for f in functions if f.parameters > MOST_PARAMETERS]
    return [
        name,
        f"{len(found.files)} / {sum(found.files):,}",
        _spread(found.files),
        _spread([f.lines for f in functions]),
        f"{sum(f.lines > MOST_LINES for f in functions)} of {len(functions)}",
        f"{len(many)} ({max((f.parameters for f in functions), default=0)})",
        _spread([f.nesting for f in functions]),
        f"{found.classes} ({found.dataclasses})",
        f"{100 * found.documented / max(1, found.public):.0f}/{100 * found.typed / max(1, found.signatures):.0f}",
        f"{found.imports / max(1, len(found.files)):.2f}",
    ]


HEAD = ["", "files / lines", "file med/p90/max", "function med/p90/max", f"functions > {MOST_LINES} lines"]
HEAD += [f"> {MOST_PARAMETERS} parameters (max)", "nesting med/p90/max", "classes (dataclasses)", "documented/typed %"]
HEAD += ["own imports a module"]


def report(folders: list[Path]) -> str:
    """The table, and what is longest."""
    rows = [HEAD, ["---"] * len(HEAD)]
    named = [("ptqpipe", PACKAGE), ("of that stages", PACKAGE / "stages"), *((one.name, one) for one in folders)]
    rows += [row(name, structure(folder)) for name, folder in named]
    lines = ["| " + " | ".join(one) + " |" for one in rows]
    whole = structure(PACKAGE)
    many = [f for f in whole.functions if f.parameters > 10 and not f.kernel]
    lines += ["", f"More than 10 parameters, Triton's kernels aside ({len(many)}):"]
    lines += [f"- {f.where}: {f.parameters}" for f in sorted(many, key=lambda f: -f.parameters)]
    long = sorted((f for f in whole.functions if f.lines > 60), key=lambda f: -f.lines)
    lines += ["", f"More than 60 lines ({len(long)}):", *(f"- {f.where}: {f.lines}" for f in long)]
    sizes: Counter[str] = Counter()
    for file in (PACKAGE / "stages").rglob("*.py"):
        sizes[file.relative_to(PACKAGE / "stages").parts[0]] += file.read_text(encoding="utf-8").count("\n")
    lines += ["", "stages: " + ", ".join(f"{name} {count:,}" for name, count in sizes.most_common())]
    return "\n".join(lines)


def main() -> int:
    """Prints the report, or one JSON line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true", help="one line for each row, with every function")
    given = parser.parse_args()
    if given.json:
        for folder in (PACKAGE, PACKAGE / "stages", *given.folders):
            print(json.dumps({"folder": folder.name, **asdict(structure(folder))}))
    else:
        print(report(given.folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
