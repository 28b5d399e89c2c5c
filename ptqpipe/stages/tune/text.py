"""What tune says at its end: as text, as JSON."""

from collections.abc import Mapping
from typing import Any

from ptqpipe.report.output_error import samples_text
from ptqpipe.stages.tune.run import Tuned


def to_json(done: Tuned) -> dict[str, Any]:
    """One object: the folder, what each block gained, the cost."""
    return {
        "out": str(done.out),
        "digest": done.content["digest"],
        "blocks": {name: dict(entry) for name, entry in done.content["blocks"].items()},
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def render(done: Tuned) -> str:
    """A line a block, then the cost."""
    judged = samples_text([entry["held_out"] for entry in done.content["blocks"].values()])
    lines = [f"{'block':<24} {'start':>10} {'found':>10} {'ratio':>6} {'moved':>6}   output error on {judged}"]
    lines += [_line(name, entry) for name, entry in done.content["blocks"].items()]
    left = [weight for entry in done.content["blocks"].values() for weight in entry["not_learned"]]
    if left:
        lines.append(f"not learned, since the model holds them in a way that is not known: {', '.join(left)}")
    lines.append(
        f"{done.out}: {len(done.content['weights'])} weights in {done.seconds:.1f} s, peak memory "
        f"{done.peak_rss_bytes >> 20} MiB"
    )
    return "\n".join(lines)


def _line(name: str, entry: Mapping[str, Any]) -> str:
    before, after = entry["start_loss"], entry["learned_loss"]
    if before is None:
        return f"{name:<24} {'-':>10} {'-':>10}"
    note = "" if entry["kept"] else "   not better: the start is kept"
    return f"{name:<24} {before:10.4g} {after:10.4g} {after / before:6.3f} {entry['moved']:6.1%}{note}"
