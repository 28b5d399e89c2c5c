"""What a run of several stages takes of the disk, where it is known before: the output, and codes beside it.

What stages put down besides is small (statistics, factors), or lies on disk only where memory has no room for it.
"""

import shutil
from pathlib import Path

from ptqpipe.checkpoint import Paths
from ptqpipe.errors import OutputError, arg
from ptqpipe.models.source import Source
from ptqpipe.pipeline.presets import QualityPreset
from ptqpipe.run.quantities import disk_size


def codes_bytes(source: Source, preset: QualityPreset | None, *, weights_bytes: int) -> int:
    """What the codes that `tune` finds take at most, until they are in the output: no more than the output.

    weights_bytes  of the output; 0 where a budget decides it, which the size of the source then bounds
    """
    return (weights_bytes or source.reader.nbytes) if preset is not None and preset.method else 0


def check_disk(out: Path, nbytes: int) -> None:
    """OutputError where the disk of ``out`` has less than ``nbytes`` free."""
    place = next(folder for folder in Paths.of(out).out.parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise OutputError(
            f"{place} has {disk_size(free)} free, the output and its codes need {disk_size(nbytes)}; free some space, "
            f"or choose another {arg('out')}"
        )
