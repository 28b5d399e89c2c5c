"""Decoder layers in one compiled call, for steps in which every sequence has one token.

A layer of transformers gets a forward of its own if it has the parts of a Llama layer, if those are what the kernel
multiplies (weights in panels whose inputs are not quantized), and if the kernel's answer to a random input is the
layer's own, bit for bit, in the pages, too. All other steps and layers run as they did: other parts, hooks on them as
ranks have, FP8 caches, soft caps and sinks.

The first of such layers computes those behind it as well, as if the model gave each what the one before it made; a
later one takes that if it is indeed what it is given, else it computes anew, over the same slots. So a call for each
layer, with what Python and torch need around it, is saved, and nothing is assumed of the model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ptqpipe.numerics.kernels.cpu_attention import PagedQueries, PagedSpans
from ptqpipe.numerics.kernels.cpu_layer import Layer, LayerParts, fits, run
from ptqpipe.serving.engine.attention import PagedAttention, Terms
from ptqpipe.serving.engine.batch import Batch, Span

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Listener(PagedAttention):
    """Attention over the same pages that records the arguments of each layer's call."""

    def __init__(self, other: PagedAttention) -> None:
        super().__init__(other.pages, other.block_size, device=other.device, windows=other.windows)
        self.terms: dict[int, Terms] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """Runs the attention and records its arguments."""
        self.terms[layer] = terms
        return super().attend(layer, query, key, value, terms)


@torch.inference_mode()
def use_layers(model: torch.nn.Module, attention: PagedAttention) -> list[Layer]:
    """Gives a model's layers their kernels, in place: those that got one. The pages must be all zeros, and are so
    afterwards."""
    tables: dict[bytes, torch.Tensor] = {}
    chain = _Chain()
    for layer in list(model.modules()):
        if _has_parts(layer):
            _use_layer(layer, attention, tables, chain)
    return chain.layers


Rotary = tuple[torch.Tensor, torch.Tensor]
Where = tuple[PagedQueries, PagedSpans]


class _Chain:
    """Layers in the order of the model, and what those of them that are ahead of the model gave in its step.

    ends   of links that the model does not have: layers that were given something else than the one before made
    """

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.ends: set[int] = set()
        self._of: tuple[object, ...] = ()  # the step and the angles that the results are of
        self._first, self._outs, self._kept = 0, torch.empty(0), torch.empty(0)

    def run(self, at: int, x: torch.Tensor, rotary: Rotary, slots: torch.Tensor, where: Where) -> torch.Tensor | None:
        """The output of layer ``at``; None where it has no kernel."""
        of, behind = (where[1], *rotary), at - self._first
        if 0 < behind < len(self._outs) and all(a is b for a, b in zip(of, self._of, strict=True)):
            if torch.equal(x, self._kept[behind - 1]):
                return self._outs[behind]
            self.ends.add(at)
        last, widths = at + 1, self.layers[at].widths
        while last < len(self.layers) and last not in self.ends and self.layers[last].widths == widths:
            last += 1
        outs = run(self.layers[at:last], x, rotary, slots, where)
        if outs is None:
            return None
        # A copy, since the model may change in place what it was given.
        self._of, self._first, self._outs, self._kept = of, at, outs, outs.clone() if last > at + 1 else outs
        return outs[0]


def _has_parts(layer: torch.nn.Module) -> bool:
    """Whether a module has a Llama layer's parts and nothing else, and all products are the compiled kernel's."""
    children = dict(layer.named_children())
    if set(children) != _LAYER or "forward" in vars(layer) or layer.training:
        return False
    feed, own = dict(children["mlp"].named_children()), dict(children["self_attn"].named_children())
    if set(own) != _ATTENTION or set(feed) != _FEED_FORWARD or not hasattr(children["self_attn"], "layer_idx"):
        return False
    products = (*own.values(), *(feed[name] for name in _FEED_FORWARD - {"act_fn"}))
    return all(getattr(module, "operand", None) is not None for module in products)


def _use_layer(layer: Any, attention: PagedAttention, tables: dict[bytes, torch.Tensor], chain: _Chain) -> None:
    """Replaces a layer's forward where that changes no bit."""
    at, own, listener = int(layer.self_attn.layer_idx), layer.forward, Listener(attention)
    both = (layer.input_layernorm, layer.post_attention_layernorm)
    if not all(isinstance(getattr(norm, "weight", None), torch.Tensor) for norm in both):
        return
    norms = [(norm.weight.detach(), epsilon_of(norm)) for norm in both]
    hooks = [kind for part in list(layer.modules())[1:] for kind in (part._forward_hooks, part._forward_pre_hooks)]
    if any(hooks):
        return
    expected = answer(own, listener, at, len(norms[0][0]))
    terms = listener.terms.get(at)
    if expected is None or terms is None or terms.sinks is not None or terms.softcap is not None:
        return
    products = [getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"]
    products += [getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    parts = LayerParts(
        tuple(norms), tuple((product.operand, product.bias) for product in products),
        activation_table(layer.mlp.act_fn, tables), attention.pages[at].keys, attention.pages[at].values, terms.scaling,
        terms.window,
    )  # fmt: skip
    if not fits(parts):
        return
    alone = _Chain()
    alone.layers.append(Layer(parts))
    actual = answer(_forward(own, alone, listener, hooks), listener, at, len(norms[0][0]))
    if actual is not None and all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True)):
        chain.layers.append(Layer(parts))
        layer.forward = _forward(own, chain, attention, hooks)


def _forward(
    own: Callable[..., Any], chain: _Chain, attention: PagedAttention, hooks: Sequence[Mapping[int, Any]]
) -> Callable[..., Any]:
    """The forward of a chain's last layer: by the kernel in the steps that it is for, as long as none of ``hooks`` has
    an entry."""
    at = len(chain.layers) - 1

    def forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        where, rotary = attention.singles(), options.get("position_embeddings")
        alone = not args and options.get("attention_mask") is None and not any(hooks)
        if alone and where is not None and rotary is not None:
            output = chain.run(at, hidden_states, rotary, *where)
            if output is not None:
                return output
        return own(hidden_states, *args, **options)

    return forward


def answer(
    forward: Callable[..., Any], attention: PagedAttention, at: int, hidden: int
) -> tuple[torch.Tensor, ...] | None:
    """The outputs of a layer for a random step of up to eight sequences, and the page of keys and values that it writes
    (zeroed afterwards). None if it is not called as a Llama layer is, or keeps no bfloat16 numbers.

    The sequences' magnitudes go from large to small: whatever a layer adds to its input, in some sequences neither
    summand is rounded away.
    """
    pages, size, g = attention.pages[at], attention.block_size, torch.Generator().manual_seed(at)
    totals = tuple(range(size, max(0, size - 8), -1))  # of sequences that share a page
    if pages.keys.dtype != torch.bfloat16:
        return None
    zeros, device = torch.zeros(len(totals), dtype=torch.int64), pages.keys.device
    x = torch.randn(1, len(totals), hidden, generator=g) * torch.logspace(6, -8, len(totals), 2)[:, None]
    x = x.bfloat16().to(device)
    angles = torch.rand(1, len(totals), pages.keys.shape[3], generator=g) * 6
    rotary = (angles.cos().bfloat16().to(device), angles.sin().bfloat16().to(device))
    first = [pages.keys[0], pages.values[0]]
    for page in first:
        page.copy_(torch.randn(page.shape, generator=g))
    try:
        with attention.during(Batch(zeros, zeros, tuple(Span(1, total, (0,)) for total in totals))):
            out = forward(x, attention_mask=None, position_embeddings=rotary, position_ids=None, use_cache=False)
        return (out, *(page.clone() for page in first)) if isinstance(out, torch.Tensor) else None
    except Exception:  # a model's own code that expects something else
        return None
    finally:
        for page in first:
            page.zero_()


def epsilon_of(norm: torch.nn.Module) -> float:
    """What a norm adds to the mean square; what gives other bits than a norm's where it has none."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", float("nan"))))


def activation_table(
    function: Callable[[torch.Tensor], torch.Tensor],
    tables: dict[bytes, torch.Tensor],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The bits of a function's value at each bfloat16 number on a device, int16 [65536]; the same tensor for the
    same bits."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).to(device).view(torch.bfloat16)
    table = function(numbers).view(torch.int16)
    return tables.setdefault(table.cpu().numpy().tobytes(), table)
