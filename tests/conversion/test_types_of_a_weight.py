"""docs/architecture.md names every type that a weight meets on its way through convert, and no other."""

import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ptqpipe
from ptqpipe.checkpoint import writer
from ptqpipe.conversion import job
from ptqpipe.numerics.kernels import cpu

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="no compiled kernels: the searches that replace them differ"
)


def type_of(frame: FrameType) -> set[type]:
    """The classes of a method that is called: of the object, and the one that has the method."""
    code = frame.f_code
    if not code.co_argcount:
        return set()
    first = frame.f_locals.get(code.co_varnames[0])
    kind = first if isinstance(first, type) else type(first)
    owners = [kind] if code.co_name == "<lambda>" and code.co_varnames[0] == "_cls" else []  # makes a NamedTuple
    for base in kind.__mro__:
        method: Any = base.__dict__.get(code.co_name)
        method = getattr(method, "__func__", getattr(method, "fget", getattr(method, "func", method)))
        if getattr(method, "__code__", None) is code:
            owners += [kind, base]
    return set(owners)


def types_that_a_weight_meets(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Public classes of ptqpipe that are made, or whose methods run, while the jobs of a conversion do."""
    met: set[type] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            met.update(type_of(frame))

    def traced(jobs: Sequence[Any], do: Callable[[Any], None], *, threads: int) -> None:
        before = sys.getprofile()
        sys.setprofile(called)
        threading.setprofile(called)
        try:
            real(jobs, do, threads=threads)
        finally:
            threading.setprofile(before)
            sys.setprofile(before)

    ptqpipe.convert(model, out=out / "imports-all", workers=1)
    real = job.run_jobs
    monkeypatch.setattr(job, "run_jobs", traced)
    monkeypatch.setattr(writer, "BATCH_SECONDS", 0.0)  # else a slow machine's journal is written earlier
    ptqpipe.convert(model, out=out / "traced", workers=1)
    ours = {kind for kind in met if kind.__module__.startswith("ptqpipe.")}
    return {kind.__name__ for kind in ours if not kind.__name__.startswith("_")}


@pytest.mark.slow
def test_the_types_that_a_weight_meets_are_listed_in_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    words = text[text.index("## Words to know") : text.index("## One weight")]
    table = set(re.findall(r"^\| ([A-Z]\w+) \|", words, re.MULTILINE))
    more = set(re.findall(r"`([A-Z]\w+)`", words))
    met = types_that_a_weight_meets(ROOT / "ptqpipe" / "demo_model", tmp_path, monkeypatch)
    assert sorted(met - table) == sorted(more)
    assert f"a weight meets {len(met)} types" in words
