"""One operator for every packed layer: ``torch.ops.ptqpipe.vllm_linear(x, packed, bias, rows)``.

torch.compile cannot look into it. ``packed`` is the layer's own parameter, the packed bytes, and finds the rest of the
layer by its address; so a graph that vLLM takes from its cache works on whatever layers the process has loaded. (A
number baked into the graph would not: the cache outlives the order in which layers were loaded.)
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ptqpipe.numerics.formats import CODECS
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.packed import PackedWeight, packed_linear
from ptqpipe.serving.vllm_plugin import ops

if TYPE_CHECKING:
    from ptqpipe.numerics.formats import Format
    from ptqpipe.numerics.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer as it runs. Holding it keeps its bytes alive, so that no other tensor gets their address."""

    weight: PackedWeight
    quantizer: InputQuantizer

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [..., K]`` to ``[..., N]``, same dtype: the input quantized as the format says, then the product."""
        return packed_linear(x, self.weight, bias, quantizer=self.quantizer)


_layers: dict[int, PackedLayer] = {}


def define(dispatch_key: str) -> None:
    schema = "vllm_linear(Tensor x, Tensor packed, Tensor? bias, int rows) -> Tensor"
    ops.define(schema, _linear, shape=_shape, dispatch_key=dispatch_key)


def float_scales(fmt: "Format", stored: torch.Tensor) -> tuple["Format", torch.Tensor]:
    """Scales that a checkpoint stores in float32, for a format whose row says bfloat16: as they are, in bfloat16 where
    that loses nothing, and else with the format that says float32."""
    rounded = stored.bfloat16()
    if torch.equal(rounded.float(), stored.float()):
        return fmt, rounded
    return replace(fmt, scale=CODECS["fp32"]), stored.float()


def keep(module: Any, q: "QTensor", quantizer: InputQuantizer, *, drop: tuple[str, ...]) -> None:
    """Turns a loaded layer of vLLM into ours: its parameter ``weight`` becomes the packed bytes.

    drop  names of the parameters that the packed weight has taken over
    """
    weight = PackedWeight.from_qtensor(q).arranged()
    for name in drop:
        if hasattr(module, name):
            delattr(module, name)
    packed = torch.nn.Parameter(weight.data, requires_grad=False)
    module.weight = packed
    module.ptqpipe_rows = q.shape[0]
    _layers[packed.data_ptr()] = PackedLayer(weight, quantizer)


def apply(module: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The layer's forward: ``x [..., K]`` to ``[..., N]``."""
    return torch.ops.ptqpipe.vllm_linear(x, module.weight, bias, module.ptqpipe_rows)


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    return _layers[packed.data_ptr()](x, bias)


def _shape(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))
