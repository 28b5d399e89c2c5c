"""Kills a forked process at its n-th system call that changes the disk."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import ptqpipe.checkpoint.journal as journal_module
import ptqpipe.checkpoint.writer as writer_module

CALLS = ("pwrite", "write", "fsync", "fdatasync", "ftruncate", "rename", "mkdir", "unlink", "rmdir", "open")


class Death:
    """Counts the calls in a child, and kills it at the n-th."""

    def __init__(self, n: int, *, power_cut: bool) -> None:
        self.left = n
        self.power_cut = power_cut
        self.unsynced: dict[int, list[tuple[int, int]]] = {}
        self.journal_sizes: dict[int, int] = {}

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self.counted(name, getattr(os, name)))
        writer_module.fdatasync = os.fdatasync
        journal_module.fdatasync = os.fdatasync

    def counted(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name in ("write", "pwrite"):
                    self.note(name, args)
                    whole(args[0], args[1][: len(args[1]) // 2], *args[2:])
                self.die()
            self.note(name, args)
            return whole(*args, **options)

        return call

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "pwrite":
            self.unsynced.setdefault(args[0], []).append((args[2], len(args[1])))
        elif name in ("fsync", "fdatasync"):
            self.unsynced.pop(args[0], None)
            self.journal_sizes.pop(args[0], None)
        elif name == "write":
            self.journal_sizes.setdefault(args[0], os.fstat(args[0]).st_size)

    def die(self) -> None:
        if self.power_cut:
            self.left = -1  # the counted calls below do not die
            for fd, ranges in list(self.unsynced.items()):
                path = f"/proc/self/fd/{fd}"
                if os.path.exists(path) and os.path.isfile(path):
                    for offset, nbytes in list(ranges):
                        os.pwrite(fd, bytes(nbytes), offset)
            for fd, size in list(self.journal_sizes.items()):
                if os.path.exists(f"/proc/self/fd/{fd}"):
                    os.ftruncate(fd, size)
        os.kill(os.getpid(), signal.SIGKILL)


def dies(n: int, action: Callable[[], None], *, power_cut: bool) -> bool:
    """Runs the action in a fork that dies at its n-th call; False when it came to its end before that."""
    pid = os.fork()
    if pid == 0:
        try:
            Death(n, power_cut=power_cut).install()
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
