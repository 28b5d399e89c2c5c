"""A checkpoint's activations and FP8 kv cache, simulated on the float modules of its model.

Input quantizers: a stored weight has the name of the checkpoint; which module of the model it went to is decided by the
same conversion of names that filled the model. Weights that became parts of one module (experts in a stack, a fused
matrix) have one input; where their static scales differ the first one counts, as in vLLM. Packed layers have their own
(``replace.py``).

KV cache: keys and values are rounded to E4M3 at the checkpoint's scales before attention, as the readers do with
``k_scale`` and ``v_scale`` (names: ``layouts/_config.py``). Keys after their rotary embedding, and values,
are stored as E4M3 codes of x / scale, and attention sees code * scale. The scales are one number a tensor or one a
key-value head. The query is not quantized. transformers' attention interface gives the one place where all models hand
over keys and values.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ptqpipe.checkpoint.layouts import PartKind, StoredWeight, kv_scale_place, quantization_config
from ptqpipe.errors import CheckpointError, PtqWarning, UsageError
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer, round_to_e4m3
from ptqpipe.runtime.parameter_names import Home
from ptqpipe.runtime.shard import Cut
from ptqpipe.runtime.shard_read import check_positive
from ptqpipe.runtime.stacked_experts import experts_forward, float_project, is_experts


def simulate_activations(
    model: Any,
    source: Source,
    *,
    homes: Mapping[str, Sequence[Home]],
    packed: frozenset[str] = frozenset(),
    activations: bool = True,
) -> int:
    """Quantizes the inputs of a model's float layers as their schemes in the checkpoint require.

    homes        where the checkpoint's tensors went; those of parts that the model was made without are not named
    packed       weights whose layers quantize their inputs themselves
    activations  False leaves inputs unquantized; those of rotated weights are rotated all the same

    Returns how many modules get quantized inputs. UsageError for activations that cannot be simulated, CheckpointError
    for a weight that no module holds.
    """
    schemes = {stored.scheme for stored in source.stored.values()}
    if not any(scheme.rotation or (activations and scheme.activation is not Activation.NONE) for scheme in schemes):
        return 0
    experts: dict[str, dict[str, dict[int, InputQuantizer]]] = {}
    done: set[str] = set()
    for weight, places in homes.items():
        stored = source.stored.get(weight)
        if stored is None or weight in packed:
            continue
        if not places:
            raise CheckpointError(
                f"no module of the model has the weight {weight!r}, whose inputs the checkpoint quantizes; check "
                "config.json against the weights"
            )
        for home in places:
            for expert, quantizer in _quantizers(source, stored, home, activations=activations):
                if expert is not None:
                    experts.setdefault(home.module, {}).setdefault(home.leaf, {}).setdefault(expert, quantizer)
                elif not quantizer.idle and home.module not in done:
                    model.get_submodule(home.module).register_forward_pre_hook(quantizer.pre_hook)
                    done.add(home.module)
    for module, parts in experts.items():
        done |= {module} if _quantize_experts(model, module, parts) else set()
    return len(done)


def _quantizers(
    source: Source, stored: StoredWeight, home: Home, *, activations: bool
) -> Iterator[tuple[int | None, InputQuantizer]]:
    """(expert or None, quantizer) of every matrix of a stored weight."""
    if stored.experts is not None:
        for expert in range(stored.experts):
            yield expert, input_quantizer(source, stored, expert, activations=activations)
    else:
        yield home.expert, input_quantizer(source, stored, None, activations=activations)


def input_quantizer(
    source: Source, stored: StoredWeight, expert: int | None, *, activations: bool = True
) -> InputQuantizer:
    """What happens to the input of a stored weight (of one expert of a stack); without ``activations`` its rotation
    alone."""
    activation, rotation = stored.scheme.activation if activations else Activation.NONE, stored.scheme.rotation
    if activation is Activation.UNKNOWN:
        raise UsageError(
            f"config.json quantizes the input of {stored.weight} in a way that ptqpipe cannot simulate; "
            "use activations 'none'"
        )
    divisor = stored.part(PartKind.INPUT_GLOBAL_DIVISOR)
    part = divisor or stored.part(PartKind.INPUT_GLOBAL)
    if not activations or not stored.scheme.needs_input_global_scale:
        return InputQuantizer(activation, rotation=rotation)
    if part is None:
        raise CheckpointError(
            f"{stored.weight} has no static scale of its input, which {activation} needs; copy all "
            "files of the checkpoint again, or use activations 'none'"
        )
    value = source.reader.read(part.name).float().reshape(-1)
    check_positive(value, part.name)
    fixed = float(value[expert if part.stacked and expert else 0])
    return InputQuantizer(activation, fixed, divisor is not None, rotation)


def _quantize_experts(model: Any, module: str, by_part: dict[str, dict[int, InputQuantizer]]) -> bool:
    """Quantizes the inputs of one module of fused experts, or of modules that the model keeps apart."""
    quantizers = [quantizer for by_expert in by_part.values() for quantizer in by_expert.values()]
    if all(quantizer.idle for quantizer in quantizers):
        return False
    experts = model.get_submodule(module)
    if isinstance(experts, torch.nn.Linear):  # one expert's own layer: nothing was fused
        experts.register_forward_pre_hook(quantizers[0].pre_hook)
        return True
    inner = by_part.get("gate_up_proj") or by_part.get("up_proj")
    outer = by_part.get("down_proj")
    if not is_experts(experts) or not (inner or outer):
        raise UsageError(f"the inputs of the experts in {module} cannot be simulated; use activations 'none'")
    count = int(experts.num_experts)
    none = InputQuantizer(Activation.NONE)
    project = float_project(
        experts,
        tuple((inner or {}).get(expert, none) for expert in range(count)),
        tuple((outer or {}).get(expert, none) for expert in range(count)),
    )
    experts.forward = experts_forward(experts, project)
    return True


IMPLEMENTATION = "ptqpipe_kv_fp8"
KV_SCALES = "ptqpipe_kv_scales"
"""The attribute of attention modules with (keys', values') scales. The engine has the same name, and reads them."""


def simulate_kv_cache(
    model: Any, source: Source, *, homes: Mapping[str, Sequence[Home]], cuts: Mapping[str, Cut] | None = None
) -> int:
    """Quantizes the keys and values of attention modules whose scales the checkpoint holds. How many it changed.

    homes  where the checkpoint's tensors are in the model
    cuts   the parts of the model's parameters that this rank of several has; one scale per head is cut like its heads

    A model whose attention does not go through transformers' interface keeps its cache as it is, with a warning; so
    does a cache of another format than FP8. CheckpointError for a module with one scale of the two, and for a scale
    that is not finite and above zero.
    """
    layers = _scales(source)
    if not layers:
        return 0
    path = source.reader.path
    if not _is_fp8(source):
        warnings.warn(f"{path}: the kv cache is not FP8 per config.json; it is not simulated", PtqWarning, stacklevel=3)
        return 0
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        warnings.warn(
            f"{path}: attention is {config._attn_implementation}; its kv cache is not simulated",
            PtqWarning,
            stacklevel=3,
        )
        return 0
    for name, scales in layers.items():
        if set(scales) != {"k", "v"}:
            raise CheckpointError(f"{path}: {name} has a {'/'.join(scales)}_scale alone, expected k_scale and v_scale")
        parameter, module = _key(source, homes, name)
        cut = (cuts or {}).get(parameter)
        kept = (_local(scales["k"], cut), _local(scales["v"], cut))
        setattr(model.get_submodule(module), KV_SCALES, kept)
    _register()
    config._attn_implementation = IMPLEMENTATION
    return len(layers)


def _scales(source: Source) -> dict[str, dict[str, torch.Tensor]]:
    """Attention module (as in the checkpoint) -> "k", "v" -> float32 scale that broadcasts over [batch, heads, tokens,
    head_dim]."""
    scales: dict[str, dict[str, torch.Tensor]] = {}
    for name in source.reader.entries:
        place = kv_scale_place(name)
        if place is not None and place[1] in ("k", "v"):
            scale = source.reader.read(name).float()
            check_positive(scale, name)
            scales.setdefault(place[0], {})[place[1]] = scale.reshape(-1, 1, 1)
    return scales


def _is_fp8(source: Source) -> bool:
    described = quantization_config(source.config)
    scheme = described.get("kv_cache_scheme") or described.get("kv_cache_quant_algo")
    if isinstance(scheme, str):
        return scheme.upper() == "FP8"
    return isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"


def _key(source: Source, homes: Mapping[str, Sequence[Home]], name: str) -> tuple[str, str]:
    """(the model's parameter of the keys' projection, its attention module) of what the checkpoint calls ``name``."""
    places = homes.get(f"{name}.k_proj.weight")
    if not places:
        raise CheckpointError(f"{source.reader.path}: no attention of the model has the kv scales of {name!r}")
    return places[0].parameter, places[0].module.rpartition(".")[0]


def _local(scale: torch.Tensor, cut: Cut | None) -> torch.Tensor:
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
