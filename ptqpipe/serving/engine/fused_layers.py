"""Decoder layers in one compiled call, or in a few launches, for steps in which every sequence has one token.

A layer gets a fused forward if it has the parts of a Llama layer and the fused forward's answer to a random step is the
layer's own. All other steps and layers run as they did: prompts, other parts, hooks on them as ranks have, FP8 caches,
soft caps and sinks. There are two backends:

* `CompiledLayers` on a CPU, for products in panels whose inputs are not quantized: the same bits, in the pages, too.
* `DeviceLayer` on a GPU. Between its products torch launches some thirty kernels for a Llama layer, which take as long
  as the products do for one sequence. Here they are six: a norm, the rotary embedding with the store of keys and
  values, the residual's sum with the second norm, the gate, and the last sum; attention is as it was. Products of the
  same input are one launch where their packed weights go together (`joined` of a packed layer), else the modules' own.
  Biases and norms of the heads, as Qwen3 has, are taken. Results are near the layer's own (`near`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.numerics.kernels import triton_attention, triton_layer
from ptqpipe.numerics.kernels.cpu_attention import PagedQueries, PagedSpans
from ptqpipe.numerics.kernels.cpu_layer import Layer, LayerParts, dense, fits, run
from ptqpipe.serving.engine.attention import PagedAttention, Pages, Terms
from ptqpipe.serving.engine.batch import Batch, Span

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION, _HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_IGNORED = {"position_embeddings", "position_ids", "cache_position"}  # arguments of a layer that the step has already
Rotary = tuple[torch.Tensor, torch.Tensor]


class Listener(PagedAttention):
    """Attention over the same pages that records the arguments of each layer's call."""

    def __init__(self, other: PagedAttention) -> None:
        super().__init__(other.pages, other.block_size, device=other.device, windows=other.windows)
        self.terms: dict[int, Terms] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        self.terms[layer] = terms
        return super().attend(layer, query, key, value, terms)


@torch.inference_mode()
def use_fused_layers(model: Any, attention: PagedAttention) -> list[Layer]:
    """Gives a model's layers fused forwards, in place: returns those that are compiled for a CPU, in the model's order.
    The pages must be all zeros, and are so afterwards."""
    device, compiled = torch.device(attention.device), CompiledLayers()
    on_device = triton_layer.runs_on(device)
    fuse, alike = (device_layer, near) if on_device else (compiled.add, torch.equal)
    tables: dict[bytes, torch.Tensor] = {}
    for layer in list(model.modules()):
        if not _has_parts(layer, on_device):
            continue
        own, listener, index = layer.forward, Listener(attention), int(layer.self_attn.layer_idx)
        hooks = [kind for part in list(layer.modules())[1:] for kind in (part._forward_hooks, part._forward_pre_hooks)]
        if any(hooks) or index not in attention.pages:
            continue
        ends = (layer.self_attn.o_proj, layer.mlp.down_proj) if on_device else ()
        expected, terms = _answer(own, layer, listener, ends), listener.terms.get(index)
        if expected is None or terms is None or terms.sinks is not None or terms.softcap is not None:
            continue
        table, count = _activation_table(layer, device, tables), len(compiled.layers)
        fused = fuse(layer, attention.pages[index], terms, table)
        actual = None if fused is None else _answer(_forward(own, fused, listener, ()), layer, listener, ends)
        same = actual is not None and all(alike(one, other) for one, other in zip(actual, expected, strict=True))
        if fused is not None and same:
            layer.forward = _forward(own, fused, attention, hooks)
        else:
            del compiled.layers[count:]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the parts of joined weights had, too small for any joined one
    return compiled.layers


def _has_parts(layer: Any, on_device: bool) -> bool:
    """Whether a module has a Llama layer's parts and nothing else; on a GPU perhaps with norms of the heads, on a CPU
    with the compiled kernel's products."""
    children = dict(layer.named_children())
    if set(children) != _LAYER or "forward" in vars(layer) or layer.training:
        return False
    attention, feed_forward = (dict(children[name].named_children()) for name in ("self_attn", "mlp"))
    if set(attention) - (_HEAD_NORMS if on_device else set()) != _ATTENTION or set(feed_forward) != _FEED_FORWARD:
        return False
    products = () if on_device else (*attention.values(), *(feed_forward[name] for name in _FEED_FORWARD - {"act_fn"}))
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(getattr(product, "operand", None) is not None for product in products)
        and all(isinstance(getattr(norm, "weight", None), torch.Tensor) for norm in norms)
        and getattr(layer.self_attn, "layer_idx", None) is not None
    )


def _forward(
    own: Callable[..., Any],
    fused: "CompiledLayer | DeviceLayer",
    attention: PagedAttention,
    hooks: Sequence[Mapping[int, Any]],
) -> Callable[..., Any]:
    """The forward of a layer: ``fused`` in the steps that it is for, as long as none of ``hooks`` has an entry."""

    def forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        rotary = options.get("position_embeddings")
        others = (value for name, value in options.items() if name not in _IGNORED)
        alone = not args and all(value is None or value is False for value in others)
        if alone and rotary is not None and not any(hooks):
            output = fused.run(hidden_states, rotary, attention)
            if output is not None:
                return output
        return own(hidden_states, *args, **options)

    return forward


def _answer(
    forward: Callable[..., Any], layer: Any, attention: PagedAttention, ends: Sequence[torch.nn.Module]
) -> list[torch.Tensor] | None:
    """Results of a layer for a random step of up to eight sequences, two-dimensional each: the inputs of ``ends``, the
    output, and the page of keys and values that it writes (zeroed afterwards). None if it is not called as a Llama
    layer is, or keeps no bfloat16 numbers.

    The sequences' magnitudes go from large to small: whatever a layer adds to its input, in some sequences neither
    summand is rounded away.
    """
    index, hidden = int(layer.self_attn.layer_idx), len(layer.input_layernorm.weight)
    pages, size, g = attention.pages[index], attention.block_size, torch.Generator().manual_seed(index)
    totals = tuple(range(size, max(0, size - 8), -1))  # of sequences that share a page
    if pages.keys.dtype != torch.bfloat16:
        return None
    zeros, device = torch.zeros(len(totals), dtype=torch.int64), pages.keys.device
    x = torch.randn(1, len(totals), hidden, generator=g) * torch.logspace(6, -8, len(totals), 2)[:, None]
    x = x.bfloat16().to(device)
    angles = torch.rand(1, len(totals), pages.keys.shape[3], generator=g) * 6
    rotary = (angles.cos().bfloat16().to(device), angles.sin().bfloat16().to(device))
    first, results = (pages.keys[0], pages.values[0]), list[torch.Tensor]()
    for page in first:
        page.copy_(torch.randn(page.shape, generator=g))
    hooks = [end.register_forward_pre_hook(lambda end, args: results.append(args[0].clone())) for end in ends]
    try:
        with attention.during(Batch(zeros, zeros, tuple(Span(1, total, (0,)) for total in totals))):
            out = forward(x, attention_mask=None, position_embeddings=rotary, position_ids=None, use_cache=False)
        if not isinstance(out, torch.Tensor) or len(results) != len(ends):
            return None
        return [*(result.flatten(0, -2) for result in (*results, out)), *(page.flatten(1).clone() for page in first)]
    except Exception:  # a model's own code that expects something else
        return None
    finally:
        for hook in hooks:
            hook.remove()
        for page in first:
            page.zero_()


def _activation_table(layer: Any, device: torch.device, tables: dict[bytes, torch.Tensor]) -> torch.Tensor:
    """The bits of a layer's activation function at each bfloat16 number on a device, int16 [65536]; the same tensor for
    the same bits."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).to(device).view(torch.bfloat16)
    table: torch.Tensor = layer.mlp.act_fn(numbers).view(torch.int16)
    return tables.setdefault(table.cpu().numpy().tobytes(), table)


def _epsilon(norm: torch.nn.Module) -> float:
    """What a norm adds to the mean square; NaN, which no norm's answer equals, where it has none."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", float("nan"))))


class CompiledLayers:
    """The compiled layers of a model in its order, and the results of those that run ahead of the model.

    The first layer of a step computes those behind it as well, as if the model gave each the output of the one before;
    a later one takes its result if its input is indeed that output, else it computes anew, over the same slots. So a
    call for each layer, with what Python and torch need around it, is saved, and nothing is assumed of the model.

    ends  numbers of layers whose input was not the output of the one before
    """

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.ends: set[int] = set()
        self._step: tuple[object, ...] = ()  # the step and the angles of the results
        self._first, self._outs, self._inputs = 0, torch.empty(0), torch.empty(0)

    def add(self, layer: Any, pages: Pages, terms: Terms, activation: torch.Tensor) -> "CompiledLayer | None":
        """Appends a layer; None without kernels for it."""
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        products = [getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"]
        products += [getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        parts = LayerParts(
            tuple((norm.weight.detach(), _epsilon(norm)) for norm in norms),
            tuple((product.operand, product.bias) for product in products),
            activation, pages.keys, pages.values, terms.scaling, terms.window,
        )  # fmt: skip
        if not fits(parts):
            return None
        self.layers.append(Layer(parts))
        return CompiledLayer(self, len(self.layers) - 1)

    def run(
        self, number: int, x: torch.Tensor, rotary: Rotary, slots: torch.Tensor, where: tuple[PagedQueries, PagedSpans]
    ) -> torch.Tensor | None:
        """The output of one layer; None where the kernel does not take these tensors."""
        step, behind = (where[1], *rotary), number - self._first
        if 0 < behind < len(self._outs) and all(a is b for a, b in zip(step, self._step, strict=True)):
            if torch.equal(x, self._inputs[behind - 1]):
                return self._outs[behind]
            self.ends.add(number)
        last, widths = number + 1, self.layers[number].widths
        while last < len(self.layers) and last not in self.ends and self.layers[last].widths == widths:
            last += 1
        outs = run(self.layers[number:last], x, rotary, slots, where)
        if outs is None:
            return None
        # A copy, since the model may change an output in place.
        self._step, self._first, self._outs = step, number, outs
        self._inputs = outs.clone() if last > number + 1 else outs
        return outs[0]


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """One of `CompiledLayers`."""

    layers: CompiledLayers
    number: int

    def run(self, x: torch.Tensor, rotary: Rotary, attention: PagedAttention) -> torch.Tensor | None:
        """The output, bfloat16 ``[1, T, hidden]`` as ``x`` is; None where the step is not one for the kernels."""
        where = attention.singles()
        return None if where is None else self.layers.run(self.number, x, rotary, *where)


BOUND = 2.0**-5
Product = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether every row is within `BOUND` of itself in the root mean square.

    That is what comes out if every number took its other neighbour, up or down by chance, at each of the 17 roundings
    from one end of a layer to the other: a neighbour is 2^-7.5 away in the root mean square, and 17 of them are 2^-5.4.
    In fact few do; a layer without a residual, with another angle, window or factor of the scores is off by more.
    """
    if actual.shape != expected.shape:
        return False
    gap, size = (x.float().square().mean(-1).sqrt() for x in (actual.float() - expected.float(), expected))
    return bool((gap <= BOUND * size).all())


def device_layer(layer: Any, pages: Pages, terms: Terms, activation: torch.Tensor) -> "DeviceLayer | None":
    """A layer in a few launches; None without kernels for it."""
    keys, values, attention = pages.keys, pages.values, layer.self_attn
    if not keys.is_contiguous() or not values.is_contiguous() or values.dtype != keys.dtype:
        return None
    if keys.shape != values.shape or keys.shape[3] % 2:
        return None
    first, second = _norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm)
    if first is None or second is None or len(first.weight) != len(second.weight):
        return None
    heads = None
    if hasattr(attention, "q_norm"):
        query, key = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
        if query is None or key is None or not len(query.weight) == len(key.weight) == keys.shape[3]:
            return None
        heads = triton_layer.HeadNorms(query.weight, key.weight, query.eps, key.eps)
    projections = _product([attention.q_proj, attention.k_proj, attention.v_proj])
    gates = _product([layer.mlp.gate_proj, layer.mlp.up_proj])
    return DeviceLayer(
        int(attention.layer_idx), (first, second), heads, projections, attention.o_proj, gates, layer.mlp.down_proj,
        activation, terms,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """A layer's parts: the attention's products and the feed-forward's, all of an input in one call.

    activation  as in `triton_layer.gated`
    """

    index: int
    norms: tuple["Norm", "Norm"]
    heads: triton_layer.HeadNorms | None
    projections: Product
    output: torch.nn.Module
    gates: Product
    down: torch.nn.Module
    activation: torch.Tensor
    terms: Terms

    def run(self, x: torch.Tensor, rotary: Rotary, attention: PagedAttention) -> torch.Tensor | None:
        """As `CompiledLayer.run`. RuntimeError for heads that the attention has no kernel for."""
        where, shape, hidden = attention.placed_singles(), x.shape, len(self.norms[0].weight)
        if where is None:
            return None
        rows, dim = len(where.slots), attention.pages[self.index].keys.shape[3]
        if not dense(x, rows, hidden) or not all(dense(angles, rows, dim) for angles in rotary):
            return None
        pages = attention.pages[attention.place(self.index)]
        cache, angles = (pages.keys, pages.values), (rotary[0].view(rows, dim), rotary[1].view(rows, dim))
        x, y = self.norms[0](x.view(rows, hidden))
        query, key, value = self.projections(y)
        query = triton_layer.rotate_and_store(query, key, value, angles, cache, where.slots, self.heads)
        out = triton_attention.attention(query, *cache, where, scaling=self.terms.scaling, window=self.terms.window)
        if out is None:
            raise RuntimeError("no kernel of the device covers this attention")
        x, y = self.norms[1](x, self.output(out.flatten(1)))
        gate, up = self.gates(y)
        total: torch.Tensor = x + self.down(triton_layer.gated(gate, up, self.activation))
        return total.view(shape)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight bfloat16 ``[width]`` and epsilon."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm (`triton_layer.norm`)."""
        return triton_layer.norm(x, self.weight, self.eps, added)


def _norm_of(module: Any) -> Norm | None:
    """A module as an RMSNorm; None where it computes something else, or not in bfloat16.

    It gives the module's numbers, also where they are so small that the epsilon counts; but float32 sums in another
    order may round a number to its other neighbour before its weight multiplies it, and the product then: twice 2^-7 of
    it.
    """
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16 or weight.dim() != 1 or not eps >= 0:
        return None
    if not weight.is_contiguous() or len(weight) > triton_layer.WIDEST:
        return None
    norm, g = Norm(weight.detach(), eps), torch.Generator().manual_seed(0)
    x = torch.randn(2, len(weight), generator=g) * torch.tensor([[1.0], [eps**0.5 or 1.0]])
    x = x.bfloat16().to(weight.device)
    try:
        expected = module(x)
    except Exception:  # a norm that is called otherwise
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape or expected.dtype != x.dtype:
        return None
    gap = (norm(x)[1].float() - expected.float()).abs()
    return norm if bool((gap <= 2.0**-6 * expected.float().abs()).all()) else None


def _product(modules: Sequence[Any]) -> Product:
    joined = getattr(modules[0], "joined", None)
    together = None if joined is None else joined(modules[1:])
    if together is None:
        return lambda x: [module(x) for module in modules]
    widths = [int(module.out_features) for module in modules]
    return lambda x: torch.split(together(x), widths, -1)
