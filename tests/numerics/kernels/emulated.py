"""A plugin of pytest: the kernels of another processor, run by an emulator, under the same tests as those of this one.

``PTQPIPE_EMULATED=COMMAND python -m pytest -p tests.numerics.kernels.emulated ...``, where COMMAND starts the program
of ``emulated.cpp``, built for that processor, with a library of kernels that was. `scripts/check_aarch64.py` does it
all.
"""

import ctypes
import os
import shlex
import struct
import subprocess
import threading
from typing import Any

import pytest

_MOVED = 1 << 46  # of an address: what the other process knows it by
_PAGE = 4096
_MOST_ARGUMENTS = 8


def pytest_configure(config: pytest.Config) -> None:
    """Puts the emulated library in the place of this machine's. Before any module of tests asks for it."""
    from ptqpipe.numerics.kernels import cpu_library  # not before conftest.py has prepared the process

    library = EmulatedLibrary(shlex.split(os.environ["PTQPIPE_EMULATED"]))
    assert not cpu_library.library.cache_info().currsize, "the library of this machine is in use already"
    cpu_library._built = lambda: (library, library.ptq_abi())  # type: ignore[assignment]
    assert cpu_library.known_isas(), "it has no kernels for the processor that is emulated"
    config.stash[_LIBRARY] = library


_LIBRARY = pytest.StashKey["EmulatedLibrary"]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the emulator."""
    if _LIBRARY in config.stash:
        config.stash[_LIBRARY].close()


def pytest_report_header() -> str:
    """Which kernels these tests are of."""
    from ptqpipe.numerics.kernels import cpu_library

    return f"kernels: {', '.join(cpu_library.known_isas())} of {os.environ['PTQPIPE_EMULATED']}"


class EmulatedLibrary(ctypes.CDLL):
    """What `ctypes.CDLL` is for a library, with functions that another process runs on the memory of this one."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        self._lock = threading.Lock()
        self._functions: dict[str, EmulatedFunction] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("ptq_"):
            raise AttributeError(name)
        if name not in self._functions:
            if not self.run(name, [], call=False):
                raise AttributeError(name)
            self._functions[name] = EmulatedFunction(self, name)
        return self._functions[name]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._memory)

    def run(self, name: str, arguments: list[int], *, call: bool = True) -> int:
        """The result of a call, 64 bits; without one, whether there is such a function."""
        padded = arguments + [0] * (_MOST_ARGUMENTS - len(arguments))
        with self._lock:
            self._send(struct.pack("<Q", len(name)), name.encode(), struct.pack("<Q8Q", call, *padded))
            while (kind := self._receive(1)) != b"r":
                address, size = struct.unpack("<2Q", self._receive(16))
                if kind == b"p":
                    self._give(name, address ^ _MOVED, size)
                else:
                    ctypes.memmove(address ^ _MOVED, self._receive(size), size)
            return int(struct.unpack("<q", self._receive(8))[0])

    def _give(self, name: str, address: int, pages: int) -> None:
        try:
            found = os.pread(self._memory, pages * _PAGE, address)
        except OSError:
            found = b""
        self._send(struct.pack("<Q", len(found)), found)
        assert found, f"{name} reads or writes at {address:#x}, where there is no memory"

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(parts))
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        assert len(found) == size, f"the emulator ended with {self._process.wait()}"
        return found


class EmulatedFunction:
    """A function of the library."""

    restype: Any = ctypes.c_int

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: Any) -> int:
        kept: list[Any] = []
        numbers = [_number(argument, kept) for argument in arguments]
        return int(self.restype(self._library.run(self._name, numbers)).value)


def _number(argument: Any, kept: list[Any]) -> int:
    """An argument as the other process gets it. What it points to stays as long as ``kept``."""
    if isinstance(argument, bytes):
        kept.append(ctypes.create_string_buffer(argument))
        return _moved(kept[-1])
    if isinstance(argument, ctypes.c_int64):
        return argument.value & (1 << 64) - 1
    value = getattr(argument, "_obj", argument)  # what byref() refers to
    if isinstance(value, (ctypes.Array, ctypes.Structure)):
        value = type(value).from_buffer_copy(value)
        for job in value if isinstance(value, ctypes.Array) else [value]:
            _move_pointers(job, kept)
    kept.append(value)
    return _moved(value)


def _move_pointers(job: Any, kept: list[Any]) -> None:
    """Every address in a struct as the other process knows it, and those in what it points to: the one list of
    addresses there is, and codes to compare with."""
    if type(job).__name__ == "ptq_collective" and job.messages:
        messages = (ctypes.c_void_p * job.ranks).from_address(job.messages)
        kept.append((ctypes.c_void_p * job.ranks)(*(at and at ^ _MOVED for at in messages)))
        job.messages = ctypes.addressof(kept[-1])
    if type(job).__name__ == "ptq_decode" and job.other:
        kept.append(type(job).from_buffer_copy(type(job).from_address(job.other)))
        _move_pointers(kept[-1], kept)
        job.other = ctypes.addressof(kept[-1])
    for name, kind in job._fields_:
        at = getattr(job, name)
        if kind is ctypes.c_void_p and at:
            setattr(job, name, at ^ _MOVED)


def _moved(value: Any) -> int:
    return ctypes.addressof(value) ^ _MOVED
