"""What transformers makes of a checkpoint's config.json: its config and its empty model. Nothing else asks for either.

config.json says what a model is; which code computes attention, experts and kernels is decided here, so that a file
neither names code that would be fetched and run, nor changes a result by what its publisher's training ran with.
Whatever transformers raises meanwhile becomes one line whose remedy fits its cause.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ptqpipe.checkpoint import read_json_object, refuse_pipes
from ptqpipe.errors import (
    CheckpointError,
    PtqError,
    UsageError,
    arg,
    did_you_mean,
    first_line,
    is_no_memory,
    missing_package,
    nearest,
)

# Keys of config.json that choose code or what a run returns, not what the model is: implementations by name (also of a
# repository on the hub), kernels, fused or distributed layers, files to load; and code that comes with the checkpoint.
_CHOOSES = re.compile(
    r"_?[a-z_]*_implementation(_internal|_autoset)?|_?use_(hub_)?kernels?|_?use_flash_attn(_2)?|_?flash_attn_2_enabled"
    r"|_?use_flash_attention(_2)?|_?(hub_)?kernels?_(config|mapping)|fusion_config|compile_config|distributed_config"
    r"|device_map|(base_model_)?(tp|pp|ep|fsdp)_plan|tp_size|transformers_weights|configuration_files|auto_map|custom_generate|custom_pipelines"
    r"|_?output_(attentions|hidden_states)|_?(use_)?return_dict|torchscript|quantization_config|compression_config"
)


def without_run() -> str:
    """The remedy for a model that cannot be run."""
    return f"convert it without {arg('data')} and {arg('stats')}, which does not run the model"


def create_config(path: Path, model_type: str | None = None) -> Any:
    """transformers' config of the checkpoint at ``path``, without what chooses code and what describes quantization.

    model_type  in the place of the file's own

    UsageError without transformers, CheckpointError for a config.json that it makes no config of.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise missing_package("running a model", "transformers", "ptqpipe[hf]") from None
    refuse_pipes(path)
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} has no config.json, without which transformers cannot run it")
    raw = read_json_object(file, strict=False)
    if model_type is not None:
        raw["model_type"] = model_type
    _check_type(file, raw)
    try:
        # transformers has rules of its own by which a file becomes a config, so it is given one.
        with quiet(), TemporaryDirectory(prefix="ptqpipe-config-") as folder:
            Path(folder, "config.json").write_text(json.dumps(_without_choices(raw)), encoding="utf-8")
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            config.get_text_config().get_text_config()  # fails where a key of the file stands in a method's place
    except (PtqError, MemoryError):
        raise
    except Exception as error:  # of what kind depends on the family's code
        raise _refused(f"transformers does not understand {file}", error, "correct that value") from None
    config.name_or_path = str(path)
    return config


def empty_model(
    model_class: Any,
    config: Any,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    within: Callable[[], AbstractContextManager[Any]] = lambda: torch.device("meta"),
) -> Any:
    """The model of a class and a config, of the checkpoint at ``path``, without weights.

    dtype   of its parameters; None is the config's own
    within  makes the context in which modules are empty; by default buffers are, too

    CheckpointError for a config that describes no model.
    """
    named = {} if dtype is None else {"dtype": dtype}
    with creating(path), within():
        return model_class._from_config(config, **named)


@contextmanager
def creating(path: Path, *, done: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """transformers creates a model meanwhile, in silence: what it raises is a CheckpointError, unless ``done``."""
    try:
        with quiet():
            yield
    except PtqError:
        raise
    except Exception as error:  # of what kind depends on the family's code
        if done() or is_no_memory(error):
            raise
        what = f"transformers cannot create a model from {path / 'config.json'}"
        raise _refused(what, error, "its values contradict each other") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and messages meanwhile."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _without_choices(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_choices(part) for key, part in value.items() if not _CHOOSES.fullmatch(key)}
    return [_without_choices(part) for part in value] if isinstance(value, list) else value


def _check_type(file: Path, raw: Mapping[str, Any]) -> None:
    """CheckpointError for a kind of model that transformers does not have."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise CheckpointError(
            f"{file} has model_type {kind!r}, expected the name by which transformers knows the model; copy the file "
            "of the model's publisher"
        )
    if kind in CONFIG_MAPPING:
        return
    types = list(CONFIG_MAPPING)
    if raw.get("auto_map"):
        remedy = f"its code comes with it (auto_map), and such code is never run; {without_run()}"
    elif nearest(kind, types):
        remedy = f"{did_you_mean(kind, types)} If it is right, update transformers, or {without_run()}"
    else:
        remedy = f"update transformers, or {without_run()}"
    raise CheckpointError(
        f"{file} is of a {kind!r} model, which transformers {version('transformers')} lacks: {remedy}"
    )


def _refused(what: str, error: Exception, cause: str) -> PtqError:
    """The error for what transformers raised, with its name where its text does not say what it is."""
    reason = first_line(error)
    if isinstance(error, ImportError):
        return UsageError(f"{what}: {reason}; install that package, or {without_run()}")
    if not isinstance(error, (ValueError, OSError)):
        reason = f"{type(error).__name__} {reason}"
    return CheckpointError(f"{what}: {reason}; {cause}: copy the file of the model's publisher, or {without_run()}")


def lacks(path: Path, names: Sequence[str]) -> CheckpointError:
    """The error of a checkpoint without tensors that its model needs."""
    return CheckpointError(
        f"{path} lacks {names[0]!r} ({len(names)} in all), which its model needs: a file is not there, {_other_names()}"
    )


def no_place(path: Path, name: str) -> CheckpointError:
    """The error of a quantized tensor that its model does not take."""
    return CheckpointError(f"{path} has a quantized {name!r} that its model has no place for: {_other_names()}")


def other_shape(path: Path, name: str, stored: Sequence[int], expected: Sequence[int]) -> CheckpointError:
    """The error of a tensor whose shape is not the one that config.json says."""
    got, wanted = ("x".join(map(str, shape)) or "a number" for shape in (stored, expected))
    return CheckpointError(
        f"{path}: {name!r} is {got}, its config.json makes it {wanted}; one of the two is of another model or damaged"
    )


def _other_names() -> str:
    return (
        f"config.json is of another model, or transformers {version('transformers')} has other names; copy config.json "
        "and all weights from where the model was published, or update transformers"
    )
