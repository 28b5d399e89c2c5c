"""Decoder layers on a GPU in few launches, for steps in which every sequence has one token.

Between its products torch launches some thirty kernels for a Llama layer, which take as long as the products do for one
sequence. Here they are six: a norm, the rotary embedding with the store of keys and values, the residual's sum with the
second norm, the gate, and the last sum; attention is as it was. Products of the same input are one launch where their
packed weights go together (`joined` of a packed layer), else the modules' own.

A layer gets this forward if it has the parts of a Llama layer (with or without biases, and norms of the heads as Qwen3
has), and if it is the layer's own function:

* each norm gives the module's numbers, also where they are so small that the epsilon counts; but that float32 sums in
  another order may round a number to its other neighbour before its weight multiplies it, and the product then: twice
  2^-7 of it;
* the keys and values of a random step, what goes into the last product of either half, and the result are those of
  the layer's own forward within `BOUND` of themselves, in the root mean square over a token. That is what comes out if
  every number took its other neighbour, up or down by chance, at each of the 17 roundings from one end of a layer to
  the other: a neighbour is 2^-7.5 away in the root mean square, and 17 of them are 2^-5.4. In fact few do; a layer
  without a residual, with another angle, window or factor of the scores is off by more.

All other steps and layers run as they did: prompts, other parts, hooks, FP8 caches, soft caps and sinks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.numerics.kernels import triton_attention, triton_layer
from ptqpipe.serving.engine.attention import PagedAttention, Pages, Terms
from ptqpipe.serving.engine.layers import Listener, activation_table, answer, epsilon_of

BOUND = 2.0**-5
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_IGNORED = {"position_embeddings", "position_ids", "cache_position"}  # what a layer is given and the step has already
Product = Callable[[torch.Tensor], Sequence[torch.Tensor]]
Rotary = tuple[torch.Tensor, torch.Tensor]


@torch.inference_mode()
def use_device_layers(model: torch.nn.Module, attention: PagedAttention) -> int:
    """Gives a model's layers this forward, in place, on a device with kernels: how many got one. The pages must be all
    zeros, and are so afterwards."""
    device, tables = torch.device(attention.device), dict[bytes, torch.Tensor]()
    if not triton_layer.runs_on(device):
        return 0
    count = sum(_use_layer(layer, attention, tables) for layer in list(model.modules()) if _has_parts(layer))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the parts of joined weights had, too small for any joined one
    return count


def _has_parts(layer: torch.nn.Module) -> bool:
    """Whether a module has a Llama layer's parts and nothing else."""
    children = dict(layer.named_children())
    if set(children) != _PARTS or "forward" in vars(layer) or layer.training:
        return False
    own = {name for name, _ in children["self_attn"].named_children()}
    feed = {name for name, _ in children["mlp"].named_children()}
    standard = own in (_ATTENTION, _ATTENTION | _HEAD_NORMS) and feed == _FEED_FORWARD
    return standard and getattr(children["self_attn"], "layer_idx", None) is not None


@dataclass(frozen=True, slots=True)
class _Norm:
    """An RMSNorm: weight bfloat16 ``[width]`` and epsilon."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm (`triton_layer.norm`)."""
        return triton_layer.norm(x, self.weight, self.eps, added)


def _norm_of(module: Any) -> _Norm | None:
    """A module as an RMSNorm; None where it computes something else, or not in bfloat16."""
    weight, eps = getattr(module, "weight", None), epsilon_of(module)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16 or weight.dim() != 1 or not eps >= 0:
        return None
    if not weight.is_contiguous() or len(weight) > triton_layer.WIDEST:
        return None
    norm, g = _Norm(weight.detach(), eps), torch.Generator().manual_seed(0)
    x = torch.randn(2, len(weight), generator=g) * torch.tensor([[1.0], [eps**0.5 or 1.0]])
    x = x.bfloat16().to(weight.device)
    try:
        wanted = module(x)
    except Exception:  # a norm that is called otherwise
        return None
    if not isinstance(wanted, torch.Tensor) or wanted.shape != x.shape or wanted.dtype != x.dtype:
        return None
    y = norm(x)[1].float()
    return norm if bool(((y - wanted.float()).abs() <= 2.0**-6 * wanted.float().abs()).all()) else None


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's parts: the attention's products and the feed-forward's, all of an input in one call.

    activation  as in `triton_layer.gated`
    """

    norms: tuple[_Norm, _Norm]
    heads: triton_layer.HeadNorms | None
    projections: Product
    output: torch.nn.Module
    gates: Product
    down: torch.nn.Module
    activation: torch.Tensor
    terms: Terms

    def run(self, x: torch.Tensor, rotary: Rotary, where: triton_attention.DeviceSpans, pages: Pages) -> torch.Tensor:
        """``[T, hidden]`` of ``x [T, hidden]``; RuntimeError for heads that the attention has no kernel for."""
        _, y = self.norms[0](x)
        query, key, value = self.projections(y)
        held = (pages.keys, pages.values)
        query = triton_layer.rotate_and_store(query, key, value, rotary, held, where.slots, self.heads)
        seen = triton_attention.attention(query, *held, where, scaling=self.terms.scaling, window=self.terms.window)
        if seen is None:
            raise RuntimeError("no kernel of the device covers this attention")
        x, y = self.norms[1](x, self.output(seen.flatten(1)))
        gate, up = self.gates(y)
        hidden: torch.Tensor = x + self.down(triton_layer.gated(gate, up, self.activation))
        return hidden


def _use_layer(layer: Any, attention: PagedAttention, tables: dict[bytes, torch.Tensor]) -> bool:
    """Replaces a layer's forward where it computes the same; whether it does."""
    own, listener, at = layer.forward, Listener(attention), int(layer.self_attn.layer_idx)
    hooks = [kind for part in list(layer.modules())[1:] for kind in (part._forward_hooks, part._forward_pre_hooks)]
    pages = attention.pages.get(at)
    if any(hooks) or pages is None or pages.scales is not None or not _fits(pages):
        return False
    norms = (_norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm))
    if norms[0] is None or norms[1] is None or len(norms[0].weight) != len(norms[1].weight):
        return False
    heads, hidden = None, len(norms[0].weight)
    if hasattr(layer.self_attn, "q_norm"):
        query, key = _norm_of(layer.self_attn.q_norm), _norm_of(layer.self_attn.k_norm)
        if query is None or key is None or not len(query.weight) == len(key.weight) == pages.keys.shape[3]:
            return False
        heads = triton_layer.HeadNorms(query.weight, key.weight, query.eps, key.eps)
    ends = (layer.self_attn.o_proj, layer.mlp.down_proj)
    expected = _answers(own, listener, at, hidden, ends)
    terms = listener.terms.get(at)
    if expected is None or terms is None or terms.sinks is not None or terms.softcap is not None:
        return False
    projections = _product([getattr(layer.self_attn, f"{name}_proj") for name in "qkv"])
    gates = _product([layer.mlp.gate_proj, layer.mlp.up_proj])
    table = activation_table(layer.mlp.act_fn, tables, pages.keys.device)
    fused = _Layer((norms[0], norms[1]), heads, projections, ends[0], gates, ends[1], table, terms)
    answers = _answers(_forward(own, fused, listener, at, ()), listener, at, hidden, ends)
    if answers is None or not all(_alike(one, other) for one, other in zip(answers, expected, strict=True)):
        return False
    layer.forward = _forward(own, fused, attention, at, hooks)
    return True


def _fits(pages: Pages) -> bool:
    """Whether the kernels write to such pages."""
    keys, values = pages.keys, pages.values
    dense = keys.is_contiguous() and values.is_contiguous() and keys.dtype == values.dtype == torch.bfloat16
    return dense and keys.shape == values.shape and keys.shape[3] % 2 == 0


def _product(modules: Sequence[Any]) -> Product:
    """All products of an input, by one launch where there is one."""
    joined = getattr(modules[0], "joined", None)
    together = None if joined is None else joined(modules[1:])
    if together is None:
        return lambda x: [module(x) for module in modules]
    widths = [int(module.out_features) for module in modules]
    return lambda x: torch.split(together(x), widths, -1)


def _forward(
    own: Callable[..., Any], fused: _Layer, attention: PagedAttention, at: int, hooks: Sequence[Mapping[int, Any]]
) -> Callable[..., Any]:
    """The forward of a layer: by ``fused`` in the steps that it is for, as long as none of ``hooks`` has an entry."""
    hidden, dim = len(fused.norms[0].weight), attention.pages[at].keys.shape[3]

    def forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        where, rotary = attention.placed_singles(), options.get("position_embeddings")
        more = [value for name, value in options.items() if name not in _IGNORED]
        alone = not args and all(value is None or value is False for value in more) and not any(hooks)
        if not alone or where is None or rotary is None:
            return own(hidden_states, *args, **options)
        rows = len(where.slots)
        if not _dense(hidden_states, rows, hidden) or not all(_dense(angles, rows, dim) for angles in rotary):
            return own(hidden_states, *args, **options)
        angles = (rotary[0].view(rows, dim), rotary[1].view(rows, dim))
        pages = attention.pages[attention.place(at)]
        return fused.run(hidden_states.view(rows, hidden), angles, where, pages).view(hidden_states.shape)

    return forward


def _dense(x: torch.Tensor, rows: int, width: int) -> bool:
    """Whether a tensor is contiguous bfloat16 ``[rows, width]``."""
    return x.dtype == torch.bfloat16 and x.shape[-1] == width and x.numel() == rows * width and x.is_contiguous()


def _answers(
    forward: Callable[..., Any], attention: PagedAttention, at: int, hidden: int, ends: Sequence[torch.nn.Module]
) -> list[torch.Tensor] | None:
    """The inputs of ``ends``, [tokens, features] each, and the tensors of `answer`; None where that is None."""
    ends_inputs: list[torch.Tensor] = []
    hooks = [
        end.register_forward_pre_hook(lambda end, args: ends_inputs.extend(x.clone() for x in args[:1])) for end in ends
    ]
    try:
        result = answer(forward, attention, at, hidden)
    finally:
        for hook in hooks:
            hook.remove()
    if result is None or len(ends_inputs) != len(ends):
        return None
    out, keys, values = result
    return [*(x.flatten(0, -2) for x in (*ends_inputs, out)), keys.flatten(1), values.flatten(1)]


def _alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether every row is within `BOUND`."""
    if actual.shape != expected.shape:
        return False
    gap, size = (x.float().square().mean(-1).sqrt() for x in (actual.float() - expected.float(), expected))
    return bool((gap <= BOUND * size).all())
