"""Who may import whom: the table that keeps the layers of the package apart.

A row names a module or subpackage of ptqpipe and what it may import from ptqpipe; within itself everything may, but for
the packages of `WITHIN`. An import inside a function or under TYPE_CHECKING counts like any other. To widen a row is a
decision about the design. A name that nothing imports any more leaves its row.
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
    "_version": set(),
    "errors": set(),
    "numerics": {"errors"},
    "run": {"errors", "numerics"},
    "checkpoint": {"errors", "numerics", "run"},
    "models": {"errors", "numerics", "run", "checkpoint"},
    "runtime": {"errors", "numerics", "checkpoint", "models"},
    "recipe": {"errors", "numerics", "run", "checkpoint", "models"},
    "calibration": {"_version", "errors", "numerics", "run", "checkpoint", "models", "runtime", "recipe"},
    "quantization": {"errors", "numerics", "checkpoint", "models", "recipe", "calibration"},
    "conversion": {
        "_version", "errors", "numerics", "run", "checkpoint", "models", "runtime", "recipe", "calibration",
        "quantization",
    },
    "check": {
        "_version", "errors", "numerics", "run", "checkpoint", "models", "runtime", "recipe", "calibration",
        "quantization", "conversion",
    },
    "pipeline": {
        "_version", "errors", "numerics", "run", "checkpoint", "models", "runtime", "recipe", "calibration",
        "quantization", "conversion", "check",
    },
    "serving": {"_version", "errors", "numerics", "run", "checkpoint", "models", "runtime"},
    "api": {
        "errors", "numerics", "run", "checkpoint", "models", "runtime", "recipe", "calibration", "quantization",
        "conversion", "check", "pipeline", "serving",
    },
    "cli": {
        "_version", "errors", "run", "checkpoint", "models", "recipe", "calibration", "conversion", "check",
        "pipeline", "serving",
    },
    "__init__": {"_version", "errors", "numerics", "runtime", "api"},
    "__main__": {"run", "cli"},
}

# Packages within those of the table that know less: what each may import from outside itself.
WITHIN: dict[str, set[str]] = {
    "numerics.search": {"errors", "numerics.formats", "numerics.kernels", "numerics.qtensor"},
    "numerics.kernels": {"errors", "numerics.formats", "numerics.qtensor"},
    "checkpoint.layouts": {
        "errors", "numerics.formats", "numerics.kernels", "numerics.qtensor", "numerics.rotation",
        "numerics.schemes", "checkpoint.dtypes", "checkpoint.json_values", "checkpoint.patterns",
        "checkpoint.tensor_names",
    },
    "models.families": {"errors"},
    "models.folding": {"errors", "numerics.rotation", "numerics.schemes", "models.families"},
    "quantization.transforms": {"errors", "models.folding", "calibration.inputs"},
    "calibration.rows": {"errors", "checkpoint", "checkpoint.regular_file", "models.chat_template", "models.images"},
    "recipe.plan": {
        "errors", "numerics.formats", "numerics.schemes", "checkpoint.dtypes", "models.families",
        "models.slices", "recipe.recipe",
    },
    "serving.engine": {"errors", "numerics.kernels", "run.quantities"},
    "serving.server": {"_version", "errors", "models.chat_template", "models.images", "serving.engine"},
    "serving.collectives": {"errors", "numerics.formats", "numerics.kernels", "numerics.qtensor"},
    "serving.vllm_plugin": {
        "errors", "numerics.formats", "numerics.qtensor", "numerics.schemes", "runtime.input_quantizers",
        "runtime.packed", "serving.collectives",
    },
}
# fmt: on

# Third-party packages that only some modules may import: names in dotted form, a package stands for all it holds.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "transformers": (
        "models.chat_renderer",
        "models.chat_template",
        "models.language_model",
        "runtime",
        "calibration",
        "serving",
    ),
    "accelerate": ("runtime",),
    "lm_eval": ("check.evaluate",),
    "click": ("cli",),
    "huggingface_hub": ("checkpoint.hub", "conversion.push"),
    "triton": ("numerics.kernels",),
    "yaml": ("recipe.file", "check.evaluate.harness", "conversion.card"),
    "jinja2": ("check.report",),
    "fastapi": ("serving.server",),
    "starlette": ("serving.server",),
    "pydantic": ("serving.server",),
    "uvicorn": ("serving.server",),
    "prometheus_client": ("serving.server",),
    "greenlet": ("serving.engine.overlap",),
    "psutil": ("run.processes",),
    "PIL": ("models.images",),
    # Readers that the tests compare with. The package must not lean on them.
    "safetensors": ("checkpoint.finish",),
    "compressed_tensors": (),
    "modelopt": (),
    "vllm": ("serving.vllm_plugin",),
    "llmcompressor": (),
    "matplotlib": (),  # draws pictures of the docs
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


def module_of(name: str) -> str:
    """The module of the package that a dotted name is, or is a name in, below ptqpipe."""
    parts = name.split(".")
    while len(parts) > 1 and not (
        PACKAGE.parent.joinpath(*parts).is_dir() or PACKAGE.parent.joinpath(*parts).with_suffix(".py").is_file()
    ):
        parts.pop()
    return ".".join(parts[1:])


def outside(statement: Import, package: str) -> str | None:
    """What an import of ``package``, dotted below ptqpipe, takes from outside of it: the package and the name in it."""
    if not (inside(statement.importer, package) and inside(statement.imported, "ptqpipe")):
        return None
    imported = module_of(statement.imported)
    return None if inside(imported, package) else ".".join(imported.split(".")[:2])


@pytest.mark.parametrize("package", WITHIN)
def test_packages_within_packages_import_what_their_rows_say_and_all_of_it(package: str) -> None:
    assert {name for one in all_imports() if (name := outside(one, package)) is not None} == WITHIN[package]


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
        ("numerics/a.py", "from ptqpipe.numerics.search import b", False),
        ("numerics/a.py", "from . import b", False),
        ("numerics/a.py", "from ..errors import PtqError", False),
        ("numerics/a.py", "from ptqpipe.checkpoint.layouts import modelopt", True),
        ("numerics/a.py", "from .. import checkpoint", True),
        ("numerics/a.py", "from ..checkpoint.layouts import modelopt", True),
        ("numerics/a.py", "import ptqpipe", True),
        ("runtime/a.py", "def f():\n    from ptqpipe.conversion.conversion import Conversion", True),
        ("checkpoint/a.py", "from ptqpipe import numerics", False),
        ("models/a.py", "from ptqpipe import runtime", True),
        ("cli.py", "from ptqpipe.pipeline import command as run", False),
        ("errors.py", "from ptqpipe.numerics.qtensor import QTensor", True),
    ],
)
def test_the_check_sees_imports_of_every_spelling(path: str, source: str, *, crosses: bool) -> None:
    assert any(breaks_layers(statement) for statement in imports_of(source, Path(path))) is crosses


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ptqpipe.numerics.search import exact", None),
        ("from ptqpipe.numerics.kernels.cpu import isa", "numerics.kernels"),
        ("from ptqpipe.errors import PtqError", "errors"),
        ("from ptqpipe.numerics import formats", "numerics.formats"),
    ],
)
def test_the_check_sees_what_a_package_within_takes_from_outside(source: str, expected: str | None) -> None:
    (statement,) = imports_of(source, Path("numerics/search/a.py"))
    assert outside(statement, "numerics.search") == expected


@pytest.mark.parametrize(
    ("path", "source", "crosses"),
    [
        ("calibration/model.py", "import transformers", False),
        ("check/model.py", "import transformers", True),
        ("conversion/a.py", "import transformers", True),
        ("conversion/a.py", "def f():\n    from transformers import AutoModel", True),
        ("pipeline/demo.py", "import lm_eval.tasks", True),
        ("runtime/engine.py", "from transformers import AutoConfig", False),
        ("conversion/a.py", "import click", True),
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
