"""Claims about the wheel: one for every Python 3, of this platform where it has the kernels and of any where not."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools
from setuptools import Distribution

from ptqpipe.kernels import cpu_library

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "ptqpipe/kernels/_cpu.so"


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", given.update)
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), {"__name__": "setup"})
    return given


@pytest.mark.parametrize(("built", "platform"), [(True, "linux_x86_64"), (True, "linux_aarch64"), (False, "any")])
def test_the_tag_names_no_python_and_a_platform_only_where_there_are_kernels(
    described: dict[str, Any], tmp_path: Path, *, built: bool, platform: str
) -> None:
    if built:
        (tmp_path / LIBRARY).parent.mkdir(parents=True)
        (tmp_path / LIBRARY).touch()
    wheel = Distribution({"name": "ptqpipe", **described}).get_command_obj("bdist_wheel")
    wheel.bdist_dir, wheel.plat_name = str(tmp_path), platform if built else "linux-x86_64"
    wheel.plat_name_supplied = wheel.root_is_pure = False
    assert wheel.get_tag() == ("py3", "none", platform)


def test_the_library_is_built_where_the_package_looks_for_it(described: dict[str, Any]) -> None:
    build = Distribution({"name": "ptqpipe", **described}).get_command_obj("build_ext")
    (extension,) = described["ext_modules"]
    assert build.get_ext_filename(extension.name) == LIBRARY
    assert Path(cpu_library.__file__).parents[2] / LIBRARY == cpu_library.LIBRARY


def test_recipes_are_among_the_files_of_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ptqpipe"]
    packed = {path for pattern in patterns for path in (ROOT / "ptqpipe").glob(pattern)}
    assert set((ROOT / "ptqpipe/recipe/recipes").iterdir()) <= packed
