"""The checks of a verification that need no weight: names, config, groups, files, the plan."""

import json
from collections.abc import Callable, Mapping
from functools import partial

from ptqpipe.check.verify import claims, config, shared_scales as groups, side_files as files, tensor_fates as structure
from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.repeat import check_conversion, check_input_scales, check_plan, replan
from ptqpipe.check.verify.verification import Verification
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.conversion.input_moments import describe_statistics
from ptqpipe.conversion.record import Record
from ptqpipe.models.source import Source
from ptqpipe.runtime.expected import unlike_model


def check_headers(run: Verification) -> None:
    """Everything that needs no weight: names, config, groups, files, the plan."""
    ckpt, source, findings, record = run.ckpt, run.source, run.findings, run.record
    checks: list[tuple[str, str, Callable[[], None]]] = [
        ("index", "the index", lambda: structure.check_sizes(ckpt, findings)),
        ("config", "config.json", lambda: config.check_config(ckpt, findings)),
        ("config", "config.json", lambda: config.check_model(ckpt, findings)),
        ("config", "config.json", lambda: _check_names(ckpt, findings)),
        ("scales", "global scales", lambda: groups.check_scalars(ckpt, findings)),
        ("groups", "fused groups", lambda: _check_groups(run)),
        ("scales", "kv cache", lambda: groups.check_kv_scales(ckpt, findings)),
        ("names", "tensors", lambda: structure.check_dangling(ckpt, source, findings)),
    ]
    if record is not None:
        own: list[tuple[str, Callable[..., None]]] = [
            ("record", claims.check_itself),
            ("record", claims.check_coverage),
            *([("record", claims.check_float)] if record.plain else []),
            ("files", files.check_written_files),
            ("record", claims.check_identity),
            ("record", partial(claims.check_lists, source=source)),
            *([] if record.plain else [("record", claims.check_rules)]),
        ]
        checks += [(name, RECORD_FILE, partial(check, ckpt, record, findings)) for name, check in own]
    if source is not None:
        checks += _source_checks(run, source, record)
    for name, where, check in checks:
        findings.guard(name, where, check)
    config.check_readers(ckpt, source, findings)
    groups.note_rounded_globals(ckpt, findings)


def _check_names(ckpt: Source, findings: Findings) -> None:
    for line in unlike_model(ckpt):
        findings.fault("config", "config.json", line)


def _source_checks(
    run: Verification, source: Source, record: Record | None
) -> list[tuple[str, str, Callable[[], None]]]:
    ckpt, findings, origins = run.ckpt, run.findings, run.origins
    checks: list[tuple[str, str, Callable[[], None]]] = []
    rewritten: frozenset[str] = frozenset()
    if record is not None and record.plain:
        rewritten = claims.REWRITTEN
        checks.append(("names", "tensors", lambda: claims.check_float_fates(ckpt, source, record, findings)))
    elif origins is not None:
        checks.append(("names", "tensors", lambda: structure.check_fates(ckpt, origins, findings)))
    checks += [
        ("files", "files", lambda: files.check_files(ckpt, source, findings)),
        ("config", "config.json", lambda: structure.check_model_config(ckpt, source, findings, rewritten=rewritten)),
    ]
    if record is not None and record.conversion is not None and ckpt.container is not None:
        checks.append(("plan", RECORD_FILE, lambda: _check_plan(run, source, record)))
    return checks


def _check_groups(run: Verification) -> None:
    """Fused groups by the recorded recipe's own table, where it is one."""
    conversion = run.record.conversion if run.record is not None else None
    fuse = None if conversion is None else conversion["recipe"].get("fuse")
    if isinstance(fuse, list) and all(isinstance(leaves, list) and all(map(_is_text, leaves)) for leaves in fuse):
        groups.check_groups(run.ckpt, run.findings, fuse)
    else:
        groups.check_groups(run.ckpt, run.findings)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_plan(run: Verification, source: Source, record: Record) -> None:
    planned = replan(record, source)
    if record.converted:
        check_plan(run.ckpt, source, record, planned, run.findings)
    check_conversion(source, record, planned, run.findings)
    check_input_scales(run.ckpt, planned, record, run.findings)
    made_with = record.raw.get("statistics")
    if run.statistics is not None:
        if not isinstance(made_with, Mapping) or made_with.get("digest") != run.statistics.digest:
            run.findings.fault("statistics", str(run.statistics.path), "is not what the checkpoint was made with")
            run.statistics = None
        elif made_with != json.loads(json.dumps(describe_statistics(run.statistics))):
            run.findings.fault("record", "statistics", f"differ from those in {run.statistics.path}")
    run.planned = planned
