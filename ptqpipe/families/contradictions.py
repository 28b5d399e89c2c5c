"""Where a config.json and the tensors beside it cannot both be right: found before anything is written.

Readers that follow the config leave such a model half filled, or stop; a quantized copy would carry that on. What may
be meant so (a part of a model) is said and not refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ptqpipe.errors import CheckpointError

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOWERS = frozenset({"visual", "vision_tower", "vision_model"})
_TOWER_KEYS = ("vis", "vit", "image", "img", "tower")
_LAYER = re.compile(r".*?(^|\.)layers\.\d+(?=\.)")
_TOWER_NAMES = ("tower", "vision_model", "vision_encoder")  # keys of a text that names the tower's own model


def check_experts(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError, in one line, where a layer has too few or too many experts.

    config  of the model, as it stands in its files
    names   of all tensors
    """
    experts: dict[str, set[int]] = {}
    for name in names:
        parent, found, rest = name.partition(".experts.")
        number = rest.partition(".")[0]
        if found and number.isdecimal():
            experts.setdefault(f"{parent}.experts", set()).add(int(number))
    counts = {key: count for part in _parts(config) for key, count in part.items() if key in _COUNTS}
    for module, numbers in experts.items():
        _check_experts(module, numbers, {key: count for key, count in counts.items() if type(count) is int})


def check_tower(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError, in one line, where there is a vision tower and no config of one."""
    tower = next((name for name in names if not _TOWERS.isdisjoint(name.split("."))), "")
    nested = isinstance(config.get("text_config"), Mapping)
    if tower and nested and not _describes_tower(config):
        raise CheckpointError(
            f"config.json has a text_config and no vision_config, but the files hold a vision tower ({tower!r}); take "
            "the config.json that belongs to them, or remove the tower's tensors"
        )


def _check_experts(module: str, numbers: set[int], counts: Mapping[str, int]) -> None:
    last = max(numbers)
    absent = next((number for number in range(last + 1) if number not in numbers), None)
    if absent is None and (not counts or len(numbers) in counts.values()):
        return
    said = " or ".join(f"{key} {count}" for key, count in counts.items())
    says = f", and config.json says {said}" if counts else ""
    lacks = last + 1 if absent is None and len(numbers) < max(counts.values()) else absent
    which = "" if lacks is None else f" (there is no {module}.{lacks})"
    raise CheckpointError(
        f"{module} has {len(numbers)} experts{which}{says}; download the model again, or correct its config.json"
    )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config and every object in it."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def too_few_layers(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """What is to be said of a count of layers that the files do not hold, or nothing. Of all lists of layers together,
    since some families have several."""
    counts = [part.get("num_hidden_layers") for part in _parts(config)]
    count = next((value for value in counts if type(value) is int), 0)
    found = {match[0] for match in map(_LAYER.match, shapes) if match}
    if not found or len(found) >= count:
        return ""
    return (
        f"config.json says num_hidden_layers {count}, but the files have {len(found)}; readers stop: download what is "
        "missing, or correct the number"
    )


def another_width(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """What is to be said of an embedding whose width is no number of the config, or nothing."""
    numbers = {value for part in _parts(config) for value in part.values() if type(value) is int}
    for name, (_, shape) in shapes.items():
        if name.endswith("embed_tokens.weight") and len(shape) == 2 and "hidden_size" in _keys(config):
            if shape[1] in numbers:
                return ""
            return (
                f"{name!r} is {shape[0]}x{shape[1]}, and no number of config.json is {shape[1]}; readers stop: one of "
                "the two is of another model"
            )
    return ""


def _keys(config: Mapping[str, Any]) -> set[str]:
    return {key for part in _parts(config) for key in part}


def _describes_tower(config: Mapping[str, Any]) -> bool:
    """Whether a config has an object for a tower at its top, or a text that names one."""
    for key, value in config.items():
        if isinstance(value, Mapping) and any(word in key for word in _TOWER_KEYS):
            return True
        if isinstance(value, str) and any(key.endswith(name) for name in _TOWER_NAMES):
            return True
    return False
