"""Tensors besides the quantized weights whose numbers come from statistics: corrected biases, scales of the KV cache.

    bias correction    b += (W - What) E[x], so that the mean of a layer's output is that of the float layer. A bias
                       belongs to the job of its weight
    FP8 KV cache       one scale for each layer's keys and one for its values, or one for each head. Which attention
                       modules there are follows from the source's names, the number of heads from its config

Which tensors there will be is decided before statistics are read. Must not know how statistics were made, nor how a
weight was quantized.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptqpipe.algorithms.activation_scale import fp8_scale
from ptqpipe.algorithms.unit import Sink, Weight
from ptqpipe.checkpoint import CheckpointWriter, TensorSpec
from ptqpipe.containers import Container, container_names, get_container, kv_scale, quantization_config
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.plan import FLOAT_DTYPES, Member, Plan
from ptqpipe.qtensor import QTensor
from ptqpipe.recipe import Recipe
from ptqpipe.source import Source
from ptqpipe.statistics import Statistics

BIAS_REASON = "bias corrected by the mean error of its weight"
CACHE_REASON = "scale of the FP8 kv cache"


def corrected_biases(plan: Plan, source: Source, recipe: Recipe) -> dict[str, str]:
    """Weight -> the kept bias that is corrected with it; empty unless the recipe asks for it."""
    if not recipe.bias_correction:
        return {}
    kept = {item.name for item in plan.kept}
    found = {}
    for unit in plan.units:
        for member in unit.members:
            name = f"{member.module}.bias"
            fits = name in kept and source.tensors[name][1] == (member.shape[0],)
            if fits and source.tensors[name][0] in FLOAT_DTYPES and member.source.expert is None:
                found[member.weight] = name
    return found


def with_reasons(plan: Plan, biases: dict[str, str]) -> Plan:
    """The plan, with what becomes of these biases."""
    names = set(biases.values())
    return replace(plan, kept=tuple(replace(k, reason=BIAS_REASON) if k.name in names else k for k in plan.kept))


class MeanErrors:
    """A sink that passes rows on and sums (W - What) E[x] of every row. A row that is sent again counts once."""

    def __init__(self, weights: Sequence[Weight], means: Sequence[torch.Tensor | None], sink: Sink) -> None:
        self._weights, self._means, self._sink = weights, means, sink
        self._shifts = [torch.zeros(weight.shape[0], dtype=torch.float64) for weight in weights]

    def take(self, member: int, row: int, q: QTensor) -> None:
        """As `Sink`."""
        self._sink(member, row, q)
        mean = self._means[member]
        if mean is not None:
            stop = row + q.shape[0]
            error = self._weights[member].rows(row, stop).double() - q.dequantize().double().cpu()
            self._shifts[member][row:stop] = (error * mean.double()).sum(dim=1)

    def write(
        self, members: Sequence[Member], biases: Mapping[str, str], source: Source, writer: CheckpointWriter
    ) -> dict[str, Any]:
        """Writes the corrected biases; the record's entries of kept tensors. NumericsError where one overflows."""
        entries = {}
        for member, shift in zip(members, self._shifts, strict=True):
            name = biases.get(member.weight)
            if name is None:
                continue
            stored = source.reader.read(name)
            corrected = (stored.double() + shift).to(stored.dtype)
            if not bool(torch.isfinite(corrected).all()):
                raise NumericsError(f"{name} would not be finite after bias correction; leave bias_correction out")
            entries[name] = _write(name, corrected, writer, BIAS_REASON)
        return entries


def _write(name: str, numbers: torch.Tensor, writer: CheckpointWriter, reason: str) -> dict[str, Any]:
    """Writes a whole tensor; its entry of the record."""
    written = writer.tensor(name).put(numbers)
    return {"reason": reason, "sha256": written.sha256, "bytes": written.nbytes}


def cache_specs(
    source: Source, kind: str, container: Container, *, container_name: str
) -> dict[str, tuple[TensorSpec, TensorSpec]]:
    """Attention module -> the tensors of its k and v scales, as the container stores them; empty for ``none``.

    UsageError where the container, the config or the source has no room for them.
    """
    if kind == "none":
        return {}
    style = container.ABILITIES.kv_cache
    if style is None or not style.written:
        remedy = " or ".join(_containers(per_head=False))
        raise UsageError(f"{container_name} cannot store KV-cache scales; use --container {remedy}")
    heads = _heads(source.reader.config) if kind == "fp8_per_head" else 0
    if heads and not style.per_head:
        remedy = " or ".join(_containers(per_head=True))
        raise UsageError(f"{container_name} has one KV-cache scale per layer; use --kv-cache fp8, or {remedy}")
    found = {}
    for name in source.tensors:
        module, leaf = name.removesuffix(".weight").rpartition(".")[::2]
        if leaf == "k_proj" and f"{module}.v_proj.weight" in source.tensors:
            found[module] = (_spec(module, "k", heads, container), _spec(module, "v", heads, container))
    if not found:
        raise UsageError("the source has no k_proj and v_proj side by side; leave kv_cache at none")
    taken = next((spec.name for specs in found.values() for spec in specs if spec.name in source.tensors), None)
    if taken is not None:
        raise UsageError(f"the source already has {taken}; leave kv_cache at none to keep its scales")
    return found


def _containers(*, per_head: bool) -> list[str]:
    """The containers that scales of a KV cache can be written to; ``per_head`` those with one for each head."""
    styles = {name: get_container(name).ABILITIES.kv_cache for name in container_names()}
    return [n for n, style in styles.items() if style is not None and style.written and style.per_head >= per_head]


def config_with_cache(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The source's config with the scheme of the cache where containers look for one."""
    if kind == "none":
        return config
    strategy = "attn_head" if kind == "fp8_per_head" else "tensor"
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    return {**config, "quantization_config": {**quantization_config(config), "kv_cache_scheme": scheme}}


def check_cached(modules: Collection[str], statistics: Statistics | None) -> None:
    """UsageError where statistics are missing, or have seen no keys and values of a module."""
    if not modules:
        return
    if statistics is None:
        raise UsageError("kv_cache needs statistics; make them with `ptqpipe calibrate` and give --stats FOLDER")
    for module in modules:
        if module not in statistics.attentions:
            raise UsageError(f"{statistics.path} has no keys and values of '{module}'; calibrate again")


def write_scales(
    module: str, specs: tuple[TensorSpec, TensorSpec], statistics: Statistics, writer: CheckpointWriter
) -> dict[str, Any]:
    """Writes both scales of a module; the record's entries of kept tensors."""
    pairs = zip(specs, statistics.attention(module), strict=True)
    return {spec.name: _write(spec.name, _scales(spec, amax), writer, CACHE_REASON) for spec, amax in pairs}


def _scales(spec: TensorSpec, amax: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(amax).all()):
        raise NumericsError(f"{spec.name} would not be finite; calibrate again with --dtype float32")
    if len(spec.shape) == 3:
        if len(amax) != spec.shape[0]:
            raise UsageError(f"{spec.name} has {spec.shape[0]} heads, the statistics {len(amax)}; calibrate this model")
        return torch.stack([fp8_scale(float(a)) for a in amax])
    return fp8_scale(float(amax.max()))


def _spec(module: str, kind: str, heads: int, container: Container) -> TensorSpec:
    shape: tuple[int, ...] = (heads, 1, 1) if heads else (1,)
    part = kv_scale(f"{module}.{kind}_scale", "F32", shape, container=container)
    assert part is not None
    return TensorSpec(part.name, part.dtype, part.shape)


def _heads(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    heads = inner.get("num_key_value_heads") or inner.get("num_attention_heads")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise UsageError(f"config.json has num_key_value_heads {heads!r}, expected a number; use --kv-cache fp8")
    return heads
