"""What a rank of a service has of its machine: processor cores, memory that is free, its GPU.

Numbers are the kernel's (``/proc``, ``/sys``) and the CUDA driver's. A container's limit is its cgroup's, which
``/proc/meminfo`` does not know. What is decided from the numbers is in functions of numbers alone. Must not know models
or the service. Never run on a GPU: the CUDA parts are tested with the driver's answers given.
"""

from pathlib import Path

from ptqpipe.errors import UsageError

UNKNOWN_BYTES = 4 << 30  # free memory where the kernel does not say
_CACHE_PART = 4  # of the memory that is free after loading, one part is the cache's
_ROOT = Path("/")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def default_threads(local_ranks: int) -> int:
    """The physical cores less one, for the server, divided among the ranks of this machine; at least 1."""
    from ptqpipe.stages.common.machine import compute_threads

    return max(1, (compute_threads() - 1) // local_ranks)


def device_of(device: str, *, local_rank: int, local_ranks: int) -> str:
    """Where a rank computes: "cuda" is a GPU each, the local rank's. UsageError for one GPU and several ranks."""
    if device == "cuda":
        return f"cuda:{local_rank}"
    if device.startswith("cuda") and local_ranks > 1:
        raise UsageError(f"--device {device} is one GPU for {local_ranks} ranks; use cuda, which is one each")
    return device


def cache_bytes(device: str, *, local_ranks: int) -> int:
    """Keys and values of a rank, where nobody says: a quarter of what is free now, the host's shared by its ranks."""
    if device == "cpu":
        return part_of(available_bytes(), sharing=local_ranks)
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return part_of(free, sharing=1)


def part_of(free: int, *, sharing: int) -> int:
    """Bytes of the cache of each of so many ranks that share ``free`` bytes."""
    return free // _CACHE_PART // sharing


def available_bytes(root: Path = _ROOT) -> int:
    """Memory of the host that this process can get without swapping: what the kernel has, within the cgroup's limits.

    root  where ``proc`` and ``sys`` are
    """
    known = [found for found in (_mem_available(root), cgroup_bytes(root)) if found is not None]
    return min(known, default=UNKNOWN_BYTES)


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_bytes(root: Path = _ROOT) -> int | None:
    """What this process's cgroup, version 1 or 2, and those above it leave; None where nothing limits it.

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
        left += [room(*found) for folder in (own, *own.parents) if (found := _counts(folder, mount, names))]
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
    """Of a file of the kernel's; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
