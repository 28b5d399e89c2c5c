"""Where factors may move: found from names and shapes, refused where anything is not understood."""

from typing import Any

import pytest

from ptqpipe.errors import CheckpointError, PtqError, UsageError
from ptqpipe.models.folding.find_structure import find_structure
from ptqpipe.models.folding.structure import Edge, Matrix, Norm
from tests import tiny

CONFIG: dict[str, Any] = tiny.LLAMA_CONFIG


def shapes(tensors: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a tiny checkpoint."""
    return {name: ("BF16", tuple(t.shape)) for name, t in tensors.items()}


def edges(config: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Edge]:
    """The edges by id."""
    return {edge.id: edge for edge in find_structure(tensors, config).edges}


def test_a_llama_layer_has_four_edges_and_its_tensors_are_all_named() -> None:
    structure = find_structure(shapes(tiny.llama(layers=1)), CONFIG)
    found = {edge.id: edge for edge in structure.edges}
    layer = "model.layers.0"
    assert list(found) == [f"{layer}.qkv", f"{layer}.value", f"{layer}.gate_up", f"{layer}.mlp.up", "head"]
    assert found[f"{layer}.qkv"].producer == Norm(f"{layer}.input_layernorm.weight")
    assert [c.tensor.split(".")[-2] for c in found[f"{layer}.qkv"].consumers] == ["q_proj", "k_proj", "v_proj"]
    assert [m.tensor.split(".")[-2] for m in structure.writers] == ["o_proj", "down_proj"]
    assert structure.embeddings == ("model.embed_tokens.weight",)
    assert structure.others == ()


def test_values_of_a_head_are_read_by_every_query_head_of_its_group() -> None:
    edge = edges(CONFIG, shapes(tiny.llama(layers=1)))["model.layers.0.value"]
    assert (edge.channels, edge.repeat, edge.head_dim) == (64, 2, 32)
    # 4 query heads of 32 channels read 2 value heads: heads 0 and 1 the first, 2 and 3 the second
    expected = [head // 2 * 32 + channel for head in range(4) for channel in range(32)]
    assert edge.channel_of().tolist() == expected


def moe(*, stacked: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A Qwen3-MoE layer with three experts."""
    found = shapes(tiny.fused_moe(experts=3))
    found |= {f"model.layers.0.{n}.weight": ("BF16", (128,)) for n in ("input_layernorm", "post_attention_layernorm")}
    if not stacked:
        for name in [n for n in found if ".experts." in n]:
            del found[name]
        for e in range(3):
            for part, shape in (("gate_proj", (64, 128)), ("up_proj", (64, 128)), ("down_proj", (128, 64))):
                found[f"model.layers.0.mlp.experts.{e}.{part}.weight"] = ("BF16", shape)
    return found


def test_every_expert_and_the_router_read_the_norm() -> None:
    found = edges({**CONFIG, "model_type": "qwen3_moe"}, moe(stacked=False))
    readers = found["model.layers.0.gate_up"].consumers
    assert [c.tensor for c in readers if not c.quantized] == ["model.layers.0.mlp.gate.weight"]
    assert sum(c.quantized for c in readers) == 6
    assert sum(edge.kind == "up" for edge in found.values()) == 3


def test_stacked_experts_are_planes_with_their_up_half() -> None:
    found = edges({**CONFIG, "model_type": "qwen3_moe"}, moe(stacked=True))
    readers = [c for c in found["model.layers.0.gate_up"].consumers if c.quantized]
    assert [(c.tensor, c.expert, c.shape) for c in readers] == [
        ("model.layers.0.mlp.experts.gate_up_proj", e, (128, 128)) for e in range(3)
    ]
    assert readers[2].modules[0] == "model.layers.0.mlp.experts.gate_up_proj[2]"
    up = found["model.layers.0.experts.1.up"]
    assert isinstance(up.producer, Matrix)
    assert (up.producer.start, up.producer.shape, up.producer.expert) == (64, (64, 128), 1)


WRONG: list[tuple[str, dict[str, Any], dict[str, Any], type[PtqError], str]] = [
    ("unknown architecture", {"model_type": "mamba"}, {}, UsageError, "'mamba'"),
    ("no architecture", {"model_type": None}, {}, UsageError, "'None'"),
    ("another reader of the norm", {}, {"model.layers.0.self_attn.g_proj.weight": (128, 128)}, CheckpointError, "g_"),
    ("no value", {}, {"model.layers.0.self_attn.v_proj.weight": None}, CheckpointError, "v_proj"),
    ("no mlp", {}, {"model.layers.0.mlp.up_proj.weight": None}, CheckpointError, "up_proj"),
    ("no norm", {}, {"model.layers.0.input_layernorm.weight": None}, CheckpointError, "input_layernorm"),
    ("norm of another size", {}, {"model.layers.0.input_layernorm.weight": (64,)}, CheckpointError, "qkv"),
    ("heads that do not group", {"num_attention_heads": 3}, {}, CheckpointError, "3 attention heads"),
    ("no heads", {"num_attention_heads": None}, {}, CheckpointError, "0 attention heads"),
    ("a vector as weight", {}, {"model.layers.0.mlp.up_proj.weight": (256,)}, CheckpointError, "expected a matrix"),
    ("down of another size", {}, {"model.layers.0.mlp.down_proj.weight": (128, 200)}, CheckpointError, "mlp.up"),
]


@pytest.mark.parametrize(("config", "tensors", "kind", "says"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_is_not_understood_is_one_line(
    config: dict[str, Any], tensors: dict[str, tuple[int, ...] | None], kind: type[PtqError], says: str
) -> None:
    found = shapes(tiny.llama(layers=1))
    for name, shape in tensors.items():
        found.pop(name, None)
        if shape is not None:
            found[name] = ("BF16", shape)
    with pytest.raises(kind, match=says):
        find_structure(found, {**CONFIG, **config})


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0"):
        find_structure({"model.norm.weight": ("BF16", (8,))}, CONFIG)


def test_interleaved_or_transposed_stacks_are_refused() -> None:
    found = moe(stacked=True)
    found["model.layers.0.mlp.experts.gate_up_proj"] = ("BF16", (3, 128, 130))
    with pytest.raises(UsageError, match="not a stack"):
        find_structure(found, {**CONFIG, "model_type": "qwen3_moe"})
