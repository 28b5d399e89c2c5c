"""What transform prints at its end: text for a terminal, a dict for JSON."""

from typing import Any

from ptqpipe.quantities import disk_size, memory_size, scientific
from ptqpipe.stages.common import Done

FLOAT32_ROUNDING = 1e-12  # relative MSE below which an error is float32's own: not worth a number


def render(done: Done) -> str:
    """What was done, for a terminal."""
    record = done.record
    how = "exact: every factor is a power of two" if record["exact"] else f"rounded once to {record['dtype']}"
    if not record["exact"] and record["rounding"] > FLOAT32_ROUNDING:
        how += f", a relative MSE of {scientific(record['rounding'], 2)}"
    return (
        f"Done: {done.out}: {' then '.join(record['transforms'])}, {len(record['foldings'])} foldings into "
        f"{len(record['weights'])} tensors, {len(record['kept'])} kept; {how}; {disk_size(done.written_bytes)} in "
        f"{done.seconds:.1f} s, peak {memory_size(done.peak_rss_bytes)}"
    )


def to_json(done: Done) -> dict[str, Any]:
    """The outcome as data."""
    record = done.record
    return done.to_json(
        changed=len(record["weights"]),
        kept=len(record["kept"]),
        **{key: record[key] for key in ("transforms", "foldings", "exact", "rounding")},
    )
