"""The identity of a model: its name, and whether statistics or learned codes belong to it.

Knows names, fingerprints and records, not what is done with them.
"""

from pathlib import Path

from ptqpipe.checkpoint import OF_WEIGHTS
from ptqpipe.errors import UsageError
from ptqpipe.rounding import Rounding
from ptqpipe.source import Source
from ptqpipe.statistics import Statistics

_SHOWN = 12  # hex digits of a fingerprint in a message


def name_of(folder: Path) -> str:
    """What a folder is called: the last part of its path as it was typed, a link by the link's own name.

    A snapshot in the hub's cache is called as the repository; "." and ".." as the folders that they stand for.
    """
    if folder.name in ("", ".."):
        folder = folder.resolve()
    snapshots, repository = folder.parent, folder.parent.parent.name
    if snapshots.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name or "model"


def check_model(folder: Statistics | Rounding, source: Source) -> None:
    """UsageError, with both fingerprints and the remedy, where ``folder`` is of another model than ``source``."""
    theirs, ours = folder.model_fingerprint, source.reader.fingerprint()
    if theirs == ours:
        return
    what, verb = ("statistics", "calibrate") if isinstance(folder, Statistics) else ("learned codes", "tune")
    recorded, name = folder.content["model"].get("name"), name_of(source.reader.path)
    model = f"the model {recorded}" if recorded else "another model"
    if theirs[:OF_WEIGHTS] == ours[:OF_WEIGHTS]:
        raise UsageError(
            f"the {what} in {folder.path} belong to {model} with another config.json (fingerprint ..."
            f"{theirs[-_SHOWN:]}, {name} has the same weights and ...{ours[-_SHOWN:]}); put that config.json back, or "
            f"{verb} this model"
        )
    raise UsageError(
        f"the {what} in {folder.path} belong to {model} (fingerprint {theirs[:_SHOWN]}), this is {name} "
        f"(fingerprint {ours[:_SHOWN]}); name the folder with that model's files, or {verb} this one"
    )
