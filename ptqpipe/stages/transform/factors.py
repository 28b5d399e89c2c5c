"""The factors of scalings alone: what `transform` finds, as a small folder instead of a float copy of the model.

`Source.open` takes the folder for the model with the factors folded in, computed as it is read. One component after
another is in the journal, so a run that was interrupted goes on behind the last. Must not know what is made of it.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint import FOLDING_FILE, BlockFolder, Finished, Mode, resolve_source
from ptqpipe.errors import UsageError
from ptqpipe.folded import encoded
from ptqpipe.machine import Machine, one_thread_each, peak_bytes, progress_bar, run_jobs
from ptqpipe.rewriting import named_source, records_of
from ptqpipe.source import Source
from ptqpipe.stages.transform.plan import Component, TransformOptions
from ptqpipe.stages.transform.run import Transformation, prepare
from ptqpipe.stages.transform.weights import Weights
from ptqpipe.transforms import ROTATIONS


def find_factors(
    model: str | Path,
    out: Path,
    *,
    stats: Path,
    options: TransformOptions,
    mode: Mode = "new",
    machine: Machine | None = None,
) -> Finished:
    """Writes a folder of the factors that `transform` would fold in.

    Raises UsageError for what it would refuse, for rotations, and for another dtype than float32.
    """
    begun = time.monotonic()
    with ExitStack() as opened:
        source = opened.enter_context(Source.open(resolve_source(str(model))))
        work = prepare(source, out, opened, stats=stats, options=options)
        if any(name in ROTATIONS for name in work.names) or work.statistics is None or work.dtype != "fp32":
            raise UsageError(f"{options.apply} has no factors that are folded in while a model is read; use transform")
        folder = BlockFolder(out, work.run_parts, source=source.reader, index_file=FOLDING_FILE, mode=mode)
        with folder:
            _run(work, folder, machine or Machine())
            content = _content(work, folder)
            folder.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes())


def _run(work: Transformation, folder: BlockFolder, machine: Machine) -> None:
    """Finds what is not in the journal yet."""
    jobs = _components(work)
    left = [job for job in jobs if job.id not in folder.done]
    former = [job for job in jobs if job.id in folder.done]
    lock = threading.Lock()
    with one_thread_each(), progress_bar(left, shown=machine.progress, done=former) as advance:

        def do(job: Component) -> None:
            entry = {"foldings": _foldings(work, job)}
            with lock:
                folder.commit(job.id, entry)
            advance(job)

        run_jobs(left, do, threads=work.share_of(machine, left).threads)


def _foldings(work: Transformation, job: Component) -> list[dict[str, Any]]:
    weights = Weights(work.source.reader, work.origins)
    found = [folding for name in work.names for folding in work.fold(name, job, weights)]
    return [entry if factors is None else entry | {"factors": encoded(factors)} for entry, factors in found]


def _components(work: Transformation) -> list[Component]:
    return [job for job in work.jobs if isinstance(job, Component)]


def _content(work: Transformation, folder: BlockFolder) -> Mapping[str, Any]:
    """ptqpipe-folding.json. The model's place is for this machine; nothing that is published has it."""
    done = records_of(_components(work), folder.done)
    return {
        "ptqpipe": __version__,
        "run_id": folder.run_id,
        "model": {"path": str(work.source.reader.path.absolute()), **named_source(work.source)},
        "transforms": list(work.names),
        "foldings": [folding for entry in done for folding in entry["foldings"]],
    }
