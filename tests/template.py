"""Processes with the libraries imported, for tests that start many; see the fixture ``forks`` of conftest.py.

Importing torch and transformers takes a process 3 to 8 s of a core, most of what a small test of a process costs. A
template imports them once and forks; each fork then runs what an interpreter of its own would: its own process id,
files, folder, environment, arguments, signals, and an end in Python's order. It is a child of the process that asked,
not of the template. Nothing of ptqpipe is imported here: a fork imports that itself, and may change it first.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import platform
import runpy
import signal
import site
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIBRARIES = (
    "numpy",
    "torch",
    "torch.distributed.launcher.api",
    "safetensors.torch",
    "tqdm",
    "yaml",
    "click",
    "psutil",
    "prometheus_client",
    "fastapi",
    "uvicorn",
    "accelerate",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
)
_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
# Read by the interpreter, the loader or a library when it starts; what sets them needs a new interpreter.
_READ_ONCE = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "MALLOC_", "TORCH_", "HF_", "TRANSFORMERS_")
# The last is torchrun's.
_NOT_READ_ONCE = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_one_at_a_time = threading.Lock()
_SIGNATURE = inspect.signature(_start)


def begin() -> Callable[..., None]:
    """Starts a template, which ends with this process; its `starter`."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in read_once(environment):  # whatever the test that comes first has changed
        del environment[name]
    environment |= SETTLED
    with there:
        command = [sys.executable, __file__, str(there.fileno())]
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
    return starter(lambda: here, SETTLED)


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that take effect only when an interpreter starts."""
    return {k: v for k, v in environment.items() if k.startswith(_READ_ONCE) and k not in _NOT_READ_ONCE}


# With what a template's libraries are imported: offline as all tests are, and no threads, which no fork would have.
SETTLED = read_once(os.environ) | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def starter(channel: Callable[[], socket.socket | None], settled: dict[str, str]) -> Callable[..., None]:
    """What takes the place of ``subprocess.Popen._execute_child``: forks where it can, else starts as ever.

    channel  gives the socket to a template or to a fork in waiting; None where there is none
    settled  the variables with which the libraries were imported, see `read_once`
    """

    def execute_child(process: Any, *arguments: Any) -> None:
        given = _SIGNATURE.bind(process, *arguments).arguments
        at = channel() if can_fork(given, settled) else None
        if at is None:
            _start(process, *arguments)
        else:
            process.pid = ask(at, given)
            process._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            process._close_pipe_fds(*(given[name] for name in pipes))

    return execute_child


def can_fork(given: dict[str, Any], settled: dict[str, str]) -> bool:
    """Whether a fork can be what Popen was asked for: this interpreter, with nothing that is set before it starts."""
    command = given["args"]
    plain = not (given["shell"] or given["executable"] or given["preexec_fn"] or given["pass_fds"])
    if not plain or isinstance(command, str) or command[0] != sys.executable or parse(command[1:]) is None:
        return False
    return read_once(os.environ if given["env"] is None else given["env"]) == settled


def ask(channel: socket.socket, given: dict[str, Any]) -> int:
    """Sends the request; the process id of who fulfils it."""
    request = {
        "arguments": [os.fspath(argument) for argument in given["args"][1:]],
        "environment": dict(os.environ if given["env"] is None else given["env"]),
        "folder": os.fspath(given["cwd"] or os.getcwd()),
        "session": given["start_new_session"],
    }
    streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    with _one_at_a_time:
        inherited = [own if number == -1 else number for own, number in enumerate(streams)]
        socket.send_fds(channel, [json.dumps(request).encode()], inherited)
        return int(channel.recv(64))


def parse(arguments: Sequence[str]) -> tuple[bool, str, list[str]] | None:
    """Unbuffered; ``-m``, ``-c`` or ""; the arguments from the module, code or file on. None for what is not known."""
    unbuffered = list(arguments[:1]) == ["-u"]
    rest = [os.fspath(argument) for argument in arguments[unbuffered:]]
    rest = rest[1:] if rest[:1] == ["-P"] else rest
    if rest[:1] in (["-m"], ["-c"]) and rest[1:]:
        return unbuffered, rest[0], rest[1:]
    return (unbuffered, "", rest) if rest and not rest[0].startswith("-") else None


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its three files; None when nobody can ask any more."""
    message, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
    return (json.loads(message), streams) if message else None


def fork_beside() -> int:
    """`os.fork`, but the fork is a child of this process's parent, who can wait for it. 0 in the fork."""
    library, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    library.syscall.restype = ctypes.c_long
    python.PyOS_BeforeFork()
    none = ctypes.c_void_p()
    number = ctypes.c_long(_SYS_CLONE[platform.machine()])
    pid: int = library.syscall(number, ctypes.c_long(_CLONE_PARENT | signal.SIGCHLD), none, none, none, none)
    python.PyOS_AfterFork_Child() if pid == 0 else python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def template(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answers requests with the process id of a fork; returns in the forks, with what was asked."""
    while (request := receive(channel)) is not None:
        pid = fork_beside()
        if pid == 0:
            channel.close()
            return request
        for number in request[1]:
            os.close(number)
        channel.send(b"%d" % pid)
    os._exit(0)


def spares(request: tuple[dict[str, Any], list[int]]) -> tuple[dict[str, Any], list[int]]:
    """Forks of this process that wait to be the interpreters it will start, for then it has threads.

    Returns in each of them what was asked of it, in this process what is asked of this one.
    """
    waiting: list[socket.socket] = []
    for _ in range(children(request[0]["arguments"])):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for one in (here, *waiting):
                one.close()
            for stream in request[1]:
                os.close(stream)
            return wait(there)
        there.close()
        waiting.append(here)
    if waiting:
        settled = read_once(request[0]["environment"])
        subprocess.Popen._execute_child = starter(lambda: waiting.pop(0) if waiting else None, settled)  # type: ignore[attr-defined]
    return request


def wait(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A spare's part: the request for it. Ends the process when the one that would start it is gone."""
    request = receive(channel)
    if request is None:
        os._exit(0)
    channel.send(b"%d" % os.getpid())
    channel.close()
    return request


def children(arguments: list[str]) -> int:
    """How many interpreters a command starts: the other ranks of ``ptqpipe serve``, or those of torchrun."""
    for option, less in (("--tp", 1), ("--nproc-per-node", 0)):
        if option in arguments:
            count = arguments[arguments.index(option) + 1]
            return max(0, int(count) - less) if count.isdigit() else 0
    return 0


def become(request: dict[str, Any], streams: list[int], site_path: list[str]) -> tuple[str, str]:
    """Makes this process the one that was asked for, up to its main module: the kind and the name of that."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered, kind, arguments = parse(request["arguments"]) or (False, "", [])
    open_streams(unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(os.path.abspath(arguments[0])))
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    safe = "-P" in request["arguments"][:2] or bool(os.environ.get("PYTHONSAFEPATH"))
    sys.path[:] = [*([] if safe else [first]), *(os.path.abspath(entry) for entry in more if entry), *site_path]
    sys.argv[:] = [kind, *arguments[1:]] if kind else arguments
    sys.orig_argv[:] = [sys.executable, *request["arguments"]]
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    return kind, arguments[0]


def open_streams(unbuffered: bool) -> None:
    """Python's own three streams anew: what they are open on decides what they can do."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)


def main() -> None:
    """Imports, forks and, in a fork, does what was asked."""
    site_path, channel = sys.path[1:], socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; those who ask end the template
    sys.modules["triton"] = None  # type: ignore[assignment]  # torch asks for it; its C++ part calls what is frozen leaked
    for name in LIBRARIES:
        importlib.import_module(name)
    del sys.modules["triton"]
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a library started a thread, which no fork would have")
    gc.freeze()  # a fork neither looks through what it did not make nor copies it to do so
    run_and_end(*become(*spares(template(channel)), site_path))


def run_and_end(kind: str, name: str) -> None:
    """Runs the main module and ends the process as an interpreter does, but without taking modules apart.

    That would copy nearly every page that the fork shares: 0.2 s of a core. Who ends by an exception has Python's own
    end, and so has who cannot write its last words.
    """
    code = 0
    try:
        run(kind, name)
        flush()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not flush():
        sys.exit(code)
    os._exit(code & 0xFF)


def flush() -> bool:
    """Writes what is left for standard output and error; whether that went."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def run(kind: str, name: str) -> None:
    """Runs the module, the code or the file as ``__main__``."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), module.__dict__)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
