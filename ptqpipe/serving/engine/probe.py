"""Finds out what a model's layers do by a forward of one token: shapes of keys and values, and which tokens a query
sees.

Whether a layer slides is not always said to its attention function: some models (PhiMoE) say it by their masks alone,
which our attention does without. So the probe lets transformers make its masks, and reads the rule of each off its
last rows. Models that see other tokens in another way are refused (`check_tokens`: with their weights). Works on an
empty model on the meta device as far as its own code does. Must not know the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.errors import UsageError
from ptqpipe.serving.engine.attention import (
    KV_SCALES,
    LayerShape,
    PagedAttention,
    Terms,
    implementation,
    layer_of,
    number_of,
    paged_attention_forward,
    register,
)
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.states import RecurrentState, States, listening

PROBE = "ptqpipe_probe"
ATTENTION = frozenset({  # kinds of layers with it
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid", "hybrid_sliding",
})  # fmt: skip
STATES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})  # kinds of layers that keep states
_RULE = "_ptqpipe_rule"
_ROUNDING = 0.04  # of the spread of outputs: in bfloat16 0.01 was measured, without a state before 0.09 and more
_MOST_TOKENS = 1 << 18  # how far a mask is searched: longer windows count as none


@dataclass(frozen=True, slots=True)
class Probed:
    """By place (`PagedAttention.place`): shapes; windows where the mask is known (None: everything); kv scales [heads
    or 1, 1] if any. And the modules that keep states."""

    shapes: dict[int, LayerShape]
    windows: dict[int, int | None]
    scales: dict[int, tuple[torch.Tensor, torch.Tensor]]
    holders: tuple[RecurrentState, ...]


@dataclass(frozen=True, slots=True)
class _MaskRule:
    """Which tokens a mask lets a query see: the last ``window`` (None: all before it), where it is ``simple``."""

    simple: bool
    window: int | None = None


class _Recorder(PagedAttention):
    """Records what each layer's attention is given instead of computing it."""

    def __init__(self) -> None:
        super().__init__({}, 1)
        self.shapes: dict[int, LayerShape] = {}
        self.said: dict[int, int | None] = {}
        self.masked: dict[int, int | None] = {}
        self.holders: list[RecurrentState] = []
        self.rule: _MaskRule | None = None  # of the mask that the next call has

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """Zeros of the right shape."""
        if self.rule is not None:
            self.masked[layer], self.rule = self.rule.window, None
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.said[layer] = terms.window
        return query.new_zeros(*query.shape[:2], value.shape[2])


class _Alone(PagedAttention):
    """Attention of each token to itself alone, that still depends on its query and key."""

    def __init__(self) -> None:
        super().__init__({}, 16)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """The values, by a factor between 0 and 2 of how a query fits its own key."""
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return v * (1 + torch.tanh((query * k).sum(dim=-1, keepdim=True) * terms.scaling))


def probe(model: Any, longest: int) -> Probed:
    """How a model attends, with ``longest`` tokens of context. UsageError for one that the engine cannot serve."""
    register()
    try:
        probed = _record(model, longest, masks=True)
    except UsageError:
        raise
    except Exception:  # a model's own code that makes something else of the mask: its mask is unknown then
        probed = _record(model, longest, masks=False)
    name, kinds = type(model).__name__, kinds_of(model.config.get_text_config())
    expected = [layer for layer, kind in enumerate(kinds) if kind in ATTENTION]
    if sorted({layer_of(place) for place in probed.shapes}) != expected and len(probed.shapes) != len(expected):
        raise UsageError(
            f"{len(probed.shapes)} of {len(expected)} layers of {name} attend through transformers' attention "
            "interface; the engine cannot serve it"
        )
    keeping = sum(kind in STATES for kind in kinds)
    if len(probed.holders) < keeping:
        raise UsageError(
            f"{len(probed.holders)} of {keeping} layers of {name} keep their states where transformers' cache "
            "has them; the engine cannot serve it"
        )
    for layer, kind in enumerate(kinds):
        slides = kind in ("sliding_attention", "hybrid_sliding")
        if slides and layer not in probed.masked and probed.said.get(layer) is None:
            raise UsageError(f"layer {layer} slides over its context in a way that the engine does not know")
    by_layer = _kv_scales(model)
    scales = {place: by_layer[layer_of(place)] for place in probed.shapes if layer_of(place) in by_layer}
    return Probed(probed.shapes, probed.masked, scales, tuple(probed.holders))


def kinds_of(config: Any) -> list[str]:
    """The type of each layer, by transformers' names ("full_attention", ...)."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def check_empty(model: Any, longest: int) -> None:
    """What `probe` raises, of a model on the meta device: as far as its code runs without numbers."""
    try:
        probe(model.to(torch.bfloat16), longest)  # in which experts have kernels
    except UsageError:
        raise
    except Exception:  # code that asks for numbers, such as how many tokens an expert has: known when it is loaded
        return


@torch.inference_mode()
def check_tokens(model: Any, states: States) -> None:
    """UsageError where a token sees others, or its place, by more than attention, states and positions that it is
    given, or where states continue in a piece of a prompt otherwise than within one.

    With attention of each token to itself, and states of its own, a convolution over tokens shows, and so do positions
    that a model counts itself, other than from 0 (RoBERTa). Several tries: a router at the edge of two experts may
    answer by the last bit.
    """
    name, vocabulary = type(model).__name__, int(model.config.get_text_config().vocab_size)

    def logits(tokens: Sequence[int], *, places: bool = True, alone: bool = True) -> torch.Tensor:
        ids = torch.tensor([[token % vocabulary for token in tokens]])
        indices = torch.arange(len(tokens))[None]
        batch = Batch(ids[0], indices[0], (Span(len(tokens), len(tokens), (0,)),))
        positions = {"position_ids": indices.to(model.device)} if places else {}
        with _implementation(model, 1, masks=False), _Alone().during(batch), states.during(batch, alone=alone):
            last: torch.Tensor = (
                model(input_ids=ids.to(model.device), use_cache=False, **positions).logits[0, -1].float()
            )
        return last

    tries = [[(17 * step + 5 * place) for place in range(1, 5)] for step in range(1, 4)]
    alone: dict[int, torch.Tensor] = {}
    for index, tokens in enumerate(tries):
        alone[index] = logits(tokens)
        if not _differ(alone[index], logits([token + 7 for token in tokens[:-1]] + tokens[-1:])):
            break
    else:
        raise UsageError(f"in {name} tokens see others without attention; the engine cannot serve it")
    if all(_differ(row, logits(tries[index], places=False)) for index, row in alone.items()):
        raise UsageError(f"{name} counts positions in a way of its own; the engine cannot serve it")
    if states.held:
        with states.in_pieces() as check:
            logits(tries[0] + tries[1], alone=False)
        states.by_tokens |= not check.several <= _ROUNDING
        if not (check.single if states.by_tokens else check.several) <= _ROUNDING:
            raise UsageError(f"{name} does not continue its states in a way that the engine knows")


def _differ(x: torch.Tensor, y: torch.Tensor) -> bool:
    """By more than a tenth of their spread: rounding is far below it, another input far above."""
    return float((x - y).abs().max()) > 0.1 * float(x.std())


def _kv_scales(model: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    scales = {}
    for module in model.modules():
        if (scales_pair := getattr(module, KV_SCALES, None)) is not None:
            key, value = (x.reshape(-1, 1).to(model.device) for x in scales_pair)
            scales[number_of(module)] = (key, value)
    return scales


@torch.inference_mode()
def _record(model: Any, longest: int, *, masks: bool) -> _Recorder:
    recorder = _Recorder()
    one = torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(one[0], one[0], (Span(1, 1, (0,)),))
    with _implementation(model, longest, masks=masks), recorder.during(batch), listening(model) as recorder.holders:
        model(input_ids=one.to(model.device), position_ids=one.to(model.device), use_cache=False)
    return recorder


@torch.inference_mode()
def mtp_shape(model: Any) -> dict[int, LayerShape]:
    """Shapes of the keys and values of ``model.mtp`` (``runtime/mtp.py``), by its layer number in the cache."""
    recorder, one = _Recorder(), torch.zeros(1, 1, dtype=torch.int64)
    pairs = torch.zeros(1, 1, 2 * model.mtp.config.hidden_size, dtype=model.dtype, device=model.device)
    position = one.to(model.device)
    with _implementation(model, 1, masks=False), recorder.during(Batch(one[0], one[0], (Span(1, 1, (0,)),))):
        model.mtp(model, pairs, position)
    return recorder.shapes


@contextmanager
def _implementation(model: Any, longest: int, *, masks: bool) -> Iterator[None]:
    """Within it the model attends through us, with masks that tell their rule, or without masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(batch_size: int, *, kv_length: int, mask_function: Any, **more: Any) -> torch.Tensor:
        queries = (
            more["q_length"] if "q_length" in more else len(more["cache_position"])
        )  # as older transformers say it
        everything = torch.ones(batch_size, 1, int(queries), int(kv_length), dtype=torch.bool)
        setattr(everything, _RULE, rule_of(mask_function, min(longest, _MOST_TOKENS)))
        return everything

    config = model.config.get_text_config()
    before = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(PROBE, _probe_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, mask)
    config._attn_implementation = PROBE if masks else implementation(config)
    try:
        yield
    finally:
        config._attn_implementation = before


def _probe_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **terms: Any
) -> tuple[torch.Tensor, None]:
    """transformers' signature. UsageError for a mask of another rule."""
    rule = getattr(attention_mask, _RULE, None)
    if rule is None:
        return paged_attention_forward(module, query, key, value, attention_mask, **terms)
    if not rule.simple:
        raise UsageError(f"{type(module).__name__} masks tokens in a way that the engine does not know")
    recorder = PagedAttention.active()
    assert isinstance(recorder, _Recorder)
    recorder.rule = rule
    return paged_attention_forward(module, query, key, value, None, **terms)


def rule_of(sees: Callable[..., Any], longest: int) -> _MaskRule:
    """The rule of a mask function of transformers: (batch, head, query, key) -> whether the query sees the key.

    A window's last rows all have its length; chunks and everything that looks ahead show in other rows.
    """
    keys, zero = torch.arange(longest), torch.zeros((), dtype=torch.int64)

    def row(query: int) -> torch.Tensor:
        seen = torch.as_tensor(sees(zero, zero, torch.tensor(query), keys)).to(torch.bool)
        return seen.broadcast_to(keys.shape)

    count = int(row(longest - 1).sum())
    window = None if count == longest else count
    for query in {longest - 1, max(longest - 2, 0), longest // 2}:
        expected = (keys <= query) & (keys > query - (window or longest))
        if not torch.equal(row(query), expected):
            return _MaskRule(simple=False)
    return _MaskRule(simple=True, window=window)
