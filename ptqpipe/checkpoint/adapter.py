"""Tells an adapter (PEFT's LoRA and its kin) from a model: it holds what is to be added to another model's weights.

Quantized by itself it is of no use to any program, so whoever reads a checkpoint refuses it, with the command that
merges it. It must not read weights; names of files and tensors and ``adapter_config.json`` say it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ptqpipe.checkpoint.header import shown
from ptqpipe.checkpoint.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.errors import CheckpointError

ADAPTER_CONFIG: Final = "adapter_config.json"

# Files of PEFT, mlx-lm and diffusers.
_FILE: Final = re.compile(r"(adapters?([_.-].*)?|pytorch_lora_weights.*)\.(safetensors|bin|pt)", re.IGNORECASE)
# What PEFT's wrapper calls all of its tensors, and what an adapter calls its own.
_NAME: Final = re.compile(
    r"base_model\.model\.|(.*\.)?(lora|hada|lokr|ia3|oft|boft|poly|vera_lambda|fourierft|hra|randlora|vblora|shira)_"
    r"|(.*\.)?lora\.(up|down)\.|(.*\.)?(prompt_embeddings|prompt_encoder)(\.|$)|(.*\.)?trainable_tokens_",
    re.IGNORECASE,
)
# By the task of an adapter, what peft calls the class that loads it with its model.
_CLASSES: Final = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}
# They add inputs, not weights: peft 0.21 has no merge_and_unload of these.
_NOT_MERGED: Final = frozenset(
    {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE"}
)


def is_adapter_file(name: str) -> bool:
    """Whether a file is, by its name, the weights of an adapter."""
    return _FILE.fullmatch(name) is not None


def are_adapters(names: Iterable[str]) -> bool:
    """Whether tensors are, by all of their names, those of an adapter; False of none."""
    listed = list(names)
    return bool(listed) and all(_NAME.match(name) for name in listed)


def adapter_error(folder: Path) -> CheckpointError:
    """The error for a folder that holds an adapter and no model: whose it is, and how it is merged."""
    config = _read_config(folder)
    kind = config.get("peft_type") or config.get("fine_tune_type")
    base = config.get("base_model_name_or_path") or config.get("model")
    base = base if isinstance(base, str) and base else None
    what = f"{kind} " if isinstance(kind, str) and kind else ""
    said = f"{shown(str(folder))} is an adapter ({what}of {shown(base) if base else 'a model that it does not name'})"
    own = "its model" if base is None else shown(base)
    if kind in _NOT_MERGED:
        return CheckpointError(
            f"{said}, not a model, and of a kind that is not merged into weights; convert {own}, and load the adapter "
            "beside the result"
        )
    if base is None or "peft_type" not in config:
        fused = "mlx_lm.fuse" if "fine_tune_type" in config else "peft's merge_and_unload()"
        return CheckpointError(f"{said}, not a model; merge it into {own} ({fused}), and give the merged folder")
    loader = _CLASSES.get(str(config.get("task_type")), "AutoPeftModel")
    target = f"{folder.name or 'adapter'}-merged"
    return CheckpointError(
        f'{said}, not a model; merge it first, and give the merged folder: python -c "from peft import {loader} as A; '
        f'A.from_pretrained({shown(str(folder))}).merge_and_unload().save_pretrained({shown(target)})"'
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; empty where there is none that can be read, since that it is an adapter is known anyhow."""
    try:
        config = json.loads(read_regular(folder / ADAPTER_CONFIG, limit=MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
