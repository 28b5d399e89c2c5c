"""What the two layouts with ``weight_scale_inv`` share: DeepSeek's FP8 blocks and the mxfp8 method.

The scale multiplies despite its name, which DeepSeek-V4 shortens to ``scale``. Knows the layout only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ptqpipe.containers._codec import FLOAT_SCALES
from ptqpipe.containers._config import (
    as_found,
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
from ptqpipe.containers._lists import Lists, as_transformers, is_head, listed
from ptqpipe.containers._types import ConfigFiles, ConfigRequest, Names, Part, Role, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.formats import CODECS, FORMATS, Format
from ptqpipe.schemes import Activation, Scheme

SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")
_STATIC = (".input_scale", ".activation_scale")


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
            Part(weight, "F8_E4M3", shape, Role.DATA),
            Part(f"{weight}_scale_inv", self.scale_dtype, scheme.fmt.scale_shape(shape), Role.SCALES),
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
        """Whether a checkpoint with this config has this layout."""
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
        """Nothing beyond the plain keys."""
        return iter(())


def _unlisted_head(names: Sequence[str]) -> str | None:
    return "has no list of what is kept, and so keeps the head" if is_head(names[0]) else None


def stored_weights_of(names: Names, fmt: Format, activation: Activation, *, excluded: Lists) -> dict[str, StoredWeight]:
    """Every F8_E4M3 weight with a scale, and every I8 one: those are two E2M1 codes to a byte (DeepSeek-V4's experts).

    ``fmt`` is what the config says of F8_E4M3 weights; the scale's dtype decides its codec.
    """
    found, kinds = {}, dict[tuple[object, ...], StoredWeight]()  # a hundred thousand weights are of few kinds
    for name, described in names.items():
        if described[0] not in ("F8_E4M3", "I8") or not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        scale, static = _suffix(module, SUFFIXES, names), _suffix(module, _STATIC, names)
        if scale is None:
            raise CheckpointError(f"{name!r} is {described[0]} without a '{name}_scale_inv'; the checkpoint is damaged")
        excluded.refuse([module])
        kind = (described, scale, names[module + scale], static, static and names[module + static])
        if kind in kinds:
            found[name] = kinds[kind].renamed(name)
        else:
            found[name] = kinds[kind] = _stored(module, names, fmt, activation, scale=scale, static=static)
    for name in (name for name in names if name.endswith(SUFFIXES[:2])):
        for suffix in SUFFIXES[:2]:  # ".scale" is also what other things than weights have
            if name.endswith(suffix) and name.removesuffix(suffix) + ".weight" not in found:
                raise CheckpointError(f"{name!r} belongs to no F8_E4M3 weight; the checkpoint is damaged")
    return found


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
    module: str, names: Names, fmt: Format, activation: Activation, *, scale: str, static: str | None
) -> StoredWeight:
    """The weight of a module. ``scale``, ``static``: the suffixes of its scales, and of the static one of its input."""
    weight, scales = f"{module}.weight", module + scale
    if names[weight][0] == "I8":
        fmt, activation = FORMATS["mxfp4"], Activation.UNKNOWN
    shape = matrix_shape(names, weight, bits=fmt.element.bits, owner=module)
    fmt = fmt_of_scale(fmt, names[scales][0])
    codes = Part(weight, names[weight][0], (shape[0], shape[1] * fmt.element.bits // 8), Role.DATA)
    expected = [codes, Part(scales, names[scales][0], stored_grid(weight, fmt, shape), Role.SCALES)]
    if static is not None:
        expected.append(Part(module + static, names[module + static][0], (1,), Role.INPUT_GLOBAL))
        activation = Activation.FP8_TENSOR_STATIC
    return StoredWeight(weight, shape, scheme_for(fmt, activation), as_found(expected, names, weight=weight))
