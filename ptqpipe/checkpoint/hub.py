"""Finds the folder of the checkpoint that a user typed: a path, or the name of a repository on the Hugging Face hub.

It must not read weights. huggingface_hub is imported only when a name is not a local path; it honours HF_HUB_OFFLINE
and its cache by itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from ptqpipe.checkpoint.adapter import ADAPTER_CONFIG, adapter_error, is_adapter_file
from ptqpipe.checkpoint.files import FOLDING_FILE
from ptqpipe.checkpoint.header import shown
from ptqpipe.checkpoint.in_memory import held_in
from ptqpipe.checkpoint.partial import Paths
from ptqpipe.errors import CheckpointError, UsageError, arg, first_line, missing_package, nearest, read_failure

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GGUF: Final = "GGUF, which is not read; take the folder of the original model, with its .safetensors files"
_LFS: Final = b"version https://git-lfs"
#: Left at the hub: the same weights once more, in formats that are not read here.
_IGNORED_ON_HUB: Final = [
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite"),
    *("original/*.safetensors", "metal/*.safetensors", "consolidated*.safetensors"),
]


def resolve_source(model: str, *, revision: str | None = None) -> Path:
    """The local folder of a model, downloaded from the hub if need be.

    Raises UsageError when there is no such folder or name, CheckpointError when the folder holds no safetensors.
    """
    if not model:
        raise UsageError("the model's name is empty; name a folder, or a model on the hub")
    try:
        path = Path(model).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown user's home, a zero byte
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{shown(model)} cannot be a folder: {reason}; check the path") from None
    if there:
        if revision is not None:
            raise UsageError(f"{shown(model)} is a local folder, which has no revision {shown(revision)}; leave it out")
        return check_folder(path)
    if not is_hub_name(model):
        remedy = nearest_path(path) or "check the path"
        raise UsageError(f"{shown(model)} does not exist, and is not a hub name like 'owner/model'; {remedy}")
    return check_folder(_download(model, revision))


def cached_file(model: str, name: str) -> Path | None:
    """A file of a model on the hub, where it lies in the hub's cache already; None where it does not."""
    if not is_hub_name(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    cached = try_to_load_from_cache(model, name)
    return Path(cached) if isinstance(cached, str) else None


def is_hub_name(model: str) -> bool:
    """Whether the hub could have a model of this name; a local folder of the name goes first."""
    return _HUB_NAME.fullmatch(model) is not None and ".." not in model


def nearest_path(path: Path) -> str:
    """The question whether a name beside it is meant, for a path that does not exist: did you mean 'bench-4m'?

    Empty where nothing there is called nearly so.
    """
    if os.path.lexists(path):
        return ""
    try:
        meant = nearest(path.name, sorted(os.listdir(path.parent)))
    except OSError:
        return ""
    return f"did you mean {shown(str(path.parent / meant))}?" if meant else ""


def check_folder(path: Path) -> Path:
    """The folder itself, once it has been checked to have safetensors files of a model that are no Git LFS pointers."""
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{shown(str(path))} is {_GGUF}")
    if not path.is_dir():
        if path.suffix in (".safetensors", ".json", ".bin"):
            raise UsageError(f"{shown(str(path))} is a file, expected the folder that holds it; name the folder")
        raise UsageError(f"{shown(str(path))} is a file, expected a model: its folder, or its name on the hub")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be listed: {read_failure(error)}") from None
    weights = [name for name in names if name.endswith(".safetensors")]
    for name in weights:
        if _starts_with(path / name, _LFS):
            raise CheckpointError(
                f"{shown(str(path / name))} is a Git LFS pointer, not the weights themselves; "
                "run 'git lfs pull' in its folder"
            )
    adapters = [name for name in names if name == ADAPTER_CONFIG or is_adapter_file(name)]
    if set(weights) - set(adapters) or FOLDING_FILE in names or held_in(path) is not None:
        return path
    if any(name.endswith(".safetensors.index.json") and not name.startswith("adapter_") for name in names):
        return path
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth")) and name not in adapters]
    if adapters and not any(name.startswith("pytorch_model") for name in pickled):
        raise adapter_error(path)
    if pickled:
        raise CheckpointError(
            f"{shown(str(path))} has {shown(pickled[0])} but no .safetensors; load it with transformers and "
            "save_pretrained() it, which writes safetensors"
        )
    below = next((name for name in names if any((path / name).glob("*.safetensors"))), "")
    if below:
        raise CheckpointError(
            f"{shown(str(path))} has no .safetensors files itself; did you mean {shown(str(path / below))}?"
        )
    if any(name.lower().endswith(".gguf") for name in names):
        raise CheckpointError(f"{shown(str(path))} holds {_GGUF}")
    content = f"{len(names)} other files" if names else "nothing"
    raise CheckpointError(
        f"{shown(str(path))} has {content}, expected .safetensors files; name the model's own folder, or "
        "save_pretrained() the model with transformers if it is published in another format"
    )


def name_of(folder: Path) -> str:
    """A folder's name: the last part of its path as it was typed, a link by the link's own name.

    A snapshot in the hub's cache is called as the repository; "." and ".." as the folders that they stand for.
    """
    if folder.name in ("", ".."):
        folder = folder.resolve()
    return _repository(folder).rpartition("/")[2] or folder.name or "model"


def hub_name(path: Path) -> str | None:
    """owner/model of a snapshot in the hub's cache; None for another folder."""
    name = _repository(path.absolute())
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else None


def _repository(folder: Path) -> str:
    """The repository, as owner/model, that a folder of the hub's cache is a snapshot of; empty for another folder."""
    snapshots, repository = folder.parent.name, folder.parent.parent.name
    inside = snapshots == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if inside else ""


def check_disjoint(source: Path, out: Path, *, names: str = "the output and the source", option: str = "out") -> None:
    """Raises UsageError if the output would lie in the source, or contain it. ``names`` are what a message calls them,
    the output first, and ``option`` names the output."""
    source, out = source.resolve(), Paths.of(out).out
    if source == out or source in out.parents or out in source.parents:
        first, second = names.split(" and ")
        raise UsageError(
            f"{first} {shown(str(out))} and {second} {shown(str(source))} overlap; choose another {arg(option)}"
        )


def _starts_with(path: Path, prefix: bytes) -> bool:
    try:
        if not path.is_file():  # a pipe would block, a folder cannot be opened: the reader names them
            return False
        with open(path, "rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None


def _download(model: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        what = f"{shown(model)} is not a local folder, and fetching it from the hub"
        raise missing_package(what, "huggingface_hub", "ptqpipe[hf]") from None
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, ignore_patterns=_IGNORED_ON_HUB))
    except Exception as error:  # of what kind depends on its version and its transport
        raise UsageError(f"{shown(model)} {_why_not_fetched(error, errors, nearest_path(Path(model)))}") from None


def _why_not_fetched(error: Exception, errors: Any, meant: str) -> str:
    """What is wrong with a model on the hub, and the remedy.

    errors  huggingface_hub's
    meant   a question about a folder of nearly that name; empty without one
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return "is gated on the hub: ask for access on its page, and set HF_TOKEN or run hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "is neither a local folder nor a model on the hub that your token may see; "
            f"{meant or 'check the name; a private one needs HF_TOKEN or hf auth login'}"
        )
    if status in (401, 403):
        return "is refused by the hub: the token is not valid there; set HF_TOKEN or run hf auth login"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        # huggingface_hub says so of an answer of the hub that it cannot use, too
        answer_code = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if answer_code is not None:
            return f"is not in the hub's cache, and the hub answered {answer_code}; try again later or name a folder"
        partly = getattr(errors, "IncompleteSnapshotError", None)
        if partly is not None and isinstance(error, partly):
            return (
                "is in the hub's cache in part alone, and the hub was not reached (offline, or HF_HUB_OFFLINE is set); "
                "go online: what is there is not fetched again"
            )
        return (
            "is neither a local folder nor in the hub's cache, and the hub was not reached "
            f"(offline, or HF_HUB_OFFLINE is set); {meant or 'go online or name a folder'}"
        )
    reason = shown(first_line(error))[1:-1]
    if isinstance(error, ValueError) or status is not None:  # HFValidationError is a ValueError
        return f"cannot be fetched from the hub: {reason}; {meant or 'check the name and access'}"
    return f"was not fetched to its end ({reason}); the same command fetches what is missing"
