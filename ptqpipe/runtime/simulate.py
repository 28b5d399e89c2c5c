"""Puts the input quantizers of a checkpoint's schemes on the modules of its model.

A stored weight has the name of the checkpoint; which module of the model it went to is decided by the same conversion
of names that filled the model. Weights that became parts of one module (experts in a stack, a fused matrix) have one
input; where their static scales differ the first one counts, as in vLLM.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from ptqpipe.containers import Role, StoredWeight
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.runtime.activations import InputQuantizer, experts_forward
from ptqpipe.runtime.kv_cache import simulate_kv_cache
from ptqpipe.runtime.names import targets
from ptqpipe.runtime.state import checkpoint_name
from ptqpipe.schemes import Activation
from ptqpipe.source import Source

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def simulate_activations(model: Any, source: Source) -> int:
    """Quantizes the inputs of ``model``, loaded from ``source``, as the checkpoint says, and what its kv cache keeps.

    Returns how many modules get quantized inputs. UsageError for activations that cannot be simulated, CheckpointError
    for a weight that no module holds.
    """
    simulate_kv_cache(model, source)
    if all(stored.scheme.activation is Activation.NONE for stored in source.stored.values()):
        return 0
    experts: dict[str, dict[str, dict[int, InputQuantizer]]] = {}
    done: set[str] = set()
    for weight, stored in source.stored.items():
        for target in targets(model, checkpoint_name(weight)):
            module, _, parameter = target.rpartition(".")
            for expert, quantizer in _quantizers(source, stored):
                if expert is not None:
                    experts.setdefault(module, {}).setdefault(parameter, {}).setdefault(expert, quantizer)
                elif quantizer.activation is not Activation.NONE and module not in done:
                    model.get_submodule(module).register_forward_pre_hook(quantizer.pre_hook)
                    done.add(module)
    for module, found in experts.items():
        done |= {module} if _quantize_experts(model, module, found) else set()
    return len(done)


def _quantizers(source: Source, stored: StoredWeight) -> Iterator[tuple[int | None, InputQuantizer]]:
    """(expert or None, quantizer) of every matrix of a stored weight."""
    match = _EXPERT.search(stored.weight)
    if stored.experts is not None:
        for expert in range(stored.experts):
            yield expert, _quantizer(source, stored, expert)
    else:
        yield None if match is None else int(match[1]), _quantizer(source, stored, None)


def _quantizer(source: Source, stored: StoredWeight, expert: int | None) -> InputQuantizer:
    activation = stored.scheme.activation
    if activation is Activation.UNKNOWN:
        raise UsageError(
            f"config.json quantizes the input of {stored.weight} in a way that ptqpipe cannot simulate; "
            "use activations 'none'"
        )
    divisor = stored.part(Role.INPUT_GLOBAL_DIVISOR)
    part = divisor or stored.part(Role.INPUT_GLOBAL)
    if not stored.scheme.needs_input_global_scale:
        return InputQuantizer(activation)
    if part is None:
        raise CheckpointError(f"{stored.weight} has no static scale of its input, which {activation} needs")
    value = source.reader.read(part.name).float().reshape(-1)
    return InputQuantizer(activation, float(value[expert if part.stacked and expert else 0]), divisor is not None)


def _quantize_experts(model: Any, module: str, found: dict[str, dict[int, InputQuantizer]]) -> bool:
    """Quantizes the inputs of one module of fused experts, or of modules that the model keeps apart."""
    quantizers = [quantizer for by_expert in found.values() for quantizer in by_expert.values()]
    if all(quantizer.activation is Activation.NONE for quantizer in quantizers):
        return False
    experts = model.get_submodule(module)
    if isinstance(experts, torch.nn.Linear):  # one expert's own layer: nothing was fused
        experts.register_forward_pre_hook(quantizers[0].pre_hook)
        return True
    inner = found.get("gate_up_proj") or found.get("up_proj")
    outer = found.get("down_proj")
    if not hasattr(experts, "has_gate") or not (inner or outer):
        raise UsageError(f"the inputs of the experts in {module} cannot be simulated; use activations 'none'")
    count = int(experts.num_experts)
    none = InputQuantizer(Activation.NONE)
    experts.forward = experts_forward(
        experts,
        tuple((inner or {}).get(expert, none) for expert in range(count)),
        tuple((outer or {}).get(expert, none) for expert in range(count)),
    )
    return True
