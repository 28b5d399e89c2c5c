"""`quantize_model`: the one call, for a folder, a hub name or a model in memory; `save_checkpoint` for the latter.

A model in memory takes the converter's way: its config and tokenizer go into a temporary folder, and its weights are
read from where they are, as if transformers had saved them there. So its bytes are those of a conversion of the saved
folder. The packed checkpoint lies in ``out``, or in a temporary folder that goes with the packed model. Temporary
folders are made where ``out`` is, else where ``tempfile`` makes them (``TMPDIR``).
"""

import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ptqpipe.api.calibration_data import Data, recorded
from ptqpipe.api.calls import command, folder_of
from ptqpipe.api.convert import convert
from ptqpipe.checkpoint import RECORD_FILE, Paths, cached_file, holding, output_errors, read_json_object
from ptqpipe.errors import OutputExists, UsageError
from ptqpipe.pipeline.options import ConvertCommand
from ptqpipe.runtime.creating import quiet
from ptqpipe.runtime.hf import packed_always
from ptqpipe.runtime.linear import PackedLinear
from ptqpipe.runtime.loading import TOKENIZER_FILES, load_model
from ptqpipe.runtime.saving import save_but_weights

DEFAULT_FORMAT = "nvfp4"


@command(ConvertCommand, progress=True)
def quantize_model(
    model: str | Path | torch.nn.Module,
    format: str = DEFAULT_FORMAT,
    *,
    data: Data = None,
    forward_loop: Callable[[Any], Any] | None = None,
    tokenizer: Any = None,
    out: str | Path | None = None,
    **options: Any,
) -> Any:
    """Quantizes a model with the best that data allow, and returns a `Result`, or the packed model of one in memory.

    model         a folder, a name on the hub, or a model of transformers in memory
    format        as `convert` takes it
    data          what the model is calibrated on: files, data sets by name, texts, token ids, a ``datasets`` object or
                  a DataLoader; None: no calibration
    forward_loop  instead of data: ``forward_loop(model)`` calls the model, and the token ids of its calls are the data.
                  A model that is named by its folder is loaded for that, as a whole
    tokenizer     of a model in memory, for data that are texts; None: that of the folder it was loaded from,
                  or of its name on the hub as far as it is in the cache
    out           folder to write; None: as `convert` names it, and for a model in memory a temporary folder
    options       of `convert`: ``quality`` ("fast", "good" or "best"), ``samples``, ``seqlen``, ``eval``, ...

    A model in memory is left as it is; the packed one computes with the weights of the checkpoint, in the same dtype
    and on the same device, and `save_checkpoint` writes that checkpoint.

    >>> texts = [Path("TEXT.txt").read_text()]
    >>> ptqpipe.quantize_model("MODEL", data=texts, quality="fast", samples=8, seqlen=64, out="FAST")
    <quantize_model FAST: format nvfp4, weights 21 at 4.50 bits, size 1.20 MB, time ... s>
    """
    if data is not None and forward_loop is not None:
        raise UsageError("data and forward_loop are two ways to calibrate; give one of them")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UsageError(f"tokenizer is of type {type(tokenizer).__name__}, expected a tokenizer of transformers")
    if isinstance(model, torch.nn.Module):
        if forward_loop is not None:
            data = recorded(model, forward_loop)
        return _quantize_module(
            model, tokenizer, None if out is None else Path(out), format=_format(format, options), data=data, **options
        )
    if forward_loop is not None:
        data = recorded(load_model(folder_of(model), dtype="auto"), forward_loop)
    result = convert(model, format=_format(format, options), data=data, out=out, **options)
    result.command = "quantize_model"
    return result


def _format(format: str, options: Mapping[str, Any]) -> str | None:
    """The format of a call, None where a budget or a recipe decides it and none was asked for."""
    decided = options.get("budget") is not None or options.get("recipe") is not None
    return None if decided and format == DEFAULT_FORMAT else format


# Of a packed model: the folder of its checkpoint, and checksums of its parameters as they were loaded.
_kept: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[Path, dict[str, int]]]" = weakref.WeakKeyDictionary()


def _quantize_module(model: torch.nn.Module, tokenizer: Any, out: Path | None, **options: Any) -> torch.nn.Module:
    """The packed model of one in memory."""
    if not hasattr(model, "save_pretrained") or not hasattr(type(model), "from_pretrained"):
        raise UsageError(
            f"{type(model).__name__} is no model of transformers; give the model inside a wrapper, or save it, "
            "and name its folder"
        )
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise UsageError(f"this {type(model).__name__} is packed already; give the float model")
    empty = next((name for name, value in model.named_parameters() if value.is_meta), None)
    if empty is not None:
        raise UsageError(
            f"{empty} is on the meta device, without values; load the model's weights first, without a "
            "device_map that offloads them"
        )
    if out is not None:
        with _saved(model, tokenizer, Paths.of(out).out.parent) as folder:
            return _packed(model, convert(folder, out=out, **options).path)
    home = tempfile.mkdtemp(prefix="ptqpipe-packed-")
    try:
        with _saved(model, tokenizer, None) as folder:
            packed = _packed(model, convert(folder, out=Path(home, "packed"), **options).path)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    weakref.finalize(packed, shutil.rmtree, home, ignore_errors=True)
    return packed


@contextmanager
def _saved(model: Any, tokenizer: Any, place: Path | None) -> Iterator[Path]:
    """A folder below ``place`` that reads as the model that transformers saves, and its tokenizer; it goes afterwards.
    No weight is written."""
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    origin = str(getattr(model, "name_or_path", "") or "")
    with tempfile.TemporaryDirectory(prefix=".ptqpipe-model-", dir=place) as temporary:
        folder = Path(temporary, Path(origin).name or type(model).__name__)
        with output_errors(folder):
            with quiet():  # transformers says that it writes weights, which it does not
                weights = save_but_weights(model, folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            files = [_file_of(origin, name) for name in TOKENIZER_FILES if origin and tokenizer is None]
            for file in filter(Path.is_file, files):
                shutil.copyfile(file, folder / file.name)
        with holding(folder, weights):
            yield folder


def _file_of(origin: str, name: str) -> Path:
    """A file of the model that was loaded from a folder, or by its name on the hub: then as it lies in the hub's cache.
    It need not exist."""
    return (None if Path(origin).is_dir() else cached_file(origin, name)) or Path(origin, name)


def _packed(model: Any, folder: Path | None) -> torch.nn.Module:
    """The model of the checkpoint in ``folder``, of the class, dtype and device of ``model``."""
    assert folder is not None  # a conversion has a path
    described = read_json_object(folder / "config.json").get("quantization_config", {})
    with quiet():
        packed: Any = type(model).from_pretrained(folder, dtype=model.dtype, **packed_always(described))
        packed = packed.to(model.device)
    _kept[packed] = folder, _sums(packed)
    return packed  # type: ignore[no-any-return]


def _sums(model: torch.nn.Module) -> dict[str, int]:
    """A checksum of every parameter: of what is not packed."""
    return {
        name: zlib.crc32(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, parameter in model.named_parameters()
    }


@command()
def save_checkpoint(model: torch.nn.Module, out: str | Path, *, overwrite: bool = False) -> Path:
    """Writes the checkpoint of a packed model that `quantize_model` made of one in memory; its folder.

    The weights' files have the bytes that `convert` writes from the folder to which transformers saves the model.
    UsageError for other models, and for one whose parameters were changed; OutputExists.

    >>> packed = ptqpipe.quantize_model(AutoModelForCausalLM.from_pretrained("MODEL"), "nvfp4")
    >>> ptqpipe.save_checkpoint(packed, "SAVED")
    PosixPath('SAVED')
    """
    saved = _kept.get(model)
    if saved is None:
        raise UsageError(
            f"this {type(model).__name__} was not packed by quantize_model; ptqpipe.convert writes the checkpoint of a "
            "folder"
        )
    folder, sums = saved
    if _sums(model) != sums:
        raise UsageError("the model was changed since quantize_model packed it; save what quantize_model returned")
    target = Paths.of(Path(out)).out
    ours = (target / RECORD_FILE).is_file() or (target.is_dir() and not any(target.iterdir()))
    if target.exists() and not (overwrite and ours):
        remedy = "overwrite=True replaces it, or choose another out" if ours else "it is no checkpoint; choose another"
        raise OutputExists(f"{out} exists; {remedy}")
    with output_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as growing:
            shutil.copytree(folder, Path(growing, "new"))
            if target.exists():
                target.rename(Path(growing, "old"))
            Path(growing, "new").rename(target)
    return Path(out)
