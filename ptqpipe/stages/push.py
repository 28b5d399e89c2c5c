"""push: uploads a finished checkpoint to the hub, with the token and endpoint that huggingface_hub finds by itself."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptqpipe.errors import AlreadyComplete, OutputError, UsageError, first_line, one_line


def check_push(repo: str) -> None:
    """UsageError where an upload cannot work: without huggingface_hub or a token, for a name that no repository has.

    Asks nobody: it is called before any work, and the hub may be out of reach until the end.
    """
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError as error:
        raise UsageError(f"--push names no repository: {first_line(error)}; expected owner/name") from None
    if "/" not in repo:
        raise UsageError(f"--push {one_line(repo)!r} has no owner; expected owner/name")
    if hub.get_token() is None:
        raise UsageError("--push needs a token of the hub, and there is none; set HF_TOKEN, or run hf auth login")
    if hub.constants.HF_HUB_OFFLINE:
        raise UsageError("--push needs the hub, and HF_HUB_OFFLINE is set; unset it, or leave --push out")


def push(folder: Path, repo: str) -> str:
    """Uploads a folder's files to a model repository, which is made (private or not as the account says) where it is
    missing; its address. OutputError where that fails: the folder stays as it is.
    """
    hub = _hub()
    try:
        address = hub.HfApi().create_repo(repo, repo_type="model", exist_ok=True)
        hub.HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload quantized model")
        return str(address)
    except Exception as error:  # of what kind depends on its transport; whatever it is, nothing here is lost
        raise OutputError(
            f"the upload to {one_line(repo)!r} failed: {_reason(error)}; {folder} is complete, push it again with: "
            f"{shlex.join(['hf', 'upload', repo, str(folder)])}"
        ) from None


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
        raise UsageError("--push needs huggingface_hub; install it with: pip install 'ptqpipe[hf]'") from None
    return huggingface_hub


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    words = {401: "the token is not valid", 403: "the token may not write there", 404: "there is no such owner"}
    if status in words:
        return words[status]
    said = first_line(error)
    return said if status is not None else f"the hub was not reached, or not to the end ({said})"
