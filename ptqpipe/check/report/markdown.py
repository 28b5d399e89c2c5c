"""A report as compact markdown, for model cards. Names from files are escaped: no markup of theirs survives."""

import re
from collections.abc import Iterable, Sequence

from ptqpipe.check.report import MARKDOWN_MARK, error_charts as errors, numbers, roles
from ptqpipe.check.report.content import Report, pooled_mse
from ptqpipe.check.report.roles import shown
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.run.quantities import decibels, disk_size

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")


def escaped(text: str) -> str:
    """Text that markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", shown(text)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def code(text: str) -> str:
    """A name in code style; where it holds a backtick or a bar, which would end it, escaped text instead."""
    name = shown(text)
    return f"`{name}`" if name and not set(name) & set("`|<>&\\") else escaped(name)


def render_markdown(report: Report) -> str:
    """The markdown."""
    rows = roles.by_role(report)
    blocks = [
        MARKDOWN_MARK,
        f"## Quantization of {escaped(report.name)}",
        _summary(report),
        _quality(report),
        _roles(report, rows),
        _scales(rows),
        _worst(report),
        _kept(report),
        _provenance(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """A markdown table; the first columns are text, the others numbers."""
    rule = ["---" if i < text_columns else "---:" for i in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _summary(report: Report) -> str:
    before = disk_size(report.before_bytes) + ("" if report.before_measured else " in bfloat16")
    part = 100 * report.after_bytes / report.before_bytes if report.before_bytes else 100.0
    lines = [f"- **{report.verdict[0]}**: {escaped(report.verdict[1])}"] if report.verdict is not None else []
    lines += [f"- {escaped(line)}" for line in report.headline]
    lines.append(f"- {disk_size(report.after_bytes)} of tensors, from {before} ({part:.1f} %)")
    lines.append(
        f"- {report.bits_per_weight:.3f} bits per quantized weight ({len(report.weights)} weights, "
        f"{numbers.count(report.quantized_params)} of {numbers.count(report.params)} numbers), "
        f"{report.bits_overall:.2f} over the whole model"
    )
    if report.versus_rtn is not None:
        count = sum(weight.versus_rtn is not None for weight in report.weights)
        lines.append(
            f"- output error {numbers.ratio(report.versus_rtn)} times that of plain rounding, on {report.judged}, mean "
            f"over {count} calibrated weights"
        )
    if report.blocks:
        lines.append(
            f"- output error of the decoder layers {numbers.ratio(mean_known(b.ratio for b in report.blocks))} times "
            f"that of {report.blocks_from}, on {report.blocks_judged}, mean over {len(report.blocks)}"
        )
    error = decibels(pooled_mse(report.weights))
    if error is not None and report.versus_rtn is None and not report.blocks:
        how = "recomputed from the source" if report.errors_from == "source" else "as recorded at conversion"
        lines.append(f"- weight error {error:.2f} dB (relative MSE {numbers.sci(pooled_mse(report.weights))}), {how}")
    if report.proof.claimed is None or report.provable:
        lines.append(f"- {_proof(report)}")
    return "\n".join([*lines, *(f"- note: {escaped(note)}" for note in report.notes)])


def _proof(report: Report) -> str:
    proof = report.proof
    if proof.claimed is None:
        return "whether the block scales are optimal is unknown (no record of the search)"
    text = f"block scales of {proof.claimed} of {report.provable} weights proven optimal"
    if proof.worse:
        return f"{text} by the record, but brute force finds {proof.worse} of {proof.checked:,} blocks that are not"
    return f"{text}, checked by brute force on {proof.checked:,} blocks" if proof.checked else text


def _quality(report: Report) -> str:
    evaluation = report.evaluation
    if evaluation is None:
        return ""
    lines = []
    for p in evaluation["perplexity"]:
        cells = [numbers.plain(p["checkpoint"]), numbers.plain(p["baseline"]), numbers.signed(p["difference"])]
        lines.append([f"perplexity, {escaped(p['data'])}", *cells])
    for d in evaluation["kl"]:
        lines.append([f"mean KL, {escaped(d['data'])} (nats)", numbers.sci(d["mean"]), "0", "–"])
    for t in evaluation["tasks"]:
        recovery = "–" if t["recovery"] is None else f"{t['recovery']:.2f} %"
        name = f"{escaped(t['task'])} ({escaped(t['metric'])})"
        lines.append([name, numbers.plain(t["checkpoint"], 4), numbers.plain(t["baseline"], 4), recovery])
    against = f" against {escaped(evaluation['baseline'])}" if evaluation["baseline"] else ""
    return f"### Quality{against}\n\n" + table(
        ["metric", "this checkpoint", "baseline", "difference or recovery"], lines
    )


def _roles(report: Report, rows: Sequence[roles.RoleRow]) -> str:
    names = report.choice_names
    calibrated = report.versus_rtn is not None
    body = []
    for row in rows:
        by_name = {c.name: c.versus_absmax for c in row.choices}
        mse = pooled_mse(row.weights)
        cells = [code(row.role), row.format, str(len(row.weights))]
        cells += [numbers.ratio(mean_known(w.versus_rtn for w in row.weights))] if calibrated else []
        cells += [numbers.db(row.sqnr_db), numbers.sci(mse)]
        body.append(cells + [numbers.ratio(by_name.get(name)) for name in names if name != "abs-max"])
    head = ["role", "format", "weights", *(["output error / plain rounding"] if calibrated else [])]
    head += ["SQNR dB", "relative MSE", *(f"{name} vs abs-max" for name in names if name != "abs-max")]
    return "### Weights\n\n" + table(head, body, text_columns=2)


def _scales(rows: Sequence[roles.RoleRow]) -> str:
    body = []
    for row in rows:
        c = row.codes
        shares = ((c.largest, c.elements), (c.zero, c.elements), (c.saturated, c.blocks), (c.subnormal, c.blocks))
        body.append([code(row.role), row.format, *(numbers.share(part, whole) for part, whole in shares)])
    head = ["role", "format", "weights at largest code", "weights at zero", "largest scale", "subnormal scale"]
    return "### Clipping and underflow\n\n" + table(head, body, text_columns=2)


def _worst(report: Report) -> str:
    worst = errors.worst_weights(report)
    if not worst:
        return ""
    body = [[code(w.name), w.format, numbers.db(w.sqnr_db), numbers.sci(w.relative_mse)] for w in worst]
    return "### Worst weights\n\n" + table(["weight", "format", "SQNR dB", "relative MSE"], body, text_columns=2)


def _kept(report: Report) -> str:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for kept in report.kept:
        groups.setdefault((kept.role, kept.dtype, kept.reason), []).append(kept.nbytes)
    if not groups:
        return ""
    body = [
        [code(role), dtype, escaped(reason) or "–", str(len(sizes)), disk_size(sum(sizes))]
        for (role, dtype, reason), sizes in groups.items()
    ]
    return "### Kept\n\n" + table(["role", "dtype", "reason", "tensors", "size"], body, text_columns=3)


def _provenance(report: Report) -> str:
    rules = [f"- {code(match)}: {escaped(scheme)}, {escaped(how)}" for match, scheme, how in report.rules]
    facts = [f"- {escaped(what)}: {code(value)}" for what, value in report.provenance]
    recipe = ["### Recipe", "", *rules, ""] if rules else []
    return "\n".join([*recipe, "### Provenance", "", *facts])
