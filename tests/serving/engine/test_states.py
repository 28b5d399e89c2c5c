"""Models with linear attention, state-space layers and short convolutions: greedy tokens equal transformers' generate.

Small random models in float32, however the work is cut.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from ptqpipe.errors import UsageError
from ptqpipe.serving.engine import EngineOptions, invariance
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.model_runner import ModelRunner
from tests.serving.engine.models import ask, engine, generate, greedy_of, run_all, tokenizer
from tests.serving.engine.test_architectures import SIZES

GROUPED = {key: value for key, value in SIZES.items() if key != "head_dim"}
KINDS = ["linear_attention", "full_attention"]
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16}
ALONE = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**SIZES, **DELTA, **SHARED, layer_types=KINDS),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**SIZES, **DELTA, layer_types=KINDS),
    "qwen3.5 moe": lambda: transformers.Qwen3_5MoeTextConfig(**SIZES, **DELTA, **SHARED, layer_types=KINDS),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp", "moe"], mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16,
        n_groups=2, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32, n_group=1, topk_group=1,
    ),
    "granite 4": lambda: transformers.GraniteMoeHybridConfig(
        **GROUPED, **MAMBA2, layer_types=["mamba", "attention"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "lfm2 moe": lambda: transformers.Lfm2MoeConfig(
        **GROUPED, **EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1
    ),
    "falcon-h1, both in a layer": lambda: transformers.FalconH1Config(**SIZES, **MAMBA2, mamba_d_ssm=128),
    "jamba, by tokens": lambda: transformers.JambaConfig(
        **GROUPED, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=8,
    ),
    "bamba": lambda: transformers.BambaConfig(**GROUPED, **MAMBA2, attn_layer_indices=[1]),
    "zamba2, an attention in several layers": lambda: transformers.Zamba2Config(
        **{**GROUPED, "num_hidden_layers": 4}, mamba_d_state=16, n_mamba_heads=8, mamba_headdim=16, mamba_ngroups=1,
        chunk_size=16, layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1, attention_head_dim=32,
        attention_hidden_size=128,
    ),
    "mamba, by tokens": lambda: transformers.MambaConfig(**ALONE, state_size=8, pad_token_id=0),
    "mamba2, without pages": lambda: transformers.Mamba2Config(
        **ALONE, state_size=16, num_heads=8, head_dim=16, n_groups=1, chunk_size=16, pad_token_id=0
    ),
    "recurrent gemma, states in attributes": lambda: transformers.RecurrentGemmaConfig(
        **{**SIZES, "num_hidden_layers": 3}, lru_width=64, attention_window_size=12
    ),
    "minimax, a cache of its own": lambda: transformers.MiniMaxConfig(
        **SIZES, layer_types=KINDS, block_size=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "olmo hybrid": lambda: transformers.OlmoHybridConfig(**GROUPED, **DELTA, layer_types=KINDS),
    "kimi linear": lambda: transformers.KimiLinearConfig(
        **{**SIZES, **LATENT}, layer_types=KINDS, num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
        linear_num_heads=4, linear_head_dim=16,
    ),
    "zaya": lambda: transformers.ZayaConfig(**SIZES),
}  # fmt: skip
BY_TOKENS = {"jamba, by tokens", "mamba, by tokens", "recurrent gemma, states in attributes"}
LENGTH = 64
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [tuple(torch.randint(3, 96, (n,), generator=GENERATOR).tolist()) for n in (5, 27, 14, 1)]


def build(name: str) -> Any:
    """A model whose layers' parts are of a size that matters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_generate(name: str) -> None:
    """At once and in steps of 9 tokens with a cache that is too small for all: pieces of prompts, single tokens and
    first ones beside each other, and sequences that are put out and computed again."""
    model = build(name)
    served = ModelRunner(copy.deepcopy(model), EngineOptions(1 << 24, LENGTH, 3, 4))
    assert served.states.by_tokens == (name in BY_TOKENS)
    expected = [greedy_of(copy.deepcopy(model), prompt, 10) for prompt in PROMPTS]  # RecurrentGemma's keeps states
    served_blocks = served.blocks
    for max_batch_tokens, blocks in ((512, served_blocks), (9, LENGTH // 4 + 1)):
        served.blocks = blocks
        made = engine(served, max_len=LENGTH, max_batch_tokens=max_batch_tokens, tokens=tokenizer())
        found = generate(made, [ask(prompt, 10, name=str(at)) for at, prompt in enumerate(PROMPTS)])
        assert [found[str(at)][0] for at in range(len(PROMPTS))] == expected
        assert (made.scheduler.preemptions > 0) == (blocks < served_blocks)


def test_a_common_beginning_is_computed_again_and_siblings_have_states_of_their_own() -> None:
    model = build("lfm2")
    made = engine(
        ModelRunner(copy.deepcopy(model), EngineOptions(1 << 24, LENGTH, 4, 4)), max_len=LENGTH, tokens=tokenizer()
    )
    made.add(ask(PROMPTS[1], 4))
    run_all(made)
    made.add(ask(PROMPTS[1], 4, name="b", n=2))
    pieces = run_all(made)
    assert {piece.cached for piece in pieces} == {0}
    for index in (0, 1):
        tokens = [token for piece in pieces if piece.index == index for token in piece.tokens]
        assert tokens == greedy_of(model, PROMPTS[1], 4)


def test_states_count_in_the_cache() -> None:
    model = build("mamba2, without pages")
    served = ModelRunner(model, EngineOptions(1 << 24, LENGTH, 4))
    assert (served.bytes_per_block, served.max_seqs) == (0, 4)
    each = served.state_bytes
    inner, channels = 128, 128 + 2 * 16  # of 8 heads of 16, and with B and C
    assert each == 2 * 4 * (channels * 4 + inner * 16)  # layers, float32, a kernel of 4, 16 states
    for limit, sequences in ((5 * each, 2), (2 * each, 1)):
        assert ModelRunner(build("mamba2, without pages"), EngineOptions(limit, LENGTH, 4)).max_seqs == sequences
    with pytest.raises(UsageError, match="kv_cache_size to "):
        ModelRunner(build("mamba2, without pages"), EngineOptions(each - 1, LENGTH, 4))
    with pytest.raises(UsageError, match=r"beside 4 sequences' states.*kv_cache_size to (\d+)") as error:
        ModelRunner(build("lfm2"), EngineOptions(12000, LENGTH, 4))
    needed = int(str(error.value).split("kv_cache_size to ")[1].split()[0])
    assert ModelRunner(build("lfm2"), EngineOptions(needed, LENGTH, 4)).blocks * 16 > LENGTH


def test_rows_that_do_not_lie_beside_each_other_give_the_same() -> None:
    served = ModelRunner(build("qwen3-next"), EngineOptions(1 << 24, LENGTH, 4, 16))
    tokens = torch.tensor(PROMPTS[1][:4])

    def logits(rows: tuple[int, ...]) -> torch.Tensor:
        for at, row in enumerate(rows):
            served.run(Batch(tokens[at : at + 2], tokens[:0], (Span(2, 2, (at,), row),)))
        spans = tuple(Span(1, 3, (at,), row) for at, row in enumerate(rows))
        return served.run(Batch(tokens[-2:], torch.arange(2), spans))

    torch.testing.assert_close(logits((3, 1)), logits((0, 1)), rtol=0, atol=0)


def test_states_that_do_not_continue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("lfm2")
    conv = model.model.layers[0].conv
    own = type(conv).forward

    @functools.wraps(own)
    def forgets(self: Any, hidden_states: torch.Tensor, cache: Any = None, *rest: Any, **options: Any) -> Any:
        """Only of the first of its layers: a difference that the logits hardly show."""
        found = own(self, hidden_states, cache, *rest, **options)
        if self is conv and cache is not None:
            cache.layer.conv_states[0].mul_(0.8)
        return found

    monkeypatch.setattr(type(conv), "forward", forgets)
    with pytest.raises(UsageError, match="does not continue its states"):
        ModelRunner(model, EngineOptions(1 << 24, LENGTH, 2))


def test_a_model_may_give_all_logits_where_some_are_asked() -> None:
    """As MiniCPM-V does."""
    model = build("lfm2")
    served = ModelRunner(copy.deepcopy(model), EngineOptions(1 << 24, LENGTH, 2))
    own = served.model.forward
    served.model.forward = lambda logits_to_keep, **options: own(**options)
    made = engine(served, max_len=LENGTH, tokens=tokenizer())
    assert generate(made, [ask(PROMPTS[0], 6)])["a"][0] == greedy_of(model, PROMPTS[0], 6)


def test_the_same_bits_in_every_batch_are_not_promised() -> None:
    served = ModelRunner(build("lfm2"), EngineOptions(1 << 24, LENGTH, 2))
    with pytest.raises(UsageError, match="layers with states"):
        invariance.check(served)
