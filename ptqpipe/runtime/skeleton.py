"""A transformers model without weights, and the loading of any part of it from a checkpoint by name.

Parameters are on the meta device until they are asked for; buffers are real. Which checkpoint tensor belongs to which
parameter, and how experts become stacks, is transformers' own conversion mapping (written for 5.23), applied to the
tensors of one part at a time. A quantized checkpoint is decoded as it is read (`runtime/state.py`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from ptqpipe.errors import CheckpointError, first_line, is_no_memory, missing_package
from ptqpipe.models.embedder import Pooling, is_embedder
from ptqpipe.models.families import check_experts
from ptqpipe.models.language_model import (
    image_model_of,
    image_parts,
    keep_language_model,
    lacks_head,
    layered_model_of,
    leave_out_pooler,
    without_head,
)
from ptqpipe.models.source import Source
from ptqpipe.runtime.creating import empty_model, lacks, other_shape, quiet, without_run
from ptqpipe.runtime.loading import config_of
from ptqpipe.runtime.mtp import add_mtp, find_mtp
from ptqpipe.runtime.state import LazyTensor, lazy_state

MTP = "mtp"  # the name of the multi-token prediction layer in the model


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model whose parameters come and go.

    model         of transformers, in evaluation mode
    blocks        names and modules of its decoder layers, in order
    mtp           the same of its multi-token prediction layer (``runtime/mtp.py``); empty without one
    origins       parameter (or persistent buffer) -> the checkpoint tensors that it is made of
    unplaced      checkpoint tensors that the model has no place for
    """

    model: Any
    blocks: tuple[tuple[str, torch.nn.Module], ...]
    origins: Mapping[str, tuple[str, ...]]
    unplaced: tuple[str, ...]
    dtype: torch.dtype
    state: Mapping[str, LazyTensor]
    conversions: Sequence[Any]
    mtp: tuple[tuple[str, torch.nn.Module], ...] = ()

    @classmethod
    def of(cls, source: Source, *, dtype: torch.dtype, images: bool = False) -> "Skeleton":
        """Names and shapes only. CheckpointError for a model that transformers cannot run layer by layer.

        images  with the parts that only images pass, too
        """
        check_experts(source.reader.config, source.tensors)
        config = config_of(source, layered_model_of)
        model = _empty_model(config, dtype, source, images=images)
        model = model if images else keep_language_model(model)
        conversions, layer = _conversions(model), find_mtp(source)
        blocks = _find_blocks(model, source)
        if layer is not None:
            with _empty():
                conversions = [*add_mtp(model, layer), *conversions]
        mtp = () if layer is None else ((MTP, model.mtp),)
        state = lazy_state(source)
        origins, unplaced = _place(state, model, conversions)
        leave_out_pooler(model, origins)
        _check_apart(model, blocks, origins)
        return cls(model, blocks, origins, unplaced, dtype, state, conversions, mtp)

    @property
    def outside(self) -> tuple[str, ...]:
        """Parameters and persistent buffers outside of the layers, the head's aside: it is never run."""
        head = self._head
        skip = tuple(f"{name}." for name, _ in (*self.blocks, *self.mtp)) + ((f"{head}.",) if head else ())
        return tuple(name for name in self.model.state_dict() if not name.startswith(skip))

    @property
    def head_name(self) -> str | None:
        """The name of the language-model head in the model; None where the checkpoint, of an embedding model or a
        classifier, has no weights of one."""
        name = self._head
        return None if name is None or lacks_head(self.model, self.origins) else name

    @property
    def _head(self) -> str | None:
        head = self.model.get_output_embeddings()
        return next((name for name, module in self.model.named_modules() if module is head), None)

    @property
    def pooling(self) -> Pooling | None:
        """How a sentence embedder makes a vector of its last hidden states; None of a causal model."""
        path = next(iter(self.state.values())).source.reader.path
        return Pooling.of(path) if is_embedder(path) else None

    def require_head(self) -> None:
        """CheckpointError for a checkpoint without a language-model head."""
        if self.head_name is None:
            raise without_head(next(iter(self.state.values())).source.reader.path, self.model)

    def load(self, names: Sequence[str], device: torch.device) -> None:
        """Fills parameters and persistent buffers. CheckpointError for one that the checkpoint lacks, or whose shape
        differs."""
        lost = [name for name in names if name not in self.origins and not self._is_buffer(name)]
        path = next(iter(self.state.values())).source.reader.path
        if lost:
            raise lacks(path, lost)
        wanted = {origin: self.state[origin] for name in names for origin in self.origins.get(name, ())}
        info = _load(self, wanted, device)
        if info.mismatched_keys:
            name, stored, expected = sorted(info.mismatched_keys, key=str)[0]
            raise other_shape(path, name, stored, expected)
        for name in names:
            if self._tensor(name).is_meta:
                raise CheckpointError(
                    f"transformers did not make '{name}' of {self.origins[name]}; update transformers, or "
                    f"{without_run()}"
                )

    def free(self, names: Sequence[str]) -> None:
        """Gives the memory of parameters back."""
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(parent)
            if leaf in module._parameters:
                parameter = module._parameters[leaf]
                module._parameters[leaf] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    def names_in(self, part: str) -> tuple[str, ...]:
        """Parameters and persistent buffers of a part of the model."""
        return tuple(name for name in self.model.state_dict() if name.startswith(f"{part}."))

    def nbytes(self, part: str) -> int:
        """Bytes of a part's parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.get_submodule(part).parameters())

    def largest_matrix(self) -> int:
        """Numbers in the largest matrix of a layer, of stacked experts in one of theirs."""
        shapes = (p.shape[-2:] for _, block in self.blocks for p in block.parameters())
        return max((math.prod(shape) for shape in shapes if len(shape) == 2), default=0)

    def has_room(self, tokens: int, memory_bytes: int, streams: int) -> bool:
        """Whether weights of a layer and so many sets of hidden states of all tokens fit into memory together."""
        return streams * tokens <= self.room(memory_bytes)

    def room(self, memory_bytes: int) -> int:
        """How many tokens' hidden states fit into memory beside the weights of the largest layer; negative where the
        weights alone do not fit."""
        hidden: int = self.model.config.get_text_config().hidden_size
        left = memory_bytes - max(self.nbytes(name) for name, _ in self.blocks)
        return left // (hidden * torch.empty(0, dtype=self.dtype).element_size())

    def _is_buffer(self, name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        return leaf in self.model.get_submodule(parent)._buffers

    def _tensor(self, name: str) -> torch.Tensor:
        parent, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.model.get_submodule(parent), leaf)
        return tensor


def _empty_model(config: Any, dtype: torch.dtype, source: Source, *, images: bool) -> Any:
    model_class, config = (image_model_of if images else layered_model_of)(config, source.reader.path)
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):  # for a loss of training, which needs the routers of all layers
        text.output_router_logits = False
    return empty_model(model_class, config, source.reader.path, dtype=dtype, within=_empty).eval()


def _empty() -> AbstractContextManager[None]:
    """Within it modules are made without the memory of their parameters; buffers have theirs."""
    try:
        from accelerate import init_empty_weights
    except ImportError:
        raise missing_package("calibration", "accelerate", "ptqpipe[hf]") from None
    context: AbstractContextManager[None] = init_empty_weights(include_buffers=False)
    return context


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _place(
    state: Mapping[str, LazyTensor], model: Any, conversions: Sequence[Any]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Parameters with the checkpoint tensors that make them, and the tensors that make none."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state_dict = model.state_dict()
    prefix = model.base_model_prefix
    origins: dict[str, list[str]] = defaultdict(list)
    unplaced = []
    for name in sorted(state, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state_dict)
        if target not in state_dict and name in state_dict:
            target, pattern = rename_source_key(name, [], [], prefix, state_dict)
        if target not in state_dict:
            unplaced.append(name)
            continue
        converter = next((c for c in converters if pattern is not None and pattern in c.source_patterns), None)
        for parameter in _targets(target, converter, state_dict):
            origins[parameter].append(name)
    return {name: tuple(sources) for name, sources in origins.items()}, tuple(unplaced)


def _targets(first: str, converter: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Every parameter that a conversion makes: its first target, and those that its pattern names beside it."""
    if converter is None:
        return [first]
    patterns = converter.target_patterns
    names = [first.replace(patterns[0], pattern) for pattern in patterns]
    return [name for name in dict.fromkeys(names) if name in parameters] or [first]


def _load(skeleton: Skeleton, wanted: Mapping[str, LazyTensor], device: torch.device) -> Any:
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    settings = LoadStateDictConfig(
        device_map={"": device}, dtype=skeleton.dtype, weight_mapping=list(skeleton.conversions)
    )
    convert = convert_and_load_state_dict_in_model
    old = {"tp_plan": None} if "tp_plan" in signature(convert).parameters else {}  # up to transformers 5.8 at least
    try:
        with quiet(), torch.no_grad():
            info, _ = convert(skeleton.model, dict(wanted), settings, **old)
    except RuntimeError as error:
        if is_no_memory(error):
            raise
        raise CheckpointError(f"the weights do not fit config.json: {first_line(error)}") from None
    for parameter in skeleton.model.parameters():
        parameter.requires_grad_(False)
    return info


def _check_apart(model: Any, blocks: Iterable[tuple[str, Any]], origins: Mapping[str, Any]) -> None:
    """CheckpointError for decoder layers that share weights (Zamba's), of which the checkpoint has one copy: each layer
    is filled and run by itself, and moments belong to one layer."""
    layers = tuple(f"{name}." for name, _ in blocks)
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name.startswith(layers) and name not in origins and other in origins:
            raise CheckpointError(
                f"{type(model).__name__} has one weight in several decoder layers ('{name}' is '{other}') and cannot "
                f"be run layer by layer; {without_run()}"
            )


def _find_blocks(model: Any, source: Source) -> tuple[tuple[str, torch.nn.Module], ...]:
    """The list of modules that has as many as the config says layers, the outermost one."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    towers = tuple(f"{part}." for part in image_parts(model))
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and not f"{name}.".startswith(towers)
    ]
    if not lists:
        raise CheckpointError(
            f"{source.reader.path}: {type(model).__name__} has no list of {count} decoder layers; it cannot be run "
            f"layer by layer; {without_run()}"
        )
    name, blocks = min(lists, key=lambda entry: entry[0].count("."))
    return tuple((f"{name}.{i}", module) for i, module in enumerate(blocks))
