"""What the recorded recipe makes of the source, against what is stored.

The record names the recipe, so the whole plan follows from it and the source's headers: every name, dtype, shape, place
and config key of the checkpoint is compared with it.
"""

import json
from collections.abc import Mapping
from typing import Any

from ptqpipe.checkpoint import RECORD_FILE, run_id_of
from ptqpipe.errors import CheckpointError
from ptqpipe.record import Record, object_of, text_of
from ptqpipe.source import Source
from ptqpipe.stages.common import Outputs, outputs_of
from ptqpipe.stages.verify.claims import check_reasons, conversion_parts, recipe_of
from ptqpipe.stages.verify.findings import Findings


def replan(record: Record, source: Source) -> Outputs:
    """What must have been written. Raises a PtqError where the recorded recipe is none, or makes nothing of this
    source."""
    conversion = record.conversion
    if conversion is None:
        raise CheckpointError(f"{RECORD_FILE} has no recipe")
    recipe, name = recipe_of(object_of(conversion, "recipe")), text_of(conversion, "container", RECORD_FILE)
    return outputs_of(source, recipe, container_name=name)


def check_plan(ckpt: Source, source: Source, record: Record, planned: Outputs, findings: Findings) -> None:
    """Names, dtypes, shapes, places, config files and the run's identity follow from recipe and source."""
    reader, layout = ckpt.reader, planned.layout
    specs = {spec.name: spec for shard in layout.shards for spec in shard.tensors}
    for name in sorted(specs.keys() - reader.entries.keys()):
        findings.fault("plan", name, "should have been written by the recorded recipe, but is missing")
    for name, entry in reader.entries.items():
        spec = specs.get(name)
        if spec is None:
            findings.fault("plan", name, "would not have been written by the recorded recipe")
        elif (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            wanted = f"{spec.dtype} {list(spec.shape)}"
            findings.fault("plan", name, f"is {entry.dtype} {list(entry.shape)}, the recorded recipe writes {wanted}")
        elif (entry.file.relative_to(reader.path).as_posix(), entry.offset) != (
            layout.placements[name].file,
            layout.placements[name].offset,
        ):
            findings.fault("plan", name, "lies at another place than the recorded recipe puts it")
    check_reasons(record, planned.plan, findings, planned.recipe)
    _check_config_files(ckpt, source, record, planned, findings)


def _check_config_files(ckpt: Source, source: Source, record: Record, planned: Outputs, findings: Findings) -> None:
    for name, wanted in planned.configs(source, version=record.raw.get("ptqpipe")).items():
        found = ckpt.reader.read_json(name)
        if found is None:
            findings.fault("config", name, "is missing")
        elif found != json.loads(json.dumps(wanted)):
            findings.fault("config", name, f"differs from what was written in {_where(found, wanted)}")


def _where(found: Any, wanted: Any, path: str = "") -> str:
    """The path of the first difference of two JSON values, with what was found there."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in [*wanted, *(k for k in found if k not in wanted)]:
            if key not in found or key not in wanted:
                return f"{path}{key} ({'missing' if key not in found else 'added'})"
            if found[key] != wanted[key]:
                return _where(found[key], wanted[key], f"{path}{key}.")
    return f"{path.rstrip('.')} ({found!r:.60}, expected {wanted!r:.60})"


def check_conversion(source: Source, record: Record, planned: Outputs, findings: Findings) -> None:
    """The run that converted binds recipe and source to the layout that the recipe makes of it."""
    conversion = record.conversion
    assert conversion is not None  # it was planned again
    raw = {**record.raw, "ptqpipe": conversion.get("ptqpipe", record.raw.get("ptqpipe"))}
    parts = conversion_parts(raw, planned.recipe, layout=planned.layout.digest)
    if conversion.get("run_id") != run_id_of(parts):
        findings.fault("record", RECORD_FILE, "its run_id is not that of its recipe, layout, version and source")
    claimed = record.raw.get("consumed")
    if claimed != sorted(source.consumed):
        findings.fault("record", "consumed", "does not list the parts of the source's own quantized weights")
