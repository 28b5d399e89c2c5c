"""push: uploads a finished checkpoint to the hub, with the token and endpoint that huggingface_hub finds by itself."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptqpipe.errors import AlreadyComplete, OutputError, UsageError, arg, first_line, missing_package, one_line

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def check_push(repo: str) -> None:
    """UsageError where an upload cannot work: without huggingface_hub or a token, for a name that no repository has.

    Asks nobody: it is called before any work, and the hub may be out of reach until the end.
    """
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError as error:
        raise UsageError(f"{arg('push')} names no repository: {first_line(error)}; expected owner/name") from None
    if "/" not in repo:
        raise UsageError(f"{arg('push', one_line(repo))} has no owner; expected owner/name")
    if hub.get_token() is None:
        raise UsageError(
            f"{arg('push')} needs a token of the hub, and there is none; set HF_TOKEN, or run hf auth login"
        )
    if hub.constants.HF_HUB_OFFLINE:
        raise UsageError(
            f"{arg('push')} needs the hub, and HF_HUB_OFFLINE is set; unset it, or leave {arg('push')} out"
        )


def push(folder: Path, repo: str) -> str:
    """Uploads a folder's files to a model repository, which is made (private or not as the account says) where it is
    missing; its address. OutputError where that fails, and where weights lie there that would stay beside the folder's:
    readers load them, too. The folder stays as it is.
    """
    hub = _hub()
    try:
        address = hub.HfApi().create_repo(repo, repo_type="model", exist_ok=True)
        stale = _other_weights(hub.HfApi().list_repo_files(repo), folder)
        if stale:
            raise OutputError(
                f"{one_line(repo)!r} has weights that are not of this checkpoint, {one_line(stale[0])!r} for one, "
                "which readers would load with it; name another repository, or delete them there; "
                f"{folder} is complete, push it again with: {shlex.join(['hf', 'upload', repo, str(folder)])}"
            )
        hub.HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload quantized model")
        return str(address)
    except OutputError:
        raise
    except Exception as error:  # of what kind depends on its transport; whatever it is, nothing here is lost
        raise OutputError(
            f"the upload to {one_line(repo)!r} failed: {_reason(error)}; {folder} is complete, push it again with: "
            f"{shlex.join(['hf', 'upload', repo, str(folder)])}"
        ) from None


def _other_weights(there: Sequence[str], folder: Path) -> list[str]:
    """Of the files of a repository those with weights, or an index of them, that the folder has no file for."""
    return [
        name
        for name in there
        if name.endswith((*_WEIGHTS, *(f"{end}.index.json" for end in _WEIGHTS)))
        and "/" not in name
        and not (folder / name).is_file()
    ]


@contextmanager
def also_complete(repo: str | None) -> Iterator[None]:
    """Pushes what a resumed run finds complete, before its AlreadyComplete says so; without ``repo`` nothing."""
    try:
        yield
    except AlreadyComplete as done:
        if repo is None:
            raise
        raise AlreadyComplete(f"{done}; uploaded to {push(done.out, repo)}", done.out) from None


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise missing_package(arg("push"), "huggingface_hub", "ptqpipe[hf]") from None
    return huggingface_hub


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    words = {401: "the token is not valid", 403: "the token may not write there", 404: "there is no such owner"}
    if status in words:
        return words[status]
    reason = first_line(error)
    return reason if status is not None else f"the hub was not reached, or not to the end ({reason})"
