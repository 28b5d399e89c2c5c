"""Claims about the table of families: every row has a model, and what is written of it is what its readers take."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.models.families import (
    FAMILIES,
    Family,
    fails_either_way,
    family_of,
    fuse_of,
    issues_of,
    outside_language_model,
)
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.recipe import matches, reader_issues
from ptqpipe.runtime import load, load_model
from tests import families, family_rows, tiny

# Held by models of their own elsewhere: tests/tiny.py, tests/families.py, tests/quantization/transforms/models.py,
# tests/image_text.py.
ELSEWHERE = {"deepseek_v3", "glm4_moe", "llama", "qwen3_vl", "gemma3_text", "internvl", "phi4_multimodal", "step3p7"}
ELSEWHERE |= {"inkling2", "llama4", "llama4_text", "mixtral", "persimmon", "phi", "stablelm", "seed_oss", "mistral3"}
ELSEWHERE |= {"qwen2_vl", "glm4v", "lfm2_vl", "aya_vision", "minimax_m3_vl"}
KINDS = [*family_rows.MADE_BY_TRANSFORMERS, *family_rows.NAMES_AND_SHAPES]

# model_type -> what of its first layers stays beside routers, heads and embeddings.
KEPT: dict[str, set[str]] = {
    "gemma3n_text": {
        *(f"altup_projections.{i}" for i in range(3)), *(f"altup_unembed_projections.{i}" for i in range(3)),
         "altup.correction_coefs", "altup.modality_router", "altup.prediction_coefs",
        "laurel.linear_left", "laurel.linear_right", "per_layer_input_gate", "per_layer_projection",
        "per_layer_model_projection",
    },
    "gemma4_text": {"per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"},
    "deepseek_v4": {
        "attn.compressor.wgate", "attn.compressor.wkv", "attn.indexer.compressor.wgate",
        "attn.indexer.compressor.wkv", "attn.wo_a", "head",
    },
    "qwen4_exp_text": {
        *(f"self_attn.{leaf}_proj" for leaf in "qkv"), "self_attn.indexer.index_qk_proj",
        "ple.key_proj", "ple.value_proj", "lm_head",
    },
    "kimi_linear": {f"self_attn.{leaf}_proj" for leaf in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b")},
    "jamba": {f"mamba.{leaf}_proj" for leaf in ("in", "x", "dt", "out")},
    "nemotron_h": {"mixer.fc1_latent_proj", "mixer.fc2_latent_proj"},
    "hunyuan_v1_moe": {"mlp.gate.wg"},
    "step3p5": {"self_attn.g_proj"},
    "glm5_next_text": {f"self_attn.{leaf}_proj" for leaf in ("q", "k", "v", "b", "f_a", "g_a")},
    "internvl_chat": {"mlp1.1", "mlp1.3"},
    "lighton_ocr": {"vision_projection.linear_1"},
    "phi4mm": {
        "self_attn.o_proj.lora_A.vision", "embed_tokens_extend.image_embed.img_projection.0",
        "embed_tokens_extend.audio_embed.audio_projection.speech.0",
    },
}  # fmt: skip
_LAYER = re.compile(r"^(model\.|backbone\.)?(layers\.[01]\.)?")


# The same for what is kept in every model, whatever its family.
KEPT_IN_ALL: dict[str, set[str]] = {
    "qwen3_next": {"linear_attn.in_proj_ba"},
    "qwen3_5_text": {"linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "qwen3_5_moe_text": {"linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "olmo_hybrid": {"linear_attn.a_proj", "linear_attn.b_proj"},
    "qwen4_exp_text": {
        "linear_attn.in_proj_a", "linear_attn.in_proj_b",
        "hyper_connection_mixer.input_mix_weight_down", "hyper_connection_mixer.input_mix_weight_up",
        *(
            f"{part}_hyper_connection.{leaf}" for part in ("attn", "mlp")
            for leaf in ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")
        ),
    },
}  # fmt: skip
GATES = {"gates of a linear-attention layer, a few rows each", "hyper-connection"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each model once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = family_rows.make(tmp_path_factory.mktemp("rows") / kind, kind)
        return made[kind]

    return of


def options(kind: str) -> RecipeOptions:
    """Of NVFP4, without a search."""
    container = {"gpt2": "ptqpipe", "gpt_oss": "ptqpipe"}.get(kind)
    return RecipeOptions(format="nvfp4", scale_search="absmax", global_scale="absmax", container=container)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.types[0])
def test_every_row_has_a_model(family: Family) -> None:
    """Those that say of their norms alone have one in tests/quantization/transforms/test_families.py."""
    assert {*KINDS, *ELSEWHERE} & {*family.types} or family == Family(family.types, norms=family.norms)


def test_the_page_of_families_is_what_the_table_says() -> None:
    script = Path(__file__).resolve().parent.parent.parent / "scripts/models_docs.py"
    made = runpy.run_path(str(script))
    assert made["PAGE"].read_text() == made["page"](), "run python scripts/models_docs.py"


def test_no_model_type_stands_in_two_rows() -> None:
    types = [name for family in FAMILIES for name in family.types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_unquantized_is_what_the_row_says(kind: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    own = {issue.keep.reason for issue in family_of({"model_type": kind}).issues if issue.by_default}
    with prepare(model(kind), options=options(kind), out=tmp_path / "out") as prepared:
        kept = prepared.outputs.plan.kept
    for reasons, expected in ((own, KEPT), (GATES - own, KEPT_IN_ALL)):
        stays = {
            _LAYER.sub("", entry.name.removesuffix(".weight"))
            for entry in kept
            if any(reason in entry.reason for reason in reasons)
        }
        assert stays == expected.get(kind, set())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_converted_verified_and_loaded(kind: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    given = options(kind)
    done = ptqpipe.convert(
        model(kind), out=tmp_path / "out", format=given.format, scale_search=given.scale_search,
        global_scale=given.global_scale, container=given.container, workers=1,
    )  # fmt: skip
    report = verify(done.out, source=model(kind), workers=1)
    assert report.ok, [fault.message for fault in report.faults]
    if kind not in family_rows.MADE_BY_TRANSFORMERS:
        return
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        decoded, packed = load_model(done.out)(ids).logits, load(done.out, dtype="float32")(ids).logits
        plain = load_model(model(kind))(ids).logits
    assert torch.allclose(packed, decoded, rtol=0, atol=1e-5 * float(decoded.abs().max()))
    assert not torch.allclose(plain, decoded, rtol=0, atol=1e-2 * float(plain.abs().max()))


# A module for each issue about readers that a family has, and the layout in which they fail.
FAILING: list[tuple[str, str, str]] = [
    ("deepseek_v4", "layers.0.attn.compressor.wkv", "compressed_tensors"),
    ("deepseek_v4", "layers.0.attn.wo_a", "compressed_tensors"),
    ("deepseek_v4", "head", "modelopt"),
    ("glm4_moe", "model.layers.1.mlp.shared_experts.up_proj", "compressed_tensors"),
    ("falcon_h1", "model.layers.0.mamba.in_proj", "modelopt"),
    ("granitemoehybrid", "model.layers.0.block_sparse_moe.experts.0.up_proj", "compressed_tensors"),
    ("granitemoehybrid", "model.layers.0.shared_mlp.input_linear", "modelopt"),
    ("zamba2", "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.0.1", "modelopt"),
    ("hunyuan_v1_moe", "model.layers.0.self_attn.o_proj", "modelopt"),
    ("qwen3_next", "model.layers.1.self_attn.q_proj", "modelopt"),
    ("deepseek_v3", "model.layers.0.self_attn.q_a_proj", "compressed_tensors"),
    ("qwen3_next", "mtp.fc", "compressed_tensors"),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz", "compressed_tensors"),
    ("gpt_oss", "model.layers.0.self_attn.o_proj", "compressed_tensors"),
    ("llama4_text", "model.layers.0.feed_forward.experts.0.up_proj", "compressed_tensors"),
    ("qwen3_5", "mtp.layers.0.self_attn.o_proj", "modelopt"),
    ("qwen4_exp", "model.language_model.layers.1.self_attn.q_proj", "modelopt"),
    ("qwen4_exp", "lm_head", "compressed_tensors"),
    ("mamba", "backbone.layers.0.mixer.x_proj", "compressed_tensors"),
    ("jamba", "model.layers.0.mamba.in_proj", "compressed_tensors"),
    ("step3p5", "model.layers.0.self_attn.g_proj", "compressed_tensors"),
    ("step3p7", "vit_large_projector", "compressed_tensors"),
    ("minimax_m3_vl", "patch_merge_mlp.0", "compressed_tensors"),
    ("internvl", "mlp1.1", "compressed_tensors"),
    ("internvl", "language_model.model.layers.0.self_attn.o_proj", "modelopt"),
    ("lighton_ocr", "model.vision_projection.linear_1", "compressed_tensors"),
    ("phi4mm", "model.embed_tokens_extend.image_embed.img_projection.0", "compressed_tensors"),
    ("deepseek_v4", "layers.0.attn.wkv", "modelopt"),
    ("persimmon", "model.layers.0.self_attn.dense", "modelopt"),
    ("phi", "model.layers.0.mlp.fc1", "modelopt"),
    ("stablelm", "model.layers.0.self_attn.q_proj", "compressed_tensors"),
    ("gemma4", "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear", "compressed_tensors"),
]
# A module for each issue about readers that take a kept one for quantized.
FAILING_KEPT: list[tuple[str, str, str]] = [
    ("gemma2", "model.layers.0.mlp.down_proj", "modelopt"),
    ("qwen3_vl", "model.language_model.layers.0.self_attn.q_proj", "compressed_tensors"),
    ("qwen3_vl_moe", "model.language_model.layers.0.mlp.experts.gate_up_proj", "compressed_tensors"),
    ("qwen2_5_vl", "model.layers.0.self_attn.q_proj", "compressed_tensors"),
    ("mistral3", "language_model.model.layers.0.mlp.up_proj", "modelopt"),
    ("hunyuan_v1_moe", "model.layers.0.mlp.experts.3.down_proj", "compressed_tensors"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1", "compressed_tensors"),
    ("persimmon", "model.layers.0.self_attn.query_key_value", "compressed_tensors"),
    ("phi", "model.layers.0.mlp.fc1", "compressed_tensors"),
    ("glm4v", "model.visual.blocks.0.attn.qkv", "compressed_tensors"),
    ("glm_ocr", "model.language_model.layers.0.mlp.gate_up_proj", "modelopt"),
    ("gemma4", "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear", "modelopt"),
    ("lfm2_vl", "model.multi_modal_projector.linear_1", "compressed_tensors"),
    ("lfm2_vl", "model.language_model.layers.0.feed_forward.w1", "modelopt"),
    ("lfm2_moe", "model.layers.0.feed_forward.w1", "modelopt"),
    ("lfm2_moe", "model.layers.0.feed_forward.experts.0.w1", "compressed_tensors"),
    ("granitemoe", "model.layers.0.block_sparse_moe.input_linear", "modelopt"),
    ("kimi_linear", "model.layers.0.block_sparse_moe.experts.0.w1", "compressed_tensors"),
    ("nemotron_h", "backbone.layers.0.mixer.experts.0.up_proj", "compressed_tensors"),
    ("qwen3_next", "mtp.layers.0.self_attn.o_proj", "compressed_tensors"),
]


@pytest.mark.parametrize(("kind", "module", "container"), FAILING)
def test_readers_that_fail_are_named_where_a_rule_quantizes_it_all_the_same(
    kind: str, module: str, container: str
) -> None:
    config = {"model_type": kind}
    issues = (issue for issue in family_of(config).issues if issue.symptom and not issue.unless_quantized)
    own = [issue for issue in issues if matches(issue.keep.pattern, module)]
    assert own
    for issue in own:
        if container not in (issue.containers or (container,)):
            continue
        quantized = {module: get_scheme(issue.formats[0] if issue.formats else "nvfp4")}
        assert (issue, [module]) in list(reader_issues(config, quantized, container=container))
        assert not any(other in own for other, _ in reader_issues({}, quantized, container=container))
        if issue.formats:
            others = {module: get_scheme("fp8_block")}
            assert (issue, [module]) not in list(reader_issues(config, others, container=container))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "module", "container"), FAILING_KEPT)
def test_readers_that_take_a_kept_module_for_quantized_are_named_beside_quantized_ones_alone(
    kind: str, module: str, container: str
) -> None:
    config = {"model_type": kind}
    own = [
        issue for issue in family_of(config).issues if issue.unless_quantized and matches(issue.keep.pattern, module)
    ]
    alike = {module.replace("0", "1"): get_scheme((own[0].formats or ("nvfp4",))[0])}
    found = [
        issue
        for issue, names in reader_issues(config, alike, container=container, kept=[module])
        if issue.unless_quantized
    ]
    assert [issue.readers for issue in found] == [("sglang",)]
    assert not [issue for issue, _ in reader_issues(config, alike, container=container) if issue.unless_quantized]
    assert not list(reader_issues(config, {}, container=container, kept=[module]))
    others = reader_issues({"model_type": "llama"}, alike, container=container, kept=[module])
    assert not [issue for issue, _ in others if issue.unless_quantized]


def test_a_kept_module_that_sglang_takes_for_quantized_is_refused_for_it_and_noted_by_verify(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    call: dict[str, Any] = {"format": "fp8_dynamic", "ignore": "*self_attn*", "out": tmp_path / "out", "workers": 1}
    said = r"model\.layers\.0\.self_attn\.k_proj .*would be kept, and SGLang does not find it .*; quantize it"
    with pytest.raises(UsageError, match=said):
        ptqpipe.convert(model("gemma2"), reader="sglang", **call)
    assert not (tmp_path / "out").exists()
    done = ptqpipe.convert(model("gemma2"), **call)
    report = verify(done.out, source=model("gemma2"), workers=1)
    assert report.ok
    assert any("is kept, like 7 more of its name: SGLang does not find" in note.message for note in report.notes)


def test_what_fails_both_quantized_and_kept_is_not_sent_from_one_to_the_other() -> None:
    config = {"model_type": "gemma4"}
    tower = "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"
    layer = "model.language_model.layers.0.mlp.up_proj"
    nvfp4 = get_scheme("nvfp4")
    for quantized, kept in (({layer: nvfp4}, [tower]), ({tower: nvfp4}, [])):
        [issue] = [
            issue
            for issue, names in reader_issues(config, quantized, container="modelopt", kept=kept)
            if names == [tower] and issue.readers == ("sglang",)
        ]
        assert fails_either_way(config, issue)
    one_way = {"model_type": "gemma2"}
    assert not any(fails_either_way(one_way, issue) for issue in issues_of(one_way))


@pytest.mark.parametrize("kind", sorted({kind for family in FAMILIES for kind in family.types}))
def test_no_fact_about_a_tower_or_a_projector_takes_layers_of_the_language_model(kind: str) -> None:
    names = [
        f"{prefix}layers.0.{leaf}.weight"
        for prefix in ("model.", "model.language_model.", "language_model.model.")
        for leaf in ("self_attn.q_proj", "feed_forward.w1", "mlp.up_proj")
    ]
    assert not outside_language_model({"model_type": kind}, names)


def test_every_fact_about_readers_of_a_family_is_tried() -> None:
    tried = {
        issue.keep
        for kind, module, _ in [*FAILING, *FAILING_KEPT]
        for issue in family_of({"model_type": kind}).issues
        if matches(issue.keep.pattern, module)
    }
    assert tried == {issue.keep for family in FAMILIES for issue in family.issues if issue.symptom}


def test_a_fact_about_readers_alone_keeps_nothing(tmp_path: Path) -> None:
    source = families.make_model(tmp_path / "model", "deepseek_v3")
    with prepare(source, options=RecipeOptions(format="fp8_dynamic"), out=tmp_path / "out") as prepared:
        assert not [kept for kept in prepared.outputs.plan.kept if "kv_b_proj" in kept.name]
    packed = RecipeOptions(format="int8", ignore=("*q_a_proj", "*kv_a_proj*"))
    with pytest.raises(UsageError, match=r"kv_b_proj .*asks for the plain weight"):
        prepare(source, options=packed, out=tmp_path / "out", reader="sglang")


def test_a_family_is_known_by_the_language_model_inside() -> None:
    inner: dict[str, Any] = {"model_type": "qwen3_5_text"}
    for config in (
        {"model_type": "some_wrapper", "text_config": inner},
        {"thinker_config": {"model_type": "x", "text_config": inner}},
    ):
        assert family_of(config) is family_of(inner)
        assert [issue.keep for issue in issues_of(config)] == [issue.keep for issue in issues_of(inner)]
    assert family_of({"model_type": None, "text_config": 3}) == Family()


def test_a_family_s_fused_groups_take_the_place_of_those_that_share_a_name() -> None:
    groups = fuse_of({"model_type": "kimi_linear"})
    leaves = [leaf for group in groups for leaf in group]
    assert len(leaves) == len(set(leaves))
    assert ("gate_proj", "up_proj") in groups
    assert fuse_of({"model_type": "llama"}) == fuse_of({})


def test_a_pure_mamba_is_quantized_with_a_warning_and_a_mixed_one_keeps_what_vllm_cannot_read(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    with prepare(model("mamba"), options=options("mamba"), out=tmp_path / "out") as prepared:
        assert any("Mamba-1 unquantized" in line for line in prepared.warnings)
    rule = RecipeOptions(format="nvfp4", ignore=("*attn*", "*feed_forward*"))
    with pytest.raises(UsageError, match="nothing would be quantized"):
        prepare(model("jamba"), options=rule, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "module", "reader", "says"),
    [
        ("jamba", "model.layers.0.mamba.in_proj", "vllm", "Mamba-1 unquantized"),
        ("step3p5", "model.layers.0.self_attn.g_proj", "sglang", "plain linear layer"),
        ("gemma", "model.embed_tokens", "vllm", "rows of an embedding"),
        ("gpt_oss", "model.layers.0.self_attn.o_proj", "sglang", "leaves these weights random"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz", "sglang", "asks for the plain weight"),
    ],
)
def test_for_a_reader_what_it_fails_on_is_refused_before_any_work(
    kind: str, module: str, reader: str, says: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(f"version: 1\nrules:\n- {{match: {module}, format: nvfp4}}\n")
    call: dict[str, Any] = {"recipe": str(recipe), "out": out, "workers": 1}
    with pytest.raises(UsageError, match=rf'reader="{reader}": {module} .*{says}.*ignore=\["{module}"\]'):
        ptqpipe.convert(model(kind), reader=reader, **call)
    with pytest.raises(UsageError, match=f'reader="{reader}": {module}'):
        ptqpipe.convert(model(kind), reader=reader, report=True, **call)
    assert not out.exists()
    ptqpipe.convert(model(kind), **call)  # without it: a warning, and verify names the reader
    found = [finding.message for finding in verify(out, workers=1).findings if finding.check == "readers"]
    assert any(says in message for message in found)


@pytest.mark.parametrize(
    ("reader", "fmt", "container", "remedy"),
    [
        ("vllm", "fp8_tensor", None, "give them fp8_dynamic"),
        ("vllm", "fp8_dynamic", "modelopt", "use container=.compressed_tensors"),
        ("sglang", "fp8_tensor", None, "give them fp8_dynamic"),
        ("sglang", "int8_w8a8", None, "give them fp8_dynamic"),
    ],
)
def test_formats_that_a_reader_runs_in_linear_layers_alone_are_refused_for_experts(
    reader: str, fmt: str, container: str | None, remedy: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    call: dict[str, Any] = {"format": fmt, "container": container, "out": tmp_path / "out", "scale_search": "absmax"}
    with pytest.raises(UsageError, match=rf"{reader} runs no experts in {fmt} from \w+; {remedy}"):
        ptqpipe.convert(model("qwen3_5_moe_text"), reader=reader, **call)
    assert not (tmp_path / "out").exists()
    ptqpipe.convert(model("qwen3_5_moe_text"), reader=reader, ignore="*.experts.*", **call)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "qwen3_5_text"])
def test_no_block_of_scales_lies_in_two_outputs_that_vllm_builds_of_a_weight(
    kind: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    call: dict[str, Any] = {
        "format": "fp8_block",
        "scale_search": "absmax",
        "container": "compressed_tensors",
        "workers": 1,
    }
    done = ptqpipe.convert(model(kind), out=tmp_path / "out", **call)
    weight = next(name for name in done.record["kept"] if re.search(r"\.in_proj(_qkv)?\.weight$", name))
    assert re.search(r"^\d+ rows, of \d outputs .* blocks of 128$", done.record["kept"][weight]["reason"])
    assert verify(done.out, workers=1).ok
    if "qkv" in weight:
        assert "fused with" in done.record["kept"][weight.replace("qkv", "z")]["reason"]

    # what does not know the outputs quantizes it, and verify, which knows them, says who refuses that
    unlike = tmp_path / "unlike"
    shutil.copytree(model(kind), unlike)
    config = json.loads((unlike / "config.json").read_text())
    (unlike / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    done = ptqpipe.convert(unlike, out=tmp_path / "wrong", **call)
    assert weight in done.record["weights"]
    file = done.out / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
    said = {item.where: item.message for item in verify(done.out, workers=1).findings if item.check == "groups"}
    assert "blocks of 128; vLLM and SGLang refuse this" in said[weight]


# What vLLM's falcon_h1.py, granitemoehybrid.py and zamba2.py give their layers as a prefix: the models have two layers,
# of which one is a hybrid one in Zamba2.
PREFIXES = {
    "falcon_h1": {"model.2.mixer.in_proj", "model.3.mixer.in_proj", "model.layers.1.q_proj"},
    "granitemoehybrid": {"model.layers.0.mixer.in_proj"},
    "zamba2": {"1.mixer.in_proj", "2.mixer.in_proj"},
}


@pytest.mark.parametrize("kind", PREFIXES)
def test_kept_modules_are_listed_by_the_names_that_vllm_gives_them_too(
    kind: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    call: dict[str, Any] = {"format": "fp8_block", "scale_search": "absmax", "out": tmp_path / "out", "workers": 1}
    done = ptqpipe.convert(model(kind), **call)
    described = json.loads((done.out / "config.json").read_text())["quantization_config"]
    assert {"model.layers.0.mamba.in_proj", *PREFIXES[kind]} <= {*described["modules_to_not_convert"]}


def test_every_part_of_zamba2_that_is_kept_is_listed_by_the_name_that_vllm_gives_it(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    block = "model.layers.1.shared_transformer"
    names = {
        "model.layers.1.mamba_decoder.mamba.out_proj": "2.mixer.out_proj",
        "model.layers.1.linear": "2.linear",
        f"{block}.self_attn.k_proj": "model.qkv_proj",
        f"{block}.self_attn.o_proj": "model.o_proj",
        f"{block}.feed_forward.down_proj": "model.feed_forward.down_proj",
        f"{block}.feed_forward.gate_up_proj_adapter_list.0.1": "model.feed_forward.gate_up_proj_adapter_list.0.B",
        f"{block}.self_attn.linear_q_adapter_list.0.0": "model.linear_q_adapter.A",
    }
    call: dict[str, Any] = {"format": "nvfp4", "scale_search": "absmax", "out": tmp_path / "out", "workers": 1}
    done = ptqpipe.convert(model("zamba2"), ignore=["model.layers.1.*"], **call)
    listed = json.loads((done.out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {*names, *names.values()} <= {*listed}


@pytest.mark.parametrize("rule", ["*experts.0.down_proj", "*experts.1.*"])
@pytest.mark.parametrize("other", ["keep", "fp8_dynamic"])
def test_experts_of_one_layer_in_different_formats_are_refused_for_readers_that_build_them_alike(
    rule: str, other: str, tmp_path: Path
) -> None:
    tensors = {}
    for name, w in tiny.llama().items():
        for each in [name.replace(".mlp.", f".mlp.experts.{number}.") for number in range(2 if ".mlp." in name else 1)]:
            tensors[each] = w.clone()
    source = tiny.save(tmp_path / "model", tensors)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'version: 1\nrules:\n- {{match: "{rule}", format: {other}}}\n- {{match: "*", format: nvfp4}}\n')
    call: dict[str, Any] = {"recipe": str(recipe), "out": tmp_path / "out", "workers": 1}
    for reader in ("vllm", "sglang"):
        with pytest.raises(
            UsageError, match=r'experts\.\* .*of one layer differ.*ignore=\["model\.layers\.0\..*experts'
        ):
            ptqpipe.convert(source, reader=reader, **call)
    ptqpipe.convert(source, **call)
    said = [item for item in verify(tmp_path / "out", source=source, workers=1).findings if item.check == "groups"]
    assert len(said) == 2  # layers
    assert all("build all experts of a layer alike" in item.message for item in said)

    recipe.write_text('version: 1\nrules:\n- {match: "*", format: nvfp4}\n')
    ptqpipe.convert(source, reader="vllm", **{**call, "out": tmp_path / "alike"})
    assert not [i for i in verify(tmp_path / "alike", workers=1).findings if "experts of one layer" in i.message]


def test_a_model_with_several_hidden_states_a_token_is_refused_in_one_line(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    data = families.write_windows(tmp_path / "data.jsonl")
    given = CalibrateOptions(samples=4, seqlen=16, moments=("diagonal",), holdout=0)
    with pytest.raises(CheckpointError, match=r"DeepseekV4ForCausalLM passes several hidden states .* layer by layer"):
        calibrate(model("deepseek_v4"), [str(data)], tmp_path / "stats", options=given)
    assert not (tmp_path / "stats").exists()
