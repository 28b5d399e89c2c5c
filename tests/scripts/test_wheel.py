"""Claims about the wheel: one for every Python 3, of this platform where it has the kernels and of any where not."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools
from setuptools import Distribution

from ptqpipe.numerics.kernels import cpu_library

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "ptqpipe/numerics/kernels/_cpu.so"


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
    assert Path(cpu_library.__file__).parents[3] / LIBRARY == cpu_library.LIBRARY


def build(source: Path, command: str, out: Path) -> Path:
    """The one file that a build command of setuptools writes to ``out``."""
    call = [sys.executable, "setup.py", "-q", command, "-d", str(out)]
    subprocess.run(call, cwd=source, capture_output=True, text=True, timeout=300, check=True)
    (made,) = out.iterdir()
    return made


@pytest.mark.slow
def test_the_wheel_and_the_sources_hold_the_recipes_and_an_installation_finds_them(tmp_path: Path) -> None:
    """Of a copy without the kernels' sources, whose compilation takes minutes."""
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns("csrc", "*.so", "__pycache__")
    shutil.copytree(ROOT / "ptqpipe", tree / "ptqpipe", ignore=left_out)
    shutil.copytree(ROOT / "recipes", tree / "recipes")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml")}

    stale = tree / "build/lib/ptqpipe/recipes/models/stale.yaml"  # of an earlier build
    stale.parent.mkdir(parents=True)
    stale.touch()
    with zipfile.ZipFile(build(tree, "bdist_wheel", tmp_path / "wheel")) as wheel:
        packed = {name.removeprefix("ptqpipe/") for name in wheel.namelist() if name.endswith(".yaml")}
        wheel.extractall(tmp_path / "installed")
    assert {name for name in packed if name.startswith("recipes/")} == recipes
    with tarfile.open(build(tree, "sdist", tmp_path / "sources")) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    assert recipes <= names

    def run(*call: str) -> subprocess.CompletedProcess[str]:
        code = "from ptqpipe.__main__ import run; run()"
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}
        words = [sys.executable, "-c", code, *call]
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    listed = json.loads(run("recipes", "--json").stdout)
    assert {one["file"] for one in listed} == {str(tmp_path / "installed/ptqpipe" / name) for name in recipes}
    shutil.rmtree(tmp_path / "installed/ptqpipe/recipes")
    without = run("recipes")
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr.splitlines() == [
        f"Error: {tmp_path}/installed/ptqpipe/recipes has no recipes; install ptqpipe again, or name a YAML file"
    ]
