"""What is to be said of a source before it is converted."""

from ptqpipe.checkpoint.adapter import ADAPTER_CONFIG
from ptqpipe.conversion.planned_outputs import Outputs
from ptqpipe.errors import CheckpointError, UsageError, arg
from ptqpipe.models.families import doubts, is_known, issues_of
from ptqpipe.models.source import Source
from ptqpipe.recipe.recipe import matches
from ptqpipe.runtime.expected import unlike_model


def doubts_of(source: Source, reader: str | None) -> tuple[str, ...]:
    """What is to be said of a source: that its family has no row, and where its config.json and its tensors are not of
    one model. CheckpointError for the latter where a program is named that shall load the result."""
    config = source.reader.config
    if not source.reader.has_config:
        return ()
    unlike = unlike_model(source)
    if "model_type" not in config:
        unlike = [
            "config.json has no 'model_type', which says what class the weights are of; take the config.json that "
            "was published with them"
        ]
    if unlike and reader is not None:
        raise CheckpointError(f"{arg('reader', reader)}: {unlike[0]}; {reader} would not load what is made of it")
    unknown = []
    if not is_known(config):
        whose = "" if reader is None else f"; whether {reader} takes them quantized is not known"
        unknown.append(
            f"the table of families has no row for model_type {config.get('model_type')!r}: names and shapes alone "
            f"decide what stays unquantized{whose}; look at the list of what is kept, and ignore what else has "
            "to stay"
        )
    if (source.reader.path / ADAPTER_CONFIG).is_file():
        unknown.append(
            f"{ADAPTER_CONFIG} lies beside the model: what its adapter adds to the weights is left out; merge it first "
            "if it shall count"
        )
    return (*unknown, *unlike, *doubts(config, source.tensors))


def check_mtp(outputs: Outputs, source: Source) -> None:
    """UsageError where multi-token prediction layers are to be quantized and there is nothing of them."""
    issues = [issue for issue in issues_of(source.reader.config) if issue.mtp]
    patterns = [issue.keep.pattern for issue in issues]
    units = (unit for unit in outputs.plan.units if unit.rule.match in patterns)
    if outputs.recipe.mtp == "keep" or next(units, None) is not None:
        return
    mtp, path = arg("mtp", outputs.recipe.mtp), source.reader.path
    if any(matches(pattern, module) for pattern in patterns for module in outputs.plan.modules):
        raise UsageError(f"{mtp} would change nothing: what it could quantize is kept for other reasons; leave it out")
    counted = next((issue.counted_by for issue in issues if issue.counted_by), None)
    if counted is not None:
        raise UsageError(
            f"{mtp}: {path} has no tensor of the layers that {counted} in its config.json counts; add the files with "
            "them from where the model was published, or leave it out"
        )
    raise UsageError(f"{mtp}: {path} has no multi-token prediction layer; leave it out")
