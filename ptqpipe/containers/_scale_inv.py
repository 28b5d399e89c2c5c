"""What the two layouts with ``weight_scale_inv`` share: DeepSeek's FP8 blocks and the mxfp8 method.

The scale multiplies despite its name, which DeepSeek-V4 shortens to ``scale``. Knows the layout only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ptqpipe.containers._codec import FLOAT_SCALES
from ptqpipe.containers._config import (
    as_found,
    kept_experts,
    matrix_shape,
    module_list,
    quantization_config,
    refuse,
    scheme_for,
    stored_grid,
    structure,
    without_quantization,
)
from ptqpipe.containers._types import ConfigFiles, ConfigRequest, Names, Part, Role, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.formats import CODECS, FORMATS, Format
from ptqpipe.schemes import Activation, Scheme

SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")


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
        return str(quantization_config(config).get("quant_method", "")).lower() == self.method

    def config_faults(self, files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
        """Nothing beyond the plain keys."""
        return iter(())


def stored_weights_of(names: Names, fmt: Format, activation: Activation) -> dict[str, StoredWeight]:
    """Every F8_E4M3 weight with a scale, and every I8 one: those are two E2M1 codes to a byte (DeepSeek-V4's experts).

    ``fmt`` is what the config says of F8_E4M3 weights; the scale's dtype decides its codec.
    """
    # Of a hundred thousand weights in few formats.
    found, schemes, formats = {}, dict[tuple[str, Activation], Scheme](), dict[tuple[bool, str], Format]()
    for name, (dtype, _) in names.items():
        if not name.endswith(".weight") or dtype not in ("F8_E4M3", "I8"):
            continue
        module = name.removesuffix(".weight")
        scale = next((module + suffix for suffix in SUFFIXES if module + suffix in names), None)
        if scale is None:
            raise CheckpointError(f"{name!r} is {dtype} without a '{name}_scale_inv'; the checkpoint is damaged")
        two_codes = dtype == "I8"
        own = FORMATS["mxfp4"] if two_codes else fmt
        shape = matrix_shape(names, name, bits=own.element.bits, owner=module)
        kind = (two_codes, names[scale][0])
        if kind not in formats:
            formats[kind] = fmt_of_scale(own, names[scale][0])
        own = formats[kind]
        found[name] = _stored(
            name, shape, scale, own, Activation.UNKNOWN if two_codes else activation, names, schemes=schemes
        )
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


def _stored(
    weight: str,
    shape: tuple[int, int],
    scale: str,
    fmt: Format,
    activation: Activation,
    names: Names,
    *,
    schemes: dict[tuple[str, Activation], Scheme],
) -> StoredWeight:
    module = weight.removesuffix(".weight")
    codes = Part(weight, names[weight][0], (shape[0], shape[1] * fmt.element.bits // 8), Role.DATA)
    expected = [codes, Part(scale, names[scale][0], stored_grid(weight, fmt, shape), Role.SCALES)]
    static = next((f"{module}.{s}" for s in ("input_scale", "activation_scale") if f"{module}.{s}" in names), None)
    if static is not None:
        expected.append(Part(static, names[static][0], (1,), Role.INPUT_GLOBAL))
        activation = Activation.FP8_TENSOR_STATIC
    checked = as_found(expected, names, weight=weight)
    key = (names[scale][0] + names[weight][0], activation)
    if key not in schemes:
        schemes[key] = scheme_for(fmt, activation)
    return StoredWeight(weight, shape, schemes[key], checked)
