"""The host's memory: how much of it this process can have, and how malloc keeps what the engine frees.

What is free is the kernel's number (``/proc``, ``/sys``), within the limit of a container's cgroup, which
``/proc/meminfo`` does not know. By itself glibc's malloc gives large blocks back to the system at once and gets fresh
pages for the next ones, which the system must clear: a sixth of a prefill's time on small models. What is kept is what
the largest step needs; of no effect where the C library is another one. Must not know models or a service.
"""

import ctypes
from pathlib import Path

UNKNOWN_BYTES = 4 << 30  # free memory where the kernel does not say
_ROOT = Path("/")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_KEPT = 1 << 30  # bytes


def use_one_arena() -> None:
    """All threads share a heap, which may grow to any size; call it before the first of them starts.

    Heaps of threads are cut into 64 MiB, between which a step's memory comes and goes.
    """
    _set(_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """What is free goes back to the system, once. By itself malloc gives back the end of the heap alone, and between
    the tensors of a packed model lies as much as half their size."""
    _of_malloc("malloc_trim", 0)


def keep_freed_memory() -> None:
    """Blocks below 1 GiB come from the heap from now on, and it does not shrink by less. To be called when a model is
    loaded: what loading has freed goes back first."""
    return_freed_memory()
    _set(_MMAP_THRESHOLD, _KEPT)
    _set(_TRIM_THRESHOLD, _KEPT)


def _set(option: int, value: int) -> None:
    _of_malloc("mallopt", option, value)


def _of_malloc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def available_bytes(root: Path = _ROOT) -> int:
    """Memory of the host that this process can get without swapping: what the kernel has, within the cgroup's limits.

    root  where ``proc`` and ``sys`` are
    """
    limits = [limit for limit in (_mem_available(root), cgroup_bytes(root)) if limit is not None]
    return min(limits, default=UNKNOWN_BYTES)


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_bytes(root: Path = _ROOT) -> int | None:
    """Memory left by the limits of this process's cgroup (version 1 or 2) and its parents; None without a limit.

    A container may see its own cgroup's files at the top whatever its path is called, so missing folders are skipped.
    """
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        own = mount / path.lstrip("/")
        left += [room(*counts) for folder in (own, *own.parents) if (counts := _counts(folder, mount, names))]
    return min(left, default=None)


def room(limit: int, used: int, inactive_file: int) -> int:
    """Bytes left of a limit. Pages of files that nobody has used lately are given back when memory is asked for."""
    return max(0, limit - max(0, used - inactive_file))


def _counts(folder: Path, mount: Path, names: tuple[str, str, str]) -> tuple[int, int, int] | None:
    """(limit, used, inactive pages of files) of one cgroup; None without a limit."""
    if not folder.is_relative_to(mount):
        return None
    limit, used = (_lines(folder / name) for name in names[:2])
    if not limit or not used or limit[0] == "max":
        return None
    stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
    return int(limit[0]), int(used[0]), int(stat.get(names[2], 0))


def _lines(path: Path) -> list[str]:
    """Lines of a file of /proc or /sys; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
