"""Operators that are opaque to torch.compile, as vLLM defines its own: below the dispatcher, without autograd."""

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("ptqpipe", "FRAGMENT")  # keeps them defined


def define(
    schema: str, run: Callable[..., torch.Tensor], *, shape: Callable[..., torch.Tensor], dispatch_key: str
) -> None:
    """Defines ``torch.ops.ptqpipe.<name of the schema>``.

    run    computes it; must return a new tensor
    shape  an empty tensor of the result's shape and dtype, for tracing
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, run, dispatch_key)
    torch.library.register_fake(f"ptqpipe::{name}", shape, lib=_library)
