"""What the two layouts with ``weight_scale_inv`` share: DeepSeek's FP8 blocks and the mxfp8 method.

The scale multiplies despite its name, which DeepSeek-V4 shortens to ``scale``. Knows the layout only.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ptqpipe.checkpoint.layouts._codec import FLOAT_SCALES, scale_codes
from ptqpipe.checkpoint.layouts._config import (
    FLOAT_MODEL,
    accept_variants,
    kept_experts,
    matrix_shape,
    module_list,
    quant_method,
    quantization_config,
    refuse,
    scheme_for,
    stored_grid,
    structure,
    without_quantization,
)
from ptqpipe.checkpoint.layouts._lists import Lists, as_transformers, is_head, listed
from ptqpipe.checkpoint.layouts._types import ConfigFiles, ConfigRequest, Load, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.formats import CODECS, FORMATS, Format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation, Scheme

SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")
_STATIC = (".input_scale", ".activation_scale")
_MOST_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class ScaleInv:
    """One of the two layouts: a single scheme, and how its config describes it.

    name, method  of the container, and its ``quant_method``
    scale_dtype   of ``weight_scale_inv``
    described     the plain keys of its ``quantization_config``
    ignore_keys   keys that list what is kept; readers look under different ones
    """

    name: str
    method: str
    scheme: Scheme
    scale_dtype: str
    described: Mapping[str, Any]
    ignore_keys: tuple[str, ...]

    def supports(self, scheme: Scheme) -> str | None:
        """None for the one scheme, with its activations, else what to use."""
        own = self.scheme
        if structure(scheme.fmt) == structure(own.fmt) and scheme.activation is own.activation:
            return None
        return f"{self.name} stores {own.fmt.name} only, not {scheme.name}; use the {scheme.container} container"

    def parts(
        self,
        weight: str,
        shape: tuple[int, int],
        scheme: Scheme,
        *,
        experts: int | None = None,
        transposed: bool = False,
    ) -> tuple[Part, ...]:
        """The two tensors of a weight. FormatError for what the layout cannot store."""
        reason = self.supports(scheme)
        refuse(weight, container=self.name, scheme_reason=reason, experts=experts, transposed=transposed)
        return (
            Part(weight, "F8_E4M3", shape, PartKind.DATA),
            Part(f"{weight}_scale_inv", self.scale_dtype, scheme.fmt.scale_shape(shape), PartKind.SCALES),
        )

    def configs(self, request: ConfigRequest) -> dict[str, dict[str, Any]]:
        """config.json with everything kept listed by its exact name: transformers' default skip list is replaced."""
        request.check(self.supports)
        kept = module_list(request.kept_modules, request.targets, request.base)
        # Readers ask for the module of the experts, not for those of single ones or for the tensors of a kept stack.
        kept = list(dict.fromkeys([*kept, *kept_experts(kept, request.targets)]))
        lists = {key: list(kept) for key in self.ignore_keys}
        described = {"quant_method": self.method, **self.described, **lists, "ptqpipe": dict(request.provenance)}
        return {"config.json": {**without_quantization(request.base), "quantization_config": described}}

    def detect(self, config: Mapping[str, Any], names: Names) -> bool:
        return quant_method(config) == self.method

    def lists(self, config: Mapping[str, Any]) -> Lists:
        """What readers take for excluded: a run of whole components of a name (SGLang), an expression from its
        beginning, its end (transformers). Without a list transformers keeps the head, vLLM and SGLang always do."""
        entries = listed(quantization_config(config), "modules_to_not_convert", "ignored_layers")
        return Lists(
            "modules_to_not_convert" if "modules_to_not_convert" in quantization_config(config) else "ignored_layers",
            entries or [],
            literal="parts",
            patterns=as_transformers(entries or []),
            suffixes=True,
            also=_unlisted_head if entries is None else None,
            unsure=lambda module: is_head(module) and not entries,
        )

    def config_faults(self, files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
        return iter(())


def _unlisted_head(names: Sequence[str]) -> str | None:
    return "has no list of what is kept, and so keeps the head" if is_head(names[0]) else None


def stored_weights_of(
    names: Names, fmt: Format, activation: Activation, *, excluded: Lists, in_shards: bool = False
) -> dict[str, StoredWeight]:
    """Every F8_E4M3 weight with a scale, and every I8 one: those are two E2M1 codes to a byte (DeepSeek-V4's experts).

    fmt        what the config says of F8_E4M3 weights; the scale's dtype decides its codec
    in_shards  blocks of a fused ``qkv_proj`` begin anew with each of the shards that it was quantized in
    """
    weights, kinds = {}, dict[tuple[object, ...], StoredWeight]()  # a hundred thousand weights are of few kinds
    for name, described in names.items():
        if described[0] not in ("F8_E4M3", "I8") or not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        scale, static = _suffix(module, SUFFIXES, names), _suffix(module, _STATIC, names)
        if scale is None:
            raise CheckpointError(f"{name!r} is {described[0]} without a '{name}_scale_inv'; {FLOAT_MODEL}")
        excluded.refuse([module])
        kind = (described, scale, names[module + scale], static, static and names[module + static])
        sharded = in_shards and module.endswith("qkv_proj")
        if kind in kinds and not sharded:
            weights[name] = kinds[kind].renamed(name)
            continue
        weights[name] = _stored(module, names, fmt, activation, scale=scale, static=static, in_shards=sharded)
        if not sharded:
            kinds[kind] = weights[name]
    for name in (name for name in names if name.endswith(SUFFIXES[:2])):
        for suffix in SUFFIXES[:2]:  # ".scale" is also what other things than weights have
            if name.endswith(suffix) and name.removesuffix(suffix) + ".weight" not in weights:
                raise CheckpointError(f"{name!r} belongs to no F8_E4M3 weight; {FLOAT_MODEL}")
    return weights


def fmt_of_scale(fmt: Format, dtype: str) -> Format:
    """``fmt`` with the codec that scales of this dtype hold: floats as such, one byte as E8M0; float32 may hold E8M0,
    too, where the config says so."""
    if fmt.scale.name == "e8m0" and dtype == "F32":
        return fmt
    codec = "e8m0" if dtype in ("U8", "F8_E8M0") else FLOAT_SCALES.get(dtype)
    if codec is None:
        raise CheckpointError(f"scales of dtype {dtype} are not read; expected F32, BF16, F16, U8 or F8_E8M0")
    return fmt if fmt.scale.name == codec else replace(fmt, scale=CODECS[codec])


def _suffix(module: str, suffixes: Sequence[str], names: Names) -> str | None:
    """The first of these that there is a tensor with of this module."""
    for suffix in suffixes:
        if module + suffix in names:
            return suffix
    return None


def _stored(
    module: str, names: Names, fmt: Format, activation: Activation, *, scale: str, static: str | None, in_shards: bool
) -> StoredWeight:
    """The weight of a module. ``scale``, ``static``: the suffixes of its scales, and of the static one of its input."""
    weight, scales = f"{module}.weight", module + scale
    if names[weight][0] == "I8":
        fmt, activation = FORMATS["mxfp4"], Activation.UNKNOWN
    shape = matrix_shape(names, weight, bits=fmt.element.bits, owner=module)
    fmt = fmt_of_scale(fmt, names[scales][0])
    codes = Part(weight, names[weight][0], (shape[0], shape[1] * fmt.element.bits // 8), PartKind.DATA)
    grid, whole = stored_grid(weight, fmt, shape), None
    if fmt.step(0) > 1 and (in_shards or names[scales][1] != grid):
        rows = _shard_rows(scales, names[scales][1], shape[0], fmt, grid=grid, in_shards=in_shards)
        if rows < shape[0] and rows % fmt.step(0):
            grid, high = names[scales][1], fmt.step(0)
            fmt = replace(fmt, block=(math.gcd(rows, high), fmt.block[1]))
            whole = partial(_read_shards, weight, scales, fmt, shape, rows=rows, high=high)
    expected = [codes, Part(scales, names[scales][0], grid, PartKind.SCALES)]
    if static is not None:
        expected.append(Part(module + static, names[module + static][0], (1,), PartKind.INPUT_GLOBAL))
        activation = Activation.FP8_TENSOR_STATIC
    return StoredWeight(
        weight, shape, scheme_for(fmt, activation), accept_variants(expected, names, weight=weight), whole=whole
    )


def _shard_rows(
    scales: str, stored: tuple[int, ...], total: int, fmt: Format, *, grid: tuple[int, ...], in_shards: bool
) -> int:
    """How many rows each of the shards has that a weight of ``total`` rows was quantized in, one below the other; all
    of them where it was quantized as one, or shards begin where blocks do.

    Where the rows of a shard do not fill blocks, its last block is short, and the next shard begins a new one. How many
    shards there are is told by nothing but shapes. CheckpointError where they leave it open, and for shards where
    nothing says what they are. ``stored``: the shape of the scales. ``grid``: that of the scales of one weight.
    """
    high, columns = fmt.step(0), stored[1:] == grid[1:] and len(stored) == 2
    counts = [n for n in range(1, min(stored[0], _MOST_SHARDS) + 1) if total % n == 0] if columns else []
    fits = {total // n for n in counts if n * -(-(total // n) // high) == stored[0]}
    rows = {total if height % high == 0 else height for height in fits}  # whole blocks: as if it were one
    if len(rows) == 1 and (in_shards or rows == {total}):
        return rows.pop()
    if not rows or (stored == grid and not in_shards):
        return total  # and no shape that is read
    counted = ", ".join(str(total // height) for height in sorted(rows, reverse=True))
    if in_shards:
        why = f"which fit {counted} shards of the rows, each quantized apart, alike: how it is to be read is left open"
    else:
        why = (
            f"as if it had been quantized in {counted} shards apart, a layout that is read of MiMo-V2's qkv_proj alone"
        )
    raise CheckpointError(
        f"{scales!r} has {stored[0]} rows of scales for {total} rows of the weight, {why}; {FLOAT_MODEL}"
    )


def _read_shards(
    weight: str, scales: str, fmt: Format, shape: tuple[int, int], load: Load, *, rows: int, high: int
) -> QTensor:
    """A weight of shards of ``rows`` rows, quantized in blocks ``high`` rows high, as blocks that no shard cuts."""
    first = torch.arange(0, shape[0], fmt.step(0))
    index = first // rows * -(-rows // high) + first % rows // high
    scale_rows = load(scales, None, None)[index]
    if fmt.scale.enumerable:
        scale_rows = scale_codes(scale_rows, fmt, scales)
    return QTensor(fmt, shape, load(weight, None, None).view(torch.uint8), scale_rows)
