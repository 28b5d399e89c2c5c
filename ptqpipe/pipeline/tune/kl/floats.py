"""``train`` of tune: floats and global scales that descent on the whole model changes after the codes.

A kind of tensor is a row of `KINDS`. Trained of it are the parameters of the model that are one float tensor of the
checkpoint each, and that the recipe keeps. They are stored in the dtype that they have in the source.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.runner import Runner
from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.conversion.bias_correction import BIAS_REASON
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.errors import UsageError, arg
from ptqpipe.numerics.global_scale import canonical
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune.kl.descent import Float
from ptqpipe.pipeline.tune.options import GLOBAL
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.plan import FLOAT_DTYPES, Unit
from ptqpipe.runtime.skeleton import MTP, Skeleton

_LEAST = 0.01  # what the root mean square of a tensor counts at least: biases may be zeros
_GLOBAL_RATE = 9e-4  # of the logarithm of a global scale


@dataclass(frozen=True, slots=True)
class _Kind:
    """rate: the first step, in units of the root mean square of the tensor."""

    rate: float
    has: Callable[[Any, torch.nn.Module, str], bool]  # (model, module, leaf of its parameter)


KINDS: Mapping[str, _Kind] = {
    "head": _Kind(1e-3, lambda model, module, leaf: leaf == "weight" and module is model.get_output_embeddings()),
    "embeddings": _Kind(3e-4, lambda model, module, leaf: leaf == "weight" and module is model.get_input_embeddings()),
    "norms": _Kind(3e-3, lambda model, module, leaf: leaf == "weight" and "norm" in type(module).__name__.lower()),
    "biases": _Kind(3e-3, lambda model, module, leaf: leaf == "bias"),
}


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """A tensor that is trained: its parameter in the model, its name and dtype in the checkpoint."""

    parameter: str
    tensor: str
    dtype: torch.dtype
    kind: str


def find_kept(prepared: Conversion, skeleton: Skeleton, train: Sequence[str]) -> tuple[TrainedTensor, ...]:
    """The tensors that ``train`` names. UsageError for a kind that the model has none of, or whose tensor is quantized,
    or is another one's, too."""
    source, model = prepared.source, skeleton.model
    reasons = {kept.name: kept.reason for kept in prepared.outputs.plan.kept}
    tensors: list[TrainedTensor] = []
    for kind in (kind for kind in train if kind != GLOBAL):
        before = len(tensors)
        for name in _parameters(model, kind):
            if kind in ("head", "embeddings") and _tied(skeleton) and not {"head", "embeddings"} <= set(train):
                raise UsageError(
                    f"{arg('train', kind)}: the head of {source.reader.path} is its embedding, one tensor; name both: "
                    + arg("train", "head,embeddings")
                )
            origins = skeleton.origins.get(name, ())
            if not origins and kind == "head":
                continue  # it is the embedding
            tensor = origins[0] if len(origins) == 1 else None
            reason = None if tensor is None else reasons.get(tensor)
            own = tensor is not None and reason is not None and tensor not in source.stored
            if tensor is None or not own or source.tensors[tensor][0] not in FLOAT_DTYPES:
                why, remedy = "it is a part of one, or is stored in codes", ""
                if tensor is not None and reason is None and tensor not in source.stored:
                    why, remedy = "the recipe quantizes it", f", or keep it with {arg('ignore')}"
                raise UsageError(
                    f"{arg('train', kind)}: '{name}' is no float tensor of its own in the output ({why}); leave "
                    f"{kind} out"
                    f"{remedy}"
                )
            if reason == BIAS_REASON:
                raise UsageError(
                    f"{arg('train', kind)}: the recipe's bias_correction decides '{tensor}'; leave one of them out"
                )
            tensors.append(TrainedTensor(name, tensor, DTYPES[source.tensors[tensor][0]][0], kind))
        if len(tensors) == before and not (kind == "head" and _tied(skeleton)):
            raise UsageError(f"{arg('train', kind)}: the model has no such tensor; leave it out")
    if GLOBAL in train and not any(unit.scheme.fmt.has_global for unit in prepared.outputs.plan.units):
        raise UsageError(f"{arg('train', GLOBAL)}: no weight has a global scale in this format; leave it out")
    return tuple(tensors)


def check_train(prepared: Conversion, train: Sequence[str]) -> None:
    """Raises as `find_kept` does, before any weight is read."""
    find_kept(prepared, Skeleton.of(prepared.source, dtype=torch.float32), train)


def _parameters(model: Any, kind: str) -> Iterator[str]:
    for name, module in model.named_modules():
        if name != MTP and not name.startswith(f"{MTP}."):
            for leaf in module._parameters:
                if module._parameters[leaf] is not None and KINDS[kind].has(model, module, leaf):
                    yield f"{name}.{leaf}"


def _tied(skeleton: Skeleton) -> bool:
    return skeleton.head_name is not None and f"{skeleton.head_name}.weight" not in skeleton.origins


class Trained:
    """What is trained beside the codes, of a model whose weights are loaded.

    floats  by the tensor's name; a global scale's logarithm by that of its unit
    gains   key of a weight -> the logarithm of what its global scale is multiplied by
    """

    def __init__(
        self,
        skeleton: Skeleton,
        kept: Sequence[TrainedTensor],
        scales: Sequence[tuple[Unit, torch.Tensor]],
        device: torch.device | str = "cpu",
    ) -> None:
        """``scales``: units whose global scale is trained, with what it starts from; the gains are on ``device``."""
        self.floats: dict[str, Float] = {}
        self.gains: dict[str, torch.Tensor] = {}
        layers = tuple(f"{name}." for name, _ in skeleton.blocks)
        outside = []
        for each in kept:
            parameter = skeleton.model.get_parameter(each.parameter).requires_grad_(True)
            size = max(float(parameter.detach().square().mean().sqrt()), _LEAST)
            self.floats[each.tensor] = Float(parameter, KINDS[each.kind].rate * size, _to(each.dtype))
            if not each.parameter.startswith(layers):
                outside.append(parameter)
        for unit, scale in scales:
            gain = torch.zeros((), device=device, requires_grad=True)
            self.floats[unit_name(unit)] = Float(gain, _GLOBAL_RATE, _to_canonical(scale, unit))
            self.gains |= {member.key: gain for member in unit.members}
        self._float = [(parameter, parameter.detach().clone()) for parameter in outside]

    @contextlib.contextmanager
    def float_head(self) -> Iterator[None]:
        """What lies outside of the layers has the values of the float model while it is open."""
        learned = [parameter.data for parameter, _ in self._float]
        for parameter, value in self._float:
            parameter.data = value
        try:
            yield
        finally:
            for (parameter, _), value in zip(self._float, learned, strict=True):
                parameter.data = value


def unit_name(unit: Unit) -> str:
    """The name of a unit's trained global scale."""
    return f"{GLOBAL}:{unit.id}"


def with_gain(q: QTensor, gain: torch.Tensor) -> QTensor:
    """``q`` with its global scale multiplied by exp(``gain``), and canonical (`ptqpipe.numerics.global_scale`)."""
    assert q.global_scale is not None
    return QTensor(q.fmt, q.shape, q.data, q.scales, canonical(q.global_scale * gain.exp(), q.fmt))


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


def _to_canonical(start: torch.Tensor, unit: Unit) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gain: (canonical(start * gain.exp().cpu(), unit.scheme.fmt) / start).log().to(gain.device)


def global_scales(prepared: Conversion, stored: LearnedCodes) -> list[tuple[Unit, torch.Tensor]]:
    """Units whose weights share a global scale, with that scale."""
    scales = []
    for unit in prepared.outputs.plan.units:
        first = unit.members[0]
        scale = stored.of(first.key, unit.scheme.fmt, shape=first.shape).global_scale
        scales += [] if scale is None else [(unit, scale)]
    return scales


def check_trainable(runner: Runner, train: Sequence[str]) -> None:
    """UsageError for tensors that the model gives its layers in another way than by hidden states, which are kept."""
    wrong = [kind for kind in ("embeddings", "norms") if kind in train]
    if runner.of_tokens and wrong:
        raise UsageError(
            f"{arg('train', wrong[0])}: {type(runner.skeleton.model).__name__} gives its decoder layers more of the "
            f"tokens than hidden states, which would change; leave {wrong[0]} out"
        )
