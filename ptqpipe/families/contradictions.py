"""Where a config.json and the tensors beside it cannot both be right: found before anything is written.

Readers that follow the config leave such a model half filled, or stop; a quantized copy would carry that on.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ptqpipe.errors import CheckpointError

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOWERS = ("visual", "vision_tower", "vision_model")
_TOWER_KEYS = ("vis", "vit", "image", "img", "tower")


def check_config(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError, in one line, where experts are too few or too many, or where a tower has no config.

    config  of the model, as it stands in its files
    names   of all tensors
    """
    experts: dict[str, set[int]] = {}
    tower = ""
    for name in names:
        parent, found, rest = name.partition(".experts.")
        number = rest.partition(".")[0]
        if found and number.isdecimal():
            experts.setdefault(f"{parent}.experts", set()).add(int(number))
        elif not tower and not {*_TOWERS}.isdisjoint(name.split(".")):
            tower = name
    counts = {key: count for part in _parts(config) for key, count in part.items() if key in _COUNTS}
    for module, numbers in experts.items():
        _check_experts(module, numbers, {key: count for key, count in counts.items() if type(count) is int})
    nested = isinstance(config.get("text_config"), Mapping)
    if tower and nested and not any(word in key for key in _objects(config) for word in _TOWER_KEYS):
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


def _objects(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of objects and of texts at the top: a tower's config is the one or the other."""
    return (key for key, value in config.items() if isinstance(value, Mapping | str))
