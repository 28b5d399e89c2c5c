"""Claims about mutation testing of the searches: every mutant of the table still applies, and a mutant is caught."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from ptqpipe.numerics.kernels import cpu

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/mutate_search.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("mutate_search", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["mutate_search"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The script with these options."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        timeout=240,
    )


def test_every_mutant_changes_one_place_of_the_sources(script: ModuleType) -> None:
    mutants = script.table()  # raises for one that does not apply
    assert len(mutants) >= 60
    assert all(mutant.breaks for mutant in mutants)
    for mutant in mutants:
        for test in mutant.tests:
            assert (SCRIPT.parents[1] / test.partition("::")[0]).is_file(), mutant.name


def test_a_mutant_that_applies_nowhere_or_twice_is_an_error(script: ModuleType) -> None:
    broken = script.Mutant("gone", "ptqpipe/numerics/search/objective.py", "no such line", "", "nothing", ())
    with pytest.raises(script.TableError, match=r"'no such line' lies 0 times in ptqpipe/numerics/search/objective.py"):
        broken.line()
    with pytest.raises(script.TableError, match=r"lies [0-9]+ times"):
        script.Mutant("many", "ptqpipe/numerics/search/objective.py", "torch.Tensor", "", "nothing", ()).line()


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the CPU kernels are not built: pip install -e . with a C++ compiler")
def test_a_mutant_is_killed_by_name_and_without_it_the_tests_pass(script: ModuleType, tmp_path: Path) -> None:
    """The oracle of an exact search, told to prefer the larger of two scales of one score."""
    done = run("--only", "brute-tie", "--out", str(tmp_path / "lines"))
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert line["status"] == "killed"
    assert line["killed_by"].startswith("tests/numerics/search/test_brute_force.py::")
    assert done.stderr.strip() == "1 killed"


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the CPU kernels are not built: pip install -e . with a C++ compiler")
@pytest.mark.parametrize("name", ["e8m0-tie", "integers-tie"])
def test_the_search_of_one_instruction_set_compiles_alone(script: ModuleType, tmp_path: Path, name: str) -> None:
    """With the headers that body.h has today: those of short blocks, and those without them."""
    (mutant,) = (mutant for mutant in script.table() if mutant.name == name)
    source = tmp_path / mutant.file
    shutil.copytree(script.ROOT / script.CSRC, source.parent)
    source.write_text(source.read_text().replace(mutant.find, mutant.put))
    assert script.build(tmp_path, mutant, cpu.isas()[0]) == ""
    assert (tmp_path / script.LIBRARY).is_file()


def test_a_survivor_is_named_and_costs_the_exit_code(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    survived = script.Result("lone", "search.h", 7, "nobody looks", "survived", "", "avx2", 1.0, "")
    assert script.report([survived]) == 1
    assert "lone (search.h:7) survived: nobody looks" in capsys.readouterr().err
    assert script.report([]) == 0


@pytest.mark.usefixtures("forks")
def test_an_unknown_name_is_refused() -> None:
    done = run("--only", "nonsense")
    assert done.returncode == 2
    assert done.stderr.strip() == "Error: no mutant is called nonsense; see --list"
