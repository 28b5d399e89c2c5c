"""An FP8 kv cache, simulated: keys and values are rounded to E4M3 at the checkpoint's scales before attention.

What the readers do with ``k_scale`` and ``v_scale`` (their names: ``containers/_kv.py``): keys after their rotary
embedding and values are stored as E4M3 codes of x / scale, and attention sees code * scale. The scales are one number
a tensor or one a key-value head. The query is not quantized. transformers' attention interface gives the one place
where all models hand over keys and values.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptqpipe.containers import kv_scale_place, quantization_config
from ptqpipe.errors import CheckpointError
from ptqpipe.runtime.activations import round_to_e4m3
from ptqpipe.runtime.names import Home
from ptqpipe.runtime.scales import check_positive
from ptqpipe.runtime.shard import Cut
from ptqpipe.source import Source

IMPLEMENTATION = "ptqpipe_kv_fp8"
KV_SCALES = "ptqpipe_kv_scales"
"""The attribute of attention modules with (keys', values') scales. The engine has the same name, and reads them."""


def simulate_kv_cache(
    model: Any, source: Source, *, homes: Mapping[str, Sequence[Home]], cuts: Mapping[str, Cut] | None = None
) -> int:
    """Quantizes the keys and values of attention modules whose scales the checkpoint holds. How many it changed.

    homes  where the checkpoint's tensors are in the model
    cuts   the parts of the model's parameters that this rank of several has; a scale a head is cut like its heads

    A model whose attention does not go through transformers' interface keeps its cache as it is, with a warning; so
    does a cache of another format than FP8. CheckpointError for a module with one scale of the two, and for a scale
    that is not finite and above zero.
    """
    found = _scales(source)
    if not found:
        return 0
    path = source.reader.path
    if not _is_fp8(source):
        warnings.warn(f"{path}: the kv cache is not FP8 per config.json; it is not simulated", stacklevel=3)
        return 0
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        warnings.warn(
            f"{path}: attention is {config._attn_implementation}; its kv cache is not simulated", stacklevel=3
        )
        return 0
    for name, scales in found.items():
        if set(scales) != {"k", "v"}:
            raise CheckpointError(f"{path}: {name} has a {'/'.join(scales)}_scale alone, expected k_scale and v_scale")
        parameter, module = _key(source, homes, name)
        cut = (cuts or {}).get(parameter)
        kept = (_local(scales["k"], cut), _local(scales["v"], cut))
        setattr(model.get_submodule(module), KV_SCALES, kept)
    _register()
    config._attn_implementation = IMPLEMENTATION
    return len(found)


def _scales(source: Source) -> dict[str, dict[str, torch.Tensor]]:
    """Attention module (as in the checkpoint) -> "k", "v" -> float32 scale that broadcasts over [batch, heads, tokens,
    head_dim]."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in source.reader.entries:
        place = kv_scale_place(name)
        if place is not None and place[1] in ("k", "v"):
            scale = source.reader.read(name).float()
            check_positive(scale, name)
            found.setdefault(place[0], {})[place[1]] = scale.reshape(-1, 1, 1)
    return found


def _is_fp8(source: Source) -> bool:
    described = quantization_config(source.reader.config)
    scheme = described.get("kv_cache_scheme") or described.get("kv_cache_quant_algo")
    if isinstance(scheme, str):
        return scheme.upper() == "FP8"
    return isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"


def _key(source: Source, homes: Mapping[str, Sequence[Home]], name: str) -> tuple[str, str]:
    """(the model's parameter of the keys' projection, its attention module) of what the checkpoint calls ``name``."""
    found = homes.get(f"{name}.k_proj.weight")
    if not found:
        raise CheckpointError(f"{source.reader.path}: no attention of the model has the kv scales of {name!r}")
    return found[0].parameter, found[0].module.rpartition(".")[0]


def _local(scale: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """The scales of this rank's heads."""
    if cut is None or scale.shape[0] == 1:
        return scale
    start, stop = cut.ranges(scale.shape[0])[0]
    return scale[start:stop]


def _register() -> None:
    """Enters the attention into transformers' interfaces: sdpa with keys and values rounded first."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        scales = getattr(module, KV_SCALES, None)
        if scales is not None:
            key, value = (_rounded(x, scale) for x, scale in zip((key, value), scales, strict=True))
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Keys or values [batch, heads, tokens, head_dim] through the cache: float32 inside, the same dtype."""
    scale = scale.to(x.device)
    return (round_to_e4m3(x.float() / scale) * scale).to(x.dtype)
