"""The header and the closing text of tune, and the latter as JSON."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ptqpipe.calibration.data import Samples
from ptqpipe.checkpoint import Finished, name_of
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.output_error import samples_text
from ptqpipe.errors import arg
from ptqpipe.models.language_model import with_note
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.run.quantities import counted, memory_size, number, table


def described(prepared: Conversion, samples: Samples, options: TuneOptions, config: Any) -> str:
    """The header: the model, the method, and the samples."""
    units = prepared.outputs.plan.units
    count, seqlen = samples.windows.shape
    schemes = ", ".join(sorted({unit.scheme.name for unit in units}))
    held_out = f", {len(samples.held_out)} more held out" if len(samples.held_out) else ""
    header = (
        f"{name_of(prepared.source.reader.path)} in {schemes}, {sum(len(unit.members) for unit in units)} weights, by "
        f"{options.method}\n{counted(count, 'sample')} of {counted(seqlen, 'token')}{held_out} (of "
        f"{counted(samples.candidates, 'window')}{samples.thinned}, seed {options.seed})"
    )
    return with_note(header, config, images=samples.shown)


def to_json(done: Finished) -> dict[str, Any]:
    return {
        "out": str(done.out),
        "digest": done.content["digest"],
        **({"end_to_end": done.content["end_to_end"]} if "end_to_end" in done.content else {}),
        "blocks": {name: dict(entry) for name, entry in done.content["blocks"].items()},
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def render(done: Finished) -> str:
    """A row for each decoder layer, then the cost."""
    blocks = done.content["blocks"]
    judged = samples_text([entry["held_out"] for entry in blocks.values()])
    lines = [
        f"output error of each decoder layer on {judged}:",
        table(
            ["layer", "start", "result", "ratio", "moved", ""],
            [_row(name, entry) for name, entry in blocks.items()],
        ),
    ]
    left = [weight for entry in blocks.values() for weight in entry["not_learned"]]
    if left:
        lines.append(f"skipped: unsupported parameter layout in this model: {', '.join(left)}")
    lines += [*_end_to_end(done.content.get("end_to_end")), *done.notes]
    lines.append(
        f"Done: {done.out}: {len(done.content['weights'])} weights in {done.seconds:.1f} s, peak "
        f"{memory_size(done.peak_rss_bytes)}"
    )
    return "\n".join(lines)


def _end_to_end(descent: Mapping[str, Any] | None) -> list[str]:
    """What gradient descent on the whole model gave, on each text that judged it: of the codes, then of the floats."""
    if descent is None:
        return []
    lines = [_of_descent("end to end", "codes", descent, f"{descent['moved']:.2%} of the codes moved")]
    if "train" in descent:
        kinds = Counter(entry["kind"] for entry in descent["trained"].values())
        parts = [f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items()]
        parts += ["global scales"] if "global" in descent["train"]["kinds"] else []
        lines.append(_of_descent(f"then {arg('train')}", "values", descent["train"], f"trained: {', '.join(parts)}"))
    return lines


def _of_descent(name: str, what: str, descent: Mapping[str, Any], parts: str) -> str:
    if not descent["best"]:
        return (
            f"{name}, {descent['steps']} steps: no {what} lowered the KL divergence on both "
            f"{' and '.join(descent['start'])}; the initial {what} are kept"
        )
    texts = [
        f"{name} {1e3 * before:.4g} -> {1e3 * descent['result'][name]:.4g}" for name, before in descent["start"].items()
    ]
    return f"{name}, step {descent['best']} of {descent['steps']}: KL divergence x 1000 on {', '.join(texts)}; {parts}"


def _row(name: str, entry: Mapping[str, Any]) -> list[str]:
    before, after = entry["start_loss"], entry["learned_loss"]
    if before is None:
        return [name, "-", "-", "", "", ""]
    note = "" if entry["kept"] else "not better: unchanged"
    ratio = f"{after / before:.3f}" if before else "-"  # the format may hold a layer's weights exactly
    return [name, number(before), number(after), ratio, f"{entry['moved']:.1%}", note]
