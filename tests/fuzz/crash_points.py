"""Kills a command before every event of the file system, and looks whether --resume ends with the same bytes.

    python -m tests.fuzz.crash_points MODEL TEXT --work /tmp/crash
    python -m tests.fuzz.crash_points MODEL TEXT --work /tmp/crash --only best,tune --every 7
    python -m tests.fuzz.crash_points MODEL TEXT --work /tmp/crash --only convert --points 100:140 --twice

MODEL should be tiny, TEXT a file of text or rows for --data. An event is a call that changes a file or a folder in the
work folder: open for writing, write, truncate, sync, rename, remove, make a folder. Point i is a run that dies by
kill -9 before its i-th event, of a write when half of it is done; then the same call with --resume. Every run is a fork
of one process that has the libraries imported, which takes a tenth of a second instead of six.

Prints a JSON line for each point that did not end with the same bytes and nothing beside them, and one for each
command: how many events it has, how many points were walked, what came of them. With --overwrite a point before the
journal has its first line is "not begun": --resume refuses, the former output is untouched, and the same call ends.
The exit code is 1 where anything else came out. Needs no network and no GPU.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # no pool of threads may be there when the process is forked
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import builtins
import hashlib
import io
import json
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

AUDITED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FEW = ("--samples", "4", "--seqlen", "32", "--workers", "1")
LEARN = ("--data", "TEXT", *FEW)

COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "MODEL", "--format", "nvfp4", "--workers", "1"),
    "overwrite": ("convert", "MODEL", "--format", "nvfp4", "--workers", "1", "--overwrite"),
    "fast": ("convert", "MODEL", "--format", "nvfp4", *LEARN, "--quality", "fast"),
    "good": ("convert", "MODEL", "--format", "nvfp4", *LEARN, "--quality", "good"),
    "best": ("convert", "MODEL", "--format", "nvfp4", *LEARN, "--quality", "best"),
    "best overwrite": ("convert", "MODEL", "--format", "nvfp4", *LEARN, "--overwrite"),
    "best w4a4": ("convert", "MODEL", "--format", "nvfp4_w4a4", *LEARN, "--eval", "TEXT", "--report"),
    "self": ("convert", "MODEL", "--format", "nvfp4", "--data", "self", *FEW),
    "budget": ("convert", "MODEL", "--budget", "5bits", *LEARN, "--quality", "fast"),
    "calibrate": ("calibrate", "MODEL", *LEARN, "--moments", "diagonal,full,kl,pairs"),
    "tune": ("tune", "MODEL", *LEARN, "--format", "nvfp4", "--method", "gptq"),
    "dequantize": ("dequantize", "PACKED", "--workers", "1"),
    "relayout": ("relayout", "PACKED", "--container", "modelopt", "--workers", "1"),
    "transform": ("transform", "MODEL", "--transforms", "rotate_residual", "--untie", "--workers", "1"),
}
SAME, NOT_BEGUN = "same bytes", "not begun"


class Events:
    """Counts the events in a folder, and ends the process before one of them."""

    def __init__(self, folder: Path, at: int) -> None:
        self.count, self._folder, self._at = 0, f"{folder.resolve()}/", at

    def install(self) -> None:
        """For the rest of this process."""
        import ptqpipe.checkpoint.journal as journal
        import ptqpipe.checkpoint.writer as writer

        for name in ("write", "pwrite", "fsync", "fdatasync", "posix_fallocate"):
            setattr(os, name, self._counted(getattr(os, name), halves=name.endswith("write")))
        vars(journal)["fdatasync"] = vars(writer)["fdatasync"] = os.fdatasync
        io.open = builtins.open = self._open
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in AUDITED or (event == "open" and not (isinstance(args[2], int) and args[2] & WRITES)):
            return
        at = args[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") and args[-1] >= 0 else None
        if self._is_inside(args[0], at=at):
            self._happens()

    def _is_inside(self, path: Any, *, at: int | None = None) -> bool:
        try:
            where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
            if at is not None and not where.startswith("/"):
                where = os.path.join(os.readlink(f"/proc/self/fd/{at}"), where)
        except OSError:
            return False
        return os.path.abspath(where).startswith(self._folder)

    def _happens(self, half: Callable[[], object] = lambda: None) -> None:
        self.count += 1
        if self.count == self._at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, real: Callable[..., Any], *, halves: bool) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if self._is_inside(fd):
                self._happens(lambda: real(fd, args[0][: len(args[0]) // 2], *args[1:]) if halves else None)
            return real(fd, *args)

        return call

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        """`open` whose files count what they write. Of what is read, and of text, the real one."""
        if not set(mode) & set("wax") or "b" not in mode or buffering == 0 or args or kwargs:
            return _OPEN(file, mode, buffering, *args, **kwargs)
        events = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                if events._is_inside(self.fileno()):
                    whole = super().write
                    events._happens(lambda: whole(memoryview(data)[: len(data) // 2]))
                return super().write(data)

        return io.BufferedWriter(Raw(file, mode.replace("b", "")))


_OPEN = io.open


def run(words: list[str], work: Path, *, at: int = 0) -> tuple[int, int, str]:
    """(exit code or minus the signal, events, the last line) of a call in a fork, which dies before event ``at``."""
    said, counted = work.with_name(f"{work.name}.said"), work.with_name(f"{work.name}.count")
    counted.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(words, work, at, said, counted)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    return code, int(counted.read_text()) if counted.exists() else 0, lines[-1] if lines else ""


def _child(words: list[str], work: Path, at: int, said: Path, counted: Path) -> None:
    from ptqpipe.cli import main

    code = 1
    try:
        fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.argv = ["ptqpipe", *words]
        events = Events(work, at)
        events.install()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        counted.write_text(str(events.count))
    finally:
        os._exit(code)


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file, by its path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Walk:
    """The points of one command."""

    def __init__(self, name: str, values: Mapping[str, str], work: Path, *, twice: bool) -> None:
        self.name, self._work, self._twice = name, work, twice
        self._words = [values.get(word, word) for word in COMMANDS[name]]
        self._replaces = "--overwrite" in self._words
        self._former = Path(values["FORMER"])

    def _call(self, *more: str) -> list[str]:
        words = [word for word in self._words if word != "--overwrite"] if "--resume" in more else self._words
        return [*words, "-q", "-o", str(self._work / "o"), *more]

    def _begin(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        if self._replaces:
            shutil.copytree(self._former, self._work / "o")

    def undisturbed(self) -> int:
        """How many events a run has that nobody stops; its files are what the others are held to."""
        self._begin()
        code, events, said = run(self._call(), self._work)
        if code:
            raise SystemExit(f"{self.name}: {said}")
        self._expected = self._files()
        return events

    def _files(self) -> dict[str, str]:
        """Of the output alone, and the names of what lies beside it."""
        beside = {path.name: "" for path in self._work.iterdir() if path.name != "o"}
        return {**hashes(self._work / "o"), **beside} if (self._work / "o").is_dir() else beside

    def point(self, at: int) -> dict[str, Any]:
        """What came of a kill before event ``at``."""
        self._begin()
        code, _, said = run(self._call(), self._work, at=at)
        if code != -signal.SIGKILL:
            return {"outcome": SAME if code == 0 else f"ended before that event: {said}"}
        left = sorted(path.name for path in self._work.iterdir())
        if self._twice:
            run(self._call("--resume"), self._work, at=1 + at // 2)
        code, _, said = run(self._call("--resume"), self._work)
        found: dict[str, Any] = {"left": left, "code": code, "said": said}
        if code and self._replaces and "--overwrite replaces it" in said:
            if self._files() != hashes(self._former):
                return found | {"outcome": "the former output is not what it was"}
            code, _, said = run(self._call(), self._work)
            return {"outcome": NOT_BEGUN if self._files() == self._expected else "other bytes"}
        if code:
            return found | {"outcome": "refused"}
        files = self._files()
        if files == self._expected:
            return {"outcome": SAME}
        beside = sorted(files.keys() - self._expected.keys())
        return found | {"outcome": f"left behind: {beside}" if beside else "other bytes"}


def points_of(text: str, events: int, every: int) -> Iterator[int]:
    """The points that --points and --every name, from 1 on."""
    first, _, last = text.partition(":")
    return iter(range(int(first or 1), min(int(last or events), events) + 1, every))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--work", type=Path, required=True, help="folder that is emptied for every point")
    parser.add_argument("--only", default="", help=f"commands, with commas between: {'; '.join(COMMANDS)}")
    parser.add_argument("--every", type=int, default=1, help="walk every N-th point")
    parser.add_argument("--points", default=":", help="first:last point")
    parser.add_argument("--twice", action="store_true", help="kill the first --resume, too")
    given = parser.parse_args()
    work = given.work.resolve()
    values = {"MODEL": str(Path(given.model).resolve()), "TEXT": str(Path(given.text).resolve())}
    values |= {name: str(work.with_name(f"{work.name}.{name.lower()}")) for name in ("PACKED", "FORMER")}
    names = [name for name in COMMANDS if not given.only or name in given.only.split(",")] or list(COMMANDS)
    warm(values["MODEL"])
    for name, scheme in (("PACKED", "nvfp4"), ("FORMER", "fp8")):
        shutil.rmtree(values[name], ignore_errors=True)
        run(["convert", values["MODEL"], "--format", scheme, "--workers", "1", "-q", "-o", values[name]], work)
    wrong = 0
    for name in names:
        begun, walk, outcomes = time.monotonic(), Walk(name, values, work, twice=given.twice), Counter[str]()
        events = walk.undisturbed()
        for at in points_of(given.points, events, given.every):
            found = walk.point(at)
            outcomes[found["outcome"]] += 1
            if found["outcome"] not in (SAME, NOT_BEGUN):
                wrong += 1
                print(json.dumps({"command": name, "point": at, **found}), flush=True)
        seconds = round(time.monotonic() - begun, 1)
        summary = {"command": name, "events": events, "walked": outcomes.total(), **outcomes, "seconds": seconds}
        print(json.dumps(summary), flush=True)
    return int(wrong > 0)


def warm(model: str) -> None:
    """Imports what the commands import, and starts no thread."""
    import torch
    import transformers

    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.AutoModelForCausalLM._model_mapping[type(config)]  # imports the model's module


if __name__ == "__main__":
    sys.exit(main())
