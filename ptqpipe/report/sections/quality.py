"""The headline numbers of an evaluation."""

from collections.abc import Mapping

from ptqpipe.report.content import Report, Task


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


def recovery_words(report: Report) -> str:
    """What stands beside the mean recovery: its 95 % interval, samples, tasks.

    The interval is the mean of the tasks' own: at least as wide as that of the mean, however the tasks hang together.
    """
    tasks = [] if report.evaluation is None else [t for t in report.evaluation.tasks if t.recovery is not None]
    words = [f"mean over {len(tasks)} task metrics" if len(tasks) != 1 else "one task metric"]
    samples: dict[str, int] = {}
    for task in tasks:
        samples[task.name] = max(samples.get(task.name, 0), task.samples or 0)
    if all(samples.values()):
        words.append(f"{sum(samples.values()):,} samples")
    bounds = [bound for bound in map(_recovery_bounds, tasks) if bound is not None]
    if bounds and len(bounds) == len(tasks):
        low, high = (sum(ends) / len(ends) for ends in zip(*bounds, strict=True))
        words.append(f"95 % interval {low:.1f} to {high:.1f} %" if high > low else "the same on every sample")
    return ", ".join(words)


def _recovery_bounds(task: Task) -> tuple[float, float] | None:
    """The interval of the difference as one of the recovery, for metrics of which more is better."""
    if task.low is None or task.high is None or not task.baseline or task.recovery is None:
        return None
    ends = (100 * (1 + task.low / task.baseline), 100 * (1 + task.high / task.baseline))
    return ends if ends[0] <= task.recovery <= ends[1] else None
