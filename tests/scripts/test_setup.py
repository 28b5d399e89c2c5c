"""scripts/setup.sh: installs once, with the pin in the same pip command, and says in one line what is missing.

The environment here is a fake: its ``python`` is a shell script that writes down how it was called.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/bash
echo "$*" >> "$(dirname "$0")/calls"
[ "$1" = --version ] && echo "Python 3.11.0"
exit 0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what setup.sh reads, with a fake environment in .venv."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    csrc = tmp_path / "ptqpipe/numerics/kernels/csrc"
    csrc.mkdir(parents=True)
    (csrc / "kernel.cpp").write_text("int zero() { return 0; }\n")
    (tmp_path / "ptqpipe/cli.py").write_text("")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.sh in ``tree`` without the caller's own settings of it."""
    kept = {key: value for key, value in os.environ.items() if key not in {"PTQPIPE_VENV", "PYTHON"}}
    return subprocess.run(
        ["bash", "scripts/setup.sh", *arguments],
        cwd=tree,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def installs(tree: Path) -> list[str]:
    """The pip commands that installed the package, as the fake Python was given them, oldest first."""
    lines = (tree / ".venv/bin/calls").read_text().splitlines()
    return [line.partition(" --disable")[0] for line in lines if "pip install" in line and " -e " in line]


def test_the_torch_pin_stands_in_the_command_that_installs_the_package(tree: Path) -> None:
    done = setup(tree, "dev")
    assert done.returncode == 0, done.stderr
    (command,) = installs(tree)
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert f" {pin} " in command
    assert "-c constraints.txt" in command
    assert command.endswith("-e .[dev]")


def test_an_install_says_each_step_with_its_seconds_and_names_its_log(tree: Path) -> None:
    said = setup(tree, "hf").stderr.splitlines()
    assert said[0].endswith(f"what pip says goes to {tree}/.venv/ptqpipe-install.log")
    steps = [re.sub(r"\s+\d+ s$", "", line) for line in said[1:]]
    assert [step.split()[0] for step in steps] == ["torch", "packages", "kernels", "ptqpipe[hf]"]
    assert all(re.search(r" \d+ s$", line) for line in said[1:])


def test_kernels_are_shown_as_they_are_compiled(tree: Path) -> None:
    python = tree / ".venv/bin/python"
    compiles = (
        '[ "$3" = wheel ] && sleep 0.3 && echo "  kernels 3/8: search.cpp 12 s"\n[ "$3" = install ] && sleep 0.3\n'
    )
    python.write_text(FAKE_PYTHON.replace("exit 0", f"{compiles}exit 0"))
    assert "\n  kernels 3/8: search.cpp 12 s\n" in setup(tree, "hf").stderr


def test_a_second_run_installs_nothing(tree: Path) -> None:
    setup(tree, "hf")
    again = setup(tree, "hf")
    assert len(installs(tree)) == 1
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_dev_serves_hf_but_not_the_other_way_round(tree: Path) -> None:
    setup(tree, "hf")
    setup(tree, "dev")
    setup(tree, "hf")
    assert [command.split()[-1] for command in installs(tree)] == [".[hf]", ".[dev]"]


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "constraints.txt", "setup.py", "ptqpipe/numerics/kernels/csrc/kernel.cpp"]
)
def test_what_decides_the_install_causes_one(tree: Path, changed: str) -> None:
    setup(tree, "hf")
    with (tree / changed).open("a") as file:
        file.write("\n")
    setup(tree, "hf")
    assert len(installs(tree)) == 2


def test_a_python_source_causes_none_because_the_install_is_editable(tree: Path) -> None:
    setup(tree, "hf")
    (tree / "ptqpipe/cli.py").write_text("changed = True\n")
    setup(tree, "hf")
    assert len(installs(tree)) == 1


def test_an_install_that_failed_is_tried_again(tree: Path) -> None:
    python = tree / ".venv/bin/python"
    python.write_text(FAKE_PYTHON.replace("exit 0", '[ "$2" != pip ]'))
    failed = setup(tree, "hf")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("setup.sh: torch ")
    assert "failed; the last lines of " in failed.stderr
    repaired = python.with_name("repaired")  # in its place at once: what the first install began may still start it
    repaired.write_text(FAKE_PYTHON)
    repaired.chmod(0o755)
    repaired.replace(python)
    assert setup(tree, "hf").returncode == 0
    assert len(installs(tree)) == 1  # the first one ended before it


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("eval",), {}, "unknown extra 'eval'; expected hf or dev"),
        ((), {"PTQPIPE_VENV": "venv"}, "PTQPIPE_VENV is 'venv'; expected an absolute path"),
        (
            (),
            {"PTQPIPE_VENV": "/nonexistent/venv", "PYTHON": "/bin/false"},
            "no Python 3.11 or newer among: /bin/false",
        ),
    ],
)
def test_a_wrong_call_gets_one_line(
    tree: Path, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    result = setup(tree, *arguments, **environment)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
