"""The factors of scalings, or learned rotations, alone: what `transform` finds, in a small folder instead of a copy of
the model.

`Source.open` takes the folder for the model with them folded in, computed as it is read. One component after another is
in the journal, so a run that was interrupted goes on behind the last. A folder that is made of another one holds what
that one holds, too. Must not know what is made of it.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint import FOLDING_FILE, Finished, LayerFolder, Mode, read_json_object, resolve_source
from ptqpipe.conversion.job import named_source, records_of
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import Transformation, check_memory, prepare
from ptqpipe.conversion.transform.plan import Component
from ptqpipe.conversion.transform.weights import Weights
from ptqpipe.errors import UsageError
from ptqpipe.models.folded import encoded
from ptqpipe.models.folding import ROTATIONS
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine, one_thread_each, peak_bytes, progress_bar, run_jobs


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

    model  may be such a folder itself

    Raises UsageError for what it would refuse, for rotations that are not learned, and for another dtype than float32.
    """
    begun = time.monotonic()
    with ExitStack() as opened:
        path = resolve_source(str(model))
        source = opened.enter_context(Source.open(path))
        work = prepare(source, out, opened, stats=stats, options=options)
        rotates = any(name in ROTATIONS for name in work.names)
        if rotates != bool(work.units) or work.statistics is None or work.dtype != "fp32":
            raise UsageError(
                f"{options.transforms} has no factors that are folded in while a model is read; use transform"
            )
        check_memory(work, machine or Machine())
        folder = LayerFolder(out, work.run_parts, source=source.reader, index_file=FOLDING_FILE, mode=mode)
        with folder:
            if rotates:
                with one_thread_each():
                    work.learn(folder.done, folder.commit, machine or Machine())
            else:
                _run(work, folder, machine or Machine())
            content = _content(work, folder, path)
            folder.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes())


def _run(work: Transformation, folder: LayerFolder, machine: Machine) -> None:
    """Finds what is not in the journal yet."""
    jobs = _components(work)
    missing = [job for job in jobs if job.id not in folder.done]
    former = [job for job in jobs if job.id in folder.done]
    lock = threading.Lock()
    with one_thread_each(), progress_bar(missing, shown=machine.progress, done=former) as advance:

        def do(job: Component) -> None:
            entry = {"foldings": _foldings(work, job)}
            with lock:
                folder.commit(job.id, entry)
            advance(job)

        run_jobs(missing, do, threads=work.share_of(machine, missing).threads)


def _foldings(work: Transformation, job: Component) -> list[dict[str, Any]]:
    weights = Weights(work.source.reader, work.origins)
    foldings = [folding for name in work.names for folding in work.fold(name, job, weights)]
    return [entry if factors is None else entry | {"factors": encoded(factors)} for entry, factors in foldings]


def _components(work: Transformation) -> list[Component]:
    return [job for job in work.jobs if isinstance(job, Component)]


def _rotations(work: Transformation) -> list[dict[str, Any]]:
    """Of what is learned, the matrices that gain something."""
    rotations = []
    for unit in work.units:
        entry = work.learned[unit.id]
        if entry["record"] is not None and entry["record"]["error"] < entry["record"]["plain_error"]:
            rotations.append({**entry["record"], "matrices": entry["matrices"]})
    return rotations


def _content(work: Transformation, folder: LayerFolder, path: Path) -> Mapping[str, Any]:
    """ptqpipe-folding.json. The model's place is for this machine; nothing that is published has it."""
    done = records_of([] if work.units else _components(work), folder.done)
    former = read_json_object(path / FOLDING_FILE) if (path / FOLDING_FILE).is_file() else {}
    named = {"path": str(work.source.reader.path.absolute()), **named_source(work.source)}
    return {
        "ptqpipe": __version__,
        "run_id": folder.run_id,
        "model": former.get("model", named),
        "transforms": [*former.get("transforms", []), *work.names],
        "foldings": [
            *former.get("foldings", []),
            *_rotations(work),
            *(folding for entry in done for folding in entry["foldings"]),
        ],
    }
