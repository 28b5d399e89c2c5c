"""calibrate --moments kl: what gradients at outputs and of weights say, and `plan` by it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.calibration import backward as reverse_pass, command as stage
from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.backward import run_backward
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.runner import Runner
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.cli import main
from ptqpipe.conversion.input_moments import module_of
from ptqpipe.errors import CheckpointError
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.rotation import rotated_weight
from ptqpipe.pipeline.budget import cost
from ptqpipe.pipeline.budget.command import Budget, plan_mixed
from ptqpipe.pipeline.budget.error_metric import ByWindows
from ptqpipe.pipeline.budget.plan_units import find_groups, schemes_of
from ptqpipe.run.machine import Machine
from ptqpipe.runtime.skeleton import Skeleton
from tests import tiny
from tests.calibration.models import make_model, make_windows, write_windows

ROWS = 100  # two batches
OPTIONS = CalibrateOptions(samples=ROWS, seqlen=24, moments=("diagonal", "kl"), holdout=8)
ONE = Machine(workers=1)
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_windows(tmp_path_factory.mktemp("text") / "rows.jsonl", make_windows(samples=ROWS + 8))


@pytest.fixture(scope="module")
def stats(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "stats"
    calibrate(model, [str(text)], out, options=OPTIONS, machine=ONE)
    return out


@pytest.mark.slow
def test_they_are_what_the_reverse_pass_gives(model: Path, text: Path, stats: Path) -> None:
    """Of the samples that are not held out, for every linear layer but the head."""
    windows = load_samples([str(text)], model, samples=ROWS, seqlen=24, seed=0, holdout=8).windows
    with Source.open(model) as source, Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner:
        names = ["self_attn.k_proj", "mlp.down_proj"]
        found = dict(run_backward(runner, seed=0, store=InMemory, modules=lambda _block: names, weights=True))
    with Statistics.open(stats) as opened:
        for block, gradients in found.items():
            for name in names:
                (whole,) = gradients.outputs[name]
                known = opened.output_moment(f"{block}.{name}", len(whole))
                assert known is not None
                assert torch.equal(known, whole.diagonal())
                wanted = gradients.weights[name]
                stored = opened.weight_gradients(f"{block}.{name}", (len(wanted.rows), len(wanted.columns)))
                assert stored is not None
                for of in ("rows", "columns", "along"):
                    assert torch.equal(getattr(stored, of), getattr(wanted, of))
        n, k = load_file(model / "model.safetensors")[f"{DOWN}.weight"].shape
        assert opened.weight_gradients(DOWN, (n, k)) is not None
        assert opened.weight_gradients(DOWN, (n, k + 1)) is None
        assert opened.weight_gradients("lm_head", (96, k)) is None
        assert opened.output_moment(DOWN, 129) is None
        assert opened.output_moment("lm_head", 96) is None
        assert all(opened.output_moment(m, opened_rows(model, m)) is not None for m in opened.modules if "layers" in m)
        assert opened.content["settings"]["moments"] == ["diagonal", "kl"]


def opened_rows(model: Path, module: str) -> int:
    """Outputs of a module."""
    return len(load_file(model / "model.safetensors")[f"{module}.weight"])


def test_a_run_that_was_stopped_behind_the_reverse_pass_does_not_repeat_it(
    model: Path, text: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passes = stage.collect_outputs, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return real(*args, **kwargs)

    def stops(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "collect_outputs", counted)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "run_layers", stops)
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, [str(text)], tmp_path / "out", options=OPTIONS, machine=ONE)
    calibrate(model, [str(text)], tmp_path / "out", options=OPTIONS, machine=ONE, mode="resume")
    assert len(passes) == 1
    assert tiny.bytes_of(tmp_path / "out") == tiny.bytes_of(stats)


KILLED = """
import os, signal, sys
from ptqpipe.cli import main
from ptqpipe.calibration import outputs

real = outputs.run_model_backward
outputs.BASE_BYTES = 8 << 30  # all of --max-memory: the hidden states lie on disk


def dies(*args, **kwargs):
    for number, found in enumerate(real(*args, **kwargs)):
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield found


outputs.run_model_backward = dies
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_kill_9_inside_the_reverse_pass_and_resume_give_the_bytes_of_an_undisturbed_run(
    model: Path, text: Path, stats: Path, tmp_path: Path
) -> None:
    words = ["calibrate", model, "--data", text, "--samples", ROWS, "--seqlen", 24, "--moments", "diagonal,kl"]
    words = [*map(str, [*words, "--holdout", 8, "--workers", 1, "-o", tmp_path / "out"])]
    done = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "--resume continues it" in refused.output
    resumed = CliRunner().invoke(main, [*words, "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert "the run backwards is kept only once it is complete: it begins with its first layer" in resumed.output
    assert tiny.bytes_of(tmp_path / "out") == tiny.bytes_of(stats)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_plan_costs_are_kl_to_second_order(model: Path, stats: Path, tmp_path: Path) -> None:
    """By hand, of nearest codes: what follows the weight in one sum with the others of their largest errors, the rest
    in squares."""
    plan = plan_mixed(model, Budget(bits=6), sensitivity=stats, machine=ONE)
    assert plan.meaning == "KL divergence to second order of nearest codes, second moment of x"
    alone, follows = {}, {}
    ptqpipe.convert(model, format="nvfp4", objective="none", out=tmp_path / "nearest", workers=1)
    with Statistics.open(stats) as opened, ptqpipe.load_tensors(tmp_path / "nearest") as nearest:
        for name, w in load_file(model / "model.safetensors").items():
            module = name.removesuffix(".weight")
            d = opened.weight_gradients(module, (w.shape[0], w.shape[-1]))
            if d is None:
                continue
            codes, w = nearest[name], w.double()
            assert isinstance(codes, ptqpipe.QTensor)
            error = codes.dequantize().double() - w
            squares = d.rows.double().unsqueeze(1) * d.columns.double() / d.columns.double().sum()
            a = float((squares * error * w).sum() / (squares * w * w).sum())
            assert a < 0  # codes are smaller than the weights on average
            alone[module] = float((squares * (error - a * w).square()).sum())
            follows[module] = a * d.along.double()
    assert len(alone) == 14
    joint = torch.stack([*follows.values()]).sum(0) * ROWS / (ROWS + 14)
    assert float(follows[DOWN].square().mean()) != pytest.approx(float((follows[DOWN] * joint).mean()), rel=0.05)
    expected = 0.5 * (alone[DOWN] + float((follows[DOWN] * joint).mean()))
    assert plan.costs[DOWN, "nvfp4"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["mixtral", "llama4"])
def test_experts_cost_what_all_of_them_add_to_the_kl(kind: str, text: Path, tmp_path: Path) -> None:
    """By hand, of one layer's experts; in a checkpoint that holds them one by one, and in one that holds stacks."""
    model = make_model(tmp_path / "model", kind)
    calibrate(model, [str(text)], tmp_path / "stats", options=OPTIONS, machine=ONE)
    plan = plan_mixed(model, Budget(bits=9), sensitivity=tmp_path / "stats", formats=("mxfp8a16", "keep"), machine=ONE)
    assert plan.meaning == "KL divergence to second order of nearest codes, second moment of x"
    (group,) = [group for group in plan.groups if "1" in group.id and "experts" in group.id]
    assert len(group.members) >= 8
    expected = 0.0
    with Source.open(model) as source, Statistics.open(tmp_path / "stats") as opened:
        for member in group.members:
            w = SourceRows(source, member.source, shape=member.shape).rows(0, member.shape[0]).float()
            error = (ptqpipe.quantize(w, "mxfp8a16").dequantize() - w).double()
            g, h = opened.output_moment(module_of(member), len(w)), opened.of(module_of(member)).second_moment
            assert g is not None
            expected += 0.5 * float(g.double() @ error.square() @ h.double())
    assert plan.costs[group.id, "mxfp8a16"] == pytest.approx(expected, rel=1e-4)


def test_costs_of_rotated_weights_are_by_gradients_that_are_spread_over_each_block(model: Path, stats: Path) -> None:
    """Where inputs are known by column, as here. What follows the weight is the same rotated."""
    w = rotated_weight(load_file(model / "model.safetensors")[f"{DOWN}.weight"].float(), 32)
    error = (ptqpipe.quantize(w, "nvfp4").dequantize() - w).double()
    with Source.open(model) as source, Statistics.open(stats) as opened:
        groups = [group for group in find_groups(source, schemes_of(("nvfp4", "fp8_dynamic"))) if group.id == DOWN]
        costs = cost.estimate(source, groups, stats=opened, machine=ONE, rotations={"down_proj": 32})
        d = opened.weight_gradients(DOWN, (w.shape[0], w.shape[1]))
    assert d is not None
    columns = d.columns.double().reshape(-1, 32).mean(1).repeat_interleave(32)
    squares = d.rows.double().unsqueeze(1) * columns / columns.sum()
    a = float((squares * error * w).sum() / (squares * w * w).sum())
    alone = (a * d.along.double()).square().mean() * ROWS / (ROWS + 1)
    expected = float((squares * (error - a * w).square()).sum() + alone) / 2
    assert costs[DOWN, "nvfp4"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_of_a_weight_without_its_gradients_costs_are_by_tokens(model: Path, stats: Path, tmp_path: Path) -> None:
    """As experts have them, and statistics of older versions."""
    folder = copy_of(stats, tmp_path / "stats", without=f"{DOWN}.gradient_")
    costs = [plan_mixed(model, Budget(bits=6), sensitivity=path, machine=ONE).costs for path in (stats, folder)]
    assert costs[0].keys() == costs[1].keys()
    w = load_file(model / "model.safetensors")[f"{DOWN}.weight"].float()
    error = (ptqpipe.quantize(w, "nvfp4").dequantize() - w).double()
    with Statistics.open(folder) as opened:
        g, h = opened.output_moment(DOWN, len(w)), opened.of(DOWN).second_moment
    assert g is not None
    expected = 0.5 * float(g.double() @ error.square() @ h.double())
    assert costs[1][DOWN, "nvfp4"] == pytest.approx(expected, rel=1e-4)


def test_gradients_over_different_windows_are_one_clear_line(model: Path, stats: Path, tmp_path: Path) -> None:
    folder = copy_of(stats, tmp_path / "stats")
    tensors = load_file(folder / "outputs.safetensors")
    tensors[f"{DOWN}.gradient_along"] = tensors[f"{DOWN}.gradient_along"][1:].clone()
    save_file(tensors, folder / "outputs.safetensors")
    with pytest.raises(CheckpointError, match="have gradients of weights over different windows; calibrate again"):
        plan_mixed(model, Budget(bits=6), sensitivity=folder, machine=ONE)


@pytest.mark.parametrize("shape", [(), (0,), (4, 25)])
def test_windows_in_another_shape_are_as_if_they_were_not_there(
    shape: tuple[int, ...], model: Path, stats: Path, tmp_path: Path
) -> None:
    folder = copy_of(stats, tmp_path / "stats")
    tensors = load_file(folder / "outputs.safetensors")
    tensors[f"{DOWN}.gradient_along"] = torch.ones(shape)
    save_file(tensors, folder / "outputs.safetensors")
    with Statistics.open(folder) as opened:
        n, k = load_file(model / "model.safetensors")[f"{DOWN}.weight"].shape
        assert opened.weight_gradients(DOWN, (n, k)) is None
        assert opened.weight_gradients(DOWN.replace("1", "0"), (n, k)) is not None
    assert plan_mixed(model, Budget(bits=6), sensitivity=folder, machine=ONE).solution.cost > 0


def test_numbers_that_give_no_finite_cost_are_one_clear_line(
    model: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ByWindows.sums

    def overflows(self: ByWindows, error: torch.Tensor, *more: Any) -> torch.Tensor:
        return real(self, error, *more) * (float("inf") if error.shape == (64, 128) else 1.0)

    monkeypatch.setattr(ByWindows, "sums", overflows)
    with pytest.raises(CheckpointError, match=r"k_proj' is too large or too small for a cost; calibrate again"):
        plan_mixed(model, Budget(bits=6), sensitivity=stats, machine=ONE)


def copy_of(stats: Path, folder: Path, *, without: str = "", damaged: str = "", value: float = 0.0) -> Path:
    """Statistics without some tensors of the reverse pass, or with ``value`` in one, and without hashes."""
    with Statistics.open(stats) as opened:
        content = dict(opened.content)
    folder.mkdir()
    for file in stats.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(stats / "outputs.safetensors")
    if damaged:
        tensors[damaged][-1] = value
    if without:
        assert any(name.startswith(without) for name in tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not (without and name.startswith(without))}
    save_file(kept, folder / "outputs.safetensors")
    (folder / "stats.json").write_text(json.dumps({**content, "files": {}}))
    return folder


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        ("output_moment", "the output moment", -1.0),
        ("output_moment", "the output moment", float("nan")),
        ("gradient_rows", "the gradients", -1.0),
        ("gradient_columns", "the gradients", float("inf")),
        ("gradient_along", "the gradients", float("nan")),
    ],
)
def test_damaged_ones_are_one_clear_line(
    name: str, what: str, value: float, model: Path, stats: Path, tmp_path: Path
) -> None:
    folder = copy_of(stats, tmp_path / "stats", damaged=f"{DOWN}.{name}", value=value)
    with pytest.raises(CheckpointError, match=f"{what} of '{DOWN}' .* not finite or negative; calibrate"):
        plan_mixed(model, Budget(bits=6), sensitivity=folder, machine=ONE)
    (folder / "stats.json").write_bytes((stats / "stats.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"outputs\.safetensors"):  # another hash
        plan_mixed(model, Budget(bits=6), sensitivity=folder, machine=ONE)


def test_of_many_samples_every_few_are_run_backwards(
    model: Path, text: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that statistics of these samples alone have; all of them give the other moments."""
    monkeypatch.setattr(reverse_pass, "TOKENS", 20 * 24 + 1)
    done = calibrate(model, [str(text)], tmp_path / "few", options=OPTIONS, machine=ONE)
    assert done is not None
    assert (done.content["data"]["samples"], done.content["data"]["backwards"]) == (ROWS, 20)
    samples = load_samples([str(text)], model, samples=ROWS, seqlen=24, seed=0, holdout=8)
    rows = write_windows(tmp_path / "rows.jsonl", samples.windows[::5])
    alone = replace(OPTIONS, samples=20, holdout=0)
    calibrate(model, [str(rows)], tmp_path / "alone", options=alone, machine=ONE)
    few, twenty = (load_file(tmp_path / name / "outputs.safetensors") for name in ("few", "alone"))
    assert few.keys() == twenty.keys()
    assert all(torch.equal(few[name], twenty[name]) for name in few)
    with Statistics.open(stats) as every, Statistics.open(tmp_path / "few") as opened:
        assert every.content["data"]["backwards"] == ROWS
        assert torch.equal(opened.of(DOWN).second_moment, every.of(DOWN).second_moment)


OF_SO_MANY_TOKENS = """
import sys
from ptqpipe.calibration import backward as reverse
from ptqpipe.cli import main

reverse.TOKENS = int(sys.argv.pop(1))
main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("kind", "tokens"), [("", reverse_pass.TOKENS), ("", 24 * 21), ("mixtral", 24 * 21)])
def test_two_processes_give_those_of_one(
    kind: str, tokens: int, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels depend on a window's number alone, so that only the order of sums differs; and where there are more
    samples than are run backwards, both take the same ones."""
    model = make_model(tmp_path / kind, kind) if kind else model
    script = tmp_path / "script.py"
    script.write_text(OF_SO_MANY_TOKENS)
    monkeypatch.setattr(reverse_pass, "TOKENS", tokens)
    calibrate(model, [str(text)], tmp_path / "one", options=OPTIONS, machine=ONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [str(tokens), "calibrate", str(model), "--data", str(text), "--samples", str(ROWS), "--holdout", "8"]
    command += ["--seqlen", "24", "--moments", "diagonal,kl", "-o", str(tmp_path / "two"), "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(folder / "outputs.safetensors") for folder in (tmp_path / "one", tmp_path / "two"))
    assert one.keys() == two.keys()
    assert not kind or any("experts" in name for name in one)
    for name, value in one.items():
        assert torch.allclose(two[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().mean())), name


def test_statistics_without_them_give_relative_costs(model: Path, text: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, moments=("diagonal",))
    calibrate(model, [str(text)], tmp_path / "stats", options=options, machine=ONE)
    plan = plan_mixed(model, Budget(bits=6), sensitivity=tmp_path / "stats", machine=ONE)
    assert plan.meaning == "output error of nearest codes relative to the output, second moment of x"
