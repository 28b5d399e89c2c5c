"""The stages that look at the output: verify, eval and report."""

import warnings
from functools import partial

from ptqpipe.check.evaluate import command as evaluation
from ptqpipe.check.evaluate.eval_summary import write as write_evaluation
from ptqpipe.check.options import EvalOptions
from ptqpipe.check.report.command import make_report
from ptqpipe.check.verify.command import verify
from ptqpipe.errors import CheckpointError, PtqWarning
from ptqpipe.models.embedder import is_embedder
from ptqpipe.pipeline.run_plan import Pipeline


def verify_stage(run: Pipeline) -> None:
    """CheckpointError for the first fault of the output."""
    report = verify(run.out, workers=run.machine.workers, progress=run.machine.progress)
    if not report.ok:
        first = report.faults[0]
        raise CheckpointError(
            f"{run.out} has {len(report.faults)} faults, the first: {first.where} {first.message}; "
            f"ptqpipe verify {run.out} lists them"
        )


def eval_stage(run: Pipeline) -> None:
    options = EvalOptions(
        data=tuple(run.work.eval),
        text_field=run.work.text_field,
        device=str(run.machine.device),
        cache_dir=run.begun / "logits",
        command=run.command,
        samples=0 if is_embedder(run.path) else 3,
    )
    shown = run.machine.progress
    run.evaluation = evaluation.evaluate(str(run.out), source=str(run.path), options=options, progress=shown)
    warn = partial(warnings.warn, category=PtqWarning, stacklevel=2)
    write_evaluation(run.evaluation, run.beside("eval.json"), ckpt=run.out, warn=warn)


def report_stage(run: Pipeline) -> None:
    measured = run.beside("eval.json") if run.work.eval else None
    run.report, _ = make_report(
        run.out,
        source=run.path,
        evaluation=measured,
        out=run.beside("report.html"),
        command=run.command,
        machine=run.machine,
    )
