"""Whether the tensors of a checkpoint are those of the model that its config.json names, by names and shapes alone.

transformers builds the model without memory and takes tensors without numbers into it, with its own renamings: what it
then lacks, and has no place for, readers stop at. Where it is not installed or does not know the model, the families'
own rules say what structure shows.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.errors import PtqError
from ptqpipe.models.families import in_mtp_layers, is_plain_decoder, layer_count, misfits, uncounted_layers
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import create_config, quiet
from ptqpipe.runtime.fill import completed, instead_of_files
from ptqpipe.runtime.state import parameter_names

_MOST_LAYERS = 1000  # that a model is built of
_MOST_TENSORS = 5000  # that transformers takes in in a second; experts one by one are many more
_MOST_REAL = 1 << 20  # elements: tables of whole numbers are made with memory, since transformers computes with them
# Buffers that transformers used to save, of rotations, positions and masks.
_BUFFERS = ("inv_freq", "position_ids", "masked_bias", "attn.bias", "attention.bias", "num_batches_tracked")


def unlike_model(source: Source) -> list[str]:
    """What is missing, has no place or another shape, one line each; empty where all fits, or nothing is known."""
    config = source.reader.config
    tensors = {name: source.tensors[name] for name in parameter_names(source)}
    if "model_type" not in config or is_plain_decoder(config, tensors):
        return []
    lines = _by_transformers(source, tensors)
    if lines is None:
        return misfits(config, tensors)
    return lines and (misfits(config, tensors) or lines)


def _by_transformers(source: Source, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str] | None:
    """`unlike_model` by transformers; None where it is not there or does not know the model."""
    if len(tensors) > _MOST_TENSORS or (layer_count(source.reader.config) or 0) > _MOST_LAYERS:
        return None
    answers = (_unlike_class(source, tensors, *each) for each in _classes_of(source.reader.path))
    complaints = [lines for lines in answers if lines is not None]
    return next(filter(None, complaints), complaints[0] if complaints else None)


def _unlike_class(
    source: Source, tensors: Mapping[str, tuple[str, tuple[int, ...]]], model_class: Any, config: Any
) -> list[str] | None:
    """`unlike_model` of one class of transformers and its config; None where it cannot be told."""
    described = source.reader.config
    state = {name: _without_numbers(*kind) for name, kind in tensors.items()}

    def filling(model: Any, conversions: Any) -> Any:
        return SimpleNamespace(
            state=state, conversions=[_nowhere(entry) for entry in completed(model, source, conversions)]
        )

    try:
        with quiet(), instead_of_files(model_class, filling):
            _, info = model_class.from_pretrained(
                None, config=config, state_dict={}, output_loading_info=True, ignore_mismatched_sizes=True,
                device_map={"": "meta"}, attn_implementation="eager",
            )  # fmt: skip
    except RuntimeError as error:
        if "conversion" not in str(error):
            return None
        return [
            "what config.json makes one tensor (experts of a layer) has parts of other shapes; one is of another model"
        ]
    except Exception:  # of what kind depends on the family's code: it cannot be told
        return None
    name = model_class.__name__
    drafts, further = in_mtp_layers(described), tuple(uncounted_layers(described, tensors))
    extra = [x for x in _strings(info["unexpected_keys"]) if not (drafts(x) or x.startswith(further) or _is_buffer(x))]
    missing = [x for x in _strings(info["missing_keys"]) if not _is_buffer(x)]
    lines = [
        f"the files have no {names[0]!r} ({len(names)} in all), which config.json's {name} needs; "
        "take all files of the model, with the names of its own checkpoint"
        for names in (missing,)
        if names
    ]
    lines += [
        f"config.json's {name} has no place for {names[0]!r} ({len(names)} in all); take the config.json that belongs "
        "to the files, or leave out what is of another model"
        for names in (extra,)
        if names
    ]
    for tensor, stored, expected in sorted(info["mismatched_keys"], key=str)[:1]:
        lines.append(
            f"{tensor!r} is {_shown(stored)}, and config.json makes it {_shown(expected)}; one of the two is of "
            "another model"
        )
    return lines


def _nowhere(conversion: Any) -> Any:
    if not getattr(conversion, "force_cpu", False):
        return conversion
    changed = copy(conversion)
    changed.force_cpu = False
    return changed


def _classes_of(path: Path) -> list[tuple[Any, Any]]:
    """transformers' classes that the config.json at ``path`` names, each with its config; empty where there is none.

    Where ``architectures`` names a class of another type than ``model_type``, both: some readers follow the one, some
    the other. A part of a model that has several (a text's class of a model of images and text) is no contradiction.
    """
    try:
        import transformers

        config = create_config(path)
        names = getattr(config, "architectures", None)
        model_class: Any = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            return []
        kind: Any = getattr(model_class, "config_class", None)
        if kind is None:  # what families are derived from
            return []
        if isinstance(config, kind):
            return [(model_class, config)]
        by_type = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if by_type is None or config.sub_configs or kind.sub_configs:
            return []
        return [(by_type, config), (model_class, create_config(path, kind.model_type))]
    except (PtqError, ImportError):  # a type or numbers that it does not know, or not installed
        return []


def _without_numbers(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = DTYPES[dtype][0] if dtype in DTYPES else torch.bfloat16
    empty = torch.empty(shape, dtype=kind, device="meta")
    return empty if kind.is_floating_point or empty.numel() > _MOST_REAL else torch.zeros(shape, dtype=kind)


def _strings(names: Iterable[Any]) -> list[str]:
    return sorted(map(str, names))


def _is_buffer(name: str) -> bool:
    return name.endswith(_BUFFERS)


def _shown(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"
