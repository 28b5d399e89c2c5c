"""What sglang_child.py and vllm_loader_child.py share: many checkpoints in a process that has imported the reader.

``serve(load, packages)`` reads ``CKPT<tab>OUT`` lines from standard input. For each it makes a copy of the process in
which ``load(CKPT)`` gives the reader's model as its loader leaves it, writes every parameter to OUT (safetensors), and
answers one JSON line: ``{}``, or ``{"problem": ...}`` with the reader's own words. Needs torch and safetensors alone.
"""

import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

LIMIT_S = 300
CAPABILITY = (10, 0)
MARK = 0x5A  # every byte of a parameter before it is filled


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has every name, for ``packages`` that exist for GPUs alone and all below them."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = MagicMock(name=spec.name)
        made.__spec__, made.__path__, made.__version__ = spec, [], "0.0"
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do."""


class _Stream:
    """Of no GPU. A class, because readers ask whether something is one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def pretend_cuda(operators: tuple[str, ...]) -> None:
    """Lets torch say that it has a GPU of `CAPABILITY` where a reader asks, and make on the CPU what is meant for it.

    operators  names below ``torch.ops`` of a reader's kernels, which get every operator; none may be run
    """
    import torch
    import torch.library

    register = torch.library.register_fake

    def register_fake(op: Any, *args: Any, **options: Any) -> Any:
        if isinstance(op, str) and op.partition("::")[0] in operators:
            return lambda function: function
        return register(op, *args, **options)

    torch.library.register_fake = register_fake
    for name in operators:
        setattr(torch.ops, name, MagicMock(name=name))

    torch.cuda.get_device_capability = lambda *_, **__: CAPABILITY
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Stream)
    for name in ("empty", "zeros", "ones", "full", "arange", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def mark(model: Any) -> None:
    """Fills every matrix of a model with `MARK`, so that what the loader leaves out is seen. Numbers of their own and
    short lists of them stay: loaders compare them with what they begin as."""
    import torch

    for value in model.parameters():
        if value.dim() > 1 and value.numel() >= 64:
            matrix = value.data if value.data.is_contiguous() else value.data.transpose(-1, -2)
            matrix.view(torch.uint8).fill_(MARK)


def _answer(load: Callable[[str], Any], ckpt: str, out: str) -> dict[str, str]:
    from safetensors.torch import save_file

    try:
        model = load(ckpt)
        methods = {
            type(getattr(module, "scheme", None) or module.quant_method).__name__
            for module in model.modules()
            if getattr(module, "quant_method", None) is not None
        }
        tensors = {name: value.detach().contiguous().clone() for name, value in model.named_parameters()}
        save_file(tensors, out, metadata={"methods": json.dumps(sorted(methods))})
    except Exception as error:
        traceback.print_exc()
        words = " ".join(f"{type(error).__name__}: {error}".split())
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = f" ({os.path.basename(place.filename)}:{place.lineno})" if not str(error) else ""
        return {"problem": re.sub(r"0x[0-9a-f]+", "0x", words)[:300] + at}
    return {}


def serve(load: Callable[[str], Any]) -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        ckpt, out = line.rstrip("\n").split("\t")
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(LIMIT_S)
            os.write(writes, json.dumps(_answer(load, ckpt, out)).encode())
            sys.stdout.flush()
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        print(said or json.dumps({"problem": f"it ended with status {status}"}), file=answers, flush=True)
