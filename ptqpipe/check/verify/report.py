"""The report of a verification: what was found, weight by weight, as text for a terminal and as JSON."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptqpipe.check.verify.findings import Finding
from ptqpipe.check.verify.weight_checks import WeightReport
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.checkpoint.json_values import finite
from ptqpipe.checkpoint.tensor_names import name_pattern, role_of
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.errors import arg
from ptqpipe.numerics.search.proof import Optimality
from ptqpipe.run.quantities import disk_size, number, sqnr_db, table

SHOWN = 6  # findings of one kind that the text lists
MOST_FAULTS = 10  # that the text lists unless all are asked for


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification. ``ok`` when there is no fault; notes do not count.

    own         whether the checkpoint says that ptqpipe wrote it
    foreign     whether its record says that it was made from another model than ``source``
    tuned       what its record says that tune gained, a line
    kept        tensors that are not quantized, ``kept_bytes`` of them
    """

    ckpt: Path
    source: Path | None
    container: str
    own: bool
    optimal: bool
    findings: tuple[Finding, ...]
    weights: tuple[WeightReport, ...]
    kept: int
    kept_bytes: int
    seconds: float
    foreign: bool = False
    tuned: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings that make the checkpoint wrong."""
        return tuple(finding for finding in self.findings if finding.fault)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that do not."""
        return tuple(finding for finding in self.findings if not finding.fault)

    @property
    def ok(self) -> bool:
        """Whether there is no fault; what the command exits with."""
        return not self.faults


def header(ckpt: Path, source: Path | None, nbytes: Sequence[int]) -> str:
    """Lines about the coming checks; ``nbytes`` of each tensor."""
    against = "by itself, without its source" if source is None else f"against {source}"
    return f"checking {ckpt}, {len(nbytes)} tensors in {disk_size(sum(nbytes))}, {against}"


def render(report: VerifyReport, *, all_faults: bool = False) -> str:
    """The report as text: what was checked, errors by role, then faults and notes, similar ones together.

    all_faults  lists each fault; otherwise at most `MOST_FAULTS` lines of them
    """
    if report.foreign and report.faults:
        lines = [_not_the_source(report), ""]
    else:
        lines = [_headline(report), *(f"  {line}" for line in report.tuned), ""]
        lines += [_weights_table(report), ""] if report.weights else []
    if report.faults:
        lines += ["faults:", *_faults(report.faults, all_faults=all_faults), ""]
    if report.notes:
        lines += ["notes:", *_grouped(report.notes), ""]
    return "\n".join([*lines, _verdict(report)])


def _not_the_source(report: VerifyReport) -> str:
    return (
        f"{report.source} is not the model that {report.ckpt} was made from: the fingerprint in {RECORD_FILE} is "
        f"another model's; give that model as {arg('source')}"
    )


def _faults(faults: Sequence[Finding], *, all_faults: bool) -> list[str]:
    if all_faults:
        return [_line(fault) for fault in faults]
    lines = _grouped(faults)
    if len(lines) <= MOST_FAULTS:
        return lines
    return [*lines[:MOST_FAULTS], f"  ... {len(faults)} faults in all; {arg('all_faults', True)} lists each of them"]


def _headline(report: VerifyReport) -> str:
    maker = "written by ptqpipe" if report.own else "not written by ptqpipe"
    against = "without its source: errors and missing tensors are not checked"
    if report.source is not None:
        against = f"against {report.source}"
    kept = f"{report.kept} tensors kept ({disk_size(report.kept_bytes)})"
    return (
        f"{report.ckpt}  ({report.container}, {maker})\n  {against}\n  {len(report.weights)} weights quantized, {kept}"
    )


def _weights_table(report: VerifyReport) -> str:
    """Errors by role, where any were measured: of the weights, or of the output where data chose codes, which let the
    error of the weights grow where inputs are small."""
    groups: dict[tuple[str, str], list[WeightReport]] = defaultdict(list)
    for weight in report.weights:
        groups[(role_of(weight.name), weight.format)].append(weight)
    calibrated = any(w.versus_rtn is not None for members in groups.values() for w in members)
    by_data = calibrated or not all(w.nearest for w in report.weights)
    measured = not by_data and any(w.relative_mse is not None for w in report.weights)
    rows = []
    for (role, fmt), members in groups.items():
        errors = [w.relative_mse for w in members if w.relative_mse is not None]
        proofs = [w.optimality for w in members if w.optimality is not None]
        mean, versus = _together(members) if errors else (None, None)
        output = mean_known(w.versus_rtn for w in members)
        cells = [
            "-" if mean is None else f"{sqnr_db(mean):.2f}",
            number(max(errors)) if errors else "-",
            "-" if versus is None else f"{versus:.3f}",
        ]
        rows.append(
            [
                role,
                fmt,
                str(len(members)),
                *(["-" if output is None else f"{output:.3f}"] if calibrated else []),
                *(cells if measured else []),
                *([_proof_text(proofs)] if report.optimal else []),
            ]
        )
    header = ["role", "format", "count", *(["output error"] if calibrated else [])]
    header += ["SQNR dB", "largest", "vs abs-max"] if measured else []
    header += ["optimal"] if report.optimal else []
    lines = [table(header, rows, left=2)]
    if calibrated:
        lines.append("output error: relative to plain rounding to nearest, as recorded in ptqpipe.json")
    return "\n".join(lines + _unproven(report))


def _unproven(report: VerifyReport) -> list[str]:
    missing = [weight for weight in report.weights if weight.optimality is None] if report.optimal else []
    if not missing:
        return []
    if report.source is None:
        return [f"optimal: not proven; the proof needs the weights that CKPT was made from, add {arg('source')}"]
    reason = "their scales are not chosen by their own squared error alone (calibration, or one scale for several)"
    return [f"optimal: {len(missing)} of {len(report.weights)} weights are left out: {reason}"]


def _together(members: Iterable[WeightReport]) -> tuple[float, float | None]:
    """Relative MSE of several weights, and squared error over that of abs-max, weighted by energy as convert does."""
    measured = [(w.relative_mse, w.energy, w.versus_absmax) for w in members if w.relative_mse is not None]
    # a weight of zeros that is not stored as one has no energy and an infinite error
    squared = sum(error * energy if energy else error for error, energy, _ in measured)
    total = sum(energy for _, energy, _ in measured)
    absmax = sum(error * energy / versus for error, energy, versus in measured if versus)
    compared = sum(error * energy for error, energy, versus in measured if versus)
    return squared / total if total else squared, compared / absmax if absmax else None


def _proof_text(proofs: list[Optimality]) -> str:
    if not proofs:
        return "-"
    blocks = sum(p.blocks for p in proofs)
    return f"{blocks - sum(p.worse for p in proofs)} of {blocks}"


def _grouped(findings: Iterable[Finding]) -> list[str]:
    """One line per finding; of those that differ in numbers of layers and experts alone, the first few."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[(finding.check, name_pattern(finding.where))].append(finding)
    lines = []
    for members in groups.values():
        lines += [_line(finding) for finding in members[:SHOWN]]
        if len(members) > SHOWN:
            lines.append(
                f"  [{members[0].check}] ... and {len(members) - SHOWN} more of {name_pattern(members[0].where)}"
            )
    return lines


def _line(finding: Finding) -> str:
    return f"  [{finding.check}] {finding.where}: {finding.message}"


def _verdict(report: VerifyReport) -> str:
    faults, notes = len(report.faults), len(report.notes)
    verdict = "sound" if report.ok else f"{faults} fault{'s' * (faults != 1)}"
    return f"{verdict}, {notes} note{'s' * (notes != 1)} ({report.seconds:.1f} s)"


def to_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "checkpoint": str(report.ckpt),
        "source": None if report.source is None else str(report.source),
        "source_is_another_model": report.foreign,
        "container": report.container,
        "own": report.own,
        "ok": report.ok,
        "faults": [finding.to_json() for finding in report.faults],
        "notes": [finding.to_json() for finding in report.notes],
        "weights": {weight.name: _weight_json(weight) for weight in report.weights},
        "kept": report.kept,
        "kept_bytes": report.kept_bytes,
        "seconds": report.seconds,
    }


def _weight_json(weight: WeightReport) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"format": weight.format, "shape": list(weight.shape)}
    if weight.versus_rtn is not None:
        fields["versus_rtn"] = finite(weight.versus_rtn)
    if weight.relative_mse is not None:
        error = finite(weight.relative_mse)
        fields |= {"relative_mse": error, "versus_absmax": None if error is None else finite(weight.versus_absmax)}
    proof = weight.optimality
    if proof is not None:
        fields["optimality"] = {
            "blocks": proof.blocks,
            "of": proof.total,
            "worse": proof.worse,
            "tied": proof.tied,
            "saved": proof.saved,
        }
    return fields
