"""The factors of scalings, or learned rotations, alone: what `transform` finds, in a small folder instead of a copy of
the model.

`Source.open` takes the folder for the model with them folded in, computed as it is read. One component after another is
in the journal, so a run that was interrupted goes on behind the last. A folder that is made of another one holds what
that one holds, too.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint import FOLDING_FILE, Finished, LayerFolder, Mode, read_json_object, resolve_source
from ptqpipe.conversion.job import named_source
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import check_memory, prepare
from ptqpipe.conversion.transform.transformation import Transformation
from ptqpipe.errors import UsageError
from ptqpipe.models.folding import ROTATIONS
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine, one_thread_each, peak_bytes


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
        with folder, one_thread_each():
            work.find(folder.done, folder.commit, machine or Machine())
            content = _content(work, folder, path)
            folder.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes())


def _gains(folding: Mapping[str, Any]) -> bool:
    """Whether a folding is worth its place: a rotation is that has less error than none."""
    return "matrices" not in folding or folding.get("error", 0.0) < folding.get("plain_error", 0.0)


def _content(work: Transformation, folder: LayerFolder, path: Path) -> Mapping[str, Any]:
    """ptqpipe-folding.json. The model's place is for this machine; nothing that is published has it."""
    former = read_json_object(path / FOLDING_FILE) if (path / FOLDING_FILE).is_file() else {}
    named = {"path": str(work.source.reader.path.absolute()), **named_source(work.source)}
    return {
        "ptqpipe": __version__,
        "run_id": folder.run_id,
        "model": former.get("model", named),
        "transforms": [*former.get("transforms", []), *work.names],
        "foldings": [
            *former.get("foldings", []),
            *(folding for folding in work.foldings() if _gains(folding)),
        ],
    }
