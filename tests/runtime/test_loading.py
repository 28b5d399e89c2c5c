"""Claims about the import of packages that take seconds: what a terminal shows, and that no cycles are looked for."""

import gc
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ptqpipe.cli import slow_imports as loading


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called slow_one that imports slow_two, both of those that are announced, and broken_one."""
    (tmp_path / "slow_one").mkdir()
    (tmp_path / "slow_one" / "__init__.py").write_text("import slow_two\nvalue = slow_two.value + 1\n")
    (tmp_path / "slow_one" / "part.py").write_text("value = 3\n")
    (tmp_path / "slow_two.py").write_text("value = 1\n")
    (tmp_path / "broken_one.py").write_text("raise ImportError('no such library')\n")
    names = frozenset({"slow_one", "slow_two", "broken_one", "absent_one"})
    monkeypatch.setattr(loading, "_SLOW", names)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    for name in (*names, "slow_one.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loading.watch_imports(shown=True)
    loading.watch_imports(shown=True)  # once is enough


def erased(words: str) -> str:
    return f"\r{words}\r{' ' * len(words)}\r"


@pytest.mark.usefixtures("slow")
def test_an_import_shows_a_line_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("slow_one").value == 2
    assert capsys.readouterr() == ("", erased("loading slow_one ..."))  # what it imports in turn is not said
    assert import_module("slow_one.part").value == 3
    assert capsys.readouterr().err == erased("loading slow_one ...")
    import_module("slow_one")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("slow")
def test_an_import_that_fails_leaves_no_line_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError, match="no such library"):
        import_module("broken_one")
    with pytest.raises(ModuleNotFoundError, match="absent_one"):
        import_module("absent_one")
    assert capsys.readouterr().err == erased("loading broken_one ...")


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("collects", [True, False])
def test_no_cycles_are_looked_for_during_an_import_and_afterwards_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], collects: bool
) -> None:
    loading.watch_imports(shown=False)
    (tmp_path / "slow_two.py").write_text("import gc\nvalue = 10 * gc.isenabled()\n")
    try:
        if not collects:
            gc.disable()
        assert import_module("slow_one").value == 1, "10 more where cycles are looked for"
        with pytest.raises(ImportError, match="no such library"):
            import_module("broken_one")
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert capsys.readouterr() == ("", "")
