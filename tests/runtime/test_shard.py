"""Claims about who holds what: the ranks' parts make up the whole, and what does not divide is refused in one line.

Models are transformers' own on the meta device; expected shapes are divided by hand.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ptqpipe.errors import UsageError
from ptqpipe.runtime.parallel import TensorParallel
from ptqpipe.runtime.shard import STYLES, Cut, make_plan, shrink
from tests.runtime.models import CONFIGS, SIZES


def empty(config: Any) -> Any:
    """A model without numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def one_column(name: str) -> int:
    return 1


@pytest.mark.parametrize("of", [1, 2, 3, 4])
@pytest.mark.parametrize("pieces", [1, 2])
def test_the_parts_of_an_axis_make_up_the_axis(of: int, pieces: int) -> None:
    found: list[int] = []
    for index in range(of):
        ranges = Cut("out", index, of, pieces).ranges(48)
        assert sum(stop - start for start, stop in ranges) == Cut("out", index, of, pieces).local(48) == 48 // of
        found += [at for start, stop in ranges for at in range(start, stop)]
    assert sorted(found) == list(range(48))


def test_a_packed_pair_is_cut_in_each_half() -> None:
    assert Cut("out", 1, 2, pieces=2).ranges(8) == ((2, 4), (6, 8))


@pytest.mark.parametrize("size", [2, 4])
def test_heads_and_hidden_features_are_shared_out(size: int) -> None:
    model = empty(CONFIGS["biased"]())
    plan = make_plan(model, TensorParallel(size, rank=1), columns=one_column)
    shrink(model, plan)
    layer = model.model.layers[0]
    kv = max(2 // size, 1) * 32  # two key-value heads: four ranks have one each, twice
    assert tuple(layer.self_attn.q_proj.weight.shape) == (128 // size, 128)
    assert tuple(layer.self_attn.k_proj.weight.shape) == tuple(layer.self_attn.v_proj.weight.shape) == (kv, 128)
    assert tuple(layer.self_attn.o_proj.weight.shape) == (128, 128 // size)
    assert tuple(layer.mlp.gate_proj.weight.shape) == tuple(layer.mlp.up_proj.weight.shape) == (256 // size, 128)
    assert tuple(layer.mlp.down_proj.weight.shape) == (128, 256 // size)
    assert tuple(model.lm_head.weight.shape) == (96 // size, 128)
    assert tuple(layer.self_attn.q_proj.bias.shape) == (128 // size,)
    assert tuple(layer.mlp.down_proj.bias.shape) == (128,)  # added after the sum, by every rank
    assert tuple(model.model.embed_tokens.weight.shape) == (96, 128)
    assert layer.self_attn.num_key_value_groups == (4 // size) // (kv // 32)
    assert set(plan.reduce) == {f"model.layers.{i}.{x}" for i in (0, 1) for x in ("self_attn.o_proj", "mlp.down_proj")}
    assert plan.gather == ("lm_head",)


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_fewer_key_value_heads_than_ranks_are_repeated(rank: int, head: int) -> None:
    plan = make_plan(empty(CONFIGS["llama"]()), TensorParallel(4, rank), columns=one_column)
    assert plan.cuts["model.layers.0.self_attn.k_proj.weight"].ranges(64) == ((32 * head, 32 * head + 32),)


@pytest.mark.parametrize(("name", "stack"), [("qwen3_moe", "mlp"), ("mixtral", "mlp")])
def test_experts_are_cut_within(name: str, stack: str) -> None:
    model = empty(CONFIGS[name]())
    plan = make_plan(model, TensorParallel(2, 0), columns=one_column)
    shrink(model, plan)
    experts = getattr(model.model.layers[0], stack).experts
    assert tuple(experts.gate_up_proj.shape) == (4, 256, 128)
    assert tuple(experts.down_proj.shape) == (4, 128, 128)
    assert plan.cuts[f"model.layers.0.{stack}.experts.gate_up_proj"].ranges(512) == ((0, 128), (256, 384))
    assert f"model.layers.0.{stack}.experts" in plan.reduce


def test_gpt_oss_has_a_plan_of_ours() -> None:
    config = transformers.GptOssConfig(**SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    model = empty(config)
    plan = make_plan(model, TensorParallel(2, 1), columns=one_column)
    shrink(model, plan)
    layer = model.model.layers[0]
    assert tuple(layer.mlp.experts.gate_up_proj.shape) == (4, 128, 64)
    assert tuple(layer.mlp.experts.gate_up_proj_bias.shape) == (4, 64)
    assert tuple(layer.mlp.experts.down_proj.shape) == (4, 32, 128)
    assert tuple(layer.mlp.experts.down_proj_bias.shape) == (4, 128)
    assert tuple(layer.self_attn.sinks.shape) == (2,)
    assert "model.layers.0.mlp.experts.down_proj_bias" in plan.once


def test_a_tied_head_computes_its_rows_of_the_whole_matrix() -> None:
    model = empty(CONFIGS["tied"]())
    plan = make_plan(model, TensorParallel(2, 1), columns=one_column)
    assert plan.tied_rows == {"lm_head": (48, 96)}
    assert plan.gather == ("lm_head",)
    assert "lm_head.weight" not in plan.cuts


def test_a_head_that_does_not_divide_stays_whole() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 97}, intermediate_size=256)
    plan = make_plan(empty(config), TensorParallel(2, 0), columns=one_column)
    assert not plan.gather
    assert "lm_head.weight" not in plan.cuts


def llama(**changes: int) -> Callable[[], Any]:
    return lambda: transformers.LlamaConfig(**{**SIZES, "intermediate_size": 256, **changes})


@pytest.mark.parametrize(
    ("config", "size", "columns", "message"),
    [
        (llama(), 3, 1, r"tp=3 does not divide the 4 attention heads; tp can be 1, 2, 4$"),
        (llama(), 8, 1, r"tp=8 does not divide the 4 attention heads"),
        (
            llama(hidden_size=192, num_attention_heads=6, num_key_value_heads=3),
            2,
            1,
            "the 3 key-value heads of model.layers.0.self_attn",
        ),
        (
            llama(intermediate_size=224),
            4,
            16,
            r"the 224 columns of model\.layers\.0\.mlp\.down_proj\.weight in blocks of 16",
        ),
        (
            llama(),
            4,
            128,
            r"the 128 columns of model\.layers\.0\.self_attn\.o_proj\.weight in blocks of 128; tp can be 1$",
        ),
        (lambda: transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2), 2, 1, "no tensor-parallel plan for 'gpt2'"),
    ],
)
def test_what_does_not_divide_is_refused_in_one_line(
    config: Callable[[], Any], size: int, columns: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make_plan(empty(config()), TensorParallel(size), columns=lambda name: columns)
    assert "\n" not in str(caught.value)


def test_one_rank_needs_no_plan() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2)
    assert not make_plan(empty(config), TensorParallel(), columns=one_column).cuts


def test_the_styles_of_common_models_are_known() -> None:
    kinds = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "phi3", "olmo2")
    for kind in (*kinds, "deepseek_v3", "cohere2", "granite", "glm4", "smollm3", "ernie4_5", "olmoe", "qwen2_moe"):
        plan = transformers.AutoConfig.for_model(kind).base_model_tp_plan
        assert plan, kind
        assert set(plan.values()) <= STYLES.keys(), kind


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_make_no_sense_are_refused(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match="expected a size of 1 or more and a rank below it"):
        TensorParallel(size, rank).check()


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        TensorParallel(2, 0).check()
