"""What the name of a tensor or module says: its decoder layer, its expert, its role. The names are those of checkpoints
in Hugging Face's layout; nothing is known of what they name."""

import re

from ptqpipe.errors import one_line

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_COUNTED = re.compile(r"(?<=\.)\d+(?=\.)|\[\d+\]")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)(?:\.|$)")


def layer_of(name: str) -> int | None:
    """The number of the decoder layer: the first one in the name; None for none."""
    return _number(_LAYER, name)


def expert_of(name: str) -> int | None:
    """The number of the expert that has a tensor of its own; None for a stack of experts, and for what is none."""
    return _number(_EXPERT, name)


def experts_of(name: str) -> str:
    """The module of all experts of the layer: "...mlp.experts" of "...mlp.experts.3.up_proj" and of stacks; "" for what
    is of no routed expert."""
    parent, experts, _ = f".{name}".rpartition(".experts.")
    return f"{parent}{experts}"[1:-1]


def role_of(weight: str) -> str:
    """The role of a weight: its module's last name, with ``experts.`` before it for an expert's."""
    parts = re.sub(r"\[\d+\]$", "", weight).removesuffix(".weight").split(".")
    return f"experts.{parts[-1]}" if "experts" in parts else parts[-1]


def name_pattern(name: str) -> str:
    """The name with every layer or expert number as ``*``, in one line."""
    return _COUNTED.sub("*", one_line(name, limit=300))


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    """The first number that the pattern matches; None without one, or for an absurd one."""
    match = pattern.search(name)
    return int(match[1]) if match is not None and len(match[1]) <= 6 else None
