"""Compiled kernels for what transformers' modules do around the packed layers, on a CPU, in bfloat16.

Three things, each where it is found to be so, never by a model's name: linear layers that stayed bfloat16 (a head, be
it tied to the embedding) multiply in panels; norms by the root mean square run as one pass; packed layers that are
given the same tensor are computed together. A norm is replaced only if the kernel's answer to a random input is the
module's own, bit for bit.

For models that only compute from now on: a service. Knows modules and kernels; must not know batches or caches.
"""

from collections.abc import Callable

import torch

from ptqpipe.errors import UsageError, arg
from ptqpipe.numerics.kernels import cpu_layer, cpu_library, cpu_linear
from ptqpipe.runtime.linear import PackedLinear, Siblings

LEAST_NUMBERS = 1 << 20  # of a weight, where the CPU multiplies bfloat16: a smaller one is in the cache anyway
PASS_NUMBERS = 1 << 19  # of the largest weight of a model that runs in bfloat16 where it need not
_PROBE_ROWS = 8


def pass_dtype(largest: int, device: torch.device) -> torch.dtype:
    """What a pass through a model runs in whose results are means over tokens, or over labels that are drawn, which
    move them far more than rounding does: bfloat16 where a CPU multiplies that faster and the ``largest`` weight
    has `PASS_NUMBERS`, else float32, which is the same on every CPU."""
    fast = device.type == "cpu" and cpu_library.multiplies_bf16() and largest >= PASS_NUMBERS
    return torch.bfloat16 if fast else torch.float32


@torch.inference_mode()
def use_kernels(model: torch.nn.Module, *, every: bool = False) -> None:
    """Gives layers and norms of a model their kernels, in place; runs it on one token to see which go together.

    every  also linear layers of few numbers, and those that share their weight with a module that keeps it

    Of no effect where there are no kernels. The ``weight`` of a linear layer that got one is None, and so is that of an
    embedding which shares it: its numbers are in panels only. With tensor parallelism every rank calls it.
    """
    holders = _holders(model)
    least = LEAST_NUMBERS if cpu_library.multiplies_bf16() else 0  # torch's product would take long for any number
    for module in model.modules():
        if "forward" in vars(module) and not hasattr(module, "own_rows"):  # someone's own
            continue
        if type(module) is torch.nn.Linear and (every or module.weight.numel() >= least):
            others = [other for other in holders[id(module.weight)] if other is not module]
            if not others:
                _use_panels(module)
            elif len(others) == 1 and type(others[0]) is torch.nn.Embedding and "forward" not in vars(others[0]):
                _use_panels(module, others[0])
            elif every:
                _use_panels(module)
        elif type(module).__name__.endswith("RMSNorm"):
            _use_norm(module)
    _join_siblings(model)


def _holders(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    modules: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            modules.setdefault(id(parameter), []).append(module)
    return modules


def _use_panels(module: torch.nn.Linear, embedding: torch.nn.Embedding | None = None) -> None:
    """Puts a layer's weight into panels; an embedding that shares it then reads its rows out of them."""
    weight, rows = module.weight, getattr(module, "own_rows", slice(None))  # some rows: see runtime/parallel.py
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not cpu_linear.Bf16Panels.fastest():
        return
    if embedding is None:
        panels = cpu_linear.Bf16Panels(weight.data[rows])
        operand = panels.operand()
    else:
        panels = cpu_linear.Bf16Panels(weight.data)
        operand = panels.operand(rows)
    if operand is None:
        return
    bias = None if module.bias is None else module.bias[rows]

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = cpu_linear.linear(x.reshape(-1, x.shape[-1]), operand, bias)
        return y.reshape(*x.shape[:-1], -1)

    module.weight = None  # type: ignore[assignment]  # its numbers are in the panels
    module.operand = operand  # type: ignore[assignment]  # as a packed layer has it
    module.forward = forward  # type: ignore[method-assign,assignment]
    if embedding is not None:
        embedding.weight = None  # type: ignore[assignment]
        embedding.forward = panels.rows  # type: ignore[method-assign,assignment]


def _use_norm(module: torch.nn.Module) -> None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or not cpu_layer.norms_available():
        return
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.dim() != 1:
        return
    numbers = weight.detach()
    own: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != torch.bfloat16:
            return own(hidden_states)
        return cpu_layer.rms_norm(hidden_states, numbers, eps)

    x = torch.randn(_PROBE_ROWS, len(numbers), generator=torch.Generator().manual_seed(0)).bfloat16()
    if torch.equal(own(x), forward(x)):
        module.forward = forward


def _join_siblings(model: torch.nn.Module) -> None:
    """Makes packed layers that the model calls one after another with the same tensor siblings."""
    calls: list[tuple[PackedLinear, torch.Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if not layers:  # the same on all ranks, whatever kernels their machines have: the forward below sums over them
        return
    hooks = [layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args[0]))) for layer in layers]
    one = torch.zeros(1, 1, dtype=torch.int64)
    try:
        model(input_ids=one, position_ids=one, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    together: list[tuple[PackedLinear, torch.Tensor]] = []
    for call in [*calls, None]:
        if together and (call is None or not _continues(together, call)):
            if len(together) > 1:
                siblings = Siblings([layer for layer, _ in together])
                for layer in siblings.layers:
                    layer.siblings = siblings
            together = []
        if call is not None:
            together.append(call)


def _continues(together: list[tuple[PackedLinear, torch.Tensor]], call: tuple[PackedLinear, torch.Tensor]) -> bool:
    (first, x), (layer, other) = together[0], call
    new = layer not in [each for each, _ in together]
    return new and other is x and len(together) < cpu_linear.MOST_AT_ONCE and Siblings.can_be(first, layer)


# A model whose results for a token do not depend, to the bit, on which other tokens are computed with it: a sum of
# floats depends on its order, and a library chooses that by the number of rows. The compiled kernels do not: in panels
# it depends on the columns alone (``kernels/cpu_linear.py``), in attention on the sequence alone. What is left is to
# let nothing else multiply.

_ANY_ROWS = 1 << 40


def make_batch_invariant(model: torch.nn.Module) -> None:
    """Gives a model the kernels whose sums have one order, in place. UsageError that names what has none.

    All linear layers that stayed float go to panels, if need be as a copy. NVFP4 takes 3 to 11 % longer from 32 rows
    on.
    """
    if not cpu_library.multiplies_bf16() or cpu_linear.limit(panels=True) < _ANY_ROWS:
        raise UsageError(
            f"{arg('batch_invariant')} needs a CPU with AVX512-BF16 and VBMI, and without AMX, whose products are "
            "torch's; serve without it"
        )
    use_kernels(model, every=True)
    for name, module in model.named_modules():
        reason = _keep_order(module)
        if reason is not None:
            raise UsageError(
                f"{arg('batch_invariant')}: {name} ({type(module).__name__}) {reason}, so its sums may depend on the "
                "rest of a batch; serve without it"
            )


def _keep_order(module: torch.nn.Module) -> str | None:
    """Why a module may compute otherwise with other rows; None where it does not."""
    if isinstance(module, PackedLinear):
        if module.packed.operand is None:
            return f"has no kernel here for {module.packed.fmt.name}"
        if module.quantizer is not None and module.quantizer.rotation:
            return "has rotated inputs"
        module.packed.operand.keep_order()
        return None
    if isinstance(module, torch.nn.Linear):
        return None if module.weight is None else "is multiplied by torch"
    if isinstance(module, torch.nn.Embedding) or "Norm" in type(module).__name__:
        return None  # rows that are copied, or summed each on its own
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]
    return f"multiplies its {own[0]} by torch" if own else None
