"""Tables of the convert command: the plan before, the outcome after. Text for a terminal, dicts for JSON."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from ptqpipe.checkpoint.tensor_names import name_pattern, role_of
from ptqpipe.conversion.bias_correction import BIAS_REASON
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.job import WriteResult
from ptqpipe.conversion.output_error import (
    can_be_proven,
    chosen_by_data,
    judged_by,
    judgement,
    mean_known,
    tuned_blocks,
)
from ptqpipe.errors import arg, one_line
from ptqpipe.models.model_kind import has_tokenizer, may_continue_text
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.schemes import Activation
from ptqpipe.quantization.learned_codes import TRAINED_REASON
from ptqpipe.recipe.plan import pattern_hint, unmatched_patterns
from ptqpipe.recipe.recipe import BY_RECIPE, IGNORED
from ptqpipe.run.machine import WORKER_BYTES, Machine
from ptqpipe.run.quantities import disk_size, memory_size, number, option_size, option_size_above, sqnr_db, table


def header_text(work: Conversion, machine: Machine) -> str:
    """What is about to happen, in a few lines, with everything that is kept."""
    return "\n".join([*_what(work), *_slowdowns(work, machine), *_kept(work)])


def _what(work: Conversion) -> list[str]:
    source_bytes = work.source.reader.nbytes
    layout, plan = work.layout, work.outputs.plan
    lines = [f"{work.source.reader.path} -> {work.out}  ({work.outputs.container_name})"]
    lines += [f"  {scheme.describe()}" for scheme in work.outputs.recipe.schemes()]
    lines += _input_scale(work)
    count = sum(len(unit.members) for unit in plan.units)
    shards = f"{len(layout.shards)} files" if len(layout.shards) > 1 else "1 file"
    lines.append(
        f"  {count} weights in {len(plan.units)} units to quantize, {len(plan.kept)} tensors kept; "
        f"{disk_size(source_bytes)} -> {disk_size(layout.file_bytes)} "
        f"({layout.file_bytes / source_bytes:.3f}x) in {shards}"
    )
    return [*lines, *(f"  warning: {line}" for line in warnings_of(work))]


def _input_scale(work: Conversion) -> list[str]:
    """Where the static scales of activations come from, for schemes that have one."""
    recipe = work.outputs.recipe
    static = [scheme.activation for scheme in recipe.schemes() if scheme.needs_input_global_scale]
    if not static:
        return []
    if work.statistics is not None:
        times = "" if recipe.headroom == 1 else f" x {recipe.headroom:g}"
        return [
            f"  input_global_scale: each layer's own from the statistics, {recipe.input_scale}{times} of its "
            f"activations ({arg('input_scale')}, {arg('headroom')})"
        ]
    lines = []
    for activation in dict.fromkeys(static):
        amax = recipe.largest_input(activation)
        small = "blocks" if activation is Activation.NVFP4_STATIC_GLOBAL else "values"
        lines.append(
            f"  input_global_scale: no calibration, so one constant for every layer: activations up to {amax:g} do "
            f"not clip, {small} below {number(amax / 28672, 2)} lose precision ({arg('input_amax')})"
        )
    return lines


def _slowdowns(work: Conversion, machine: Machine) -> list[str]:
    """What makes the run slower than was asked for: fewer workers than ``workers``, no compiled kernels."""
    lines = []
    share = work.share_of(machine, work.jobs)
    wanted = min(machine.workers, len(work.jobs))
    least, neediest = work.least_memory()
    if share.workers < wanted:
        enough = least + (wanted - 1) * WORKER_BYTES
        lines.append(
            f"  {share.workers} units at a time, not {wanted}: {arg('max_memory', option_size(machine.memory_bytes))} "
            f"allows no more; {arg('max_memory', option_size_above(enough))} would"
        )
    at_once = share.workers if neediest is None else work.at_once(neediest, share)
    if neediest is not None and at_once < share.workers:
        lines.append(
            f"  units that need as much memory as {one_line(neediest.id, limit=300)} run {at_once} at a time; raise "
            f"{arg('max_memory')} to run more"
        )
    missing = cpu.why_missing() if machine.device.type == "cpu" else ""
    if missing:
        lines.append(f"  compiled kernels: {missing}; torch's operations run instead, many times slower")
    return lines


def warnings_of(work: Conversion) -> list[str]:
    """Warnings before the run: patterns without a match, and what readers get wrong."""
    plan = work.outputs.plan
    unused = [
        f"{pattern!r} of the recipe matches no tensor; {pattern_hint(pattern, plan) or 'is it a typo?'}"
        for pattern in unmatched_patterns(plan, work.outputs.recipe)
    ]
    if work.outputs.recipe.bias_correction and not any(kept.reason == BIAS_REASON for kept in plan.kept):
        unused.append("bias_correction changes nothing: no quantized weight has a bias of its own")
    return [*unused, *_decoded(work), *work.warnings]


def _decoded(work: Conversion) -> list[str]:
    """That weights which the source stores quantized are kept, and so become floats, though nobody asked for it."""
    stored, on_request = work.source.stored, (IGNORED, BY_RECIPE)
    decoded = [kept for kept in work.outputs.plan.kept if kept.name in stored and kept.reason not in on_request]
    if not decoded:
        return []
    name, reason = one_line(decoded[0].name, limit=300), one_line(decoded[0].reason, limit=300)
    return [
        f"{len(decoded)} weights that the source stores quantized become bfloat16, {name} ({reason}) among them; "
        f"`ptqpipe relayout` carries codes to another container as they are, and another {arg('format')} may fit"
    ]


def missing_config(work: Conversion) -> str | None:
    """The warning that a source without config.json deserves, None for one that has it."""
    if work.source.reader.has_config:
        return None
    return (
        f"{work.source.reader.path} has no config.json: transformers, vLLM and SGLang cannot load what is made of it, "
        "and what its family keeps is not known; put the model's config.json there and convert again"
    )


def missing_tokenizer(work: Conversion) -> str | None:
    """The warning that the source of a language model without tokenizer deserves, None for others."""
    path = work.source.reader.path
    if not work.source.reader.has_config or has_tokenizer(path) or not may_continue_text(work.source.reader.config):
        return None
    return (
        f"{path} has no tokenizer: eval, serve and vLLM need its files beside what is made of the model; copy them "
        "there and convert again, or into the output"
    )


def _kept(work: Conversion) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kept in work.outputs.plan.kept:
        groups[(name_pattern(kept.name), name_pattern(kept.reason))].append(kept.name)
    lines = ["kept as they are:"]
    for (pattern, reason), names in groups.items():
        shown = one_line(names[0], limit=300) if len(names) == 1 else f"{pattern} (x{len(names)})"
        lines.append(f"  {shown}: {'not quantized, but ' * (reason == TRAINED_REASON)}{reason}")
    lines += [f"  {name}: not carried over, {why}" for name, why in _left_out(work)]
    return lines


def _left_out(work: Conversion) -> list[tuple[str, str]]:
    return [(str(path.name), why) for path, why in work.source.reader.left_out.items()]


def plan_text(work: Conversion, machine: Machine) -> str:
    """The dry run: the fate of every tensor, exact sizes, memory."""
    units = work.outputs.plan.units
    of_rule = {id(unit.rule): unit for unit in units}  # one of each: tens of thousands of units have few rules
    codes = {rule: (unit.scheme.fmt.name, unit.search) for rule, unit in of_rule.items()}
    counted = Counter((name_pattern(unit.id), *codes[id(unit.rule)], unit.members[0].shape) for unit in units)
    body = [[*row, "x".join(map(str, shape)), str(count)] for (*row, shape), count in counted.items()]
    fates = table(["unit", "format", "search", "first shape", "count"], body, left=3)
    least, neediest = work.least_memory()
    workers = work.share_of(machine, work.jobs).workers
    tail = (
        f"writes {work.layout.file_bytes} bytes ({disk_size(work.layout.file_bytes)}) of weights and index; at most "
        f"{memory_size(work.most_memory(machine))} of memory with {workers} workers"
    )
    short = []
    if neediest is not None and least > machine.memory_bytes:
        short = [f"needs {arg('max_memory', option_size_above(least))}, for {neediest.id}"]
    return "\n".join([*_what(work), *_slowdowns(work, machine), fates, *_kept(work), tail, *short])


def plan_json(work: Conversion, machine: Machine) -> dict[str, Any]:
    return {
        "source": str(work.source.reader.path),
        "out": str(work.out),
        "container": work.outputs.container_name,
        "units": [
            {
                "id": unit.id,
                "format": unit.scheme.fmt.name,
                "scheme": unit.scheme.name,
                "search": unit.search,
                "weights": {m.weight: list(m.shape) for m in unit.members},
            }
            for unit in work.outputs.plan.units
        ],
        "kept": {kept.name: kept.reason for kept in work.outputs.plan.kept},
        "warnings": warnings_of(work),
        "bytes": work.layout.file_bytes,
        "files": list(work.layout.weight_files),
        "memory_bytes": machine.memory_bytes,
        "least_memory_bytes": work.least_memory()[0],
    }


def by_role(weights: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The record's weights summed by role and format, in the order of their first appearance.

    versus_rtn  output error relative to that of plain rounding, mean over the calibrated weights; None without any
    held_out    whether that is of held-out samples
    proven      whether all scales are proven optimal; None where codes are not the nearest ones, which it is about
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for name, weight in weights.items():
        groups[(role_of(name), weight["format"])].append(weight)
    rows = []
    for (role, fmt), members in groups.items():
        energy = sum(m["energy"] for m in members)
        squared = sum(m["squared_error"] for m in members)
        elements = sum(m["shape"][0] * m["shape"][1] for m in members)
        baseline = sum(m["squared_error"] / m["versus_absmax"] for m in members if m["versus_absmax"])
        provable = [m for m in members if can_be_proven(m.get("algorithm", ""), m.get("weighting", ""))]
        calibrated = [m for m in members if "versus_rtn" in m]
        rows.append(
            {
                "role": role,
                "format": fmt,
                "count": len(members),
                "elements": elements,
                "versus_rtn": mean_known(m["versus_rtn"] for m in calibrated),
                "held_out": all(m["held_out"] for m in calibrated) if calibrated else None,
                "bits_per_weight": sum(m["bits_per_weight"] * m["shape"][0] * m["shape"][1] for m in members)
                / elements,
                "relative_mse": squared / energy if energy else 0.0,
                "sqnr_db": sqnr_db(squared / energy if energy else 0.0),
                "versus_absmax": squared / baseline if baseline else 1.0,
                "proven": all(m["proven"] for m in provable) if provable else None,
            }
        )
    return rows


def converted_json(done: WriteResult) -> dict[str, Any]:
    """The outcome as data: output errors relative to plain rounding's first, where anything was calibrated or tuned."""
    weights = done.record["weights"]
    return done.to_json(
        versus_rtn=mean_known(entry.get("versus_rtn") for entry in weights.values()),
        judged_on=judged_by(weights) if _calibrated(weights) else None,
        reverted=sum(entry["reverted"] for entry in _calibrated(weights)),
        tuned_blocks={block.name: block.ratio for block in tuned_blocks(done.record)},
        roles=by_role(weights),
        kept=len(done.record["kept"]),
        not_finite=kept_not_finite(done.record),
        certificate=done.record.get("certificate"),
        rechecked_blocks=_rechecked(done.record["weights"]),
        source_bytes=done.source_bytes,
        warnings=list(done.warnings),
    )


def converted_text(done: WriteResult) -> str:
    """The closing table, and by what it is to be judged."""
    return "\n".join(
        [
            *judgement(done.record),
            _roles_table(by_role(done.record["weights"]), by_data=chosen_by_data(done.record)),
            *_looked_at(done.record["weights"]),
            *(
                [f"compared with the weights below 8 bits of the source: {done.record['certificate']}"]
                if "certificate" in done.record
                else []
            ),
            *kept_damaged(done.record),
            f"Done: {done.out} {disk_size(done.written_bytes)} ({done.written_bytes / done.source_bytes:.2f}x), "
            f"{done.seconds:.1f} s, peak {memory_size(done.peak_rss_bytes)}",
        ]
    )


def _roles_table(roles: list[dict[str, Any]], *, by_data: bool) -> str:
    """What the roles are judged by: the error of the weights, but where data chose codes the output error, since data
    let that of the weights grow where inputs are small. Columns that say nothing of any role are left out."""
    calibrated = any(row["versus_rtn"] is not None for row in roles)
    provable = any(row["proven"] is not None for row in roles)
    proven = {True: "optimal", False: "no", None: "-"}
    rows = []
    for row in roles:
        error = [f"{row['sqnr_db']:.2f}", f"{row['versus_absmax']:.3f}"]
        ratio = "-" if row["versus_rtn"] is None else f"{row['versus_rtn']:.3f}"
        bits = f"{row['bits_per_weight']:.3f}"
        cells = [row["role"], row["format"], *([proven[row["proven"]]] if provable else [])]
        cells += [ratio] if calibrated else []
        rows.append([*cells, str(row["count"]), *([] if by_data else error), bits])
    head = ["role", "format", *(["proven"] if provable else [])]
    head += ["output error"] if calibrated else []
    head += ["count", *([] if by_data else ["SQNR dB", "vs abs-max"]), "bits"]
    return table(head, rows, left=2 + provable)


def _calibrated(weights: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entry for entry in weights.values() if "versus_rtn" in entry]


def kept_damaged(record: Mapping[str, Any]) -> list[str]:
    """A warning of each tensor that is kept with NaN or infinities."""
    return [
        f"warning: {one_line(name)} is kept and has {numbers}; the source checkpoint is damaged"
        for name, numbers in kept_not_finite(record).items()
    ]


def kept_not_finite(record: Mapping[str, Any]) -> dict[str, str]:
    """Kept tensors with NaN or infinities, and how many."""
    return {name: entry["not_finite"] for name, entry in record["kept"].items() if "not_finite" in entry}


def _rechecked(weights: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(entry["rechecked"] for entry in weights.values())


def _looked_at(weights: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many blocks were re-checked by brute force, where a search promised anything."""
    some = sum(entry["rechecked"] > 0 for entry in weights.values())
    if not some:
        return []
    return [
        f"re-checked by brute force: {_rechecked(weights)} blocks of {some} of {len(weights)} weights, no difference"
    ]
