"""Claims about convert with statistics: what the numbers become, what is refused, and that machines change no byte."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ptqpipe
from ptqpipe.check.verify import report as verify_text
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion import convert_summary as convert_text
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.convert_summary import plan_text, warnings_of
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.errors import PtqError, RecipeError, UsageError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import gptq
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine
from tests import tiny
from tests.conversion import damage
from tests.quantization.inputs import correlated, inputs_of_llama, write_statistics

RECIPES = Path(__file__).parents[2] / "recipes/methods"
WITH_DATA = ("nvfp4_weighted", "nvfp4_block", "nvfp4_gptq", "nvfp4_w4a4_gptq", "mxfp4_gptq", "fp8_gptq", "fp8_static")
ATTENTION = {f"model.layers.{i}.self_attn": (torch.tensor([3.0, 7.0]), torch.tensor([0.5, 0.25])) for i in range(2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama())


@pytest.fixture(scope="module")
def stats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats") / "stats"
    return write_statistics(folder, model, inputs_of_llama(tiny.llama()), attention=ATTENTION)


def run(
    model: Path,
    stats: Path | None,
    out: Path,
    machine: Machine | None = None,
    *,
    recipe: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    prepared = prepare(model, options=RecipeOptions(**options), recipe_path=recipe, out=out, stats=stats)
    with prepared:
        done = convert(prepared, machine=machine)
    assert done is not None
    return dict(done.record)


def tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found


def output_errors(folder: Path) -> dict[str, float]:
    """E|(W - What) x|^2 of every weight, from the bytes and the inputs themselves, float64."""
    source, inputs = tiny.llama(), inputs_of_llama(tiny.llama())
    found = {}
    with ptqpipe.load_tensors(folder) as loaded:
        for module, x in inputs.items():
            q = loaded[f"{module}.weight"]
            assert isinstance(q, QTensor)
            error = source[f"{module}.weight"].double() - q.dequantize().double()
            found[module] = float((x.double() @ error.t()).square().sum()) / len(x)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_DATA)
def test_every_recipe_with_data_converts_and_verifies(name: str, model: Path, stats: Path, tmp_path: Path) -> None:
    recipe = RECIPES / f"{name}.yaml"
    if name == "fp8_static":
        recipe = tmp_path / "fp8_static.yaml"
        recipe.write_text("version: 1\nrules: [{match: '*', format: fp8_static}]\n")
    record = run(model, stats, tmp_path / "out", recipe=recipe)
    assert record["statistics"]["digest"] == json.loads((stats / "stats.json").read_text())["digest"]
    report = verify(tmp_path / "out", source=model, optimal=True)
    assert [fault.message for fault in report.faults] == []
    repeated = verify(tmp_path / "out", source=model, statistics=stats)
    assert [fault.message for fault in repeated.faults] == []


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4a16", "fp8"])
def test_each_step_lowers_the_output_error(scheme: str, model: Path, stats: Path, tmp_path: Path) -> None:
    run(model, None, tmp_path / "rtn", format=scheme)
    run(model, stats, tmp_path / "weighted", format=scheme, objective="diagonal")
    run(model, stats, tmp_path / "gptq", format=scheme, algorithm="gptq", refine_passes=0)
    run(model, stats, tmp_path / "refined", format=scheme, algorithm="gptq")
    rtn, weighted, gptq, refined = (
        sum(output_errors(tmp_path / name).values()) for name in ("rtn", "weighted", "gptq", "refined")
    )
    assert refined < gptq < 0.7 * rtn
    assert weighted <= rtn


def test_no_weight_is_worse_at_its_output_than_round_to_nearest(model: Path, stats: Path, tmp_path: Path) -> None:
    record = run(model, stats, tmp_path / "out", format="nvfp4", algorithm="gptq")
    found = output_errors(tmp_path / "out")
    for name, entry in record["weights"].items():
        assert entry["versus_rtn"] <= 1.0
        assert entry["output_error"] == pytest.approx(found[name.removesuffix(".weight")], rel=1e-3)
        assert (entry["algorithm"], entry["weighting"], entry["reverted"]) == ("gptq", "diagonal", False)
        assert entry["metric"] == "output"
        assert entry["damping"] == 0.01


def held_out(model: Path, folder: Path, *, alike: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """Statistics with held-out samples that are like the others, or whose large columns are the others' small ones."""
    both = inputs_of_llama(tiny.llama(), tokens=896)
    inputs, held = ({name: x[part] for name, x in both.items()} for part in (slice(512), slice(512, None)))
    if not alike:
        order = {name: x.square().mean(dim=0).argsort() for name, x in inputs.items()}
        held = {name: x[:, order[name].flip(0)[order[name].argsort()]] for name, x in held.items()}
    return write_statistics(folder, model, inputs, held=held), held


@pytest.mark.slow
def test_the_gate_judges_by_held_out_samples(model: Path, tmp_path: Path) -> None:
    inputs = {name: x[:512] for name, x in inputs_of_llama(tiny.llama(), tokens=896).items()}
    stats = write_statistics(tmp_path / "stats", model, inputs)
    plain = run(model, stats, tmp_path / "plain", format="nvfp4", algorithm="gptq")["weights"]
    assert {entry["held_out"] for entry in plain.values()} == {False}
    folder, held = held_out(model, tmp_path / "alike", alike=True)
    record = run(model, folder, tmp_path / "out", format="nvfp4", algorithm="gptq")
    source = tiny.llama()
    with ptqpipe.load_tensors(tmp_path / "out") as loaded:
        for module, x in held.items():
            entry, q = record["weights"][f"{module}.weight"], loaded[f"{module}.weight"]
            assert isinstance(q, QTensor)
            error = source[f"{module}.weight"].double() - q.dequantize().double()
            exact = float((x.double() @ error.t()).square().sum()) / len(x)
            assert entry["output_error"] == pytest.approx(exact, rel=1e-3)
            assert (entry["held_out"], entry["reverted"]) == (True, False)
            assert entry["versus_rtn"] < 1.0
    assert (
        tiny.bytes_of(tmp_path / "out")["model.safetensors"] == tiny.bytes_of(tmp_path / "plain")["model.safetensors"]
    )
    assert verify(tmp_path / "out", source=model, statistics=folder).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"algorithm": "gptq"}, {"objective": "diagonal"}, {"objective": "block"}])
def test_a_weight_that_held_out_samples_do_not_gain_by_goes_back(
    algorithm: dict[str, str], model: Path, tmp_path: Path
) -> None:
    folder, _ = held_out(model, tmp_path / "unlike", alike=False)
    record = run(model, folder, tmp_path / "out", format="nvfp4", **algorithm)["weights"]
    back = [name for name, entry in record.items() if entry["reverted"]]
    assert len(back) > len(record) // 2
    assert all(entry["versus_rtn"] <= 1.0 for entry in record.values())
    report = verify(tmp_path / "out", source=model, statistics=folder)
    assert report.faults == ()


def test_what_the_gate_did_is_printed_and_reported(model: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ptqpipe.cli import main

    folder, _ = held_out(model, tmp_path / "alike", alike=True)
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(out), "--stats", str(folder), "-q"])
    assert "of plain rounding to nearest, on held-out samples, mean of 14 weights; 0 of them keep plain" in done.output
    page = tmp_path / "report.md"
    told = CliRunner().invoke(main, ["report", str(out), "--kind", "md", "-o", str(page)])
    assert told.exit_code == 0, told.output
    assert "times that of plain rounding, on held-out samples, mean over 14 calibrated weights" in page.read_text()


def columns(output: str) -> list[str]:
    """The heads of the closing table, which two blanks separate."""
    (head,) = (line for line in output.splitlines() if line.startswith("role "))
    return re.split(r"  +", head)


@pytest.mark.parametrize(("alike", "words"), [(True, "held-out samples"), (None, "the calibration samples")])
def test_calibrated_weights_are_judged_by_their_output_error_first(
    alike: bool | None, words: str, model: Path, stats: Path, tmp_path: Path
) -> None:
    """The error of the weights says the opposite of them, and GPTQ proves nothing: of both no word."""
    folder = stats if alike is None else held_out(model, tmp_path / "alike", alike=alike)[0]
    told = invoked("convert", model, "-o", tmp_path / "out", "--stats", folder, "-q")
    weights = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())["weights"]
    assert columns(told) == ["role", "format", "output error", "count", "bits"]
    ratios = [entry["versus_rtn"] for name, entry in weights.items() if "o_proj" in name]
    assert re.search(rf"^o_proj +nvfp4 +{sum(ratios) / len(ratios):.3f} ", told, re.MULTILINE)
    every = [entry["versus_rtn"] for entry in weights.values()]
    first = next(line for line in told.splitlines() if "output error" in line)
    assert first.startswith(
        f"output error: {sum(every) / len(every):.3f} times that of plain rounding to nearest, on {words}"
    )
    assert "proven" not in told
    verified = invoked("verify", tmp_path / "out", "--source", model)
    assert columns(verified) == ["role", "format", "count", "output error"]
    assert re.search(rf"^o_proj +nvfp4 +2 +{sum(ratios) / len(ratios):.3f}$", verified, re.MULTILINE)
    found = json.loads(invoked("convert", model, "-o", tmp_path / "json", "--stats", folder, "--json"))
    assert (found["versus_rtn"], found["judged_on"]) == (pytest.approx(sum(every) / len(every)), words)
    row = next(row for row in found["roles"] if row["role"] == "o_proj")
    assert (row["versus_rtn"], row["held_out"]) == (pytest.approx(sum(ratios) / len(ratios)), alike is not None)
    assert row["proven"] is None
    assert list(row).index("versus_rtn") < list(row).index("relative_mse")


def test_weights_without_statistics_are_shown_as_before(model: Path, tmp_path: Path) -> None:
    told = invoked("convert", model, "-o", tmp_path / "out", "-q")
    assert columns(told) == [
        "role", "format", "proven", "count", "SQNR dB", "vs abs-max", "bits",
    ]  # fmt: skip
    assert "optimal" in told
    assert "output error" not in told + invoked("verify", tmp_path / "out", "--source", model)


@pytest.mark.slow
def test_weighted_scales_are_proven_and_said_to_be(model: Path, stats: Path, tmp_path: Path) -> None:
    """Nearest codes at scales that a search proves: there the word has a meaning."""
    words = ("--stats", stats, "--algorithm", "rtn")
    told = invoked("convert", model, "-o", tmp_path / "out", *words, "-q")
    assert columns(told)[:4] == ["role", "format", "proven", "output error"]
    assert "optimal" in told
    block = json.loads(invoked("convert", model, "-o", tmp_path / "b", *words, "--objective", "block", "--json"))
    assert {row["proven"] for row in block["roles"]} == {None}


def invoked(*words: object) -> str:
    from click.testing import CliRunner

    from ptqpipe.cli import main

    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_weighted_error_of_weighted_scales_is_the_lowest(model: Path, stats: Path, tmp_path: Path) -> None:
    weighted = run(model, stats, tmp_path / "w", format="mxfp4a16", objective="diagonal")["weights"]
    plain = run(model, None, tmp_path / "p", format="mxfp4a16")["weights"]
    inputs, source = inputs_of_llama(tiny.llama()), tiny.llama()
    with ptqpipe.load_tensors(tmp_path / "p") as loaded:
        for name, entry in weighted.items():
            q = loaded[name]
            assert isinstance(q, QTensor)
            h = inputs[name.removesuffix(".weight")].double().square().mean(dim=0)
            error = (source[name].double() - q.dequantize().double()).square()
            assert entry["weighted_error"] <= float((error * h).sum()) * (1 + 1e-6)
            assert entry["squared_error"] >= plain[name]["squared_error"] * (1 - 1e-9)


def test_workers_and_memory_change_no_byte(model: Path, stats: Path, tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("three", 3)):
        run(model, stats, tmp_path / name, Machine(workers=workers), format="nvfp4_w4a4", algorithm="gptq")
    assert tiny.bytes_of(tmp_path / "one") == tiny.bytes_of(tmp_path / "three")


def wide(tmp_path: Path) -> tuple[Path, Path]:
    """A model whose largest second moment, of 1024 columns, takes 4 MiB, and its statistics."""
    tensors = tiny.llama(layers=1, inner=1024)
    model = tiny.save(tmp_path / "wide", tensors)
    return model, write_statistics(tmp_path / "wide-stats", model, inputs_of_llama(tensors, tokens=64))


def test_a_limit_below_what_one_unit_needs_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    model, stats = wide(tmp_path)
    prepared = prepare(model, options=RecipeOptions(algorithm="gptq"), out=tmp_path / "out", stats=stats)
    least, job = prepared.least_memory()
    assert job is not None
    unit = job.id
    assert unit == "model.layers.0.mlp.down_proj"
    assert least - BASE_BYTES - WORKER_BYTES >= 32 * 1024 * 1024
    small = Machine(workers=2, memory_bytes=least - 1)
    with pytest.raises(UsageError, match=rf"too small for {unit}.*max_memory=.{-(-least >> 20)}MiB"):
        convert(prepared, machine=small)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial"))
    assert f'needs max_memory="{-(-least >> 20)}MiB"' in plan_text(prepared, small)
    done = convert(prepared, machine=Machine(workers=2, memory_bytes=-(-least >> 20) << 20))
    prepared.close()
    assert done is not None
    run(model, stats, tmp_path / "roomy", Machine(workers=3, memory_bytes=8 << 30), algorithm="gptq")
    assert tiny.bytes_of(tmp_path / "out") == tiny.bytes_of(tmp_path / "roomy")


@pytest.mark.parametrize("room", [1, 2, 3])
def test_as_many_units_run_at_once_as_memory_has_room_for(
    room: int, model: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = [0]
    running, lock, together = [0], threading.Lock(), threading.Event()
    real = gptq.quantize

    def watched(*args: Any, **kwargs: Any) -> Any:
        with lock:
            running[0] += 1
            at_once[0] = max(at_once[0], running[0])
            if at_once[0] == room:
                together.set()
        together.wait(60)  # for the others, and then a little for one too many
        time.sleep(0.05)
        try:
            return real(*args, **kwargs)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(gptq, "quantize", watched)
    monkeypatch.setattr(Conversion, "extra_bytes", lambda _, job: (1 << 30) * isinstance(job, QuantizeUnit))
    memory = BASE_BYTES + 4 * (WORKER_BYTES + (1 << 20)) + (room << 30)
    run(model, stats, tmp_path / "out", Machine(workers=3, memory_bytes=memory), algorithm="gptq")
    assert at_once[0] == room


@pytest.mark.slow
def test_a_factorization_takes_the_memory_that_is_said() -> None:
    """In a process of its own: the kernel's high-water mark, set back before, beside what is resident."""
    script = (
        "import re, torch\n"
        "from pathlib import Path\n"
        "from ptqpipe.quantization.metric import make_metric, memory_bytes\n"
        "torch.set_num_threads(1)\n"
        "make_metric(torch.eye(64))\n"
        "h = torch.eye(2048) + 1.0\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"
        "of = lambda key: int(re.search(key + r':\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) << 10\n"
        "before = of('VmRSS')\n"
        "make_metric(h)\n"
        "print(of('VmHWM') - before, memory_bytes(2048))\n"
    )
    # Matrices in pages of their own, given back with them, as glibc has it from 32 MiB on; small ones stay in the heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    taken, said = map(int, done.stdout.split())
    assert 0.4 * said < taken <= 1.3 * said


def test_other_statistics_are_another_run(model: Path, stats: Path, tmp_path: Path) -> None:
    other = write_statistics(tmp_path / "other", model, inputs_of_llama(tiny.llama(), seed=9))
    options = RecipeOptions(algorithm="gptq")
    runs = [prepare(model, out=tmp_path / "o", stats=folder, options=options) for folder in (stats, other)]
    for prepared in runs:
        prepared.close()
    assert runs[0].run_id != runs[1].run_id


def test_nvfp4_input_scales_are_those_of_the_largest_activation(model: Path, stats: Path, tmp_path: Path) -> None:
    run(model, stats, tmp_path / "out", format="nvfp4_w4a4", headroom=1.25)
    inputs = inputs_of_llama(tiny.llama())
    for module, x in inputs.items():
        divisor = tensor(tmp_path / "out", f"{module}.input_global_scale")
        assert float(divisor) == pytest.approx(2688.0 / (1.25 * float(x.abs().max())), rel=2e-4)
    same = [tensor(tmp_path / "out", f"model.layers.0.self_attn.{p}_proj.input_global_scale") for p in "qkv"]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])


@pytest.mark.parametrize(("policy", "least", "most"), [("percentile", 0.0, 1.0), ("mse", 0.0, 1.0)])
def test_other_policies_clip_rare_activations(
    policy: str, least: float, most: float, model: Path, stats: Path, tmp_path: Path
) -> None:
    record = run(model, stats, tmp_path / "out", format="fp8_static", input_scale=policy)["weights"]
    plain = run(model, stats, tmp_path / "plain", format="fp8_static")["weights"]
    ratios = [record[name]["input_scale"] / plain[name]["input_scale"] for name in record]
    assert all(least < ratio <= most for ratio in ratios)
    if policy == "percentile":
        assert min(ratios) < 1.0


def test_fp8_scales_are_bfloat16_numbers_that_do_not_clip(model: Path, stats: Path, tmp_path: Path) -> None:
    run(model, stats, tmp_path / "out", format="fp8_static", kv_cache="fp8_per_head")
    for module, x in inputs_of_llama(tiny.llama()).items():
        scale = tensor(tmp_path / "out", f"{module}.input_scale").float()
        assert 1.0 <= float(scale) * 448.0 / float(x.abs().max()) < 1.01
    k = tensor(tmp_path / "out", "model.layers.0.self_attn.k_scale")
    assert k.shape == (2, 1, 1)
    assert torch.equal(k.bfloat16().float(), k)
    assert bool((k.reshape(-1) * 448.0 >= torch.tensor([3.0, 7.0])).all())
    assert bool((k.reshape(-1) * 448.0 <= torch.tensor([3.0, 7.0]) * 1.01).all())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"


@pytest.mark.parametrize(
    ("container", "name", "shape"),
    [("compressed_tensors", "self_attn.v_scale", (1,)), ("modelopt", "self_attn.v_proj.v_scale", ())],
)
def test_kv_cache_scales_have_the_containers_names(
    container: str, name: str, shape: tuple[int, ...], model: Path, stats: Path, tmp_path: Path
) -> None:
    record = run(model, stats, tmp_path / "out", format="nvfp4", container=container, kv_cache="fp8")
    found = tensor(tmp_path / "out", f"model.layers.1.{name}")
    assert found.shape == shape
    assert float(found) == pytest.approx(0.5 / 448.0, rel=0.01)
    assert record["kept"][f"model.layers.1.{name}"]["reason"] == "scale of the FP8 kv cache"


def _other_model(model: Path, tmp_path: Path) -> Path:
    other = tiny.save(tmp_path / "other", tiny.llama(seed=5))
    return write_statistics(tmp_path / "s", other, inputs_of_llama(tiny.llama()))


def _without_a_module(model: Path, tmp_path: Path) -> Path:
    inputs = inputs_of_llama(tiny.llama())
    del inputs["model.layers.1.mlp.down_proj"]
    return write_statistics(tmp_path / "s", model, inputs)


def _without_full(model: Path, tmp_path: Path) -> Path:
    return write_statistics(tmp_path / "s", model, inputs_of_llama(tiny.llama()), moments=())


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (_other_model, {"algorithm": "gptq"}, "belong to the model other .*this is model .*calibrate this one"),
        (_without_a_module, {"objective": "diagonal"}, "no statistics of 'model.layers.1.mlp.down_proj'"),
        (_without_full, {"algorithm": "gptq"}, "no full_moment of 'model.layers.0.*moments=.diagonal,full"),
        (_without_full, {"objective": "block"}, "no block_moment of 'model.layers.0.*moments=.diagonal,block"),
        (_without_full, {"kv_cache": "fp8"}, "no keys and values of 'model.layers.0.self_attn'"),
        (lambda *_: None, {"algorithm": "gptq"}, r"needs statistics; make them with ptqpipe\.calibrate\(.*stats="),
        (lambda *_: None, {"kv_cache": "fp8"}, "needs statistics"),
        (_without_full, {"format": "fp8", "objective": "block"}, 'use objective="diagonal"'),
        (_without_full, {"kv_cache": "fp8", "container": "ptqpipe"}, "ptqpipe cannot store KV-cache scales"),
        (_without_full, {"kv_cache": "fp8_per_head", "container": "modelopt"}, "one KV-cache scale per layer"),
        (lambda m, _: m, {"algorithm": "gptq"}, "holds no stats.json"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    make: Callable[[Path, Path], Path | None], options: dict[str, str], words: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        prepare(model, options=RecipeOptions(**options), out=tmp_path / "out", stats=make(model, tmp_path))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{"algorithm": "awq"}, {"objective": "x"}, {"damping": -1.0}, {"refine_passes": -1}, {"headroom": 0.0}]
)
def test_unknown_words_and_numbers_out_of_range_are_recipe_errors(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(RecipeError):
        prepare(model, options=RecipeOptions(**options))


def test_statistics_that_are_not_finite_are_one_line(model: Path, tmp_path: Path) -> None:
    inputs = inputs_of_llama(tiny.llama())
    bad = correlated(64, 256, seed=3)
    bad[5, 7] = float("inf")
    inputs["model.layers.0.mlp.down_proj"] = bad
    stats = write_statistics(tmp_path / "s", model, inputs)
    with pytest.raises(PtqError, match=r"model\.layers\.0\.mlp\.down_proj"):
        run(model, stats, tmp_path / "out", algorithm="gptq")


def test_a_model_without_biases_has_none_to_correct(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    stats = write_statistics(tmp_path / "stats", model, inputs_of_llama(tiny.llama()))
    options = RecipeOptions("mxfp4a16", bias_correction=True)
    with prepare(model, options=options, stats=stats, out=tmp_path / "out") as work:
        assert "bias_correction changes nothing: no quantized weight has a bias of its own" in warnings_of(work)


def test_corrected_biases_give_the_mean_output_of_the_float_layer(tmp_path: Path) -> None:
    tensors = tiny.llama()
    module = "model.layers.0.self_attn.v_proj"
    tensors[f"{module}.bias"] = torch.linspace(-1.0, 1.0, 64)
    model = tiny.save(tmp_path / "model", tensors)
    inputs = inputs_of_llama(tiny.llama())
    stats = write_statistics(tmp_path / "stats", model, inputs)
    record = run(model, stats, tmp_path / "out", format="mxfp4a16", objective="diagonal", bias_correction=True)
    assert record["kept"][f"{module}.bias"]["reason"] == "bias corrected by the mean error of its weight"
    x = inputs[module].double()
    with ptqpipe.load_tensors(tmp_path / "out") as loaded:
        q = loaded[f"{module}.weight"]
        assert isinstance(q, QTensor)
        bias = tensor(tmp_path / "out", f"{module}.bias").double()
        mean = (x @ q.dequantize().double().t() + bias).mean(dim=0)
    wanted = (x @ tensors[f"{module}.weight"].double().t() + tensors[f"{module}.bias"].double()).mean(dim=0)
    assert torch.allclose(mean, wanted, rtol=0.0, atol=1e-5)
    assert not torch.equal(bias, tensors[f"{module}.bias"].double())
    assert verify(tmp_path / "out", source=model).faults == ()
    with pytest.raises(UsageError, match="bias_correction needs statistics"):
        prepare(model, options=RecipeOptions(bias_correction=True), out=tmp_path / "other")


def test_experts_share_the_input_scale_of_gate_and_up_and_have_moments_of_their_own(tmp_path: Path) -> None:
    tensors = tiny.fused_moe()
    model = tiny.save(tmp_path / "model", tensors)
    inputs = {f"model.layers.0.self_attn.{p}_proj": correlated(256, 128) for p in "qkvo"}
    for expert in range(3):
        x = correlated(256, 128, seed=expert) * (1.0 + expert)
        base = f"model.layers.0.mlp.experts.{expert}"
        inputs |= {f"{base}.gate_proj": x, f"{base}.up_proj": x, f"{base}.down_proj": correlated(256, 64, seed=expert)}
    stats = write_statistics(tmp_path / "stats", model, inputs)
    record = run(model, stats, tmp_path / "out", format="nvfp4_w4a4", algorithm="gptq")["weights"]
    base = "model.layers.0.mlp.experts"
    scales = {record[f"{base}.{e}.{leaf}_proj.weight"]["input_scale"] for e in range(3) for leaf in ("gate", "up")}
    largest = max(float(inputs[f"{base}.{e}.up_proj"].abs().max()) for e in range(3))
    assert len(scales) == 1
    assert scales.pop() == pytest.approx(largest / 2688.0, rel=2e-4)
    assert len({record[f"{base}.{e}.down_proj.weight"]["input_scale"] for e in range(3)}) == 3
    assert verify(tmp_path / "out", source=model).faults == ()


def test_the_command_line_takes_gptq_where_statistics_are_given_alone(model: Path, stats: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ptqpipe.cli import main

    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(out), "--stats", str(stats), "-q"])
    assert done.exit_code == 0, done.output
    weights = json.loads((out / "ptqpipe.json").read_text())["weights"]
    assert {entry["algorithm"] for entry in weights.values()} == {"gptq"}
    refused = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "x"), "--algorithm", "gptq"])
    assert refused.exit_code != 0
    assert "needs statistics" in refused.output
    assert "Traceback" not in refused.output


@pytest.mark.slow
def test_verify_with_statistics_finds_codes_that_do_not_follow_from_them(
    model: Path, stats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(model, stats, out, format="nvfp4", algorithm="gptq")
    record = json.loads((out / "ptqpipe.json").read_text())
    record["recipe"]["rules"][0]["refine"] = 0
    described = json.dumps(record["recipe"], sort_keys=True)
    assert "refine" in described
    damage.write_record(out, record)
    faults = verify(out, source=model, statistics=stats).faults
    assert any(fault.check == "repeat" for fault in faults)
    other = write_statistics(tmp_path / "other", model, inputs_of_llama(tiny.llama(), seed=9))
    ptqpipe.convert(model, out=tmp_path / "plain", workers=1)
    for ckpt, wrong in ((out, other), (tmp_path / "plain", stats)):  # the second was made without any
        faults = verify(ckpt, source=model, statistics=wrong).faults
        assert any("is not what the checkpoint was made with" in fault.message for fault in faults)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_python_and_the_command_line_do_the_same_with_statistics(model: Path, stats: Path, tmp_path: Path) -> None:
    done = ptqpipe.convert(model, stats=stats, refine_passes=2, container="ptqpipe", out=tmp_path / "python", workers=1)
    command = [sys.executable, "-m", "ptqpipe", "convert", str(model), "--stats", str(stats), "--refine-passes", "2"]
    subprocess.run([*command, "--container", "ptqpipe", "-o", str(tmp_path / "shell"), "-q"], check=True)
    assert {rule["algorithm"] for rule in done.record["recipe"]["rules"]} == {"gptq"}
    assert (tmp_path / "python/model.safetensors").read_bytes() == (tmp_path / "shell/model.safetensors").read_bytes()


def open_in(folder: Path) -> list[str]:
    """Files below ``folder`` that this process holds open."""
    held = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            held.append(str(descriptor.readlink()))
    return [path for path in held if path.startswith(str(folder))]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_a_finished_conversion_holds_no_file_of_source_or_statistics(model: Path, stats: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ptqpipe.cli import main

    ptqpipe.convert(model, out=tmp_path / "api", stats=stats, algorithm="rtn", objective="diagonal")
    assert open_in(stats) == open_in(model) == []
    arguments = ["convert", str(model), "-o", str(tmp_path / "cli"), "--stats", str(stats), "-q"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert open_in(stats) == open_in(model) == []
    with prepare(model, options=RecipeOptions(), out=tmp_path / "x", stats=stats) as prepared:
        assert prepared.statistics is not None
        prepared.statistics.of("model.layers.0.mlp.down_proj")
        assert open_in(stats) != []
    assert open_in(stats) == open_in(model) == []


def test_the_widest_tables_fit_80_columns(tmp_path: Path) -> None:
    """The longest names of roles and formats, in a calibrated mixture."""
    row = {"role": "experts.down_proj", "format": "fp8_channel", "sqnr_db": 32.64, "relative_mse": 5e-4, "count": 99999}
    row |= {"versus_absmax": 0.797, "bits_per_weight": 8.062, "proven": None}
    for ratio, by_data, proven in ((None, False, True), (0.25, True, None)):
        text = convert_text._roles_table([{**row, "versus_rtn": ratio, "proven": proven}], by_data=by_data)
        assert max(map(len, text.splitlines())) <= 80
    weights = [
        verify_text.WeightReport(
            "model.layers.0.mlp.experts.0.down_proj.weight", "fp8_channel", (8, 8), 5e-4, 1.0, 0.8, versus_rtn=ratio
        )
        for ratio in (None, 0.25)
    ]
    for weight in weights:
        report = verify_text.VerifyReport(tmp_path, tmp_path, "c", True, False, (), (weight,), 0, 0, 0.1)
        assert max(map(len, verify_text._weights_table(report).splitlines()[:3])) <= 80
        alone = verify_text._weights_table(replace(report, source=None, weights=(replace(weight, relative_mse=None),)))
        assert "-" not in alone.splitlines()[2].split()
