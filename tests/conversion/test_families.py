"""Claims about families of models: what of them is kept and why, what readers are told, and what verify says."""

import json
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import SAMPLE_LENGTH
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.check.evaluate.command import evaluate
from ptqpipe.check.inspect import inspect
from ptqpipe.check.options import EvalOptions
from ptqpipe.check.verify.command import verify
from ptqpipe.check.verify.report import VerifyReport
from ptqpipe.checkpoint import file_sha256
from ptqpipe.cli import main
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.pipeline.budget.command import Budget, plan_mixed
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.recipe import Recipe, Rule
from ptqpipe.run.machine import Machine
from ptqpipe.runtime import load, load_model
from ptqpipe.runtime.loading import default_length, positions_of
from ptqpipe.serving.preflight import check_checkpoint
from tests import families, tiny
from tests.conversion import damage

Make = Callable[..., Path]
MTP = f"model.layers.{families.LAYERS}."
EXACT = {"scale_search": "absmax", "global_scale": "absmax", "workers": 1}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes each model once."""
    made: dict[tuple[Any, ...], Path] = {}

    def of(kind: str, **how: bool) -> Path:
        key = (kind, *sorted(how.items()))
        if key not in made:
            made[key] = families.make_model(tmp_path_factory.mktemp(kind) / kind, kind, **how)
        return made[key]

    return of


def fates(record: dict[str, Any]) -> tuple[set[str], dict[str, str]]:
    """Names of the quantized weights, and of the kept tensors with their reasons."""
    return set(record["weights"]), {name: entry["reason"] for name, entry in record["kept"].items()}


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and all that a command prints."""
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, done.output


def readers(report: VerifyReport, weight: str) -> list[tuple[str, str]]:
    """What verify says of a weight's readers: severity and message."""
    return [
        ("fault" if item.fault else "note", item.message)
        for item in report.findings
        if (item.check, item.where) == ("readers", weight)
    ]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_dynamic"])
def test_of_a_sparse_attention_indexer_only_the_query_projection_is_quantized(
    make: Make, tmp_path: Path, *, scheme: str, fp8: bool
) -> None:
    model = make("deepseek_v32", mtp=True, fp8=fp8)
    done = ptqpipe.convert(model, out=tmp_path / "out", format=scheme, **EXACT)
    quantized, kept = fates(dict(done.record))
    for layer in range(families.LAYERS):
        indexer = f"model.layers.{layer}.self_attn.indexer."
        assert kept[f"{indexer}wk.weight"] == "key projection of the sparse-attention indexer"
        assert kept[f"{indexer}weights_proj.weight"] == "head weights of the sparse-attention indexer"
        assert f"{indexer}wq_b.weight" in quantized
        assert load_file(done.out / "model.safetensors")[f"{indexer}wk.weight"].dtype == torch.bfloat16
    assert verify(done.out, source=model, workers=1).ok


def test_verify_names_the_readers_that_fail_where_an_indexer_is_quantized(make: Make, tmp_path: Path) -> None:
    model = make("deepseek_v32", mtp=True)
    recipe = tmp_path / "recipe.yaml"
    module = "model.layers.0.self_attn.indexer.wk"
    recipe.write_text(f"version: 1\nrules:\n- {{match: {module}, format: nvfp4}}\n")
    done = ptqpipe.convert(model, out=tmp_path / "out", recipe=recipe, workers=1)
    report = verify(done.out, workers=1)
    assert not report.ok
    [(severity, message)] = readers(report, f"{module}.weight")
    assert severity == "fault"
    assert "vLLM stops with a KeyError" in message
    # DeepSeek's own spelling of FP8 is decoded by readers where they fuse it.
    assert readers(verify(make("deepseek_v32", mtp=True, fp8=True), workers=1), f"{module}.weight") == []


@pytest.mark.parametrize(
    ("kind", "fp8"),
    [("deepseek_v3", False), ("deepseek_v3", True), ("deepseek_v32", True), ("glm4_moe", False), ("glm4_moe", True)],
)
@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt"])
def test_a_numbered_mtp_layer_is_kept_whole_as_bfloat16(
    make: Make, tmp_path: Path, *, kind: str, fp8: bool, container: str
) -> None:
    model = make(kind, mtp=True, fp8=fp8)
    done = ptqpipe.convert(model, out=tmp_path / "out", container=container, **EXACT)
    quantized, kept = fates(dict(done.record))
    assert quantized
    assert not any(name.startswith(MTP) for name in quantized)
    assert kept[f"{MTP}eh_proj.weight"] == "multi-token prediction layer"
    tensors = load_file(done.out / "model.safetensors")
    config = json.loads((done.out / "config.json").read_text())["quantization_config"]
    for name, tensor in tensors.items():
        if name.startswith(MTP):
            assert tensor.dtype == torch.bfloat16, name
            if tensor.dim() == 2 and "embed" not in name:
                assert any(fnmatchcase(name.removesuffix(".weight"), entry) for entry in config["ignore"]), name
    if container == "modelopt":  # vLLM asks for the module of the experts alone
        assert f"{MTP}mlp.experts" in config["ignore"]
        assert "model.layers.1.mlp.experts" not in config["ignore"]
    report = verify(done.out, source=model, workers=1)
    assert report.ok, [fault.message for fault in report.faults]


def test_mtp_layers_are_numbered_as_the_text_config_says() -> None:
    recipe = Recipe((Rule("*", get_scheme("nvfp4")),))
    inner = {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}
    for config in (inner, {"num_hidden_layers": 1, "text_config": inner}):
        known = recipe.for_model(config)
        assert known.for_model(config) == known
        for layer, kept in ((3, False), (4, True), (5, True), (6, False), (40, False)):
            for prefix in ("model.", "model.language_model.", ""):
                rule, _ = known.rule_for(f"{prefix}layers.{layer}.mlp.up_proj")
                assert (rule is None) is kept
    odd: dict[str, Any] = {"num_hidden_layers": "x", "num_nextn_predict_layers": [1], "text_config": 3}
    for config in ({}, odd, inner | {"num_nextn_predict_layers": 0}, inner | {"num_nextn_predict_layers": 10**9}):
        assert recipe.for_model(config) == recipe
    again = Recipe.from_json(recipe.for_model(inner).to_json())
    assert again.keep == recipe.for_model(inner).keep


def test_verify_names_the_readers_that_fail_where_eh_proj_is_quantized(make: Make, tmp_path: Path) -> None:
    model = make("glm4_moe", mtp=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: 1\nrules:\n- {{match: {MTP}eh_proj, format: fp8_block}}\n")
    done = ptqpipe.convert(model, out=tmp_path / "out", recipe=recipe, workers=1)
    [(severity, message)] = readers(verify(done.out, workers=1), f"{MTP}eh_proj.weight")
    assert severity == "fault"
    assert "speculative decoding" in message


def test_kv_b_proj_is_quantized_from_8_bits_on(make: Make, tmp_path: Path) -> None:
    model = make("deepseek_v3", mtp=True)
    module = "model.layers.0.self_attn.kv_b_proj"
    for scheme, kept in (("nvfp4", True), ("mxfp4", True), ("mxfp8", False), ("fp8", False)):
        with prepare(model, options=RecipeOptions(format=scheme), out=tmp_path / "out") as prepared:
            reasons = {entry.name: entry.reason for entry in prepared.outputs.plan.kept}
            assert (f"{module}.weight" in reasons) is kept
            if kept:
                assert "at least 8 bits" in reasons[f"{module}.weight"]
    recipe = tmp_path / "mixed.yaml"  # the first rule that matches decides: no later one takes it from there
    recipe.write_text('version: 1\nrules:\n- {match: "*attn*", format: nvfp4}\n- {match: "*", format: fp8_dynamic}\n')
    with prepare(model, recipe_path=recipe, out=tmp_path / "out") as prepared:
        assert f"{module}.weight" in {entry.name for entry in prepared.outputs.plan.kept}


def test_verify_names_the_readers_that_fail_where_kv_b_proj_has_4_bits(make: Make, tmp_path: Path) -> None:
    model = make("deepseek_v3", mtp=True)
    recipe = tmp_path / "recipe.yaml"
    module = "model.layers.0.self_attn.kv_b_proj"
    for scheme, said in (("nvfp4", True), ("fp8_dynamic", False)):
        recipe.write_text(f"version: 1\nrules:\n- {{match: {module}, format: {scheme}}}\n")
        done = ptqpipe.convert(model, out=tmp_path / scheme, recipe=recipe, workers=1)
        report = verify(done.out, source=model, workers=1)
        assert report.ok
        found = readers(report, f"{module}.weight")
        assert [severity for severity, _ in found] == ["note"] * said
        assert all("SGLang" in message and "vLLM reads it" in message for _, message in found)


def test_a_plan_gives_kv_b_proj_no_format_of_4_bits(make: Make) -> None:
    pytest.importorskip("scipy")
    model = make("deepseek_v3", mtp=True)
    known = {
        formats: plan_mixed(model, Budget(bits=5.0), formats=formats, machine=Machine(1))
        for formats in (("nvfp4", "fp8_dynamic"), ("nvfp4", "mxfp4a16"))
    }
    chosen = {formats: {g.id: plan.chosen[g.id] for g in plan.groups} for formats, plan in known.items()}
    module = "model.layers.0.self_attn.kv_b_proj"
    assert chosen[("nvfp4", "fp8_dynamic")][module] == "fp8_dynamic"
    assert module not in chosen[("nvfp4", "mxfp4a16")]
    assert not any(name.startswith(MTP) for plan in known.values() for name in plan.chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fp8"), [("deepseek_v3", False), ("deepseek_v3", True), ("deepseek_v32", False), ("glm4_moe", True)]
)
def test_a_model_with_an_mtp_layer_is_calibrated_and_converted_with_its_statistics(
    make: Make, tmp_path: Path, *, kind: str, fp8: bool
) -> None:
    model = make(kind, mtp=True, fp8=fp8)
    stats = tmp_path / "stats"
    options = CalibrateOptions(samples=4, seqlen=16, moments=("diagonal",), holdout=0)
    calibrate(model, [str(families.write_windows(tmp_path / "data.jsonl"))], stats, options=options)
    done = ptqpipe.convert(model, out=tmp_path / "out", stats=stats, algorithm="rtn", objective="diagonal", workers=1)
    quantized, _ = fates(dict(done.record))
    assert not any(name.startswith(MTP) for name in quantized)
    report = verify(done.out, source=model, statistics=stats, workers=1)
    assert report.ok, [fault.message for fault in report.faults]
    # The copy of the head in it never runs: a rule that names it all the same hears why there are no statistics.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: 1\nrules:\n- {{match: {MTP}shared_head.head, format: nvfp4, objective: diagonal}}\n")
    with pytest.raises(UsageError, match=r"has no place for it.*ignore=.*, or give it a rule with algorithm rtn"):
        prepare(model, recipe_path=recipe, stats=stats, out=tmp_path / "other")


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_the_text_model_of_an_image_text_model_runs_alone(make: Make, tmp_path: Path, kind: str) -> None:
    """The logits are those of transformers' whole model, given text alone; packed weights compute the decoded ones'."""
    model = make(kind)
    ids = torch.randint(0, families.VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    whole = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    done = ptqpipe.convert(model, out=tmp_path / "out", **EXACT)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tower has no place in it
        alone = load_model(model)(ids).logits
        assert torch.allclose(alone, whole(ids).logits, rtol=0, atol=1e-5 * float(alone.abs().max()))
        decoded = load_model(done.out)(ids).logits
        packed = load(done.out, dtype="float32")(ids).logits
    assert not torch.allclose(decoded, alone, rtol=0, atol=1e-2 * float(alone.abs().max()))
    assert torch.allclose(packed, decoded, rtol=0, atol=1e-5 * float(decoded.abs().max()))


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_the_text_model_of_an_image_text_model_is_evaluated_and_accepted_by_serve(
    make: Make, tmp_path: Path, kind: str
) -> None:
    data = families.write_windows(tmp_path / "data.jsonl")
    result = evaluate(str(make(kind)), options=EvalOptions(data=(str(data),), seqlen=16))
    assert 1 < result["perplexity"][0]["checkpoint"] < 1000
    check_checkpoint(str(make(kind)), tp=1, packed=True)  # raises what serve would refuse


def test_a_model_that_carries_a_state_between_its_blocks_is_refused_in_one_line(make: Make, tmp_path: Path) -> None:
    data = str(families.write_windows(tmp_path / "data.jsonl"))
    for samples in (12, 3):  # RWKV takes what a block returns apart into three, which three samples are
        options = CalibrateOptions(samples=samples, seqlen=16, holdout=0)
        with pytest.raises(CheckpointError, match=r"RwkvForCausalLM .* cannot be run layer by layer"):
            calibrate(make("rwkv"), [data], tmp_path / "stats", options=options)
        assert not (tmp_path / "stats").exists()


@pytest.mark.slow
def test_a_model_without_a_number_of_positions_has_no_limit(make: Make, tmp_path: Path) -> None:
    model, data = make("bloom"), tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_ids": [1, 2, 3] * 2000}) + "\n")
    options = CalibrateOptions(samples=1, moments=("diagonal",), holdout=0)
    done = calibrate(model, [str(data)], tmp_path / "stats", options=options)
    assert done is not None
    assert done.content["data"]["seqlen"] == SAMPLE_LENGTH
    result = evaluate(str(model), options=EvalOptions(data=(str(data),), max_tokens=3000, seqlen=3000))
    assert result["perplexity"][0]["window"] == 3000


def test_positions_that_are_a_property_of_the_family_are_no_limit(tmp_path: Path) -> None:
    nothing = SimpleNamespace(max_position_embeddings=None)
    nothing.get_text_config = lambda: nothing
    for config in (transformers.XLNetConfig(), transformers.BloomConfig(), nothing):  # -1 of the class, none, null
        assert positions_of(config) is None
        assert default_length(config, tmp_path) == 2048
    assert positions_of(transformers.GPT2Config(n_positions=77)) == 77
    assert positions_of(families.make_config("qwen3_5")) == 64  # of the text inside
    assert default_length(families.make_config("qwen3_5"), tmp_path) == 64


def test_a_description_inside_the_text_config_is_seen_by_verify_and_inspect(make: Make, tmp_path: Path) -> None:
    done = ptqpipe.convert(make("qwen3_vl"), out=tmp_path / "out", **EXACT)
    file = done.out / "config.json"
    config = json.loads(file.read_text())

    def moved(**changes: object) -> None:
        inner = {**config["quantization_config"], **changes}
        outer = {key: value for key, value in config.items() if key != "quantization_config"}
        outer["text_config"] = {**config["text_config"], "quantization_config": inner}
        file.write_text(json.dumps(outer))
        record = done.record | {"files": {**done.record["files"], file.name: file_sha256(file)}}
        damage.write_record(done.out, record)

    moved()
    assert [fault.message for fault in verify(done.out, workers=1).faults] == []
    moved(quantization_status="frozen", kv_cache_scheme={"num_bits": 8, "type": "float"})
    said = {(fault.where, fault.message.partition(";")[0]) for fault in verify(done.out, workers=1).faults}
    assert ("quantization_status", "is 'frozen', expected 'compressed'") in said
    assert ("kv_cache_scheme", "is announced, but there are no kv-cache scales") in said
    (done.out / "ptqpipe.json").unlink()
    assert inspect(done.out).producer == f"ptqpipe {done.record['ptqpipe']}"


@pytest.mark.parametrize("container", ["deepseek_fp8", "compressed_tensors"])
def test_short_last_blocks_of_rows_are_written_as_vendors_publish_them(
    make: Make, tmp_path: Path, *, container: str
) -> None:
    model = make("deepseek_v3")  # q_a_proj has 64 rows, kv_a_proj_with_mqa 48, and readers make one matrix of the two
    done = ptqpipe.convert(model, out=tmp_path / "out", format="fp8_block", container=container, workers=1)
    quantized, kept = fates(dict(done.record))
    base = "model.layers.0.self_attn."
    assert f"{base}kv_b_proj.weight" in kept  # 32 columns
    assert "64 rows" in kept[f"{base}q_a_proj.weight"]
    assert f"{base}q_b_proj.weight" in kept  # 64 columns
    experts = {name for name in quantized if "shared_experts.gate" in name or "experts.0.gate" in name}
    assert experts == set()  # gate and up have 64 rows each
    narrow = tmp_path / "narrow"
    weights = {"model.layers.0.self_attn.o_proj.weight": torch.randn(576, 256).bfloat16()}
    tiny.save(narrow, weights, config={"model_type": "llama"})
    short = ptqpipe.convert(narrow, out=tmp_path / "short", format="fp8_block", container=container, workers=1)
    stored = load_file(short.out / "model.safetensors")
    assert next(t.shape for name, t in stored.items() if "scale" in name) == (5, 2)
    assert verify(short.out, source=narrow, workers=1).ok
    decoded = dict(ptqpipe.load_tensors(short.out))["model.layers.0.self_attn.o_proj.weight"].dequantize()
    source = weights["model.layers.0.self_attn.o_proj.weight"].float()
    assert float((decoded - source).norm() / source.norm()) < 0.03
