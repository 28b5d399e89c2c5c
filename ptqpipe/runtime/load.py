"""load_model: a transformers model of any checkpoint that ptqpipe reads, computing what the checkpoint's format says.

The weights are those of ``QTensor.dequantize``, rounded once to the asked dtype (float32 does not round them), and the
inputs of linear layers whose scheme quantizes activations are quantized as the format says (``activations.py``).
transformers supplies the model code and the conversion of checkpoint names; this file supplies the numbers. A later
runtime keeps the weights packed: it replaces the linear layers between `build` and filling.
"""

import re
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from ptqpipe.errors import CheckpointError, UsageError, one_line
from ptqpipe.runtime.state import lazy_state
from ptqpipe.source import Source

Activations = Literal["simulated", "none"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    ckpt: Path | str,
    *,
    dtype: torch.dtype | str = torch.float32,
    activations: Activations = "simulated",
    device: str = "cpu",
) -> Any:
    """A transformers causal language model in evaluation mode.

    ckpt         a checkpoint folder, plain or in any container; dense or mixture of experts
    dtype        what the model computes in; float32, the default, is exact for every decoded weight. "auto": the
                 checkpoint's own
    activations  "simulated" quantizes the inputs of linear layers and the kv cache as the checkpoint says, "none"
                 leaves them
    device       where it computes: cpu, cuda, cuda:N

    Raises UsageError without transformers or for an unknown dtype, CheckpointError where the checkpoint and the model
    do not fit together: a weight missing, one without a place, a shape that differs.
    """
    if activations not in ("simulated", "none"):
        raise UsageError(f"activations {activations!r} is unknown; use simulated or none")
    check_device(device)
    with Source.open(Path(ckpt)) as source:
        config = read_config(source.reader.path)
        model = _fill(source, config, dtype_of(dtype, config))
        if activations == "simulated":
            from ptqpipe.runtime.simulate import simulate_activations

            simulate_activations(model, source)
    return model.to(device)


def check_device(device: str) -> None:
    """UsageError for a device that is not here."""
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is unknown; use cpu, cuda or cuda:N")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {device} needs a GPU that torch can use; it sees {torch.cuda.device_count()}, use cpu"
        )


def read_config(path: Path) -> Any:
    """transformers' config of a checkpoint, without what says that it is quantized.

    UsageError without transformers, CheckpointError for a config that it does not know.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise UsageError("running a model needs transformers; pip install 'ptqpipe[hf]'") from None
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"transformers does not understand {path / 'config.json'}: {_first_line(error)}; update transformers, "
            "or check the file"
        ) from None
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def dtype_of(dtype: torch.dtype | str, config: Any) -> torch.dtype:
    """The torch dtype that ``dtype`` names for a model of ``config``. UsageError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        found = getattr(config, "dtype", None) or config.get_text_config().dtype
        return found if isinstance(found, torch.dtype) else torch.float32
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPES)} or auto")
    return DTYPES[dtype]


def _fill(source: Source, config: Any, dtype: torch.dtype) -> Any:
    """The model of ``config`` with the decoded tensors of ``source``: built on the meta device, filled one by one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
    from transformers.utils import logging

    path = source.reader.path
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"{path} is a {config.model_type!r} model, which transformers has no causal model for")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # what its report says becomes one error below
    try:
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=lazy_state(source), dtype=dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its config.json: {_first_line(error)}") from None
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    _check_fit(source, info)
    model.config.name_or_path = str(path)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def _check_fit(source: Source, info: Any) -> None:
    """Every parameter found its tensor, and every quantized weight its parameter."""
    path = source.reader.path
    missing, mismatched, unexpected = (
        sorted(info[key], key=str) for key in ("missing_keys", "mismatched_keys", "unexpected_keys")
    )
    if missing:
        raise CheckpointError(
            f"{path} lacks {missing[0]!r} ({len(missing)} in all), which its model needs; names must be those of the "
            "model's own checkpoint"
        )
    if mismatched:
        raise CheckpointError(f"{path} has another shape than its config.json says: {mismatched[0]}")
    if unexpected:
        lost = next((name for name in unexpected if name in source.stored), None)
        if lost is not None:
            raise CheckpointError(f"{path} has a quantized {lost!r} that its model has no place for")
        warnings.warn(
            one_line(f"{path}: the model has no place for {unexpected[0]!r} ({len(unexpected)} in all); left out"),
            stacklevel=4,
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
