"""Claims about the size of the tree: what was reached stays so, and what is counted is what a reader meets."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/structure.py"
# A row joins when its goal is reached.
REACHED = (
    "root_names", "repeated_names", "options_shown", "script_files", "docs_words", "changelog_words", "called_found",
    "spelled_flags", "most_imports",
)  # fmt: skip
AT_MOST = {"package_imports": 5}  # rows on their way to their goal: a number only falls


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", REACHED)
def test_a_goal_that_was_reached_stays_reached(structure: ModuleType, name: str) -> None:
    row = getattr(structure, name)()
    assert row.holds, row


@pytest.mark.parametrize("name", AT_MOST)
def test_a_number_on_its_way_to_its_goal_does_not_grow(structure: ModuleType, name: str) -> None:
    row = getattr(structure, name)()
    assert row.value <= AT_MOST[name], row


def test_a_flag_is_counted_once_a_line_and_not_in_docstrings_or_code(structure: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Knows --nothing."""\n'
        "def f(x):\n"
        '    """Of --this neither."""\n'
        '    say("give --out or "\n'
        '        f"{x} --resume")\n'
        '    say("--a and --b", "no-- flag -- here")\n'
        "    return x - --x\n"
    )
    assert structure.flag_lines(file) == {4, 5, 6}


def test_imports_inside_functions_and_of_modules_by_name_count(
    structure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "ptqpipe/__init__.py": "",
        "ptqpipe/errors.py": "",
        "ptqpipe/run/__init__.py": "from ptqpipe.errors import Error\n",
        "ptqpipe/run/jobs.py": "from ptqpipe import errors\ndef f():\n    from ptqpipe.run.bar import Bar, width\n",
        "ptqpipe/run/bar.py": "import json\nimport ptqpipe.errors\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.setattr(structure, "PACKAGE", tmp_path / "ptqpipe")
    structure.modules.cache_clear()
    structure.imported.cache_clear()
    try:
        assert structure.imported("ptqpipe.run.jobs") == {"ptqpipe.errors", "ptqpipe.run.bar"}
        assert structure.most_imports().value == 2
        assert structure.package_imports().details == ("run: 1", "errors: 0")
    finally:
        structure.modules.cache_clear()
        structure.imported.cache_clear()
