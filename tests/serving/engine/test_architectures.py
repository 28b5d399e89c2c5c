"""Models with windows, sinks, soft caps, experts, latent attention: greedy tokens equal transformers' generate.

Small random models in float32; what the engine cannot compute right it refuses.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from ptqpipe.errors import UsageError
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.attention import Terms, causal_mask, explicit_attention, fused_attention
from ptqpipe.serving.engine.model_runner import ModelRunner, context_length
from ptqpipe.serving.engine.probe import check_empty, rule_of
from tests.serving.engine.models import ask, engine, generate, greedy_of, tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 96,
}
KINDS = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral, window": lambda: transformers.MistralConfig(**SIZES, sliding_window=12),
    "gemma2, window and soft cap": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=12, layer_types=KINDS, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    ),
    "gemma3, window": lambda: transformers.Gemma3TextConfig(**SIZES, sliding_window=12, layer_types=KINDS),
    "gpt-oss, sinks and window": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=12, num_local_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "phimoe, a window that masks alone say": lambda: transformers.PhimoeConfig(
        **SIZES, sliding_window=12, num_local_experts=4, num_experts_per_tok=2
    ),
    "diffllama, attends twice in a layer": lambda: transformers.DiffLlamaConfig(**SIZES),
    "hrm, a layer attends in turns": lambda: transformers.HrmTextConfig(
        **{**SIZES, "num_hidden_layers": 4}, H_cycles=1, L_cycles=1, num_layers_per_stack=2
    ),
    "gemma3n, layers share keys": lambda: transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "intermediate_size": [96] * 4}, num_kv_shared_layers=2, laurel_rank=8,
        vocab_size_per_layer_input=96, hidden_size_per_layer_input=16, activation_sparsity_pattern=[0.0] * 4,
        sliding_window=12, layer_types=KINDS * 2,
    ),
    "llama4, a chunk": lambda: transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=128,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
    ),
    "deepseek v3.2, an indexer that chooses everything": lambda: transformers.DeepseekV32Config(
        **{key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        first_k_dense_replace=1, index_topk=128, index_head_dim=16, index_n_heads=2,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "deepseek v3, latent attention": lambda: transformers.DeepseekV3Config(
        **{key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [tuple(torch.randint(3, 96, (n,), generator=GENERATOR).tolist()) for n in (5, 40, 17)]


def build(config: Any) -> Any:
    """A model whose attention is sharp enough to matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif parameter.numel() == 4:  # sinks
                parameter.normal_(0, 1)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_architectures_equal_generate(name: str) -> None:
    model = build(CONFIGS[name]())
    served = ModelRunner(copy.deepcopy(model), EngineOptions(1 << 24, 128, 4, 8))
    requests = [ask(prompt, 20, name=str(at)) for at, prompt in enumerate(PROMPTS)]
    for max_batch_tokens in (512, 11):
        made = engine(served, max_len=128, max_batch_tokens=max_batch_tokens, tokens=tokenizer())
        found = generate(made, requests)
        assert [found[str(at)][0] for at in range(3)] == [greedy_of(model, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize(("count", "total"), [(1, 1), (1, 9), (6, 6), (4, 11)])
@pytest.mark.parametrize("window", [None, 3])
def test_written_out_attention_equals_torchs(count: int, total: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(count, 6, 8, generator=generator)
    key, value = torch.randn(total, 2, 8, generator=generator), torch.randn(total, 2, 5, generator=generator)
    mask = causal_mask(count, total, window)
    # Two orders of sums of at most 11 terms of size one in float32.
    explicit = explicit_attention(query, key, value, mask, Terms(0.3))
    if count == 1:
        seen = slice(None) if window is None else slice(-window, None)
        torch.testing.assert_close(
            fused_attention(query, key[seen], value[seen], None, 0.3), explicit, rtol=1e-5, atol=1e-6
        )
    else:
        torch.testing.assert_close(fused_attention(query, key, value, mask, 0.3), explicit, rtol=1e-5, atol=1e-6)


def test_a_window_sees_so_many_tokens_with_itself() -> None:
    assert causal_mask(2, 5, 3).tolist() == [[False, True, True, True, False], [False, False, True, True, True]]


def test_attention_that_is_not_transformers_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(UsageError, match="attention interface"):
        ModelRunner(model.eval(), EngineOptions(1 << 24, 64, 2))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: transformers.DogeConfig(**SIZES), "its own attention mask"),
        (lambda: transformers.BertConfig(**SIZES, is_decoder=False), "masks tokens"),
    ],
    ids=["doge", "bert"],
)
def test_an_empty_model_shows_what_its_config_does_not(config: Callable[[], Any], says: str) -> None:
    """So a service refuses before it loads."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=says):
        check_empty(model.eval(), 128)


def test_positions_that_a_model_counts_itself_are_refused() -> None:
    """RoBERTa's begin behind its padding token's number."""
    model = build(transformers.RobertaConfig(**SIZES, is_decoder=True))
    with pytest.raises(UsageError, match="counts positions"):
        ModelRunner(model, EngineOptions(1 << 24, 64, 2))


def test_tokens_that_see_others_without_attention_are_refused() -> None:
    model = build(CONFIGS["llama"]())
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, args, y: y + 0.5 * y.roll(1, dims=1))  # a short convolution
    with pytest.raises(UsageError, match="see others without attention"):
        ModelRunner(model, EngineOptions(1 << 24, 64, 2))


@pytest.mark.slow
def test_models_that_are_served_pass_as_empty_ones() -> None:
    for config in CONFIGS.values():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config())
        check_empty(model, 128)


def test_the_rule_of_a_mask_is_read_off_its_rows() -> None:
    causal, longest = masking_utils.causal_mask_function, 64
    none = torch.zeros(1, dtype=torch.int64)
    window = masking_utils.sliding_window_causal_mask_function
    assert (rule_of(causal, longest).simple, rule_of(causal, longest).window) == (True, None)
    for length in (1, 12, 40, 63):
        assert (rule_of(window(length), longest).simple, rule_of(window(length), longest).window) == (True, length)
    assert rule_of(window(64), longest).window is None
    for other in (
        masking_utils.chunked_causal_mask_function(12, none),
        masking_utils.chunked_causal_mask_function(63, none),
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(12),
        lambda batch, head, query, key: causal(batch, head, query, key) & (key % 2 == 0),
    ):
        assert not rule_of(other, longest).simple


def test_rotary_embeddings_that_depend_on_the_batch_end_at_the_original_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    assert context_length(transformers.LlamaConfig(**SIZES, rope_parameters=rope)) == 32
    assert context_length(transformers.LlamaConfig(**SIZES)) == 128


def test_sparse_and_chunked_attention_end_where_they_do_not_see_everything() -> None:
    chunked = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 64}
    assert context_length(transformers.Llama4TextConfig(**SIZES, **chunked)) == 64
    assert context_length(transformers.Llama4TextConfig(**SIZES, **chunked, floor_scale=32)) == 32
    assert context_length(transformers.DeepseekV32Config(max_position_embeddings=4096, index_topk=2048)) == 2048


def test_a_cache_that_is_too_small_says_what_is_needed() -> None:
    model = build(CONFIGS["llama"]())
    with pytest.raises(UsageError, match=r"kv_cache_size to (\d+)") as error:
        ModelRunner(model, EngineOptions(1000, 64, 2, 8))
    needed = int(str(error.value).split("kv_cache_size to ")[1].split()[0])
    assert ModelRunner(model, EngineOptions(needed, 64, 2, 8)).blocks == 9
