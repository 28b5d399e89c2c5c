"""The scales of an FP8 KV cache: one for each layer's keys and one for its values, or one for each head.

Which attention modules there are follows from the source's names, the number of heads from its config, the numbers from
statistics.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import CheckpointWriter, TensorSpec
from ptqpipe.checkpoint.layouts import Container, container_names, get_container, kv_scale, quantization_config
from ptqpipe.conversion.job import WriteJob, write_whole
from ptqpipe.conversion.record import CACHE_REASON
from ptqpipe.errors import NumericsError, UsageError, arg, usage
from ptqpipe.models.families import in_mtp_layers, language_config, mtp_layer, outside_language_model
from ptqpipe.models.source import Source
from ptqpipe.quantization import fp8_scale
from ptqpipe.run.machine import WorkerBudget


@dataclass(frozen=True, slots=True)
class WriteCacheScales(WriteJob):
    """Writes the scales of the keys and values that an attention module caches."""

    module: str
    specs: tuple[TensorSpec, TensorSpec]

    def run(self, work: Any, writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """``work``: a `Conversion` with statistics, as `check_cached` says."""
        return {"kept": write_scales(self.module, self.specs, work.statistics, writer)}


def cache_specs(
    source: Source, kind: str, container: Container, *, container_name: str
) -> dict[str, tuple[TensorSpec, TensorSpec]]:
    """Attention module -> the tensors of its k and v scales, as the container stores them; empty for ``none``.

    UsageError where the container, the config or the source has no room for them.
    """
    if kind == "none":
        return {}
    style = container.CAPABILITIES.kv_cache
    if style is None or not style.written:
        remedy = " or ".join(_containers(per_head=False))
        raise UsageError(f"{container_name} cannot store KV-cache scales; use {arg('container')} {remedy}")
    heads = _heads(language_config(source.reader.config)) if kind == "fp8_per_head" else 0
    if heads and not style.per_head:
        remedy = " or ".join(_containers(per_head=True))
        raise UsageError(
            f"{container_name} has one KV-cache scale per layer; use {arg('kv_cache', 'fp8')}, or {remedy}"
        )
    config, specs_of = source.reader.config, {}
    other, drafts, layer = outside_language_model(config, source.tensors), in_mtp_layers(config), mtp_layer(config)
    for name in source.tensors:
        if name in other or (
            drafts(name) and not (layer and name.startswith(layer))
        ):  # runs without a cache of its own
            continue
        module, leaf = name.removesuffix(".weight").rpartition(".")[::2]
        if leaf == "k_proj" and f"{module}.v_proj.weight" in source.tensors and not _is_linear(module, source):
            specs_of[module] = (_spec(module, "k", heads, container), _spec(module, "v", heads, container))
    if not specs_of:
        raise UsageError(
            "the source has no attention with k_proj and v_proj side by side (other kinds cache something else, or "
            f"have one matrix of both); leave {arg('kv_cache')} out"
        )
    clash = next((spec.name for specs in specs_of.values() for spec in specs if spec.name in source.tensors), None)
    if clash is not None:
        raise UsageError(f"the source already has {clash}; leave {arg('kv_cache')} out to keep its scales")
    return specs_of


def _is_linear(module: str, source: Source) -> bool:
    """Whether keys and values of a module are summed up in a state, of which no cache is kept."""
    return any(
        f"{module}.{leaf}" in source.tensors for leaf in ("A_log", "dt_bias", "conv1d.weight", "k_conv1d.weight")
    )


def _containers(*, per_head: bool) -> list[str]:
    """The containers that scales of a KV cache can be written to; ``per_head`` those with one for each head."""
    styles = {name: get_container(name).CAPABILITIES.kv_cache for name in container_names()}
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
        raise UsageError(f"{arg('kv_cache')} needs statistics; {statistics_remedy()}")
    for module in modules:
        if module not in statistics.attentions:
            raise UsageError(
                f"{statistics.path} has no keys and values of '{module}': no token passed it that calibrate saw; leave "
                f"{arg('kv_cache')} out, or calibrate again if an older ptqpipe made them"
            )


def write_scales(
    module: str, specs: tuple[TensorSpec, TensorSpec], statistics: Statistics, writer: CheckpointWriter
) -> dict[str, Any]:
    """Writes both scales of a module; the record's entries of kept tensors."""
    pairs = zip(specs, statistics.attention(module), strict=True)
    return {spec.name: write_whole(spec.name, _scales(spec, amax), writer, CACHE_REASON) for spec, amax in pairs}


def statistics_remedy() -> str:
    """How to make statistics, where there are none."""
    return f"make them with {usage('calibrate', 'MODEL', data='TEXT', out='FOLDER')} and give {arg('stats', 'FOLDER')}"


def _scales(spec: TensorSpec, amax: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(amax).all()):
        raise NumericsError(
            f"{spec.name} would not be finite; calibrate again with {arg('dtype', 'fp32')}, or check the model's "
            "weights"
        )
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
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise UsageError(
            f"config.json has num_key_value_heads {heads!r}, expected a number; use {arg('kv_cache', 'fp8')}"
        )
    return heads
