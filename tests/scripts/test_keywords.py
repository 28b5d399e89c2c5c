"""Claims about scripts, labs and examples that no test runs: the functions that they call have their keywords.

Keywords of the Python API are ``**options: Any`` to mypy."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import ptqpipe
from ptqpipe.run.options import Options

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ("recipe", "calibration", "check", "conversion", "pipeline", "pipeline.tune", "serving")
FILES = sorted(file for folder in ("scripts", "labs", "examples") for file in (ROOT / folder).rglob("*.py"))


def keywords() -> dict[str, set[str]]:
    """Name of a function of the Python API, as ``ptqpipe.convert``, or of a class of options -> its keywords."""
    functions = {name: getattr(ptqpipe, name) for name in ptqpipe.__all__}
    known = {f"ptqpipe.{n}": {*inspect.signature(f).parameters} for n, f in functions.items() if inspect.isfunction(f)}
    for package in CLASSES:
        for name, kind in vars(import_module(f"ptqpipe.{package}.options")).items():
            if inspect.isclass(kind) and issubclass(kind, Options):
                known[name] = {one.name for one in fields(kind)}
    return known


KNOWN = keywords()


def wrong_keywords(tree: ast.AST) -> Iterator[str]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (allowed := KNOWN.get(ast.unparse(call.func))):
            yield from (f"{call.lineno}: {one.arg}" for one in call.keywords if one.arg and one.arg not in allowed)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_calls_have_keywords_that_their_functions_have(file: Path) -> None:
    assert list(wrong_keywords(ast.parse(file.read_text()))) == []


def test_a_former_keyword_is_seen() -> None:
    source = "ptqpipe.convert(m, rounding=c)\nTransformOptions('rotate', block=16)\nptqpipe.convert(m, codes=c)"
    assert list(wrong_keywords(ast.parse(source))) == ["1: rounding", "2: block"]
