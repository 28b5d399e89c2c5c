"""tune, and convert --codes: codes from folder to checkpoint, or refused."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.api.matrices import load_tensors
from ptqpipe.calibration import activations, runner
from ptqpipe.calibration.activations import OnDisk
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.runner import Runner
from ptqpipe.cli import main
from ptqpipe.conversion import command as convert_stage, units
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.numerics.formats import get_format
from ptqpipe.pipeline.tune import backwards, command as tune, feedback, in_order, layer_loop, open_runner, tune_samples
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.pipeline.tune.start_codes import start_codes
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import LARGE_MATRIX, Machine
from ptqpipe.runtime import load_model
from ptqpipe.runtime.skeleton import Skeleton
from tests.calibration.models import make_model, make_windows, write_windows
from tests.pipeline.tune.tune_runs import DEMO, ONE, OPTIONS, content_of, of_method


@pytest.mark.parametrize(("large", "threads"), [(LARGE_MATRIX, 1), (1, 2)], ids=["small", "large"])
def test_small_weights_are_computed_by_one_thread(
    large: int, threads: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would wait for each other longer than they compute: ten times the seconds on a busy machine."""
    monkeypatch.setattr("ptqpipe.run.machine.LARGE_MATRIX", large)
    monkeypatch.setattr("ptqpipe.run.machine.processors", lambda: [0, 1])

    def begins(line: str) -> None:
        assert torch.get_num_threads() == threads
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune.tune(DEMO, [str(text)], tmp_path / "codes", options=OPTIONS, machine=Machine(workers=2), log=begins)


@pytest.fixture(params=["nvfp4", "mxfp4"])
def tuned(request: pytest.FixtureRequest, codes_of_run: Callable[[str, str], Path]) -> tuple[str, Path]:
    return request.param, codes_of_run(request.param, "gptq")


@pytest.mark.slow
def test_the_codes_that_were_learned_are_the_codes_that_are_written(tuned: tuple[str, Path], tmp_path: Path) -> None:
    scheme, codes = tuned
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(DEMO), "--format", scheme, "--codes", str(codes), "-o", str(out)])
    assert done.exit_code == 0, done.output
    record = json.loads((out / "ptqpipe.json").read_text())
    tensors = load_tensors(out)
    with LearnedCodes.open(codes) as stored:
        assert record["rounding"]["digest"] == stored.digest
        assert record["rounding"]["method"] == "gptq"
        assert record["rounding"]["data"] == stored.content["data"]
        for name, entry in record["weights"].items():
            q = stored.of(name, get_format(entry["format"]), shape=tuple(entry["shape"]))
            assert torch.equal(tensors[name].dequantize(), q.dequantize())
            assert entry["algorithm"] == "learned"
        page = out.parent / "page.md"
        assert CliRunner().invoke(main, ["report", str(out), "-o", str(page)]).exit_code == 0
        (told,) = (line for line in page.read_text().splitlines() if line.startswith("- learned codes"))
        assert stored.digest in told
        assert "gptq, 16 samples" in told
        assert "algorithm rtn" not in page.read_text()
    assert CliRunner().invoke(main, ["verify", str(out), "--source", str(DEMO)]).exit_code == 0


@pytest.mark.slow
def test_codes_may_differ_from_weights_by_what_would_be_a_loss_of_the_nearest_ones(
    codes_of_run: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a layer has no inputs, codes that the model's output chose may be anywhere."""
    codes, options = codes_of_run("nvfp4", "gptq"), RecipeOptions(format="nvfp4")
    monkeypatch.setattr(units, "LOST", 1e-3)
    with prepare(DEMO, options=RecipeOptions(), out=tmp_path / "out", codes=codes) as job:
        done = convert_stage.convert(job, machine=ONE)
    assert done is not None
    assert min(entry["relative_mse"] for entry in done.record["weights"].values()) > 1e-3
    with (
        prepare(DEMO, options=options, out=tmp_path / "nearest") as job,
        pytest.raises(NumericsError, match="of its energy"),
    ):
        convert_stage.convert(job, machine=ONE)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["layerwise", "gptq"])
def test_a_weight_that_its_siblings_scale_would_erase_is_refused_before_codes_are_chosen(
    method: str, text: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = 1e6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    recipe = RecipeOptions(format="nvfp4")
    with pytest.raises(NumericsError, match=r"k_proj.weight would lose \d+% of its energy.*ignore="):
        tune.tune(model, [str(text)], tmp_path / "codes", recipe=recipe, options=of_method(method), machine=ONE)


def test_every_block_says_what_it_gained_and_none_got_worse(tuned: tuple[str, Path]) -> None:
    content = content_of(tuned[1])
    assert len(content["blocks"]) == json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    for entry in content["blocks"].values():
        assert entry["not_learned"] == []
        assert entry["kept"] == (entry["learned_loss"] < entry["start_loss"])


def test_codes_of_another_model_or_format_are_refused(tuned: tuple[str, Path], tmp_path: Path) -> None:
    scheme, codes = tuned
    other = "mxfp8" if scheme == "mxfp4" else "fp8"
    done = CliRunner().invoke(
        main, ["convert", str(DEMO), "--format", other, "--codes", str(codes), "-o", str(tmp_path / "out")]
    )
    assert done.exit_code == 2
    assert "tune with the same --format" in done.output
    assert not (tmp_path / "out").exists()
    content = json.loads((codes / "rounding.json").read_text())
    content["model"]["fingerprint"] = "another"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in codes.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "rounding.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"learned codes in .*copy belong to the model demo_model .*tune this one"):
        prepare(DEMO, options=RecipeOptions(format=scheme), out=tmp_path / "o", codes=copy)


def test_codes_hold_for_every_copy_of_the_model(tuned: tuple[str, Path], tmp_path: Path) -> None:
    scheme, codes = tuned
    copy = shutil.copytree(DEMO, tmp_path / "second_download", copy_function=shutil.copyfile)
    prepare(copy, options=RecipeOptions(format=scheme), out=tmp_path / "o", codes=codes).close()


def test_a_flipped_bit_among_the_codes_is_an_error_not_another_model(tuned: tuple[str, Path], tmp_path: Path) -> None:
    scheme, codes = tuned
    copy = shutil.copytree(codes, tmp_path / "copy")
    file = sorted(copy.glob("*.safetensors"))[-1]
    raw = bytearray(file.read_bytes())
    raw[-9] ^= 1
    file.write_bytes(raw)
    arguments = ["convert", str(DEMO), "--format", scheme, "--codes", str(copy), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert f"{file.name}' is damaged" in done.stderr
    assert not (tmp_path / "out").exists()


def test_no_data_is_one_line_that_says_what_to_give(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["tune", str(DEMO), "-o", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "give --data" in done.output
    assert not (tmp_path / "out").exists()


def test_a_model_that_the_format_holds_exactly_is_tuned_to_the_end(text: Path, tmp_path: Path) -> None:
    """Layers of no error, which no ratio can be told of: such are the floats of a checkpoint that was dequantized."""
    packed, floats, codes = (str(tmp_path / name) for name in ("packed", "floats", "codes"))
    windows = ["--samples", "8", "--seqlen", "16"]
    for words in (
        ["convert", str(DEMO), "--format", "mxfp4a16", "-o", packed],
        ["dequantize", packed, "-o", floats],
        ["tune", floats, "--format", "mxfp4a16", "--data", str(text), *windows, "-o", codes],
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
    entries = content_of(Path(codes))["blocks"].values()
    assert {entry["start_loss"] for entry in entries} == {0.0}


@pytest.mark.slow
def test_layers_that_make_up_for_earlier_ones_lose_less_than_layers_by_themselves(rows: Path, tmp_path: Path) -> None:
    losses = {}
    for share in (0.0, 1.0):
        done = tune.tune(
            DEMO, [str(rows)], tmp_path / f"{share}", options=of_method("gptq", feedback=share), machine=ONE
        )
        blocks = done.content["blocks"].values()
        assert all(entry["kept"] == (entry["learned_loss"] < entry["start_loss"]) for entry in blocks)
        assert done.content["method"] == "gptq"
        losses[share] = [entry["learned_loss"] for entry in blocks]
    assert losses[1.0][-1] < losses[0.0][-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "layerwise"])
def test_layers_that_run_in_bfloat16_get_codes_that_are_as_good(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """By what the converted model computes, against the float32 one."""
    tokens = torch.tensor(json.loads(rows.read_text().splitlines()[0])["input_ids"])[None]
    exact = load_model(DEMO)(tokens).logits
    logits: dict[torch.dtype, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(layer_loop, "pass_dtype", lambda *_, dtype=dtype: dtype)
        codes, out = tmp_path / f"codes-{dtype}", tmp_path / f"out-{dtype}"
        tune.tune(DEMO, [str(rows)], codes, options=of_method(method), machine=ONE)
        done = CliRunner().invoke(main, ["convert", str(DEMO), "--codes", str(codes), "-o", str(out), "-q"])
        assert done.exit_code == 0, done.output
        logits[dtype] = load_model(out)(tokens).logits
    rounded, plain = ((logits[dtype] - exact).norm() for dtype in (torch.bfloat16, torch.float32))
    assert not torch.equal(*logits.values())
    assert rounded < 1.1 * plain


@pytest.mark.slow
def test_layers_whose_codes_are_finer_than_bfloat16_run_in_float32(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT8 loses a fifth by it: what it changes of an output is little more than the rounding."""
    dtypes = list[torch.dtype]()
    opened = layer_loop.open_runner

    def noted(*arguments: Any, dtype: torch.dtype, **options: Any) -> Any:
        dtypes.append(dtype)
        return opened(*arguments, dtype=dtype, **options)

    monkeypatch.setattr(layer_loop, "pass_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(layer_loop, "open_runner", noted)
    for scheme in ("int8", "mxfp4"):
        recipe = RecipeOptions(scheme)
        tune.tune(DEMO, [str(text)], tmp_path / scheme, recipe=recipe, options=of_method("layerwise"), machine=ONE)
    assert dtypes == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "other"}, 'method="other" is unknown'),
        ({"feedback": 1.5}, "feedback=1.5 is out of range"),
        ({"metric": "other"}, 'metric="other" is unknown; use kl, output'),
        ({"method": "learned"}, 'method="learned" is unknown; use gptq, kl, layerwise'),
    ],
)
def test_settings_that_do_not_exist_are_refused(
    changes: dict[str, Any], message: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        tune.tune(DEMO, [str(text)], tmp_path / "out", options=replace(OPTIONS, **changes), machine=ONE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["fp8", "mxfp8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral"])
def test_the_tuned_block_computes_what_the_converted_checkpoint_does(kind: str, scheme: str, tmp_path: Path) -> None:
    """Quantized inputs included, those of stacked experts too: against the model that `load_model` makes."""
    model = make_model(tmp_path / kind, kind, dtype=torch.bfloat16)
    windows = make_windows(samples=3)
    narrow = {"qwen3_moe": ("re:.*down_proj",), "mixtral": ("re:.*w2",)}  # 48 columns
    ignore = narrow.get(kind, ()) if scheme == "mxfp8" else ()
    recipe = RecipeOptions(format=scheme, ignore=ignore)
    prepared = prepare(model, options=recipe, out=tmp_path / "out")
    with prepared.source as source:
        convert_stage.convert(prepared)
        seen: list[torch.Tensor] = []
        loaded = load_model(tmp_path / "out")
        loaded.model.layers[0].register_forward_hook(lambda _m, _a, out: seen.append(out))
        with torch.no_grad():
            loaded(windows)
        wanted = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        with Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner:
            block = next(runner.layers())
            work = TunedLayer.of(block, prepared, runner)
            decoded = {key: q.dequantize() for key, q in start_codes(work).items()}
            with torch.no_grad():
                found = work.outputs(block.inputs(0), 0, work.parameters(decoded))
                plain = block.forward(block.inputs(0), 0, parameters=work.parameters(decoded))
    assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    assert float((plain - wanted).abs().max()) > 1e-3 * float(wanted.abs().max())


@pytest.mark.slow
def test_a_recipe_tunes_and_converts(text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nrules: [{match: '*', format: nvfp4}]\n")
    tune.tune(DEMO, [str(text)], tmp_path / "codes", recipe_path=recipe, options=OPTIONS, machine=ONE)
    prepared = prepare(DEMO, recipe_path=recipe, out=tmp_path / "out", codes=tmp_path / "codes")
    with prepared:
        done = convert_stage.convert(prepared)
    assert done is not None
    assert {entry["algorithm"] for entry in done.record["weights"].values()} == {"learned"}


def test_a_model_that_only_our_container_can_hold_is_tuned(tmp_path: Path) -> None:
    """GPT-2's Conv1D keeps [in, out]: the default container of nvfp4 refuses it, and says which does not."""
    model, windows = make_model(tmp_path / "gpt2", "gpt2"), make_windows(samples=4)
    tokens = write_windows(tmp_path / "tokens.jsonl", windows)
    codes, out = tmp_path / "codes", tmp_path / "out"
    words = ["--data", str(tokens), "--samples", "4", "--seqlen", str(windows.shape[1])]
    refused = CliRunner().invoke(main, ["tune", str(model), *words, "--method", "gptq", "-o", str(codes)])
    assert refused.exit_code != 0
    assert "use container ptqpipe" in refused.output
    chosen = ["--container", "ptqpipe"]
    for command in (
        ["tune", str(model), *words, *chosen, "--method", "gptq", "-o", str(codes)],
        ["convert", str(model), *chosen, "--format", "nvfp4", "--codes", str(codes), "-o", str(out)],
    ):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    algorithms = {entry["algorithm"] for entry in json.loads((out / "ptqpipe.json").read_text())["weights"].values()}
    assert algorithms == {"learned"}


@pytest.mark.slow
def test_layers_by_themselves_get_the_codes_that_convert_writes_with_statistics(tmp_path: Path) -> None:
    """No window is held out in either; a mixture of experts has moments by expert, and stand-ins for idle ones."""
    model, windows = make_model(tmp_path / "moe", "qwen3_moe"), make_windows(samples=4)
    tokens = write_windows(tmp_path / "tokens.jsonl", windows)
    seen = {"samples": 4, "seqlen": windows.shape[1]}
    calibrate(model, [str(tokens)], tmp_path / "stats", options=CalibrateOptions(**seen), machine=ONE)
    options, recipe = TuneOptions(**seen, method="layerwise"), RecipeOptions("fp8")
    tune.tune(model, [str(tokens)], tmp_path / "codes", recipe=recipe, options=options, machine=ONE)
    made = ptqpipe.convert(model, out=tmp_path / "out", format="fp8", stats=tmp_path / "stats", workers=1)
    assert {rule["algorithm"] for rule in made.record["recipe"]["rules"]} == {"gptq"}
    with LearnedCodes.open(tmp_path / "codes") as stored, load_tensors(made.out) as written:
        names = stored.content["weights"]
        assert len(names) > 20
        for name, entry in names.items():
            q, own = written[name], stored.of(name, get_format(entry["format"]), shape=tuple(entry["shape"]))
            assert torch.equal(q.data, own.data)
            assert torch.equal(q.scales, own.scales)


@pytest.mark.slow
def test_hidden_states_that_do_not_fit_in_memory_wait_on_disk(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    class Noted(OnDisk):
        def __init__(self, folder: Path) -> None:
            made.append(folder)
            super().__init__(folder)

    for module in (activations, runner):
        monkeypatch.setattr(module, "OnDisk", Noted)
    roomy = tune.tune(DEMO, [str(text)], tmp_path / "roomy", options=of_method("gptq"), machine=ONE)
    assert not made
    least = Machine(workers=1, memory_bytes=548 << 20)
    for module in (open_runner, backwards):
        monkeypatch.setattr(module, "BASE_BYTES", least.memory_bytes)
    small = tune.tune(DEMO, [str(text)], tmp_path / "small", options=of_method("gptq"), machine=least)
    backward, forward = 1 + len(small.content["blocks"]), 3
    # what the float model gives, whose place gradients take, what enters each block (the middle one of three when the
    # pass comes back to it); then the float model again, its blocks' outputs, what enters the tuned ones
    assert len(made) == backward + forward
    assert small.content["digest"] == roomy.content["digest"]


@pytest.mark.slow
def test_a_layer_that_gptq_in_order_does_not_improve_keeps_its_nearest_codes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = itertools.cycle((1.0, 2.0))  # of the layer with its nearest codes, and with what was found
    monkeypatch.setattr(in_order, "_loss", lambda *_: next(losses))
    done = tune.tune(
        DEMO, [str(text)], tmp_path / "codes", recipe=RecipeOptions("nvfp4"), options=of_method("gptq"), machine=ONE
    )
    for entry in done.content["blocks"].values():
        assert not entry["kept"]
        assert entry["moved"] == 0
        assert (entry["start_loss"], entry["learned_loss"]) == (1.0, 2.0)


@pytest.mark.slow
def test_one_window_of_eight_judges_gptq_in_order_where_the_data_have_no_more_than_the_samples(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two batches of eight windows not one, but two windows, which lead to no code: others in their place change
    what is judged alone, until it is judged otherwise."""
    for module in (runner, tune_samples):
        monkeypatch.setattr(module, "BATCH_TOKENS", 8 * 32)
    lines = rows.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*lines[:14], *lines[:2]]))
    codes, judged = [], []
    for name, data in (("one", rows), ("two", other)):
        done = tune.tune(DEMO, [str(data)], tmp_path / name, options=of_method("gptq"), machine=ONE)
        assert (done.content["data"]["samples"], done.content["data"]["held_out"]) == (14, 2)
        entries = done.content["blocks"].values()
        assert all(entry["kept"] and entry["held_out"] for entry in entries)
        judged.append([entry["start_loss"] for entry in entries])
        codes.append(
            {name: t for file in (tmp_path / name).glob("*.safetensors") for name, t in load_file(file).items()}
        )
    assert judged[0] != judged[1]
    assert codes[0].keys() == codes[1].keys()
    before = [name for name in codes[0] if "layers.0." in name and "down_proj" not in name]  # that one is
    assert len(before) >= 6
    assert all(torch.equal(codes[0][name].view(torch.uint8), codes[1][name].view(torch.uint8)) for name in before)


@pytest.mark.slow
def test_a_weight_that_loses_on_the_rows_that_are_tried_keeps_its_nearest_codes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = itertools.cycle((0.0, 1.0, 1.0))  # of the nearest codes, and of those that are tried
    monkeypatch.setattr(feedback, "cost", lambda *_: next(costs))
    recipe = RecipeOptions("nvfp4")
    done = tune.tune(DEMO, [str(text)], tmp_path / "codes", recipe=recipe, options=of_method("gptq"), machine=ONE)
    for entry in done.content["blocks"].values():
        assert not entry["kept"]
        assert entry["moved"] == 0
        assert entry["start_loss"] == entry["learned_loss"]


@pytest.mark.slow
def test_a_weight_that_loses_by_what_it_makes_up_for_is_quantized_without(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {}
    for share, tried in ((0.5, (0.0, 1.0, 0.0)), (0.0, (0.0, 0.0))):
        costs, folder = itertools.cycle(tried), tmp_path / str(share)
        monkeypatch.setattr(feedback, "cost", lambda *_, costs=costs: next(costs))
        options = replace(of_method("gptq"), feedback=share)
        done = tune.tune(DEMO, [str(text)], folder, recipe=RecipeOptions("nvfp4"), options=options, machine=ONE)
        assert all(entry["kept"] for entry in done.content["blocks"].values())
        codes[share] = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert codes[0.5].keys() == codes[0.0].keys()
    for name, found in codes[0.5].items():
        assert torch.equal(found.view(torch.uint8), codes[0.0][name].view(torch.uint8)), name
