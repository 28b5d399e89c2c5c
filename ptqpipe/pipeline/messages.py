"""What a run of several stages tells people: before it what will be done, at its end what there is."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptqpipe.check.evaluate.verdict import verdict
from ptqpipe.conversion.convert_summary import kept_damaged, kept_not_finite
from ptqpipe.conversion.output_error import judgement
from ptqpipe.run.quantities import disk_size, memory_size

if TYPE_CHECKING:
    from ptqpipe.pipeline.command import PipelineResult
    from ptqpipe.pipeline.run_plan import Pipeline
    from ptqpipe.pipeline.stages import Step


def header(run: "Pipeline", steps: Sequence["Step"]) -> Iterator[str]:
    """What will be done, a line for each stage, and what readers get wrong about the result."""
    size = f"  ({disk_size(run.weights_bytes)} of weights and index)" if run.weights_bytes else ""
    yield f"{run.path} -> {run.out}{size}"
    for number, step in enumerate(steps, 1):
        yield f"  {number} {step.name}: {step.words}"
    if run.codes_bytes:
        yield f"  disk: at most {disk_size(run.codes_bytes)} of codes, until they are in the output"
    yield from (f"  warning: {line}" for line in run.warnings)


def render(result: "PipelineResult") -> str:
    """The closing lines: what was measured, and where everything lies."""
    lines = [*judgement(result.record), *kept_damaged(result.record)]
    judged = None if result.evaluation is None else verdict(result.evaluation)
    if judged is not None:
        lines.append(str(judged))
    also = [str(path) for path in (_measured(result), result.report) if path is not None]
    lines += [f"written: {', '.join(also)}"] if also else []
    lines.append(
        f"Done: {result.out} {disk_size(_size(result))}, {result.seconds:.1f} s, peak {memory_size(result.peak_bytes)}"
    )
    return "\n".join(lines)


def to_json(result: "PipelineResult") -> dict[str, Any]:
    return {
        "out": str(result.out),
        "pipeline": result.record.get("pipeline"),
        "evaluation": result.evaluation,
        "report": None if result.report is None else str(result.report),
        "not_finite": kept_not_finite(result.record),
        "written_bytes": _size(result),
        "seconds": result.seconds,
        "peak_rss_bytes": result.peak_bytes,
    }


def _measured(result: "PipelineResult") -> Path | None:
    return None if result.evaluation is None else result.out.parent / f"{result.out.name}.eval.json"


def _size(result: "PipelineResult") -> int:
    return sum(file.stat().st_size for file in result.out.glob("*.safetensors*"))
