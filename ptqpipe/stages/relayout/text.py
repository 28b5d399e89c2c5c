"""What relayout prints at its end: text for a terminal, a dict for JSON."""

from typing import Any

from ptqpipe.quantities import disk_size, memory_size
from ptqpipe.stages.common import Done


def render(done: Done) -> str:
    """What was done, for a terminal."""
    record = done.record
    changed, irreversible = record["decode_rounds_differently"], record["reciprocal_is_not_exact"]
    lines = [
        f"Done: {done.out}: {len(record['weights'])} weights from {done.source_container} to {record['container']}, "
        f"{len(record['kept'])} tensors kept; {disk_size(done.written_bytes)} in {done.seconds:.1f} s, peak "
        f"{memory_size(done.peak_rss_bytes)}",
        "codes and block scales have the same bytes",
    ]
    if changed:
        lines.append(
            f"the global scales of {len(changed)} weights were inverted: their float32 decode is rounded differently, "
            f"by at most 5 x 2^-24 of a number ({changed[0]} is the first)"
        )
    if irreversible:
        lines.append(
            f"{len(irreversible)} global scales have no exact float32 reciprocal; converting back changes them by one "
            "unit in the last place"
        )
    if record["dropped"]:
        lines.append(
            f"{len(record['dropped'])} tensors have no place in this layout, the first: {record['dropped'][0]}"
        )
    return "\n".join([*lines, *(f"note: {warning}" for warning in done.warnings)])


def to_json(done: Done) -> dict[str, Any]:
    """The outcome as data."""
    record = done.record
    return done.to_json(
        source_container=done.source_container,
        container=record["container"],
        weights=len(record["weights"]),
        kept=len(record["kept"]),
        **{key: record[key] for key in ("decode_rounds_differently", "reciprocal_is_not_exact", "dropped")},
        warnings=list(done.warnings),
    )
