"""The part of an image-text model that only images pass: vision tower and projector, run by the first rank alone.

They are loaded with the first image, since most requests have none. transformers' own forward of the whole model runs
up to its decoder, with only the tower's weights in memory: image features, their places in the prompt, positions and
attention masks are transformers' own, for any family.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ptqpipe.errors import PtqError, UsageError, first_line
from ptqpipe.models.language_model import image_parts
from ptqpipe.models.source import Source
from ptqpipe.run.quantities import memory_size
from ptqpipe.runtime.capture import StopForward
from ptqpipe.runtime.skeleton import Skeleton
from ptqpipe.serving.engine.prompt_images import DEEP, Images, Seen

_TEXT = 54321.0  # stands for every number of a text token's embedding
_MASKS, _RULE = "ptqpipe_images", "_ptqpipe_rule"
_TAKEN = {"inputs_embeds", "position_ids", "attention_mask", "per_layer_inputs", *DEEP}
_PLAIN = (bool, int, float, str, type(None))


class Tower:
    """The tower of the checkpoint at ``path``, computing in ``dtype`` on ``device``.

    log  is told when it is loaded
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: str, log: Callable[[str], None]) -> None:
        self._path, self._dtype, self._device, self._log = path, dtype, torch.device(device), log
        self._model: Any = None

    @torch.inference_mode()
    def see(self, prompt: Sequence[int], images: Images) -> Seen:
        """The features of a prompt's images. UsageError for images that the model does not take."""
        if self._model is None:
            self._model = self._load()
        try:
            return _seen(self._model, prompt, images, self._device)
        except PtqError:
            raise
        except Exception as error:  # of what kind depends on the family's code
            raise UsageError(
                f"{type(self._model).__name__} does not take these images: {type(error).__name__}: {first_line(error)}"
            ) from None

    def _load(self) -> Any:
        with Source.open(self._path) as source:
            skeleton = Skeleton.of(source, dtype=self._dtype, images=True)
            model, parts = skeleton.model, image_parts(skeleton.model)
            names = [name for part in parts for name in skeleton.names_in(part)]
            skeleton.load(names, self._device)
            for part in parts:
                model.get_submodule(part).to(self._device)  # buffers
        size = sum(
            model.get_submodule(part).get_parameter(name).nbytes
            for part in parts
            for name, _ in model.get_submodule(part).named_parameters()
        )
        inside = tuple(f"{name}." for name, _ in skeleton.blocks)
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta and not name.startswith(inside):  # a forward may look at it beside the images
                parent, _, leaf = name.rpartition(".")
                zero = torch.zeros((), dtype=parameter.dtype, device=self._device).expand(parameter.shape)
                setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(zero, requires_grad=False))
        self._log(f"vision tower and projector loaded: {memory_size(size)}")
        return model


def _seen(model: Any, prompt: Sequence[int], images: Images, device: torch.device) -> Seen:
    count = len(prompt)
    ids = torch.tensor([list(prompt)], device=device)
    inputs = {name: _on(value, device, model.dtype) for name, value in images.inputs.items()}
    arguments = _decoder_arguments(model, {"input_ids": ids, "use_cache": False, **inputs})
    other = sorted(name for name, value in arguments.items() if name not in _TAKEN and not isinstance(value, _PLAIN))
    if other:
        raise UsageError(
            f"{type(model).__name__} gives its decoder {', '.join(other)} with images, which the engine "
            "does not; send text"
        )
    embeds = arguments["inputs_embeds"][0]
    places = (embeds != _TEXT).any(dim=-1).nonzero()[:, 0].cpu()
    mask, deep = (arguments.get(name) for name in DEEP)
    if mask is not None and not torch.equal(mask[0].cpu().nonzero()[:, 0], places):
        raise UsageError(f"{type(model).__name__} adds features to other tokens than those of images; send text")
    rows = embeds[places.to(device)].cpu()
    features = torch.stack([x.to(rows.dtype).cpu() for x in deep]) if deep else rows.new_empty(0, *rows.shape)
    groups, layers = _groups(model, arguments.get("attention_mask"), places, count)
    return Seen(places, rows, features, _positions(arguments.get("position_ids"), count), groups, layers)


def _on(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An input of the model on its device; floats in its own type."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _positions(position_ids: Any, count: int) -> torch.Tensor | None:
    """int64 [3, count], None where they are counted from 0."""
    if position_ids is None:
        return None
    positions = position_ids[-3:, 0] if position_ids.dim() == 3 else position_ids[-1:].expand(3, -1)
    positions = positions.cpu()
    return None if bool((positions == torch.arange(count)).all()) else positions.clone()


def _decoder_arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model's decoder in a forward. Text's embeddings are all `_TEXT`; masks have their `_RULE`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    arguments: dict[str, Any] = {}

    def note(*_args: Any, **kwargs: Any) -> Any:
        arguments.update(kwargs)
        raise StopForward

    def mask(*_args: Any, mask_function: Any, **_ignored: Any) -> torch.Tensor:
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        setattr(everything, _RULE, mask_function)
        return everything

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return torch.full((*ids.shape, config.hidden_size), _TEXT, dtype=model.dtype, device=ids.device)

    config, embedding, decoder = model.config.get_text_config(), model.get_input_embeddings(), model.get_decoder()
    ALL_MASK_ATTENTION_FUNCTIONS.register(_MASKS, mask)
    before, config._attn_implementation = config._attn_implementation, _MASKS
    embedding.forward, decoder.forward = embed, note
    try:
        model(**inputs)
    except StopForward:
        return arguments
    finally:
        del embedding.forward, decoder.forward
        config._attn_implementation = before
    raise UsageError(f"{type(model).__name__} runs no decoder; send text")


def _groups(
    model: Any, mask: Any, places: torch.Tensor, count: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """(first, end) of the tokens that see each other, and in which layers; both empty where each token sees those
    before it alone. UsageError for other rules."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    starts = [0, *((places.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(places)]
    runs = [(int(places[a]), int(places[b - 1]) + 1) for a, b in pairwise(starts)]
    keys, zero, groups = torch.arange(count), torch.zeros((), dtype=torch.int64), {}
    for kind in sorted(set(kinds)):
        one = mask.get(kind) if isinstance(mask, dict) else mask
        rule: Any = getattr(one, _RULE, None)
        if rule is None and one is not None:
            raise UsageError(f"{type(model).__name__} masks images in a way that the engine does not know; send text")
        ahead = []
        for first, end in runs if rule else ():
            sees = torch.as_tensor(rule(zero, zero, torch.tensor(first), keys)).broadcast_to(keys.shape)
            last = int(sees.nonzero().max()) + 1
            if last not in (first + 1, end):
                raise UsageError(
                    f"{type(model).__name__} masks images in a way that the engine does not know; send text"
                )
            ahead += [(first, end)] if last > first + 1 else []
        if ahead:
            groups[kind] = tuple(ahead)
    if not groups:
        return (), ()
    if len(set(groups.values())) > 1:
        raise UsageError(f"the layers of {type(model).__name__} see different images whole; send text")
    return next(iter(groups.values())), tuple(layer for layer, kind in enumerate(kinds) if kind in groups)
