"""Claims about plans: every tensor has exactly one fate, fused groups have one, shapes decide what cannot be asked."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ptqpipe.errors import RecipeError, UsageError
from ptqpipe.numerics.schemes import Capabilities
from ptqpipe.recipe.file import build_recipe, parse_recipe
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.plan import Plan, conv1d_leaves, make_plan
from ptqpipe.recipe.recipe import Recipe
from tests import tiny

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64"}


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def plan_of(
    tensors: Mapping[str, torch.Tensor],
    *,
    recipe: Recipe | None = None,
    config: dict[str, Any] | None = None,
    capabilities: Capabilities | None = None,
) -> Plan:
    return make_plan(
        shapes(tensors),
        tiny.LLAMA_CONFIG if config is None else config,
        recipe=recipe or build_recipe(RecipeOptions()),
        capabilities=capabilities,
    )


def fates(plan: Plan) -> dict[str, str]:
    """Source tensor -> fate; fails where a tensor has two."""
    found: dict[str, str] = {kept.name: "kept" for kept in plan.kept}
    assert len(found) == len(plan.kept)
    for unit in plan.units:
        for member in unit.members:
            assert found.setdefault(member.source.tensor, "quantized") == "quantized"
    return found


def recipe_of(*rules: tuple[str, str], **extra: Any) -> Recipe:
    return parse_recipe({"version": 1, "rules": [{"match": m, "format": f} for m, f in rules], **extra})


def test_every_tensor_has_exactly_one_fate() -> None:
    for tensors in (tiny.llama(), tiny.fused_moe(), tiny.fused_moe(transposed=True)):
        assert set(fates(plan_of(tensors))) == set(tensors)


def test_fused_weights_share_a_unit_in_the_order_of_the_table() -> None:
    members = [[m.module.rsplit(".")[-1] for m in u.members] for u in plan_of(tiny.llama(layers=1)).units]
    assert sorted(members) == sorted(
        [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    )


def test_a_dimension_that_does_not_divide_keeps_the_weight_and_its_fused_siblings() -> None:
    tensors = tiny.llama(layers=1)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(128, 172, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 136, dtype=torch.bfloat16)
    plan = plan_of(tensors)
    reasons = {kept.name: kept.reason for kept in plan.kept}
    assert "172 does not divide into nvfp4 blocks of 1x16" in reasons["model.layers.0.mlp.down_proj.weight"]
    # other columns cannot be fused with q and v, so only k itself is kept
    assert "136" in reasons["model.layers.0.self_attn.k_proj.weight"]
    assert "model.layers.0.self_attn.q_proj.weight" not in reasons


def test_an_ignored_member_keeps_its_fused_siblings_and_says_why() -> None:
    plan = plan_of(tiny.llama(layers=1), recipe=build_recipe(RecipeOptions(ignore=("re:.*v_proj$",))))
    reasons = {kept.name: kept.reason for kept in plan.kept}
    assert "fused with model.layers.0.self_attn.v_proj.weight" in reasons["model.layers.0.self_attn.q_proj.weight"]
    assert reasons["model.layers.0.self_attn.v_proj.weight"] == "ignored on request"


def test_two_schemes_in_one_fused_group_are_refused() -> None:
    with pytest.raises(RecipeError, match="fused siblings get two rules"):
        plan_of(tiny.llama(), recipe=recipe_of(("re:.*q_proj$", "fp8"), ("*", "nvfp4")))


def test_fp8_blocks_need_both_dimensions() -> None:
    tensors = tiny.llama(layers=1)
    plan = plan_of(tensors, recipe=build_recipe(RecipeOptions(format="fp8_block")))
    kept = {k.name: k.reason for k in plan.kept}
    assert "64 rows do not divide into blocks of 128" in kept["model.layers.0.self_attn.k_proj.weight"]
    assert "fused with" in kept["model.layers.0.self_attn.q_proj.weight"]
    tensors["model.layers.0.x.weight"] = torch.zeros(128, 192).bfloat16()
    plan = plan_of(tensors, recipe=build_recipe(RecipeOptions(format="fp8_block")))
    assert (
        "128x192 does not divide into fp8_block blocks of 128x128"
        in {k.name: k.reason for k in plan.kept}["model.layers.0.x.weight"]
    )


@pytest.mark.parametrize(
    ("rows", "even", "kept"),
    [(576, True, ""), (64, True, ""), (192, True, "transformers misreads 192 rows"), (192, False, "")],
)
def test_the_last_block_of_rows_may_be_short_where_every_reader_sees_it(rows: int, *, even: bool, kept: str) -> None:
    plan = plan_of(
        {"x.weight": torch.zeros(rows, 256).bfloat16(), "y.weight": torch.zeros(128, 256).bfloat16()},
        recipe=build_recipe(RecipeOptions(format="fp8_block")), capabilities=Capabilities(even_blocks=even),
    )  # fmt: skip
    reasons = {entry.name: entry.reason for entry in plan.kept}
    assert reasons.get("x.weight", "").startswith(kept)
    assert bool(reasons) is bool(kept)


def test_of_fused_weights_only_the_last_may_end_with_a_short_block() -> None:
    recipe = build_recipe(RecipeOptions(format="fp8_block"))
    for rows, fate in (((256, 576), "quantized"), ((576, 256), "kept")):
        tensors = {
            f"a.{leaf}.weight": torch.zeros(count, 256).bfloat16()
            for leaf, count in zip(("q_a_proj", "kv_a_proj_with_mqa"), rows, strict=True)
        } | {"b.weight": torch.zeros(128, 256).bfloat16()}
        found = fates(plan_of(tensors, recipe=recipe))
        assert {found[name] for name in tensors if name.startswith("a.")} == {fate}


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_experts_become_weights_of_each_expert_in_either_orientation(transposed: bool) -> None:
    plan = plan_of(tiny.fused_moe(transposed=transposed))
    experts = {m.weight: m for u in plan.units for m in u.members if ".experts." in m.weight}
    up = experts["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert (up.shape, up.source.start, up.source.step, up.source.expert, up.source.transposed) == (
        (64, 128),
        64,
        1,
        2,
        transposed,
    )
    assert experts["model.layers.0.mlp.experts.0.down_proj.weight"].shape == (128, 64)
    units = [[m.weight for m in u.members] for u in plan.units]
    assert ["model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight"] in units


def test_gate_and_up_of_gpt_oss_alternate() -> None:
    plan = plan_of(tiny.fused_moe(transposed=True), config={"model_type": "gpt_oss", "hidden_size": 128})
    up = next(m for u in plan.units for m in u.members if m.weight.endswith("experts.1.up_proj.weight"))
    assert (up.source.start, up.source.step) == (1, 2)


def test_experts_with_biases_are_kept_and_the_remedy_named() -> None:
    tensors = tiny.fused_moe()
    tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = torch.zeros(3, 128, dtype=torch.bfloat16)
    reasons = {k.name: k.reason for k in plan_of(tensors).kept}
    for stack in ("gate_up_proj", "down_proj"):  # a reader of one finds both in the same spelling
        assert "gptoss_mxfp4" in reasons[f"model.layers.0.mlp.experts.{stack}"]


def test_stacks_that_readers_know_as_a_whole_are_quantized_where_a_container_stores_stacks() -> None:
    """JetMoE's: readers of the other layouts look for the whole tensor, in floats."""
    tensors = tiny.llama(layers=1)
    moe = "model.layers.0.block_sparse_moe"
    tensors[f"{moe}.input_linear.weight"] = torch.zeros(3, 128, 128, dtype=torch.bfloat16)
    tensors[f"{moe}.output_linear.weight"] = torch.zeros(3, 128, 64, dtype=torch.bfloat16)
    tensors["model.layers.0.shared_mlp.input_linear.weight"] = torch.zeros(128, 128, dtype=torch.bfloat16)
    reasons = {k.name: k.reason for k in plan_of(tensors).kept}
    assert "use container ptqpipe" in reasons[f"{moe}.input_linear.weight"]
    assert "model.layers.0.shared_mlp.input_linear.weight" not in reasons
    plan = plan_of(tensors, capabilities=Capabilities(stacks=True))
    members = [m for u in plan.units for m in u.members if m.weight == f"{moe}.output_linear.weight"]
    assert [(m.shape, m.source.expert, m.source.transposed) for m in members] == [
        ((128, 64), expert, False) for expert in range(3)
    ]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("granitemoehybrid", ("gate_proj", "up_proj", "down_proj")),
        ("granitemoe", ("gate_proj", "up_proj", "down_proj")),
        ("granitemoeshared", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_stacks_of_granite_become_experts_by_the_names_that_readers_know(kind: str, names: tuple[str, ...]) -> None:
    tensors, moe = tiny.llama(layers=1), "model.layers.0.block_sparse_moe"
    tensors[f"{moe}.input_linear.weight"] = torch.zeros(3, 128, 128, dtype=torch.bfloat16)
    tensors[f"{moe}.output_linear.weight"] = torch.zeros(3, 128, 64, dtype=torch.bfloat16)
    plan = plan_of(tensors, config={"model_type": kind})
    units = [[m.weight for m in u.members] for u in plan.units if any("experts" in m.weight for m in u.members)]
    gate, up, down = names
    pairs = [[f"{moe}.experts.{e}.{gate}.weight", f"{moe}.experts.{e}.{up}.weight"] for e in range(3)]
    assert units == [*pairs, *([f"{moe}.experts.{e}.{down}.weight"] for e in range(3))]
    starts = [m.source.start for u in plan.units for m in u.members if m.weight.endswith(f"1.{up}.weight")]
    assert starts == [64]


def test_stacks_of_step_3_become_experts() -> None:
    tensors, moe = tiny.llama(layers=1), "model.layers.0.moe"
    for leaf, shape in (("gate", (3, 64, 128)), ("up", (3, 64, 128)), ("down", (3, 128, 64))):
        tensors[f"{moe}.{leaf}_proj.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    plan = plan_of(tensors, config={"model_type": "step3p5", "hidden_size": 128})
    shapes = {m.weight: m.shape for u in plan.units for m in u.members if ".moe." in m.weight}
    assert len(shapes) == 9
    assert shapes[f"{moe}.experts.2.down_proj.weight"] == (128, 64)
    assert shapes[f"{moe}.experts.2.up_proj.weight"] == (64, 128)
    other = plan_of(tensors, config={"model_type": "llama", "hidden_size": 128})
    assert "use container ptqpipe" in {k.name: k.reason for k in other.kept}[f"{moe}.up_proj.weight"]


def test_an_orientation_that_shapes_leave_open_is_kept_not_guessed() -> None:
    tensors = {name: t for name, t in tiny.fused_moe().items() if "down_proj" not in name}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(3, 128, 128, dtype=torch.bfloat16)
    reasons = {k.name: k.reason for k in plan_of(tensors).kept}
    assert "cannot be told" in reasons["model.layers.0.mlp.experts.gate_up_proj"]


def test_a_container_of_stacks_gets_one_unit_an_expert_under_the_stacks_name() -> None:
    plan = plan_of(tiny.fused_moe(), capabilities=Capabilities(stacks=True))
    stack = [m for u in plan.units for m in u.members if m.stack is not None]
    assert {m.weight for m in stack} == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    assert sorted(m.source.expert for m in stack if m.weight.endswith("down_proj")) == [0, 1, 2]
    assert all(m.stack == 3 for m in stack)


def test_a_stack_that_does_not_divide_is_kept_as_a_whole() -> None:
    plan = plan_of(tiny.fused_moe(inner=40))
    kept = {k.name: k for k in plan.kept}
    assert "does not divide" in kept["model.layers.0.mlp.experts.down_proj"].reason
    assert "model.layers.0.mlp.experts.gate_up_proj" not in kept


def test_one_ignored_expert_keeps_the_whole_stack() -> None:
    recipe = build_recipe(RecipeOptions(ignore=("model.layers.0.mlp.experts.1.down_proj",)))
    plan = plan_of(tiny.fused_moe(), recipe=recipe)
    kept = {k.name: k.reason for k in plan.kept}
    assert "the stack has one fate" in kept["model.layers.0.mlp.experts.down_proj"]


def test_conv1d_is_recognised_by_its_bias_and_kept() -> None:
    tensors = {
        "h.0.attn.c_attn.weight": torch.zeros(64, 192),
        "h.0.attn.c_attn.bias": torch.zeros(192),
        "h.0.attn.c_proj.weight": torch.zeros(64, 64),
        "h.0.attn.c_proj.bias": torch.zeros(64),
        "h.0.mlp.c_proj.weight": torch.zeros(256, 64),
        "h.0.mlp.c_proj.bias": torch.zeros(64),
        "h.0.mlp.fc.weight": torch.zeros(256, 64),
        "h.0.mlp.fc.bias": torch.zeros(256),
    }
    assert conv1d_leaves(shapes(tensors)) == {"c_attn", "c_proj"}
    plan = plan_of(tensors)
    assert [m.weight for u in plan.units for m in u.members] == ["h.0.mlp.fc.weight"]
    own = {m.weight: m for u in plan_of(tensors, capabilities=Capabilities(transposed=True)).units for m in u.members}
    assert own["h.0.attn.c_attn.weight"].shape == (192, 64)
    assert own["h.0.attn.c_attn.weight"].source.transposed
    assert not own["h.0.mlp.fc.weight"].source.transposed


def test_a_layout_of_experts_alone_keeps_every_matrix() -> None:
    plan = plan_of(tiny.fused_moe(), capabilities=Capabilities(matrices=False, stacks=True))
    assert {m.weight.rsplit(".", 1)[1] for u in plan.units for m in u.members} == {"gate_up_proj", "down_proj"}
    assert "stacks of experts only" in {k.name: k.reason for k in plan.kept}["model.layers.0.self_attn.q_proj.weight"]


def test_nothing_to_quantize_is_an_error_that_says_why() -> None:
    tensors = {"wte.weight": torch.zeros(64, 64), "h.0.ln.weight": torch.zeros(64)}
    with pytest.raises(UsageError, match="nothing would be quantized: 2 tensors are kept, mostly because: embedding"):
        plan_of(tensors)


def test_numbers_that_are_no_floats_are_kept() -> None:
    tensors = tiny.llama(layers=1)
    tensors["model.layers.0.self_attn.position.weight"] = torch.zeros(128, 128, dtype=torch.int64)
    reasons = {k.name: k.reason for k in plan_of(tensors).kept}
    assert reasons["model.layers.0.self_attn.position.weight"] == "I64 numbers, not weights"


def test_kept_modules_name_the_head_even_when_it_is_tied() -> None:
    tensors = tiny.llama()
    assert "lm_head" in plan_of(tensors).kept_modules
    del tensors["lm_head.weight"]
    plan = plan_of(tensors)
    assert plan.tied_head
    assert "lm_head" in plan.kept_modules


def test_routers_are_among_the_kept_modules() -> None:
    assert "model.layers.0.mlp.gate" in plan_of(tiny.fused_moe()).kept_modules


def test_the_plan_is_a_function_of_its_input() -> None:
    assert plan_of(tiny.fused_moe()) == plan_of(tiny.fused_moe())
