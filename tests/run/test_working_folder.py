"""Claims about a working folder full of Python files, such as a downloaded model's: no child process imports one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ptqpipe
from ptqpipe.api.server_process import ServiceProcess
from ptqpipe.errors import UsageError
from ptqpipe.run.processes import own_command, safe_environment
from ptqpipe.serving import vllm
from tests.serving.engine.models import DEMO
from tests.serving.server.test_processes import started

PACKAGES = ("ptqpipe", "torch", "numpy", "transformers", "click", "jinja2", "psutil", "vllm", "sitecustomize")
FORMS = {
    "no PYTHONPATH": None,
    "an empty entry": os.pathsep,
    "a dot": ".",
    "an empty entry before one": f"{os.pathsep}/nowhere",
    "a relative entry": f"..{os.sep}traps{os.pathsep}.{os.sep}",
}


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder: a file for each module of the standard library and some packages, each of which notes that
    it was run. None was when the test ends."""
    folder, mark = tmp_path / "traps", tmp_path / "mark"
    folder.mkdir()
    trap = f"open({str(mark)!r}, 'a').write(__name__ + ' was run by ' + str(__import__('sys').orig_argv) + '\\n')\n"
    for name in (*sys.stdlib_module_names, *PACKAGES):
        (folder / f"{name}.py").write_text(trap)
    (folder / "ptqpipe").mkdir()
    (folder / "ptqpipe" / "__init__.py").write_text(trap)
    monkeypatch.chdir(folder)
    yield folder
    assert not mark.exists(), mark.read_text()


def set_path(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    if path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.parametrize("path", FORMS.values(), ids=list(FORMS))
def test_the_python_of_a_further_process(traps: Path, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    set_path(monkeypatch, path)
    command = [*own_command(), "formats", "--help"]
    done = subprocess.run(command, env=safe_environment(os.environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ptqpipe formats")


@pytest.mark.parametrize("path", [None, os.pathsep], ids=["no PYTHONPATH", "an empty entry"])
def test_the_service_of_the_python_api(traps: Path, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    set_path(monkeypatch, path)
    with pytest.raises(UsageError, match="max_queue=-1 is out of range"):
        ServiceProcess(Path("."), ["--max-queue", "-1"], dict(os.environ), drain_s=1)


@pytest.mark.parametrize("path", FORMS.values(), ids=list(FORMS))
def test_the_launcher_of_vllm(traps: Path, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    """The probe, and what it starts: vLLM is not there, and no vllm.py of the folder takes its place."""
    set_path(monkeypatch, path)
    with pytest.raises(UsageError, match="vLLM is not installed"):
        vllm.find_environment(sys.executable)
    service = vllm.VllmService(".")
    there = vllm.Environment(sys.executable, "0.32.0", plugin=True, cpu=True)
    environment = vllm.environment(service, there, os.environ)
    done = subprocess.run(vllm.command(service, there), env=environment, capture_output=True, text=True, timeout=120)
    assert "No module named 'vllm'" in done.stderr


def test_what_a_command_starts_in_turn(traps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the helper processes of other libraries, which know nothing of this: by their environment."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    code = "import subprocess, sys, ptqpipe.__main__, ptqpipe.cli\n"
    code += "child = [sys.executable, '-c', 'import json, threading, multiprocessing']\n"
    code += "ptqpipe.cli.main = lambda: sys.exit(subprocess.run(child).returncode)\nptqpipe.__main__.run()"
    environment = safe_environment(os.environ)
    del environment["PYTHONSAFEPATH"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_older_python_for_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PROBE", 'print(\'{"vllm": "0.32.0", "plugin": true, "cpu": true, "python": [3, 10]}\')')
    with pytest.raises(UsageError, match=r"is Python 3\.10, .*give vLLM an environment of Python 3\.11 or later"):
        vllm.find_environment(sys.executable)


def test_absolute_entries_of_a_users_path_stay() -> None:
    path = os.pathsep.join(("/a", "", "b", ".", "/c"))
    assert safe_environment({"PYTHONPATH": path, "X": "1"}) == {
        "PYTHONPATH": f"/a{os.pathsep}/c", "PYTHONSAFEPATH": "1", "X": "1",
    }  # fmt: skip
    assert "PYTHONPATH" not in safe_environment({"PYTHONPATH": ""})


@pytest.mark.slow
def test_two_ranks(traps: Path, tmp_path: Path) -> None:
    command = ("-P", "-c", "from ptqpipe.__main__ import run; run()")
    with started(tmp_path, "--tp", "2", command=command) as service:
        assert service.ask().status_code == 200


@pytest.mark.slow
def test_torchruns_ranks_as_the_documents_start_them(traps: Path, tmp_path: Path) -> None:
    command = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    with started(tmp_path, command=(*command, str(Path(sys.executable).with_name("ptqpipe")))) as service:
        assert service.ask().status_code == 200


@pytest.mark.slow
def test_a_service_of_the_python_api_at_work(traps: Path) -> None:
    with ptqpipe.serve(DEMO, workers=1) as service:
        assert service.url
