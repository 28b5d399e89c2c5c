"""Claims about transformers: it loads what we write, nothing missing, and computes what our dequantization computes.

Weight-only schemes and every layout that transformers dequantizes give the same bits as a float model with our
dequantized weights. Where activations are quantized, too, the weights it computes with are compared.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ptqpipe.checkpoint.layouts import ConfigRequest, Target, decode, encode_part, get_container
from ptqpipe.models.layout_issues import _LLAMA4, _NO_PER_EXPERT_NAMES, layout_warnings
from ptqpipe.models.reader_facts import READERS, evidence
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.runtime.hf import register, unregister
from tests.checkpoint.layouts.builders import Checkpoint, absmax, quantize

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=256),
    "tied": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=256, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=256, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
}
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _transformers_alone() -> Iterator[None]:
    """These are claims about transformers without the quantizer that ptqpipe registers."""
    unregister()
    yield
    register()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Seeded bfloat16 models as transformers saves them, by the key of ``CONFIGS``."""
    folders = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.05)
        folders[name] = tmp_path_factory.mktemp("source") / name
        model.save_pretrained(folders[name])
    return folders


def read(folder: Path) -> Checkpoint:
    from tests.checkpoint.layouts.builders import read_checkpoint

    return read_checkpoint(folder)


def load(folder: Path, **options: Any) -> Any:
    """The model, provided that every tensor found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, sorted(info[key])[:4])
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(TOKENS).logits
    return out


def dense(module: str) -> str | None:
    """Linear layers of a dense Llama, the head aside."""
    return "x" if ".self_attn." in module or ".mlp." in module else None


def float_model(source: Path, checkpoint: Checkpoint, container: str, folder: Path) -> Any:
    """transformers' model of the source with our dequantized weights, rounded once to bfloat16."""
    values = {name: w.bfloat16() for name, w in checkpoint.dequantized(container).items()}
    original = read(source)
    assert values.keys() <= original.tensors.keys()
    return load(Checkpoint(original.configs, {**original.tensors, **values}).save(folder))


def converted(source: Path, container: str, pick: Callable[[str], str | None]) -> Checkpoint:
    return quantize(read(source), container, pick, fused=FUSED)


FLOAT_INPUTS = [
    ("compressed_tensors", "nvfp4"),
    ("compressed_tensors", "mxfp4a16"),
    ("compressed_tensors", "mxfp6"),
    ("compressed_tensors", "mxfp8a16"),
    ("compressed_tensors", "int4_g32"),
    ("compressed_tensors", "int4_g128"),
    ("compressed_tensors", "int8"),
    ("deepseek_fp8", "fp8_block"),
    ("deepseek_fp8", "fp8_block_ue8m0"),
    ("mxfp8_hf", "mxfp8"),
]


@pytest.mark.parametrize("model", ["llama", "tied"])
@pytest.mark.parametrize(("container", "scheme"), FLOAT_INPUTS)
def test_logits_are_those_of_the_dequantized_model(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str
) -> None:
    checkpoint = converted(sources[model], container, lambda module: dense(module) and scheme)
    assert ("lm_head.weight" in checkpoint.tensors) is (model == "llama")
    theirs = logits(load(checkpoint.save(tmp_path / "q")))
    ours = logits(float_model(sources[model], checkpoint, container, tmp_path / "f"))
    assert torch.equal(theirs, ours)


QUANTIZED_INPUTS = [
    "nvfp4_w4a4", "mxfp4", "mxfp4_w4a8", "mxfp8", "fp8_dynamic", "fp8_tensor", "fp8_static", "fp8_block", "int8_w8a8",
]  # fmt: skip


def test_every_format_that_transformers_is_said_to_run_is_run_here() -> None:
    run = {scheme for _, scheme in FLOAT_INPUTS} | set(QUANTIZED_INPUTS)
    assert run == {name for name in READERS["transformers"] if evidence("transformers", name).mark == "run"}


@pytest.mark.parametrize("scheme", QUANTIZED_INPUTS)
def test_quantized_activations_leave_the_weights_exact(
    sources: Mapping[str, Path], tmp_path: Path, scheme: str
) -> None:
    checkpoint = converted(sources["llama"], "compressed_tensors", lambda module: dense(module) and scheme)
    model = load(checkpoint.save(tmp_path / "q"))
    assert bool(torch.isfinite(logits(model)).all())  # the first forward decompresses
    expected = checkpoint.dequantized("compressed_tensors")
    assert len(expected) == 14
    for name, values in expected.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(module.weight, values.bfloat16()), name
        assert module.quantization_scheme.input_activations is not None


@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4", "mxfp8", "fp8_dynamic", "fp8_tensor", "fp8_block"])
def test_dequantized_on_loading_the_logits_are_ours(sources: Mapping[str, Path], tmp_path: Path, scheme: str) -> None:
    checkpoint = converted(sources["llama"], "compressed_tensors", lambda module: dense(module) and scheme)
    config = transformers.CompressedTensorsConfig(
        **checkpoint.config["quantization_config"],  # type: ignore[arg-type, dict-item]
        dequantize=True,
    )
    folder = checkpoint.save(tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    ours = float_model(sources["llama"], checkpoint, "compressed_tensors", tmp_path / "f")
    assert torch.equal(logits(model.eval()), logits(ours))


def test_mixed_groups_reach_their_modules(sources: Mapping[str, Path], tmp_path: Path) -> None:
    def pick(module: str) -> str | None:
        if ".layers.1.self_attn." in module or not dense(module):
            return None
        return "mxfp8a16" if ".self_attn." in module else "nvfp4"

    checkpoint = converted(sources["llama"], "compressed_tensors", pick)
    assert len(checkpoint.stored("compressed_tensors")) == 10
    theirs = logits(load(checkpoint.save(tmp_path / "q")))
    ours = logits(float_model(sources["llama"], checkpoint, "compressed_tensors", tmp_path / "f"))
    assert torch.equal(theirs, ours)


def experts_only(scheme: str) -> Callable[[str], str | None]:
    return lambda module: scheme if ".experts." in module else None


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("container", "scheme"),
    [
        ("compressed_tensors", "fp8_dynamic"),
        ("compressed_tensors", "fp8_tensor"),
        ("compressed_tensors", "mxfp4"),
        ("compressed_tensors", "mxfp6"),
        ("deepseek_fp8", "fp8_block"),
        ("mxfp8_hf", "mxfp8"),
        pytest.param(
            "compressed_tensors",
            "nvfp4",
            marks=pytest.mark.xfail(reason="transformers issue 48371: experts off by their global scale", strict=True),
        ),
        pytest.param(
            "compressed_tensors",
            "fp8_block",
            marks=pytest.mark.xfail(reason="transformers 5.23 multiplies the block grid as it is", raises=RuntimeError),
        ),
        pytest.param(
            "compressed_tensors",
            "mxfp8",
            marks=pytest.mark.xfail(reason="transformers 5.23 takes the exponents for scales", raises=RuntimeError),
        ),
    ],
)
def test_experts_are_exact_and_the_known_faults_are_still_there(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str
) -> None:
    """Experts are dequantized on loading. A fault that goes away fails here: then its warning goes, too."""
    checkpoint = converted(sources[model], container, experts_only(scheme))
    warned = layout_warnings(container, [Target(n, get_scheme(scheme)) for n in checkpoint.stored(container)], {})
    if scheme in ("nvfp4", "fp8_block", "mxfp8") and container == "compressed_tensors":
        assert any("transformers" in line for line in warned)
    theirs = logits(load(checkpoint.save(tmp_path / "q")))
    ours = logits(float_model(sources[model], checkpoint, container, tmp_path / "f"))
    assert torch.equal(theirs, ours)


def test_experts_of_one_scheme_and_attention_of_another(sources: Mapping[str, Path], tmp_path: Path) -> None:
    def pick(module: str) -> str | None:
        return "mxfp4" if ".experts." in module else "nvfp4" if ".self_attn." in module else None

    checkpoint = converted(sources["qwen3_moe"], "compressed_tensors", pick)
    theirs = logits(load(checkpoint.save(tmp_path / "q")))
    ours = logits(float_model(sources["qwen3_moe"], checkpoint, "compressed_tensors", tmp_path / "f"))
    assert torch.equal(theirs, ours)


def test_gpt_oss_stacks_load_exactly(sources: Mapping[str, Path], tmp_path: Path) -> None:
    original, layout, scheme = read(sources["gpt_oss"]), get_container("gptoss_mxfp4"), get_scheme("mxfp4a16")
    tensors, targets, values, kept = {}, [], {}, []
    for name, tensor in original.tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            kept += [name.removesuffix(".weight")] if tensor.dim() == 2 else []
            continue
        experts = [absmax(tensor[e].T.contiguous(), scheme.fmt) for e in range(len(tensor))]
        for part in layout.parts(name, experts[0].shape, scheme, experts=len(experts), transposed=True):
            tensors[part.name] = torch.stack([encode_part(part, q) for q in experts])
        targets.append(Target(name, scheme, len(experts), transposed=True))
        values[name] = torch.stack([q.dequantize().T for q in experts]).bfloat16()
    configs = layout.configs(ConfigRequest(original.config, targets, kept, {}))
    checkpoint = Checkpoint(configs, tensors)
    for name, found in checkpoint.stored("gptoss_mxfp4").items():
        again = torch.stack([decode(found, checkpoint.load, expert=e).dequantize().T for e in range(4)])
        assert torch.equal(again.bfloat16(), values[name])
    theirs = logits(load(checkpoint.save(tmp_path / "q")))
    ours = logits(load(Checkpoint(original.configs, {**original.tensors, **values}).save(tmp_path / "f")))
    assert torch.equal(theirs, ours)


def test_warnings_of_expert_names_are_true_of_transformers() -> None:
    """It has a converter from ``experts.N`` names for none of the models that are warned of, and for others it has."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    def merges(kind: str) -> bool:
        entries = get_checkpoint_conversion_mapping(kind) or []
        patterns = [pattern for entry in entries for pattern in entry.source_patterns]
        return any(re.search(r"experts\\?\.\*", pattern) for pattern in patterns)

    assert not [kind for kind in _NO_PER_EXPERT_NAMES | _LLAMA4 if merges(kind)]
    assert all(merges(kind) for kind in ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2"))
