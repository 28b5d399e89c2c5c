"""compressed-tensors' transform_config: whose inputs are rotated by block Hadamard matrices while a model runs.

A rotation by blocks of 64 columns is the group

    {"type": "hadamard", "head_dim": 64, "apply": [{"targets": [...], "location": "input"},
                                                   {"targets": [...], "location": "weight_input", "inverse": true}]}

whose second entry says that the stored weights are rotated already. No matrix is stored: its name stands for it, and
vLLM's kernel takes none. Read and written are rotations of inputs by the blocks of `ROTATION_BLOCKS`; every other
change of inputs or outputs makes another model than the weights alone, so that it is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ptqpipe.checkpoint.layouts._config import strings
from ptqpipe.checkpoint.layouts._config_groups import resolver
from ptqpipe.checkpoint.layouts._patterns import name_patterns
from ptqpipe.checkpoint.layouts._types import Target, schemes_of
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.schemes import ROTATION_BLOCKS

KEY = "transform_config"
_IN_WEIGHTS = ("weight_input", "weight_output")  # what is done to weights is in them already


def described_rotations(targets: Sequence[Target], kept: Sequence[str]) -> dict[str, Any]:
    """The entry of a config for these targets, ``kept`` being the modules that are not quantized; empty for none."""
    names = [*kept, *(target.module for target in targets)]
    groups, used = {}, {scheme.rotation for scheme in schemes_of(targets)}
    for block in ROTATION_BLOCKS:
        if block in used:
            rotated = [target.module for target in targets if target.scheme.rotation == block]
            patterns = name_patterns(rotated, [name for name in names if name not in set(rotated)])
            uses: list[dict[str, Any]] = [{"targets": patterns, "location": "input"}]
            uses += [{"targets": patterns, "location": "weight_input", "inverse": True}]
            groups[f"rotate_{block}"] = {"type": "hadamard", "head_dim": block, "apply": uses}
    return {KEY: {"config_groups": groups}} if groups else {}


def stored_rotations(config: Mapping[str, Any], described: Mapping[str, Any]) -> Callable[[str], int]:
    """A function: module -> block size of its input's rotation in columns; 0: none.

    CheckpointError for a ``transform_config`` that changes inputs or outputs in any other way.
    """
    blocks: list[tuple[list[str], int]] = []
    for holder in (config, described):
        entry = holder.get(KEY) or {}
        groups = entry.get("config_groups") or {} if isinstance(entry, Mapping) else None
        if not isinstance(groups, Mapping):
            raise CheckpointError(f"{KEY} in config.json is damaged; expected an object with config_groups")
        for name, group in groups.items():
            blocks += [(strings(use.get("targets"), f"{KEY} {name!r}"), block) for use, block in _inputs(name, group)]
    find = resolver(blocks, classes=False)
    return lambda module: find(module) or 0


def _inputs(name: str, group: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    """(entry, block) of everything that a group does while the model runs."""
    described: Mapping[str, Any] = group if isinstance(group, Mapping) else {}
    uses, block = described.get("apply"), described.get("head_dim")
    for use in uses if isinstance(uses, list) else [{}]:
        place = use.get("location") if isinstance(use, Mapping) else None
        if place in _IN_WEIGHTS:
            continue
        supported = place == "input" and described.get("type") == "hadamard" and not described.get("randomize")
        if not supported or block not in ROTATION_BLOCKS or use.get("ignore"):
            raise CheckpointError(
                f"{KEY} in config.json has {name!r} at {place!r}: a change of the activations that ptqpipe does not "
                f"read, which are Hadamard rotations of inputs by blocks of {', '.join(map(str, ROTATION_BLOCKS))}; "
                "start from the float checkpoint"
            )
        yield use, int(block)
