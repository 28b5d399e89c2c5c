"""What transformers would save of a model, without writing its weights."""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch

_lock = Lock()


def save_but_weights(model: Any, folder: Path) -> dict[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]]:
    """Saves a model of transformers into a folder, its weights and their index aside; those are what is returned.

    By each weight file's name its tensors and its metadata. Tensors are the model's own wherever it stores them as the
    checkpoint does; those that it does not, such as experts in stacks, are split here, which takes memory for them once
    more. It is transformers' own saving (written for 5.23) with another function for the writing of files.
    """
    from transformers import modeling_utils

    files: dict[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]] = {}
    write = modeling_utils.safe_save_file

    def take(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
        if Path(filename).parent != folder:  # another thread saves a model of its own
            write(tensors, filename, metadata=metadata)
            return
        files[Path(filename).name] = dict(tensors), dict(metadata or {})

    with _lock:
        modeling_utils.safe_save_file = take
        try:
            model.save_pretrained(folder)
        finally:
            modeling_utils.safe_save_file = write
    for index in folder.glob("*.safetensors.index.json"):
        index.unlink()
    return files
