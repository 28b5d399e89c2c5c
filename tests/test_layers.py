"""Who may import whom: the table that keeps the layers of the package apart.

A row names a module or subpackage of ptqpipe and what it may import from ptqpipe; within itself everything may. An
import inside a function or under TYPE_CHECKING counts like any other. To widen a row is a decision about the design. A
name that nothing imports any more leaves its row.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ptqpipe"

# fmt: off
MAY_IMPORT: dict[str, set[str]] = {
    "_version":     set(),
    "json_values":  set(),
    "dtypes":       set(),
    "errors":       set(),
    "quantities":   {"errors"},
    "patterns":     set(),
    "rotation":     set(),
    "inputs":       {"rotation"},
    "regular_file": set(),
    "tensor_names": {"errors"},
    "images":       {"errors", "regular_file"},
    "families":     {"errors"},
    "formats":      {"errors"},
    "options":      {"errors"},
    "processes":    {"errors"},
    "schemes":      {"errors", "formats"},
    "qtensor":      {"errors", "formats"},
    "global_scale": {"errors", "formats"},
    "kernels":      {"errors", "formats", "qtensor"},
    "search":       {"errors", "formats", "qtensor", "kernels"},
    # An algorithm chooses scales by the name of a search, so it knows the lookup in search/__init__.py.
    "algorithms":   {
        "errors", "formats", "schemes", "qtensor", "global_scale", "kernels", "search", "options", "inputs",
    },
    "transforms":   {"errors", "families", "inputs", "rotation", "schemes"},
    "containers":   {
        "dtypes", "errors", "formats", "schemes", "qtensor", "kernels", "patterns", "rotation", "tensor_names",
        "json_values",
    },
    "checkpoint":   {"dtypes", "errors", "quantities", "regular_file"},
    "readers":      {"errors", "schemes"},
    "machine":      {"errors", "quantities", "kernels"},
    "recipe":       {"errors", "families", "schemes", "patterns", "regular_file", "options"},
    "plan":         {"dtypes", "errors", "families", "formats", "schemes", "recipe"},
    "folded":       {"dtypes", "errors", "checkpoint", "transforms"},
    "source":       {"errors", "formats", "qtensor", "checkpoint", "containers", "plan", "folded", "rotation"},
    "origins":      {"errors", "schemes", "containers", "plan", "recipe", "source"},
    "card":         {"errors", "quantities", "regular_file", "checkpoint", "evaluation", "record", "source"},
    "record":       {"errors", "regular_file", "checkpoint", "containers"},
    "scan":         {"algorithms", "formats", "global_scale", "qtensor", "report", "source"},
    "measured":     {"formats", "qtensor", "global_scale", "kernels", "search", "source"},
    "statistics":   {"errors", "checkpoint", "inputs"},
    "rounding":     {"errors", "formats", "qtensor", "checkpoint"},
    # The child imports nothing of the package, and is started by its path.
    "chat_renderer": set(),
    "chat_template": {"errors", "processes"},
    "rows":         {"chat_template", "checkpoint", "errors", "images", "regular_file"},
    "calibration":  {
        "errors", "families", "formats", "images", "inputs", "qtensor", "checkpoint", "plan", "source", "statistics",
        "runtime", "rotation", "rows",
    },
    "runtime":      {
        "dtypes", "errors", "families", "formats", "schemes", "qtensor", "kernels", "containers", "checkpoint", "plan",
        "rotation", "source",
    },
    "evaluation":   {"_version", "errors", "quantities", "regular_file", "checkpoint", "rows"},
    # The engine is given a model; a server is given an engine. Neither knows files, formats or each other's business.
    "engine":       {"errors", "kernels", "quantities"},
    "server":       {"_version", "chat_template", "errors", "engine", "images"},
    "report":       {"errors", "quantities"},
    "collectives":  {"errors", "formats", "qtensor", "kernels"},
    # Runs inside vLLM, beside vLLM's own transformers: nothing that imports ours.
    "vllm_plugin":  {"errors", "formats", "schemes", "qtensor", "collectives", "runtime"},
    # What convert, relayout, dequantize and transform share, and what tune and verify add to it. They know no command.
    "rewriting":    {
        "_version", "algorithms", "card", "checkpoint", "containers", "dtypes", "errors", "families", "inputs",
        "machine", "measured", "options", "plan", "qtensor", "quantities", "readers", "recipe", "rotation",
        "rounding", "schemes", "source", "statistics", "tensor_names",
    },
    "tuning":       {
        "_version", "algorithms", "calibration", "checkpoint", "dtypes", "errors", "evaluation", "global_scale",
        "inputs", "kernels", "machine", "options", "plan", "qtensor", "quantities", "recipe", "rewriting", "rotation",
        "rounding", "runtime", "schemes", "source", "statistics",
    },
    "verification": {
        "card", "checkpoint", "containers", "dtypes", "errors", "families", "formats", "json_values", "measured",
        "origins", "plan", "qtensor", "quantities", "recipe", "record", "regular_file", "rewriting", "rounding",
        "search", "source", "statistics", "tensor_names",
    },
    "stages":       {
        "_version", "dtypes", "errors", "formats", "schemes", "qtensor", "regular_file", "global_scale",
        "families", "kernels", "search", "algorithms", "transforms", "chat_template", "containers", "checkpoint",
        "recipe", "plan", "source", "origins", "record", "folded", "measured", "statistics", "rounding", "calibration",
        "runtime", "evaluation", "report", "engine", "server", "collectives", "options", "inputs", "processes",
        "quantities", "readers", "rotation", "rows", "scan", "card", "machine", "tensor_names", "json_values",
        "rewriting", "tuning", "verification",
    },
    "api":          {
        "errors", "formats", "schemes", "qtensor", "algorithms", "source", "options", "stages", "checkpoint",
        "evaluation", "quantities", "rows", "runtime", "machine", "processes", "rewriting", "tuning",
    },
    "cli":          {
        "_version", "checkpoint", "errors", "machine", "processes", "quantities", "stages", "options", "rewriting",
        "tuning",
    },
    "__main__":     {"cli", "processes"},
    # The face of the package: names that load on first use (see the test of torch below).
    "__init__":     {"_version", "errors", "qtensor", "api", "runtime"},
}
# fmt: on

# Within stages a command's folder (or file) may import itself, ``common``, and what a row adds.
COMMANDS: dict[str, set[str]] = {
    "demo": {"convert", "verify"},
    "report": {"evaluate", "inspect", "verify"},
    "pipeline": {"calibrate", "convert", "evaluate", "generate", "plan", "report", "transform", "tune", "verify"},
    "transform": {"dequantize"},
    "tune": {"convert"},
}

# Third-party packages that only some modules may import: names in dotted form, a package stands for all it holds.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "transformers": ("calibration", "chat_renderer", "chat_template", "runtime", "engine", "stages.serve"),
    "accelerate": ("calibration",),
    "lm_eval": ("evaluation",),
    "click": ("cli",),
    "huggingface_hub": ("checkpoint.source", "stages.push"),
    "triton": ("kernels",),
    "yaml": ("recipe.file", "evaluation.harness", "card"),
    "jinja2": ("report",),
    "matplotlib": (),
    "fastapi": ("server",),
    "starlette": ("server",),
    "pydantic": ("server",),
    "uvicorn": ("server",),
    "prometheus_client": ("server",),
    "greenlet": ("engine.overlap",),
    "psutil": ("processes",),
    "PIL": ("images",),
    # Readers that the tests compare with. The package must not lean on them.
    "safetensors": (),
    "compressed_tensors": (),
    "modelopt": (),
    "vllm": ("vllm_plugin",),
    "llmcompressor": (),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: ``importer`` (dotted, below ptqpipe) imports ``imported`` (dotted, from the root)."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"ptqpipe.{self.importer}:{self.line} imports {self.imported}"


def imported_names(node: ast.AST, folder: tuple[str, ...]) -> list[str]:
    """Absolute dotted names that a node imports; ``from a import b`` gives ``a.b``, which may be a name in ``a``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
        base = ".".join(part for part in (origin, node.module) if part)
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def imports_of(source: str, path: Path) -> Iterator[Import]:
    """The imports in ``source``, the text of the module at ``path`` (relative to the folder of the package)."""
    importer = ".".join((*path.parts[:-1], path.stem))
    folder = ("ptqpipe", *path.parts[:-1])
    for node in ast.walk(ast.parse(source)):
        for name in imported_names(node, folder):
            yield Import(importer, name, getattr(node, "lineno", 0))


@cache
def all_imports() -> list[Import]:
    """Every import statement of the package."""
    found: list[Import] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += imports_of(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE))
    return found


def inside(name: str, package: str) -> bool:
    """Whether the dotted ``name`` is ``package`` or lies in it."""
    return name == package or name.startswith(package + ".")


def breaks_layers(statement: Import) -> bool:
    """Whether an import crosses the table ``MAY_IMPORT``. The bare ``import ptqpipe`` does: it hides what is meant."""
    if not inside(statement.imported, "ptqpipe"):
        return False
    layer = statement.importer.split(".")[0]
    target = [*statement.imported.split("."), "__init__"][1]
    return target != layer and target not in MAY_IMPORT.get(layer, set())


def breaks_third_party(statement: Import) -> bool:
    """Whether an import of another distribution stands outside the places that ``ONLY_IN`` gives it."""
    places = ONLY_IN.get(statement.imported.split(".")[0])
    return places is not None and not any(inside(statement.importer, place) for place in places)


def test_every_module_has_a_row_in_the_table() -> None:
    layers = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert layers - MAY_IMPORT.keys() == set()


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()
    while ready := {layer for layer, below in MAY_IMPORT.items() if layer not in done and below <= done}:
        done |= ready
    assert done == MAY_IMPORT.keys()


@pytest.mark.slow
def test_layers_import_only_what_lies_below_them() -> None:
    assert [str(statement) for statement in all_imports() if breaks_layers(statement)] == []


def layer_pairs() -> set[tuple[str, str]]:
    """(layer, other layer that it imports), of every import statement within the package."""
    own = [statement for statement in all_imports() if inside(statement.imported, "ptqpipe")]
    return {(one.importer.split(".")[0], [*one.imported.split("."), "__init__"][1]) for one in own}


@pytest.mark.slow
def test_layers_import_all_that_their_rows_say() -> None:
    pairs = layer_pairs()
    assert [
        (name, other) for name, row in MAY_IMPORT.items() for other in sorted(row) if (name, other) not in pairs
    ] == []


def command_of(name: str) -> str | None:
    """The command that a dotted module of stages belongs to."""
    parts = name.removeprefix("ptqpipe.").split(".")
    return parts[1] if parts[0] == "stages" and len(parts) > 1 else None


def breaks_commands(statement: Import) -> bool:
    """Whether an import crosses the table ``COMMANDS``."""
    importer, imported = command_of(statement.importer), command_of(statement.imported)
    if importer is None or imported is None or importer == "__init__":
        return False
    return imported not in {importer, "common"} | COMMANDS.get(importer, set())


def test_commands_import_only_what_their_rows_say() -> None:
    assert [str(statement) for statement in all_imports() if breaks_commands(statement)] == []


def test_commands_import_all_that_their_rows_say() -> None:
    pairs = {(command_of(statement.importer), command_of(statement.imported)) for statement in all_imports()}
    assert [(name, other) for name, row in COMMANDS.items() for other in row if (name, other) not in pairs] == []


@pytest.mark.parametrize(
    ("path", "source", "crosses"),
    [
        ("pipeline/budget/command.py", "from ptqpipe.pipeline.budget import cost", False),
        ("pipeline/budget/command.py", "from ptqpipe.run.quantities import sqnr_db", False),
        ("pipeline/budget/command.py", "from ptqpipe.check.verify.command import verify", True),
        ("stages/common.py", "from ptqpipe.stages import convert", True),
        ("pipeline/demo.py", "from ptqpipe.check.verify import command as run", False),
    ],
)
def test_the_check_sees_imports_between_commands(path: str, source: str, *, crosses: bool) -> None:
    assert any(breaks_commands(statement) for statement in imports_of(source, Path(path))) is crosses


def test_third_party_packages_are_imported_in_their_places_only() -> None:
    assert [str(statement) for statement in all_imports() if breaks_third_party(statement)] == []


def test_third_party_packages_are_imported_in_all_their_places() -> None:
    places = [(package, place) for package, row in ONLY_IN.items() for place in row]
    used = [(statement.imported.split(".")[0], statement.importer) for statement in all_imports()]
    vacuous = [
        (package, place)
        for package, place in places
        if not any(package == imported and inside(importer, place) for imported, importer in used)
    ]
    assert vacuous == []


@pytest.mark.parametrize(
    ("path", "source", "crosses"),
    [
        ("search/a.py", "from ptqpipe.numerics.search import b", False),
        ("search/a.py", "from . import b", False),
        ("search/a.py", "from ..formats import CODECS", False),
        ("search/a.py", "from ptqpipe.checkpoint.layouts import modelopt", True),
        ("search/a.py", "from .. import containers", True),
        ("search/a.py", "from ..containers.modelopt import f", True),
        ("search/a.py", "import ptqpipe", True),
        ("runtime/a.py", "def f():\n    from ptqpipe.conversion.conversion import convert", True),
        ("checkpoint/a.py", "from ptqpipe import formats", True),
        ("cli.py", "from ptqpipe.stages import convert", False),
        ("formats.py", "from ptqpipe.numerics.qtensor import QTensor", True),
    ],
)
def test_the_check_sees_imports_of_every_spelling(path: str, source: str, *, crosses: bool) -> None:
    assert any(breaks_layers(statement) for statement in imports_of(source, Path(path))) is crosses


@pytest.mark.parametrize(
    ("path", "source", "crosses"),
    [
        ("calibration/model.py", "import transformers", False),
        ("evaluation/model.py", "import transformers", True),
        ("stages/convert.py", "import transformers", True),
        ("stages/convert.py", "def f():\n    from transformers import AutoModel", True),
        ("pipeline/demo.py", "import lm_eval.tasks", True),
        ("runtime/engine.py", "from transformers import AutoConfig", False),
        ("stages/convert.py", "import click", True),
        ("cli.py", "import click", False),
    ],
)
def test_the_check_sees_third_party_imports(path: str, source: str, *, crosses: bool) -> None:
    assert any(breaks_third_party(statement) for statement in imports_of(source, Path(path))) is crosses


@pytest.mark.parametrize("module", ["ptqpipe", "ptqpipe.cli"])
def test_importing_does_not_load_torch(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    loaded = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert module in loaded
    assert loaded & {"torch", "numpy", "safetensors", "transformers"} == set()
