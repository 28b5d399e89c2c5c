"""The model of the engine: a batch in, logits out. Creates the KV cache that fits it; refuses models that it would
compute wrong.

A model is transformers' own module. It gets the tokens of all sequences in one row with their positions; attention is
ours (``attention.py``), modules that keep states get them by sequences (``states.py``), everything else in a decoder
works token by token. Models with other ways to see other tokens (shared caches, sparse attention) are refused by what
their config says and by what the probe (``probe.py``) shows.
"""

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from ptqpipe.errors import UsageError, arg
from ptqpipe.run.quantities import option_size
from ptqpipe.serving.engine.attention import PagedAttention, Pages, implementation, numbers_of
from ptqpipe.serving.engine.batch import Batch
from ptqpipe.serving.engine.decode_step import DecodeStep, decode_step
from ptqpipe.serving.engine.engine import EngineOptions
from ptqpipe.serving.engine.fused_layers import use_fused_layers
from ptqpipe.serving.engine.graphs import StepGraphs
from ptqpipe.serving.engine.probe import ATTENTION, STATES, check_tokens, kinds_of, mtp_shape, probe
from ptqpipe.serving.engine.prompt_images import DEEP
from ptqpipe.serving.engine.states import States

if TYPE_CHECKING:
    from ptqpipe.serving.engine.overlap import Overlap

_LIMITS = {  # of kinds of layers that see everything up to so many tokens; Llama 4 has a temperature that is 1 so far
    "chunked_attention": ("attention_chunk_size", "floor_scale"),
    "indexed_attention": ("index_topk",),
}
_NOTHING = {"mlp", "moe"}  # kinds of layers that see a token alone
_OTHER_TOKENS = {"paligemma"}  # measured: the engine's tokens are not those of transformers


class ModelRunner:
    """A model with its cache. Every rank of a tensor-parallel group has one, and runs the same batches."""

    def __init__(
        self,
        model: Any,
        options: EngineOptions,
        *,
        agree: Callable[[int], int] | None = None,
        overlap: "Overlap | None" = None,
    ) -> None:
        """Allocates the KV cache.

        agree    of all ranks on the number of blocks, and of sequences
        overlap  what runs the model's collectives, and steps in halves beside them
        """
        self.model, self.options, self.overlap = model, options, overlap
        self.block_size = options.block_size
        self.config = model.config.get_text_config()
        check_model(model)
        probed = probe(model, context_length(self.config))
        self.config._attn_implementation = implementation(self.config)
        for module in model.modules():  # counts positions itself, for a factor that is 1 within the context
            if getattr(module, "attn_temperature_tuning", False):
                module.attn_temperature_tuning = False
        self.dtype: torch.dtype = model.dtype
        self.shapes, self.scales = probed.shapes, probed.scales
        if getattr(model, "mtp", None) is not None:  # a layer of the cache like the others
            self.shapes |= mtp_shape(model)
        self.bytes_per_block = options.block_size * sum(
            shape.heads * (shape.key_dim + shape.value_dim) * (1 if layer in self.scales else self.dtype.itemsize)
            for layer, shape in self.shapes.items()
        )
        self.state_bytes = sum(holder.nbytes for holder in probed.holders)
        count = self._sequence_count(options)
        self.max_seqs = count if agree is None else agree(count)
        count = self._block_count(options)
        self.blocks = count if agree is None else agree(count)
        self.states = States(probed.holders, self.max_seqs, device=model.device)
        check_tokens(model, self.states)
        pages = {layer: self._pages(layer) for layer in self.shapes}
        self.attention = PagedAttention(pages, options.block_size, device=model.device, windows=probed.windows)
        alone = agree is None and overlap is None
        self.graphs = self._step_graphs(options.max_len) if alone else None
        layers = use_fused_layers(model, self.attention) if alone or model.device.type == "cpu" else []
        self.decode_step: DecodeStep | None = None
        self.decode_step = decode_step(model, layers, self.attention, self._forward)
        model.get_input_embeddings().register_forward_hook(self._with_images)
        for module in model.modules():
            if set(DEEP) <= signature(module.forward).parameters.keys():
                module.register_forward_pre_hook(self._with_features, with_kwargs=True)

    def _step_graphs(self, max_len: int) -> StepGraphs | None:
        """CUDA graphs, on a GPU, for models without recurrent states and without an MTP layer; else None."""
        if self.model.device.type != "cuda" or self.state_bytes or getattr(self.model, "mtp", None) is not None:
            return None
        return StepGraphs(self.model, self.attention, max_len=max_len, max_seqs=self.max_seqs, spare=self.blocks)

    def _sequence_count(self, options: EngineOptions) -> int:
        """Number of sequences with recurrent states: as requested, within half of ``max_bytes``; at least one."""
        if not self.state_bytes:
            return options.max_seqs
        return max(1, min(options.max_seqs, options.max_bytes // 2 // self.state_bytes))

    def _block_count(self, options: EngineOptions) -> int:
        """Number of cache blocks: as many as sequences use, within ``max_bytes``. UsageError if one does not fit."""
        one = -(-(options.max_len + 1) // options.block_size)
        states = self.max_seqs * self.state_bytes
        count = one * self.max_seqs
        if self.bytes_per_block:
            count = min(max(options.max_bytes - states, 0) // self.bytes_per_block, count)
        if count < one or states > options.max_bytes:
            needed = one * self.bytes_per_block
            needed = 2 * max(needed, self.state_bytes) if states else needed  # half of it for states
            beside = f" beside {self.max_seqs} sequences' states" if states else ""
            raise UsageError(
                f"a kv cache of {option_size(options.max_bytes)} holds {count * options.block_size} tokens{beside}, "
                f"expected at least {options.max_len}; raise {arg('kv_cache_size')} to {needed} or lower "
                f"{arg('max_model_len')}"
            )
        return int(count)

    def _pages(self, layer: int) -> Pages:
        shape, scales = self.shapes[layer], self.scales.get(layer)
        dtype = self.dtype if scales is None else torch.float8_e4m3fn
        spare = self.model.device.type == "cuda"  # a page for the rows of a recorded step that have no sequence
        size = (self.blocks + spare, self.block_size, shape.heads)
        dims = (shape.key_dim, shape.value_dim)
        keys, values = (torch.zeros(*size, dim, dtype=dtype, device=self.model.device) for dim in dims)
        if scales is None:
            return Pages(keys, values)
        rows = max(len(scale) for scale in scales)
        numbers = [numbers_of(scale.expand(rows, 1), self.dtype) for scale in scales]
        return Pages(keys, values, *scales, (numbers[0], numbers[1]))

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [wanted, vocabulary] of a batch, where the model is."""
        return self._forward(batch) if self.overlap is None else self.overlap.run(batch, self._forward)

    def _forward(self, batch: Batch) -> torch.Tensor:
        by_graph = None if self.graphs is None else self.graphs.run(batch)
        if by_graph is not None:
            return by_graph.to(torch.float32, copy=True)
        device = self.model.device
        with self.attention.during(batch), self.states.during(batch):
            by_kernels = None if self.decode_step is None else self.decode_step.run(batch)
            if by_kernels is not None:
                return by_kernels.float()
            out = self.model(
                input_ids=batch.tokens[None].to(device),
                position_ids=batch.positions().unsqueeze(-2).to(device),
                use_cache=False,
                logits_to_keep=batch.wanted.to(device) if len(batch.wanted) else 1,
            )
        logits: torch.Tensor = out.logits[0]
        if len(logits) == len(batch.tokens) != len(batch.wanted):  # by models that do not know it (MiniCPM-V)
            logits = logits[batch.wanted.to(device)]
        return logits[: len(batch.wanted)].float()

    def _with_images(self, _module: Any, _args: Any, embeds: torch.Tensor) -> torch.Tensor:
        """The embeddings [1, T, hidden] of a step's tokens, those of images in their places."""
        images = self.attention.images()
        if images is None or not len(images.places):
            return embeds
        embeds = embeds.clone()
        embeds[0, images.places.to(embeds.device)] = images.rows.to(embeds.device, embeds.dtype)
        return embeds

    def _with_features(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The decoder's arguments with the features that images add behind its first layers."""
        images = self.attention.images()
        if images is None or not len(images.places) or not len(images.deep):
            return args, kwargs
        x = kwargs["inputs_embeds"]
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        mask[0, images.places.to(x.device)] = True
        return args, {**kwargs, **dict(zip(DEEP, (mask, list(images.deep)), strict=True))}


def check_model(model: Any) -> None:
    """UsageError for a model whose layers are not all causal attention over one cache each, or keep states."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(kinds_of(config))
    others = sorted(kinds - ATTENTION - STATES - _NOTHING)
    if others:
        raise UsageError(
            f"{name} has {', '.join(others)} layers; the engine serves full and sliding attention, and layers with "
            "states"
        )
    if model.config.model_type in _OTHER_TOKENS:
        raise UsageError(f"the engine does not compute the tokens of {name} as transformers does, and refuses it")
    if not kinds & STATES and not getattr(model, "_supports_attention_backend", False):
        raise UsageError(f"{name} does not use transformers' attention interface; the engine cannot serve it")


def context_length(config: Any) -> int:
    """The longest sequence that a model computes the same whatever else is in its batch, by attention to all tokens.

    Rotary embeddings of the types ``dynamic`` and ``longrope`` change for all tokens when one is beyond the original
    context, so they end there. Attention in chunks ends with its first chunk, sparse attention with as many tokens as
    its indexer chooses: up to there both see everything.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0) or 2048)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = parameters.values() if parameters and all(isinstance(x, dict) for x in parameters.values()) else ()
    for rope in (parameters, *by_layer):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or longest
            longest = min(longest, int(original))
    for kind in set(getattr(config, "layer_types", None) or ()) & set(_LIMITS):
        longest = min([longest, *(int(getattr(config, name, None) or longest) for name in _LIMITS[kind])])
    return longest
