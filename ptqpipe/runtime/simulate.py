"""Puts the input quantizers of a checkpoint's schemes on the float modules of its model.

A stored weight has the name of the checkpoint; which module of the model it went to is decided by the same conversion
of names that filled the model. Weights that became parts of one module (experts in a stack, a fused matrix) have one
input; where their static scales differ the first one counts, as in vLLM. Packed layers have their own (``replace.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ptqpipe.containers import Role, StoredWeight
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.runtime.activations import InputQuantizer
from ptqpipe.runtime.experts import experts_forward, float_project, is_experts
from ptqpipe.runtime.names import Home
from ptqpipe.runtime.scales import check_positive
from ptqpipe.schemes import Activation
from ptqpipe.source import Source


def simulate_activations(
    model: Any, source: Source, *, homes: Mapping[str, Sequence[Home]], packed: frozenset[str] = frozenset()
) -> int:
    """Quantizes the inputs of a model's float layers as their schemes in the checkpoint require.

    homes   where the checkpoint's tensors went
    packed  weights whose layers quantize their inputs themselves

    Returns how many modules get quantized inputs. UsageError for activations that cannot be simulated, CheckpointError
    for a weight that no module holds.
    """
    if all(stored.scheme.activation is Activation.NONE for stored in source.stored.values()):
        return 0
    experts: dict[str, dict[str, dict[int, InputQuantizer]]] = {}
    done: set[str] = set()
    for weight, stored in source.stored.items():
        if weight in packed:
            continue
        if not homes.get(weight):
            raise CheckpointError(
                f"no module of the model has the weight {weight!r}, whose inputs the checkpoint quantizes; check "
                "config.json against the weights"
            )
        for home in homes[weight]:
            for expert, quantizer in _quantizers(source, stored, home):
                if expert is not None:
                    experts.setdefault(home.module, {}).setdefault(home.leaf, {}).setdefault(expert, quantizer)
                elif quantizer.activation is not Activation.NONE and home.module not in done:
                    model.get_submodule(home.module).register_forward_pre_hook(quantizer.pre_hook)
                    done.add(home.module)
    for module, found in experts.items():
        done |= {module} if _quantize_experts(model, module, found) else set()
    return len(done)


def _quantizers(source: Source, stored: StoredWeight, home: Home) -> Iterator[tuple[int | None, InputQuantizer]]:
    """(expert or None, quantizer) of every matrix of a stored weight."""
    if stored.experts is not None:
        for expert in range(stored.experts):
            yield expert, input_quantizer(source, stored, expert)
    else:
        yield home.expert, input_quantizer(source, stored, None)


def input_quantizer(source: Source, stored: StoredWeight, expert: int | None) -> InputQuantizer:
    """What happens to the input of a stored weight (of one expert of a stack)."""
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
    check_positive(value, part.name)
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
