"""What tests of verify share: names of tensors, a small mixture of experts, findings as text, damage to files."""

from collections.abc import Callable
from pathlib import Path

import torch

from ptqpipe.check.verify.command import verify
from ptqpipe.check.verify.report import VerifyReport
from tests import tiny
from tests.conversion import damage

MOE_CONFIG = {**tiny.LLAMA_CONFIG, "architectures": [], "model_type": "qwen3_moe", "num_hidden_layers": 1}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
GATE, UP, DOWN = (f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up", "down"))
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


def moe(experts: int = 3, hidden: int = 128, inner: int = 64) -> dict[str, torch.Tensor]:
    """One layer with a weight for each projection of each expert."""
    t = tiny.Tensors(3)
    t.add(EMBEDDING, 96, hidden)
    tiny.attention(t, "model.layers.0.self_attn", hidden=hidden, kv=hidden // 2)
    t.add("model.layers.0.mlp.gate.weight", experts, hidden)
    for expert in range(experts):
        base = f"model.layers.0.mlp.experts.{expert}"
        for leaf, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            t.add(f"{base}.{leaf}.weight", *shape)
    t.ones("model.norm.weight", hidden)
    t.add("lm_head.weight", 96, hidden)
    return t.made


def check(ckpt: Path, source: Path | None, **options: bool) -> VerifyReport:
    return verify(ckpt, source=source, workers=1, **options)


def found(report: VerifyReport) -> str:
    return "\n".join(f"[{f.check}] {f.where}: {f.message}" for f in report.findings)


Damage = Callable[[Path], object]


def group(edit: Callable[[dict[str, dict[str, object]]], object]) -> Damage:
    """A change of the one config group."""
    return lambda folder: damage.edit_config(folder, lambda c: edit(c["config_groups"]["group_0"]))


def config(edit: Callable[[dict[str, object]], object]) -> Damage:
    return lambda folder: damage.edit_config(folder, edit)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
