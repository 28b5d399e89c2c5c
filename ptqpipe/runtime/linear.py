"""PackedLinear: a linear layer whose weight stays packed in memory, with the input that its format states.

The product is ``packed.py``'s: on a CPU a compiled kernel reads the packed bytes, on CUDA a Triton kernel. Formats that
quantize activations have them quantized and decoded first (``input_quantizers.py``), which is what hardware for the
format computes up to the order of its sums and one rounding of the inputs. Must not know models, files or ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from ptqpipe.errors import CheckpointError, arg
from ptqpipe.numerics.kernels import cpu_linear
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.packed import PackedWeight, packed_linear, packed_linears


class PackedLinear(torch.nn.Module):
    """``y = quantize(x) @ W.T + bias`` with W packed; x ``[..., in_features]`` in any float dtype, y in the same.

    The weight is no parameter: it is not in the ``state_dict``, its codes do not follow ``to(dtype)``, and do follow
    ``to(device)``.

    dtype   of the ``weight`` that a model which asks for it is given
    loaded  whether the model is complete; before that it asks in order to initialize
    """

    bias: torch.nn.Parameter | None
    unpacked: torch.Tensor | None

    def __init__(
        self,
        q: QTensor,
        *,
        bias: torch.nn.Parameter | None = None,
        quantizer: InputQuantizer | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.dtype, self.loaded = dtype, False
        self.register_buffer("unpacked", None, persistent=False)
        self.out_features, self.in_features = q.shape
        self.packed = PackedWeight.from_qtensor(q).arranged()
        self.quantizer = None if quantizer is None or quantizer.idle else quantizer
        self.siblings: Siblings | None = None
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        if self.unpacked is not None:
            x = x if self.quantizer is None else self.quantizer(x)
            return linear(x, self.unpacked.to(x.dtype), self.bias)
        if self.siblings is not None:
            return self.siblings.output(self, x)
        return packed_linear(x, self.packed, self.bias, quantizer=self.quantizer)

    @property
    def operand(self) -> cpu_linear.Operand | None:
        """What the compiled kernel multiplies with, of a layer that is this product with its bias and no more."""
        more = self.quantizer is not None or self.unpacked is not None
        return None if more else self.packed.operand

    def joined(self, others: Sequence[Any]) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """One product for this layer and others of the same inputs, outputs side by side ``[..., all out_features]``.

        Their packed bytes are parts of one weight from then on, so that none is there twice. None where one of them is
        more than a packed weight and a bias, or where the weights do not go together.
        """
        layers = [self, *others]
        for layer in layers:
            if not isinstance(layer, PackedLinear) or layer.quantizer is not None:
                return None
            if layer.unpacked is not None or layer.siblings is not None or "forward" in vars(layer):
                return None
        with torch.inference_mode(False), torch.no_grad():
            joined = PackedWeight.joined([layer.packed for layer in layers])
            if joined is None:
                return None
            whole, *parts = joined
            for layer, part in zip(layers, parts, strict=True):
                layer.packed = part
            bias = None
            if any(layer.bias is not None for layer in layers):
                bias = torch.cat([layer._numbers_of_bias() for layer in layers])
        return lambda x: packed_linear(x, whole, bias)

    def _numbers_of_bias(self) -> torch.Tensor:
        """``[N]``: zeros without one."""
        if self.bias is None:
            return torch.zeros(self.out_features, dtype=self.dtype, device=self.packed.device)
        return self.bias.detach()

    @property
    def weight(self) -> torch.Tensor:
        """``[N, K]``, decoded; kept, and from then on multiplied with, since the model may write to it (RWKV does).

        For models that multiply in their own way, as Mamba with its dt_proj.
        """
        if self.unpacked is not None:
            return self.unpacked
        w = self.packed.dequantize().to(self.dtype)
        w._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it alone, as a loaded one
        if self.loaded:
            if self.quantizer is not None and self.quantizer.rotation:
                raise CheckpointError(
                    "the model multiplies with a weight itself whose inputs are to be rotated; convert it without "
                    f"{arg('rotate')} of this role"
                )
            self.unpacked = w
        return w

    def extra_repr(self) -> str:
        """The layer's part of ``print(model)``."""
        activation = "" if self.quantizer is None else f", input {self.quantizer.activation}"
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}{activation}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """The codes move to where ``fn`` puts a tensor of bytes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.packed.device)).device
        self.packed = self.packed.to(device)
        return self


class Siblings:
    """Layers that a model gives one tensor after another, as a query, a key and a value: the first to be asked
    computes the outputs of all in one pass, and the others hand out theirs.

    An output is handed out for the very tensor that it was computed from, once; asked with another, or with it after it
    was written to, a layer computes. Writes to inference tensors leave no trace: these must not be written to before
    the last of the layers has been asked.
    """

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self.layers = tuple(layers)
        self._x: torch.Tensor | None = None
        self._version = 0
        self._ready: dict[PackedLinear, torch.Tensor] = {}

    @staticmethod
    def can_be(first: PackedLinear, second: PackedLinear) -> bool:
        """Whether two layers may have the same ones."""
        pair = (first, second)
        if any(layer.quantizer is not None for layer in pair):
            return False
        one, other = first.packed.operand, second.packed.operand
        return one is not None and other is not None and cpu_linear.alike(one, other)

    def output(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]`` of one of them."""
        version = 0 if x.is_inference() else x._version
        if x is not self._x or version != self._version or layer not in self._ready:
            outputs = packed_linears(x, [(each.packed, each.bias) for each in self.layers])
            self._x, self._version, self._ready = x, version, dict(zip(self.layers, outputs, strict=True))
        y = self._ready.pop(layer)
        if not self._ready:
            self._x = None
        return y


def side_by_side(parts: list[QTensor]) -> QTensor | None:
    """Matrices with the same inputs as one of all their rows; None where they share no format or global scale."""
    first = parts[0]
    if len(parts) == 1:
        return first
    same = all(
        part.fmt == first.fmt
        and part.shape[1] == first.shape[1]
        and part.global_divides == first.global_divides
        and (part.global_scale is None or torch.equal(part.global_scale, _scalar(first)))
        and part.shape[0] % part.fmt.block_extent(part.shape)[0] == 0
        for part in parts
    )
    if not same or first.fmt.shares_rows:
        return None
    return replace(
        first,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        data=torch.cat([part.data for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
    )


def _scalar(q: QTensor) -> torch.Tensor:
    assert q.global_scale is not None
    return q.global_scale


class Stacked(torch.nn.Module):
    """Layers of the same input, their outputs side by side: a gate and an up projection of different scales."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., sum of out]``."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)
