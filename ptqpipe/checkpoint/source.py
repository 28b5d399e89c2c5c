"""Finds the folder of the checkpoint that a user typed: a path, or the name of a repository on the Hugging Face hub.

It must not read weights. huggingface_hub is imported only when a name is not a local path; it honours HF_HUB_OFFLINE
and its cache by itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from ptqpipe.checkpoint.files import FOLDING_FILE
from ptqpipe.checkpoint.header import shown
from ptqpipe.checkpoint.held import held_in
from ptqpipe.checkpoint.partial import Paths
from ptqpipe.errors import CheckpointError, UsageError, first_line, missing_package, nearest

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
    found = try_to_load_from_cache(model, name)
    return Path(found) if isinstance(found, str) else None


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
    """The folder itself, once it has been checked to have safetensors files that are not Git LFS pointers."""
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{shown(str(path))} is {_GGUF}")
    if not path.is_dir():
        raise UsageError(f"{shown(str(path))} is a file, expected the folder that holds it; name the folder")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be listed: {error.strerror}; check the folder") from None
    weights = [name for name in names if name.endswith(".safetensors")]
    for name in weights:
        if _starts_with(path / name, _LFS):
            raise CheckpointError(
                f"{shown(str(path / name))} is a Git LFS pointer, not the weights themselves; "
                "run 'git lfs pull' in its folder"
            )
    if weights or FOLDING_FILE in names or held_in(path) is not None:
        return path
    if any(name.endswith(".safetensors.index.json") for name in names):
        return path
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
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
    found = f"{len(names)} other files" if names else "nothing"
    raise CheckpointError(
        f"{shown(str(path))} has {found}, expected .safetensors files; name the model's own folder, or "
        "save_pretrained() the model with transformers if it is published in another format"
    )


def check_disjoint(source: Path, out: Path) -> None:
    """Raises UsageError if the output would lie in the source, or contain it."""
    source, out = source.resolve(), Paths.of(out).out
    if source == out or source in out.parents or out in source.parents:
        raise UsageError(f"the output {shown(str(out))} and the source {shown(str(source))} overlap; choose another -o")


def _starts_with(path: Path, prefix: bytes) -> bool:
    try:
        if not path.is_file():  # a pipe would block, a folder cannot be opened: the reader names them
            return False
        with open(path, "rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {error.strerror}; check the file") from None


def _download(model: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        what = f"{shown(model)} is not a local folder, and fetching it from the hub"
        raise missing_package(what, "huggingface_hub", "ptqpipe[hf]") from None
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, ignore_patterns=_IGNORED_ON_HUB))
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UsageError(
            f"{shown(model)} is neither a local folder nor in the hub's cache, and the hub was not reached "
            f"(offline, or HF_HUB_OFFLINE is set); {nearest_path(Path(model)) or 'go online or name a folder'}"
        ) from None
    except (errors.HfHubHTTPError, OSError, ValueError) as error:  # HFValidationError is a ValueError
        reason = shown(first_line(error))[1:-1]
        remedy = nearest_path(Path(model)) or "check the name and access"
        raise UsageError(f"{shown(model)} cannot be fetched from the hub: {reason}; {remedy}") from None
