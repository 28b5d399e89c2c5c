"""A model's multi-token prediction layer: one more decoder layer, which guesses the token after the next.

transformers leaves its weights out of a model. Here the layer is made of the model's own class of decoder layers and
hung into the empty model as ``mtp``; the names of its tensors come from the table of families. At a place of a text it
gets what the head sees there (the state behind the final norm, as vLLM and transformers 5.23 have it) and the embedding
of the token that follows; the model's own head then reads its answer. Embedding and head are the model's: published
copies in the layer are the same numbers. Must not know caches, batches or statistics.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ptqpipe.errors import CheckpointError, UsageError, arg
from ptqpipe.models.families import Mtp, family_of, layer_count
from ptqpipe.models.language_model import with_cache
from ptqpipe.models.source import Source


class MtpLayer(torch.nn.Module):
    """The first multi-token prediction layer of a model on the meta device, by its parts.

    block       a decoder layer
    eh_proj     from the embedding of the following token and the state, side by side
    enorm       of the embedding; ``hnorm`` of the state
    norm        of what the head then sees
    """

    def __init__(self, model: Any, config: Any, layers: int) -> None:
        super().__init__()
        decoder = model.get_decoder()
        own = _config_of_more_layers(config)
        self.block = type(decoder.layers[-1])(own, layers).to(decoder.norm.weight.dtype)
        self.norm = copy.deepcopy(decoder.norm)
        self.enorm, self.hnorm = copy.deepcopy(decoder.norm), copy.deepcopy(decoder.norm)
        hidden, weight = own.hidden_size, self.norm.weight
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, device=weight.device, dtype=weight.dtype)
        own.num_hidden_layers = 1
        if getattr(own, "layer_types", None):
            own.layer_types = own.layer_types[-1:]
        self.config, self.layer = own, layers  # its number in caches

    def pair(self, model: Any, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States [samples, tokens, hidden] behind the final norm and int64 [samples, tokens] of the tokens that follow
        -> what goes in [samples, tokens, 2 * hidden]."""
        return torch.cat([model.get_input_embeddings()(tokens), states], dim=-1)

    def forward(
        self, model: Any, pairs: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """What the head sees [samples, tokens, hidden]. ``positions`` of the states, None: from 0 on; ``cache``: what
        attention gets as a key-value cache."""
        embedded, states = pairs.chunk(2, dim=-1)
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], dim=-1))
        around = self._around(model)
        out: torch.Tensor = around(inputs_embeds=joined, position_ids=positions, **with_cache(around, cache))[0]
        return out

    def _around(self, model: Any) -> Any:
        """The model's decoder with this layer in the place of all of its own: its masks and position embeddings."""
        decoder = model.get_decoder()
        decoder_copy = copy.copy(decoder)
        decoder_copy._forward_hooks = OrderedDict()  # of the model's own run
        decoder_copy._modules = {**decoder._modules, "layers": torch.nn.ModuleList([self.block]), "norm": self.norm}
        self.config._attn_implementation = decoder.config._attn_implementation
        decoder_copy.config = self.config
        return decoder_copy


def find_mtp(source: Source) -> tuple[Mtp, int] | None:
    """The row of the source's family about such layers and how many other layers the model has; None where the family
    has no row, or the source none of their tensors.

    CheckpointError where config.json counts such layers and their tensors are incomplete.
    """
    config = source.reader.config
    names, layers = family_of(config).mtp, layer_count(config)
    if names is None or layers is None:
        return None
    wanted = [f"{part}.weight".format(layer=layers) for part in (names.join, names.tokens, names.states, names.last)]
    missing = [name for name in wanted if name not in source.tensors]
    block = names.block.format(layer=layers)
    if len(missing) == len(wanted):
        return None
    if missing or not any(name.startswith(f"{block}.") for name in source.tensors):
        lost = missing[0] if missing else f"{block}.*"
        raise CheckpointError(
            f"{source.reader.path} has a multi-token prediction layer without {lost!r}; copy its files again"
        )
    return names, layers


def require_mtp(source: Source) -> None:
    """UsageError, with the reason, for a checkpoint without a multi-token prediction layer that can be run."""
    if find_mtp(source) is not None:
        return
    config, path = source.reader.config, source.reader.path
    names, layers = family_of(config).mtp, layer_count(config)
    if names is None or layers is None:
        raise UsageError(
            f"{arg('speculative', 'mtp')}: {path} is a {config.get('model_type')!r} model, for which no multi-token "
            "prediction layer is known; serve without it"
        )
    raise UsageError(
        f"{arg('speculative', 'mtp')}: {path} has no multi-token prediction layer (no "
        f"{names.join.format(layer=layers)!r}); serve without it, or add the files with it from where the model "
        "was published"
    )


def add_mtp(model: Any, layer: tuple[Mtp, int]) -> list[Any]:
    """Hangs the layer into an empty model; transformers' renamings of the checkpoint's names, which go before others.
    Called where modules are made empty, as the model was.

    CheckpointError for a model whose decoder layers cannot be made one by one.
    """
    from transformers.core_model_loading import WeightRenaming

    names, layers = layer
    try:
        model.mtp = MtpLayer(model, model.config.get_text_config(), layers).eval()
    except (AttributeError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"the multi-token prediction layer of {type(model).__name__} cannot be made of its decoder layers: "
            f"{type(error).__name__} {error}; leave its use out ({arg('speculative')}, {arg('mtp')})"
        ) from None
    parts: Mapping[str, str] = {
        names.join: "eh_proj", names.tokens: "enorm", names.states: "hnorm", names.last: "norm",
    }  # fmt: skip
    renamings = {f"^{_escaped(name, layers)}\\.": f"mtp.{part}." for name, part in parts.items()}
    others = "(?!embed_tokens|shared_head)"  # the model's own are used
    renamings[f"^{_escaped(names.block, layers)}\\.{others}"] = "mtp.block."
    return [WeightRenaming(pattern, target) for pattern, target in renamings.items()]


def _escaped(name: str, layers: int) -> str:
    return name.format(layer=layers).replace(".", r"\.")


def _config_of_more_layers(config: Any) -> Any:
    """A copy with one layer more: lists by layer go on as they end, kinds of layers with full attention."""
    own, layers = copy.deepcopy(config), config.num_hidden_layers
    for name, value in list(vars(own).items()):
        if isinstance(value, list) and len(value) == layers:
            full = name == "layer_types" and "full_attention" in value
            vars(own)[name] = [*value, "full_attention" if full else value[-1]]
    return own
