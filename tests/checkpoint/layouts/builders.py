"""Checkpoints for the container tests, written by hand: abs-max scales, our parts, safetensors, config.json.

The scales are deliberately plain: searches have tests of their own, these tests are about spelling.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ptqpipe.checkpoint.layouts import (
    ConfigRequest,
    Container,
    Names,
    StoredWeight,
    Target,
    decode,
    encode_part,
    get_container,
)
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.numerics.qtensor import QTensor, encode, magnitude_codes, to_blocks
from ptqpipe.numerics.schemes import Scheme, get_scheme

DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}
INPUT_SCALE = torch.tensor(0.125)
"""The static scale of every input: bfloat16 holds it, and so does its reciprocal."""


def absmax(w: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None = None) -> QTensor:
    """``w`` with every block's scale from its largest magnitude, rounded up where rounding down would saturate."""
    if fmt.has_global and global_scale is None:
        global_scale = absmax_global(float(w.float().abs().amax()), fmt)
    step = 1.0 if global_scale is None else float(global_scale)
    amax = to_blocks(w.float(), fmt).abs().amax(dim=1).reshape(fmt.scale_shape((w.shape[0], w.shape[1])))
    wanted = (amax / (fmt.element.max * step)).clamp(min=2.0**-100)
    if not fmt.scale.enumerable:
        assert fmt.scale.dtype is not None
        scales = (wanted * (1 + 2.0**-8)).to(fmt.scale.dtype)
    elif fmt.scale.power_of_two:
        scales = magnitude_codes(torch.exp2(torch.ceil(torch.log2(wanted))), fmt.scale).to(torch.uint8)
    else:
        scales = magnitude_codes(wanted, fmt.scale).clamp(min=fmt.scale.first_scale_code).to(torch.uint8)
    return encode(w, scales, fmt=fmt, global_scale=global_scale)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory: config files by name, and tensors."""

    configs: Mapping[str, dict[str, object]]
    tensors: Mapping[str, torch.Tensor]

    @property
    def config(self) -> dict[str, object]:
        """config.json."""
        return self.configs["config.json"]

    @property
    def names(self) -> Names:
        """name -> (dtype, shape), as a reader's headers give them."""
        return {name: (DTYPES[t.dtype], tuple(t.shape)) for name, t in self.tensors.items()}

    def load(self, name: str, start: int | None, stop: int | None) -> torch.Tensor:
        """The ``Load`` of this checkpoint."""
        tensor = self.tensors[name]
        return tensor if start is None else tensor[start:stop]

    def stored(self, container: str) -> dict[str, StoredWeight]:
        """What the container finds in it."""
        return get_container(container).stored_weights(self.config, self.names)

    def dequantized(self, container: str) -> dict[str, torch.Tensor]:
        """float32 of every quantized 2-D weight."""
        return {name: decode(w, self.load).dequantize() for name, w in self.stored(container).items()}

    def save(self, path: Path) -> Path:
        """Writes a folder that libraries load."""
        path.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, path / "model.safetensors", {"format": "pt"})
        for name, content in self.configs.items():
            (path / name).write_text(json.dumps(content, indent=1))
        return path


def read_checkpoint(path: Path) -> Checkpoint:
    """A folder with one model.safetensors."""
    configs = {name: json.loads((path / name).read_text()) for name in ("config.json",)}
    return Checkpoint(configs, load_file(path / "model.safetensors"))


def stored_parts(container: Container, weight: str, q: QTensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Every part of one weight."""
    return {
        part.name: encode_part(part, q, input_global_scale=INPUT_SCALE)
        for part in container.parts(weight, q.shape, scheme)
    }


def quantize(
    source: Checkpoint, container: str, scheme_of: Callable[[str], str | None], *, fused: Sequence[Sequence[str]] = ()
) -> Checkpoint:
    """``source`` with every ``.weight`` matrix for which ``scheme_of(module)`` names a scheme quantized.

    fused  leaf names of modules that share one global scale with their siblings
    """
    layout = get_container(container)
    tensors: dict[str, torch.Tensor] = {}
    targets: list[Target] = []
    kept: list[str] = []
    for name, tensor in source.tensors.items():
        module = name.removesuffix(".weight")
        scheme_name = scheme_of(module) if tensor.dim() == 2 and module != name else None
        if scheme_name is None:
            tensors[name] = tensor
            kept += [module] if tensor.dim() == 2 else []
            continue
        scheme = get_scheme(scheme_name)
        shared = _shared_global(source.tensors, module, scheme.fmt, fused)
        tensors.update(stored_parts(layout, name, absmax(tensor, scheme.fmt, global_scale=shared), scheme))
        targets.append(Target(name, scheme))
    configs = layout.configs(ConfigRequest(source.config, targets, kept, {"version": "test"}))
    return Checkpoint(configs, tensors)


def _shared_global(
    tensors: Mapping[str, torch.Tensor], module: str, fmt: Format, fused: Sequence[Sequence[str]]
) -> torch.Tensor | None:
    parent, _, leaf = module.rpartition(".")
    group = next((group for group in fused if leaf in group), (leaf,))
    if not fmt.has_global:
        return None
    amax = torch.stack([tensors[f"{parent}.{sibling}.weight"].float().abs().amax() for sibling in group]).amax()
    return absmax_global(float(amax), fmt)
