"""convert --data: each quality gives the bytes of the commands that it stands for."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.cli import main
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.errors import WrongOutput
from ptqpipe.models.folded import encoded
from ptqpipe.models.reader_facts import READERS
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.pipeline.prepare_stages import prepare
from ptqpipe.pipeline.presets import FP8, TABLE, QualityPreset, kind_of, markdown
from ptqpipe.quantization.transforms import learn_rotations
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.runtime import load_model
from tests.calibration.models import make_model
from tests.conversion import damage
from tests.pipeline.runs import LENGTH, ONE, few, files_of, made, ran, weights_of, work_of
from tests.quantization.transforms.models import token_ids


@pytest.mark.slow
def test_best_is_tune_and_convert_in_one_call_and_leaves_nothing_else(model: Path, text: Path, tmp_path: Path) -> None:
    printed = ran("convert", model, *few(text), "-o", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    for words in (
        "1 tune: GPTQ layer after layer",
        "[1/3] tune",
        "[3/3] verify",
        "Next: ptqpipe verify",
    ):  # it has no tokenizer
        assert words in printed
    again = ran("convert", model, "--eval", text, "-o", tmp_path / "measured", "--workers", 1)
    assert f"Next: ptqpipe report {tmp_path / 'measured'} --source {model}" in again
    assert json.loads((tmp_path / "measured.eval.json").read_text())["made"]["command"].startswith("ptqpipe")
    ran("tune", model, *few(text), "-o", tmp_path / "codes")
    ran("convert", model, "--codes", tmp_path / "codes", "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    assert record["pipeline"]["quality"] == "best"
    assert record["rounding"]["method"] == "gptq"
    said = "output error of the tuned decoder layers: "
    assert printed.splitlines()[-3].startswith(said), "before what is written, and where"
    assert f"  {said}" in ran("verify", tmp_path / "out", "--source", model)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8"])
def test_good_has_the_codes_of_statistics_with_full_moments(
    scheme: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """The moments that are collected block by block are those of calibrate, held-out windows apart."""
    made(model, tmp_path / "out", work_of(text, quality="good"), scheme)
    ran("calibrate", model, *few(text), "-o", tmp_path / "stats")
    ran("convert", model, "--format", scheme, "--stats", tmp_path / "stats", "-o", tmp_path / "two", "--workers", 1)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")


def test_a_tensor_that_is_kept_with_nan_is_told_as_convert_without_data_tells_it(
    model: Path, text: Path, tmp_path: Path
) -> None:
    broken, out = shutil.copytree(model, tmp_path / "broken"), tmp_path / "out"
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    windows = ["--data", str(text), "--samples", "8", "--seqlen", str(LENGTH), "--quality", "good"]
    wanted = "warning: lm_head.weight is kept and has 1 NaN and 0 inf; the source checkpoint is damaged"
    assert wanted in ran("convert", broken, "-o", tmp_path / "plain")
    assert wanted in ran("convert", broken, *windows, "-o", out)
    shown = json.loads(ran("convert", broken, *windows, "-o", out, "--overwrite", "--json", "-q"))
    assert shown["not_finite"] == {"lm_head.weight": "1 NaN and 0 inf"}


def test_fast_weights_scales_by_small_statistics(model: Path, text: Path, tmp_path: Path) -> None:
    done = made(model, tmp_path / "out", work_of(text, quality="fast", work_dir=str(tmp_path / "kept")))
    assert {entry["weighting"] for entry in done.record["weights"].values()} == {"diagonal"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"pipeline.json", "statistics"}
    columns = {
        name: t.numel() for file in (tmp_path / "kept").rglob("*.safetensors") for name, t in load_file(file).items()
    }
    assert max(columns.values()) <= 96  # no moment of pairs


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4"])
def test_four_bit_activations_are_quantized_behind_a_transform(
    scheme: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """Its factors are folded in while the model is read, to the bytes of the commands one by one, whose float32 copy of
    the model says float32 in its config; here the model's own dtype stays. Half of the text is the model's own."""
    done = made(model, tmp_path / "out", work_of(text), scheme)
    static = scheme == "nvfp4_w4a4"
    applied = done.record["transformed"]["transform"].split(",")  # without rotations that gain nothing
    assert (applied[0], applied[-1]) == ("rotate_residual", "aqas")
    assert done.record["source"]["name"] == "small"
    assert ("statistics" in done.record) == static
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    own, stats, floats, codes, two = (tmp_path / name for name in ("own.jsonl", "stats", "floats", "codes", "two"))
    ran("generate", model, "--samples", 4, *few(text)[4:], "-o", own)
    mixed = ("--data", f"{text}=1", *few(f"{own}=1"))
    turned = rotated(model, mixed, tmp_path, scheme)
    ran("calibrate", turned, *mixed, "--moments", "diagonal,block", "-o", stats)
    find_factors(turned, floats, stats=stats, options=TransformOptions("aqas", format=scheme, dtype="fp32"))
    if static:
        ran("calibrate", floats, *mixed, "--moments", "diagonal", "-o", tmp_path / "again")
    again = ("--stats", tmp_path / "again") if static else ()
    ran("tune", floats, *mixed, "--format", scheme, *again, "-o", codes)
    ran("convert", floats, "--codes", codes, *again, "-o", two)
    assert weights_of(tmp_path / "out") == weights_of(two)


def rotated(model: Path, data: tuple[object, ...], folder: Path, scheme: str) -> Path:
    """The model with rotations that are learned for a format folded in."""
    pairs, turned = folder / "pairs", folder / "turned"
    ran("calibrate", model, *data, "--moments", "diagonal,pairs", "--holdout", 0, "-o", pairs)
    steps = TABLE[kind_of([get_scheme(scheme)])]["best"].steps
    options = TransformOptions("rotate", learn=steps, format=scheme, dtype="fp32")
    find_factors(model, turned, stats=pairs, options=options)
    return turned


@pytest.mark.slow
def test_eight_bit_activations_are_quantized_behind_rotations(model: Path, text: Path, tmp_path: Path) -> None:
    done = made(model, tmp_path / "out", work_of(text), "fp8")
    assert done.record["transformed"]["transform"].startswith("rotate_residual")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    turned = rotated(model, few(text), tmp_path, "fp8")
    ran("tune", turned, *few(text), "--format", "fp8", "-o", tmp_path / "codes")
    ran("convert", turned, "--codes", tmp_path / "codes", "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    told = json.loads(ran("verify", tmp_path / "out", "--source", model, "--json"))
    assert told["faults"] == []
    worst = max(weight["relative_mse"] for weight in told["weights"].values())
    assert 0 < worst < 0.02, worst  # of rotated weights beside plain ones it is near 2
    with safe_open(model / "model.safetensors", "pt") as before, safe_open(done.out / "model.safetensors", "pt") as now:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert before.get_slice(name).get_dtype() == now.get_slice(name).get_dtype()


@pytest.mark.slow
def test_a_model_whose_head_is_the_embedding_has_its_values_rotated_and_the_record_says_so(
    text: Path, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama_tied", dtype=torch.bfloat16)
    said: list[str] = []
    done = made(model, tmp_path / "out", work_of(text), "fp8", say=said.append)
    assert done.record["transformed"]["transform"] == "rotate_values"
    assert "the output head is tied to the embedding" in done.record["pipeline"]["without"][0]
    assert any(
        "warning: rotate_residual is left out: the output head is tied to the embedding" in line for line in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_w4a4"])
def test_a_head_that_becomes_a_tensor_of_its_own_lets_the_stream_be_rotated(
    scheme: str, text: Path, tmp_path: Path
) -> None:
    """As transform --untie writes it: every reader finds it by the config, and verify by the record."""
    model = make_model(tmp_path / "model", "llama_tied", dtype=torch.bfloat16)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():  # large inputs in one channel, so that rotations gain on every kind of CPU
        if name.endswith("layernorm.weight"):
            tensor[3] *= 16
    save_file(tensors, str(model / "model.safetensors"), metadata={"format": "pt"})
    work = work_of(text, untie=True)
    done = made(model, tmp_path / "out", work, scheme)
    assert done.record["transformed"]["transform"].startswith("rotate_residual")
    assert json.loads((done.out / "config.json").read_text())["tie_word_embeddings"] is False
    told = json.loads(ran("verify", done.out, "--source", model, "--json"))
    assert told["faults"] == []
    assert "--quality best --untie\n" in (done.out / "README.md").read_text()
    stored, plain = load_file(done.out / "model.safetensors"), load_file(model / "model.safetensors")
    assert stored["lm_head.weight"].dtype == plain["model.embed_tokens.weight"].dtype
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    told_size = prepare(model, RecipeOptions(scheme), None, tmp_path / "two", work, "new", ONE).weights_bytes
    size = sum(file.stat().st_size for file in done.out.glob("*.safetensors*"))
    assert abs(size - told_size) < stored["lm_head.weight"].nbytes // 8
    ran("convert", model, "--format", scheme, "-o", tmp_path / "plain", "--workers", 1)
    with torch.no_grad():
        wanted, found, nearest = (
            load_model(one)(token_ids()).logits.log_softmax(-1) for one in (model, done.out, tmp_path / "plain")
        )
        kl, of_nearest = ((wanted.exp() * (wanted - one)).sum(-1).mean() for one in (found, nearest))
    assert 0 < kl < 1.1 * of_nearest, (kl, of_nearest)
    with pytest.raises(WrongOutput, match="is no output of this run"):
        made(model, done.out, work_of(text), scheme, mode="resume")


def test_rotations_that_gain_nothing_are_left_out(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE[FP8], "best", QualityPreset("rotate", 1, method="gptq"))
    monkeypatch.setattr(learn_rotations, "_RATE", 0.0)
    said: list[str] = []
    done = made(model, tmp_path / "out", work_of(text), "fp8", say=said.append)
    assert "transformed" not in done.record
    assert [line.split()[0] for line in done.record["pipeline"]["without"]] == ["rotate_residual", "rotate_values"]
    assert sum("what was learned gains nothing" in line for line in said) == 2


@pytest.mark.slow
def test_a_mixture_of_experts_gets_gptq_for_its_experts(text: Path, tmp_path: Path) -> None:
    """They are one stack each while the model runs, and the order of calls says nothing of them."""
    moe = make_model(tmp_path / "moe", "mixtral", dtype=torch.bfloat16)
    made(moe, tmp_path / "out", work_of(text), "fp8")
    ptqpipe.convert(moe, format="fp8", out=tmp_path / "plain", workers=1)
    found, plain = (ptqpipe.load_tensors(tmp_path / name) for name in ("out", "plain"))
    experts = [name for name in plain if "experts" in name and hasattr(plain[name], "codes")]
    assert experts
    moved = [name for name in experts if not torch.equal(found[name].codes, plain[name].codes)]
    assert len(moved) > len(experts) / 2  # the held-out window may give some back to plain rounding


@pytest.mark.slow
def test_what_was_quantized_behind_a_transform_is_compared_with_the_model_itself(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """By the factors in the record, also after a change of layout; other factors are another model's."""
    out = tmp_path / "out"
    out.mkdir()
    for name, raw in whole.items():
        (out / name).write_bytes(raw)
    ran("relayout", out, "--container", "modelopt", "-o", tmp_path / "modelopt")
    for folder in (out, tmp_path / "modelopt"):
        told = json.loads(ran("verify", folder, "--source", model, "--json"))
        assert told["faults"] == []
        assert not any("folded into the model" in note["message"] for note in told["notes"])
        worst = max(weight["relative_mse"] for weight in told["weights"].values())
        assert 0 < worst < 0.2, worst  # of rotated weights beside plain ones it is near 2
    shown = ran("report", out, "--source", model, "-o", tmp_path / "report.html")
    assert "decoder layers' output error" in shown
    record = json.loads((out / "ptqpipe.json").read_text())
    folding = next(entry for entry in record["transformed"]["foldings"] if entry.get("changed"))
    folding["factors"] = encoded(torch.full((folding["channels"],), 2.0, dtype=torch.float64))
    damage.write_record(out, record)
    refused = CliRunner().invoke(main, ["verify", str(out), "--source", str(model)])
    assert refused.exit_code == 1
    folding["factors"] = "damaged"
    damage.write_record(out, record)
    refused = CliRunner().invoke(main, ["verify", str(out), "--source", str(model)])
    assert f"the factors of '{folding['edge']}' are damaged" in refused.output


@pytest.mark.slow
def test_a_budget_is_kept_and_its_layers_are_tuned(model: Path, text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("--budget", "6.5bits", "--reader", "vllm", "--work-dir", kept)
    ran("convert", model, *few(text), *words, "-o", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    bits = [(entry["bits_per_weight"], entry["shape"][0] * entry["shape"][1]) for entry in record["weights"].values()]
    assert sum(b * n for b, n in bits) / sum(n for _, n in bits) <= 6.5
    assert len({rule["scheme"] for rule in record["recipe"]["rules"]}) > 1  # of which one may keep
    assert {entry["algorithm"] for entry in record["weights"].values()} == {"learned"}
    assert {path.name for path in kept.iterdir()} == {"pipeline.json", "statistics", "recipe.yaml", "codes"}
    assert "KL divergence to second order" in (kept / "recipe.yaml").read_text()
    assert not {"mxfp4a16", "mxfp8a16"} & {entry["scheme"] for entry in record["weights"].values()}


def test_a_reader_chooses_the_container(model: Path, tmp_path: Path) -> None:
    ran("convert", model, "--format", "nvfp4_w4a4", "--reader", "trtllm", "-o", tmp_path / "a")
    ran("convert", model, "--format", "nvfp4_w4a4", "--container", "modelopt", "-o", tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_every_reader_runs_formats_that_its_containers_can_store() -> None:
    for reader, rows in READERS.items():
        for scheme, containers in rows.items():
            assert all(get_container(name).supports(get_scheme(scheme)) is None for name in containers), reader


def test_the_docs_have_the_table_of_qualities() -> None:
    assert markdown() in (Path(ptqpipe.__file__).parents[1] / "docs" / "calibration.md").read_text()


def test_plan_chooses_among_what_the_reader_runs_and_warns_of_what_it_gets_wrong(model: Path, tmp_path: Path) -> None:
    ran("plan", model, "--budget", "6bits", "--reader", "sglang", "-o", tmp_path / "a.yaml")
    text = (tmp_path / "a.yaml").read_text()
    assert "container: compressed_tensors" in text
    assert set(re.findall(r"format: (\w+)", text)) <= {"nvfp4", "fp8_dynamic", "keep"}
    ran("convert", model, "--recipe", tmp_path / "a.yaml", "--reader", "sglang", "-o", tmp_path / "out")
    words = ("plan", model, "--budget", "6bits", "-o", tmp_path / "b.yaml")
    told = ran(*words, "--formats", "mxfp4a16,fp8")
    assert "warning: vLLM 0.32 quantizes the activations of mxfp4a16" in told
    refused = CliRunner().invoke(main, [*map(str, words), "--formats", "mxfp4a16,fp8", "--reader", "vllm"])
    assert refused.exit_code == 2
    assert "vllm does not run mxfp4a16" in refused.output
