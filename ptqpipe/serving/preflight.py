"""Checks before a service loads anything: options, a template, a tokenizer, files that make no model.

Everything here takes a second or two, reads no weight and starts no process.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptqpipe.checkpoint.regular_file import MAX_RECIPE_BYTES, read_regular_text
from ptqpipe.errors import PtqError, UsageError, arg, missing_package, one_line
from ptqpipe.models.chat_template import TemplateError, compile_template, render

if TYPE_CHECKING:
    from ptqpipe.serving.rank_processes import RankInfo

PACKAGES = ("transformers", "fastapi", "uvicorn", "prometheus_client", "greenlet", "psutil")


def require_packages(packages: tuple[str, ...] = PACKAGES) -> None:
    """UsageError that names the extra where a package of the service is missing."""
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise missing_package("serving", ", ".join(missing), "ptqpipe[serve]")


def check_place(ckpt: str, device: str, place: "RankInfo") -> None:
    """UsageError without a folder, and where the last rank of this machine would have no device."""
    from ptqpipe.runtime.loading import check_device

    check_device(replace(place, local_rank=place.local - 1).device(device))
    if not Path(ckpt).is_dir():
        raise UsageError(f"{ckpt} is not a folder; give a checkpoint that lies on this machine")


def check_sums(allreduce: str) -> None:
    """UsageError for sums in a codec that there is not, however many ranks there are."""
    from ptqpipe.serving.collectives.codecs import get_wire_codec

    if allreduce not in ("off", "auto"):
        get_wire_codec(allreduce)


def read_template(file: Path | None) -> str | None:
    """The text of a chat template. UsageError for one that is not Jinja."""
    if file is None:
        return None
    try:
        text = read_regular_text(file, limit=MAX_RECIPE_BYTES)
        compile_template(text)  # with transformers' own tags and filters
    except OSError as error:
        raise UsageError(f"{arg('chat_template', file)} cannot be read: {error.strerror}; give a Jinja file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{arg('chat_template', file)} is not UTF-8 text; give a Jinja file") from None
    except TemplateError as error:
        what = "is of no use" if error.compiles else "is no Jinja template"
        raise UsageError(
            f"{arg('chat_template', file)} {what}: {one_line(str(error), limit=300)}; give another file"
        ) from None
    return text


def try_template(tokenizer: Any, template: str | dict[str, str]) -> None:
    """UsageError for a chat template that is none, or does not end. One that refuses this chat may take others."""
    try:
        render(tokenizer, [{"role": "user", "content": "Hello"}], template, {"add_generation_prompt": True})
    except TemplateError as error:
        if error.ends and error.compiles:
            return
        what = "is of no use" if error.compiles else "is no Jinja template"
        raise UsageError(f"the chat template {what}: {error}; give another one with {arg('chat_template')}") from None


def processor_of(ckpt: str, *, batch_invariant: bool) -> Any:
    """The model's processor for images; without one, a text that says why, for who asks with an image."""
    from ptqpipe.models.language_model import takes_images
    from ptqpipe.runtime.loading import read_config
    from ptqpipe.runtime.processor import Processor

    config = read_config(Path(ckpt))
    if not takes_images(config, Path(ckpt)):
        return "this model takes no images"
    if batch_invariant:
        return f"images are not taken with {arg('batch_invariant')}"
    try:
        return Processor(Path(ckpt), config)
    except PtqError as error:
        return f"images are not taken: {error}"


def context_of(ckpt: str, max_model_len: int | None) -> int:
    """The longest sequence: what is asked, within what the model can. UsageError for more."""
    from ptqpipe.runtime.loading import read_config
    from ptqpipe.serving.engine.model_runner import context_length

    longest = context_length(read_config(Path(ckpt)).get_text_config())
    if max_model_len is not None and max_model_len > longest:
        raise UsageError(
            f"{arg('max_model_len')} is {max_model_len}, this model can {longest}; give no more, or leave it out"
        )
    return max_model_len or longest


def check_checkpoint(ckpt: str, *, tp: int, packed: bool) -> None:
    """UsageError or CheckpointError where the model cannot be loaded, be cut for ``tp`` ranks, or be served."""
    from ptqpipe.runtime.loading import check_load
    from ptqpipe.serving.engine.model_runner import check_model, context_length
    from ptqpipe.serving.engine.probe import check_empty

    model = check_load(ckpt, tp=tp, packed=packed)
    check_model(model)
    check_empty(model, context_length(model.config.get_text_config()))


def check_speculative(ckpt: str, *, tp: int) -> None:
    """UsageError for drafts on several ranks, and for a checkpoint without a layer that drafts."""
    from ptqpipe.models.source import Source
    from ptqpipe.runtime.mtp import require_mtp

    if tp > 1:
        raise UsageError(f"{arg('speculative', 'mtp')} runs on one rank, not on {tp}; leave it or {arg('tp')} out")
    with Source.open(Path(ckpt)) as source:
        require_mtp(source)
