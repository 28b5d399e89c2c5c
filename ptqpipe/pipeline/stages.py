"""The stages of one run of `convert` with ``data``, a budget or an evaluation, in their order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ptqpipe.models.embedder import is_embedder
from ptqpipe.pipeline.check_stages import eval_stage, report_stage, verify_stage
from ptqpipe.pipeline.data_stages import calibrate_stage, generate_stage, rotate_stage, transform_stage
from ptqpipe.pipeline.output_stages import convert_stage, plan_stage, tune_stage
from ptqpipe.pipeline.presets import QualityPreset, describe
from ptqpipe.pipeline.run_plan import Pipeline


@dataclass(frozen=True, slots=True)
class Step:
    """A stage of the run: its name, what the header says of it, and what does it."""

    name: str
    words: str
    run: Callable[[], None]


def steps_of(run: Pipeline) -> list[Step]:
    preset, work = run.preset, run.work
    steps: list[Step] = []
    embeds = is_embedder(run.path)

    def add(wanted: object, name: str, words: str, stage: Callable[[Pipeline], None]) -> None:
        if wanted:
            steps.append(Step(name, words, partial(stage, run)))

    add(run.own_weight is not None, "generate", "the model generates text to calibrate on", generate_stage)
    words = "learn rotations from the gradients at the inputs of layers, and fold them into the weights"
    add(preset and preset.rotations, "rotate", words, rotate_stage)
    statistics = run.needs_statistics and preset is not None
    add(statistics, "calibrate", "statistics of the inputs of every layer, a few kB each", calibrate_stage)
    folded = f"{preset and preset.transform}: find scaling factors, and fold them into the weights"
    add(preset and preset.transform, "transform", folded, transform_stage)
    add(work.budget, "plan", f"a format for every layer at {work.budget}", plan_stage)
    add(
        preset and preset.method,
        "tune",
        describe(
            QualityPreset(method=preset.method if preset else ""), "error of embeddings" if embeds else "KL divergence"
        ),
        tune_stage,
    )
    add(True, "convert", f"into {run.out}", convert_stage)
    add(True, "verify", "check hashes and recorded claims of the result", verify_stage)
    compared = "cosine of embeddings with" if embeds else "KL divergence from"
    add(work.eval, "eval", f"{compared} the original model on {', '.join(work.eval)}", eval_stage)
    add(work.report, "report", f"{run.beside('report.html')}", report_stage)
    return steps
