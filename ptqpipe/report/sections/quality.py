"""The headline numbers of an evaluation."""

from collections.abc import Mapping

from ptqpipe.report.content import Report


def tiles_of_quality(report: Report) -> Mapping[str, float | None]:
    """The headline numbers of an evaluation: the first of each kind, mean recovery of the tasks."""
    found: dict[str, float | None] = {}
    evaluation = report.evaluation
    if evaluation is None:
        return found
    if evaluation.divergence:
        found["kl"] = evaluation.divergence[0].mean
        found["top1"] = evaluation.divergence[0].top1
    if evaluation.perplexity:
        found["ppl"], found["ppl_base"] = evaluation.perplexity[0].value, evaluation.perplexity[0].baseline
    recoveries = [t.recovery for t in evaluation.tasks if t.recovery is not None]
    if recoveries:
        found["recovery"] = sum(recoveries) / len(recoveries)
    return found
