"""Whether statistics and learned codes are of the model that is converted."""

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import name_of
from ptqpipe.errors import UsageError
from ptqpipe.models.source import Source
from ptqpipe.quantization.learned_codes import LearnedCodes

_SHOWN = 12  # hex digits of a fingerprint in a message


def check_model(folder: Statistics | LearnedCodes, source: Source) -> None:
    """UsageError, with both fingerprints and the remedy, where ``folder`` is of another model than ``source``."""
    theirs, ours = folder.model_fingerprint, source.reader.fingerprint()
    if theirs == ours:
        return
    what, verb = ("statistics", "calibrate") if isinstance(folder, Statistics) else ("learned codes", "tune")
    recorded, name = folder.content["model"].get("name"), name_of(source.reader.path)
    model = f"the model {recorded}" if recorded else "another model"
    if source.reader.has_weights_of(theirs):
        raise UsageError(
            f"the {what} in {folder.path} belong to {model} with another config.json (fingerprint ..."
            f"{theirs[-_SHOWN:]}, {name} has the same weights and ...{ours[-_SHOWN:]}); put that config.json back, or "
            f"{verb} this model"
        )
    raise UsageError(
        f"the {what} in {folder.path} belong to {model} (fingerprint {theirs[:_SHOWN]}), this is {name} "
        f"(fingerprint {ours[:_SHOWN]}); name the folder with that model's files, or {verb} this one"
    )
