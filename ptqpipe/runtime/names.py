"""From the names of a checkpoint's tensors to those of a model's parameters, by transformers' own conversions."""

from typing import Any

from ptqpipe.errors import CheckpointError


def targets(model: Any, weight: str) -> list[str]:
    """The parameters of ``model`` that the checkpoint's tensor ``weight`` went to.

    CheckpointError where there is none. ``model`` must have been loaded by transformers, which notes the conversions.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = model.state_dict()
    entries = getattr(model, "_weight_conversions", None) or []
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    name, pattern = rename_source_key(weight, renamings, converters, model.base_model_prefix, state)
    if name not in state and weight in state:
        name, pattern = weight, None
    converter = next((c for c in converters if pattern is not None and pattern in c.source_patterns), None)
    parts = [name] if converter is None else converter.target_patterns
    found = [name.replace(parts[0], part) for part in parts]
    if any(target not in state for target in found):
        raise CheckpointError(f"no module of the model holds {weight!r}; what the checkpoint says of it has no place")
    return found
