"""Claims about low-rank parts from convert to every reader: the decode is codes plus product, wherever it is read."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.check.diff import diff
from ptqpipe.check.inspect import inspect
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.cli import main
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import CheckpointError, FormatError, RecipeError, UsageError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline import demo
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from tests import tiny
from tests.conversion import damage
from tests.quantization.inputs import inputs_of_llama, write_statistics

RECIPE = Path(__file__).parents[2] / "recipes/methods/nvfp4_lorc.yaml"
DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"
WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny.LLAMA_CONFIG, "num_hidden_layers": 1}
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama(layers=1), config=config)


@pytest.fixture(scope="module")
def stats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_statistics(tmp_path_factory.mktemp("stats") / "stats", model, inputs_of_llama(tiny.llama(layers=1)))


def run(
    model: Path,
    out: Path,
    *,
    stats: Path | None = None,
    recipe: Path | None = None,
    machine: Machine | None = None,
    **options: Any,
) -> dict[str, Any]:
    chosen = {"container": "ptqpipe", "low_rank": 8, **options} if recipe is None else options
    prepared = prepare(model, options=RecipeOptions(**chosen), recipe_path=recipe, out=out, stats=stats)
    with prepared:
        forecast = prepared.outputs.layout.file_bytes
        done = convert(prepared, machine=machine)
    assert done is not None
    written = sum(path.stat().st_size for path in out.iterdir() if ".safetensors" in path.name)
    assert written == forecast
    return dict(done.record)


def decoded(folder: Path, name: str, *, k: int) -> torch.Tensor:
    """float32 [N, K] of an NVFP4 weight with factors, from the stored tensors and the words of the layout alone."""
    stored = load_file(folder / "model.safetensors")
    packed, scales = stored[f"{name}_packed"], stored[f"{name}_scale"].float()
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], k)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([grid, -grid])[codes.long()]
    w = values * (scales * stored[f"{name}_global_scale"]).repeat_interleave(16, dim=1)
    left, right = (stored[f"{name}_low_rank_{side}"].float().double() for side in ("left", "right"))
    scale = stored.get(f"{name}_low_rank_scale", torch.ones(left.shape[1])).double()
    return w + ((left * scale) @ right).float()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_reader_gives_codes_plus_product(dtype: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out, scheme="nvfp4", low_rank_dtype=dtype)
    wanted = decoded(out, WEIGHT, k=256)
    with ptqpipe.load_tensors(out) as loaded:
        q = loaded[WEIGHT]
        assert isinstance(q, QTensor)
        assert torch.allclose(q.dequantize(), wanted, rtol=0.0, atol=1e-8)
        exact = q.dequantize()
    dequantize(out, tmp_path / "floats", dtype="fp32")
    assert torch.equal(load_file(tmp_path / "floats" / "model.safetensors")[WEIGHT], exact)
    module = ptqpipe.load_model(out).get_parameter(WEIGHT)
    assert torch.equal(module, exact)
    report = inspect(out)
    assert {row.scheme for row in report.weights} == {f"nvfp4 + rank 8 in {dtype}"}
    assert verify(out, source=model, optimal=True).faults == ()


def test_packed_loading_computes_with_the_whole_weight(tmp_path: Path) -> None:
    from ptqpipe.runtime import load

    out = tmp_path / "out"
    run(DEMO, out)
    tokens = torch.arange(24).unsqueeze(0)
    with torch.no_grad():
        packed, plain = load(out, dtype="float32")(tokens).logits, ptqpipe.load_model(out)(tokens).logits
    assert torch.allclose(packed, plain, rtol=1e-4, atol=1e-3)  # other products of the layers that are packed or fused


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stats": True, "algorithm": "gptq"}, {"stats": True}])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4a16", "fp8", "fp8_tensor", "fp8_block", "nvfp4_w4a4"])
def test_every_scheme_gains_and_verifies(
    scheme: str, options: Mapping[str, Any], model: Path, stats: Path, tmp_path: Path
) -> None:
    known = stats if options.get("stats") else None
    algorithm = options.get("algorithm")
    record = run(model, tmp_path / "out", stats=known, scheme=scheme, algorithm=algorithm)["weights"]
    plain = run(model, tmp_path / "plain", stats=known, scheme=scheme, algorithm=algorithm, low_rank=0)["weights"]
    for name, entry in record.items():
        told = entry["low_rank"]
        assert (told["rank"], told["dtype"], told["dropped"]) == (8, "bf16", False)
        assert told["moment"] == ("none" if known is None else "full")
        assert told["versus_codes"] < 0.95
        bits = 16 * 8 * sum(entry["shape"]) / (entry["shape"][0] * entry["shape"][1])
        assert entry["bits_per_weight"] == pytest.approx(plain[name]["bits_per_weight"] + bits)
        if known is None:
            assert entry["squared_error"] < plain[name]["squared_error"]
    assert verify(tmp_path / "out", source=model).faults == ()
    assert verify(tmp_path / "out", source=model, statistics=known).faults == ()


def test_the_output_error_falls_with_the_rank(model: Path, stats: Path, tmp_path: Path) -> None:
    errors = []
    source = tiny.llama(layers=1)
    inputs = inputs_of_llama(source)
    for rank in (0, 2, 8, 32):
        out = tmp_path / str(rank)
        run(model, out, stats=stats, scheme="nvfp4", algorithm="gptq", low_rank=rank)
        total = 0.0
        with ptqpipe.load_tensors(out) as loaded:
            for module, x in inputs.items():
                q = loaded[f"{module}.weight"]
                assert isinstance(q, QTensor)
                left = source[f"{module}.weight"].double() - q.dequantize().double()
                total += float((x.double() @ left.t()).square().sum())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_a_diagonal_moment_is_used_where_there_is_no_full_one(model: Path, tmp_path: Path) -> None:
    stats = write_statistics(tmp_path / "stats", model, inputs_of_llama(tiny.llama(layers=1)), moments=())
    record = run(model, tmp_path / "out", stats=stats, weighting="diagonal")["weights"]
    assert {entry["low_rank"]["moment"] for entry in record.values()} == {"diagonal"}
    assert verify(tmp_path / "out", source=model, statistics=stats).faults == ()


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_experts_have_stacks_of_factors(transposed: bool, tmp_path: Path) -> None:
    tensors = tiny.fused_moe(transposed=transposed)
    model = tiny.save(tmp_path / "model", tensors)
    run(model, tmp_path / "out", scheme="nvfp4", low_rank_dtype="fp8")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    assert stored[f"{name}_low_rank_left"].shape == (3, 128, 8)
    assert stored[f"{name}_low_rank_right"].shape == (3, 8, 64)
    assert stored[f"{name}_low_rank_scale"].shape == (3, 8)
    assert verify(tmp_path / "out", source=model).faults == ()
    with ptqpipe.load_tensors(tmp_path / "out") as loaded:
        for expert in range(3):
            q = loaded[f"{name}[{expert}]"]
            assert isinstance(q, QTensor)
            w = tensors[name][expert].t() if transposed else tensors[name][expert]
            assert q.low_rank is not None
            codes = float((w.float() - q.dequantize() + q.low_rank.product()).square().sum())
            assert float((w.float() - q.dequantize()).square().sum()) < 0.95 * codes
    dequantize(tmp_path / "out", tmp_path / "floats", dtype="fp32")
    floats = load_file(tmp_path / "floats" / "model.safetensors")[name]
    assert floats.shape == tensors[name].shape
    assert float((floats - tensors[name].float()).square().sum()) < float(tensors[name].float().square().sum()) / 100


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_machines_and_interruptions_change_no_byte(model: Path, stats: Path, tmp_path: Path) -> None:
    options = ["--recipe", str(RECIPE), "--stats", str(stats), "-q"]
    run(model, tmp_path / "one", stats=stats, recipe=RECIPE, machine=Machine(workers=1))
    run(model, tmp_path / "three", stats=stats, recipe=RECIPE, machine=Machine(workers=3))
    wanted = tiny.bytes_of(tmp_path / "one")
    assert tiny.bytes_of(tmp_path / "three") == wanted
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "ptqpipe"]
    command = [*torchrun, "convert", str(model), "-o", str(tmp_path / "two"), *options]
    subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True)
    assert tiny.bytes_of(tmp_path / "two") == wanted


def test_a_killed_run_resumes_to_the_same_bytes(
    model: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ptqpipe.conversion import units

    run(model, tmp_path / "whole", stats=stats, recipe=RECIPE)
    real, calls = units.correct_unit, []

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(units, "correct_unit", stops)
    prepared = prepare(model, recipe_path=RECIPE, out=tmp_path / "cut", stats=stats)
    with pytest.raises(KeyboardInterrupt):
        convert(prepared, machine=Machine(workers=1))
    assert not (tmp_path / "cut").exists()
    monkeypatch.undo()
    convert(prepared, mode="resume", machine=Machine(workers=1))
    prepared.close()
    assert tiny.bytes_of(tmp_path / "cut") == tiny.bytes_of(tmp_path / "whole")


def mean_kl(ckpt: Path, tokens: torch.Tensor) -> float:
    """Nats from the demo model's next-token distribution, on its held-out text."""
    logs = []
    for path in (DEMO, ckpt):
        with torch.no_grad():
            logs.append(ptqpipe.load_model(path)(tokens).logits.double().log_softmax(dim=-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1).mean())


@pytest.mark.slow
def test_the_demo_model_diverges_less(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = (DEMO / "heldout.txt").read_text()
    ids = AutoTokenizer.from_pretrained(DEMO)(text, return_tensors="pt").input_ids[0]
    tokens = ids[: len(ids) // 64 * 64].reshape(-1, 64)[:16]
    found = []
    for rank in (0, 8, 32):
        run(DEMO, tmp_path / str(rank), low_rank=rank)
        found.append(mean_kl(tmp_path / str(rank), tokens))
    assert found[2] < found[1] < found[0]


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt", "mxfp8_hf", "deepseek_fp8", None])
def test_other_containers_refuse(container: str | None, model: Path, tmp_path: Path) -> None:
    scheme = {"mxfp8_hf": "mxfp8", "deepseek_fp8": "fp8_block"}.get(str(container), "nvfp4")
    options = RecipeOptions(scheme=scheme, container=container, low_rank=8)
    with pytest.raises(FormatError, match="use --container ptqpipe"):
        prepare(model, options=options, out=tmp_path / "out")


def test_relayout_and_learned_codes_refuse(model: Path, tmp_path: Path) -> None:
    from ptqpipe.pipeline.tune import command as tune

    run(model, tmp_path / "out")
    with pytest.raises(FormatError, match=r"has a low-rank part \(rank 8 in bf16\).*dequantize"):
        relayout(tmp_path / "out", tmp_path / "other", container="compressed_tensors")
    assert not (tmp_path / "other").exists()
    text = tmp_path / "text.txt"
    text.write_text("a b c " * 400)
    with pytest.raises(UsageError, match="low_rank out"):
        tune.tune(DEMO, [str(text)], tmp_path / "codes", recipe=RecipeOptions(container="ptqpipe", low_rank=4))


@pytest.mark.parametrize("options", [{"low_rank": -1}, {"low_rank": 5000}, {"low_rank": 4, "low_rank_dtype": "int4"}])
def test_ranks_and_dtypes_out_of_range_are_recipe_errors(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(RecipeError, match="low_rank"):
        prepare(model, options=RecipeOptions(container="ptqpipe", **options))


def test_the_command_line_names_rank_and_dtype(model: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(model), "--container", "ptqpipe", "--low-rank", "4", "--low-rank-dtype", "fp8", "-q"]
    dry = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "out"), "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    done = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(dry.stdout)["bytes"] == json.loads(done.stdout)["written_bytes"]
    refused = CliRunner().invoke(main, ["convert", str(model), "--low-rank", "4", "-o", str(tmp_path / "x")])
    assert refused.exit_code != 0
    assert "use --container ptqpipe" in refused.output


def _without(folder: Path, ending: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith(ending)}, folder / "model.safetensors")


def _silent_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["default"]["low_rank"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: _without(f, f"{WEIGHT}_low_rank_right"), "low_rank_right"),
        (lambda f: _without(f, f"{WEIGHT}_low_rank_left"), "low_rank_left"),
        (_silent_config, "no low_rank"),
    ],
)
def test_a_missing_half_is_an_error_and_never_another_weight(
    damage: Any, words: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(model, out)
    damage(out)
    with pytest.raises(CheckpointError, match=words):
        ptqpipe.load_tensors(out)
    assert verify(out, source=model).faults != ()


def test_a_changed_factor_is_a_fault_of_record_and_recipe(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record = run(model, out)
    shutil.copytree(out, tmp_path / "other")
    with CheckpointReader.open(out) as reader:
        entry = reader.entries[f"{WEIGHT}_low_rank_left"]
    with open(entry.file, "r+b") as file:
        file.seek(entry.offset)
        file.write(bytes(2))
    checks = {fault.check for fault in verify(out, source=model).faults}
    assert "record" in checks
    assert not diff(out, tmp_path / "other").equal
    assert diff(tmp_path / "other", tmp_path / "other").equal
    claimed = record["weights"][WEIGHT]
    claimed["squared_error"] *= 1.01
    claimed["relative_mse"] *= 1.01
    damage.write_record(tmp_path / "other", record)
    messages = [fault.message for fault in verify(tmp_path / "other", source=model).faults]
    assert any("low-rank part leaves" in message for message in messages)


def test_the_rank_of_a_narrow_weight_is_its_width(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(hidden=32, inner=32, layers=1))
    record = run(model, tmp_path / "out", scheme="nvfp4", low_rank=64)["weights"]
    assert {entry["low_rank"]["rank"] for entry in record.values()} <= {16, 32}
    assert all(entry["relative_mse"] < 1e-4 for entry in record.values())
    assert verify(tmp_path / "out", source=model).faults == ()
