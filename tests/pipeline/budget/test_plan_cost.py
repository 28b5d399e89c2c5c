"""Claims about what `plan` reads and holds while it estimates costs."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ptqpipe
from ptqpipe.calibration.inputs import InputStatistics, WeightGradients
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.cli import main
from ptqpipe.errors import UsageError
from ptqpipe.models.source import Source
from ptqpipe.numerics.rotation import rotated
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.pipeline.budget import cost
from ptqpipe.pipeline.budget.error_metric import ByTokens, ByWindows, input_noise
from ptqpipe.pipeline.budget.plan_units import Group, find_groups, schemes_of
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine
from ptqpipe.runtime.input_quantizers import InputQuantizer
from tests import tiny
from tests.quantization.inputs import inputs_of_llama, write_statistics

ROOMY = Machine(3, memory_bytes=8 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama())


@pytest.fixture(scope="module")
def stats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_statistics(tmp_path_factory.mktemp("stats") / "stats", model, inputs_of_llama(tiny.llama()))


def groups_of(source: Source) -> list[Group]:
    return list(find_groups(source, schemes_of(("nvfp4", "fp8_dynamic"))))


def test_a_moment_that_several_weights_share_is_read_once(
    model: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = Statistics.of

    def watched(self: Statistics, module: str, **asked: bool) -> InputStatistics:
        read.append(self.key(module))
        return real(self, module, **asked)

    monkeypatch.setattr(Statistics, "of", watched)
    with Source.open(model) as source, Statistics.open(stats) as opened:
        costs = cost.estimate(source, groups_of(source), stats=opened, machine=ROOMY)
    assert costs
    assert sorted(read) == sorted(set(read))
    assert len(read) == 2 * 4  # of each layer: q, k and v; o; gate and up; down


@pytest.mark.parametrize("room", [1, 2])
def test_as_many_units_are_estimated_at_once_as_memory_has_room_for(
    room: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, lock, together = [0], [0], threading.Lock(), threading.Event()
    real = cost._unit_errors

    def watched(*args: Any, **kwargs: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if most[0] == room:
                together.set()
        together.wait(60)  # for the second, and then a little for one too many
        time.sleep(0.05)
        try:
            return real(*args, **kwargs)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(cost, "_unit_errors", watched)
    monkeypatch.setattr(cost, "_bytes", lambda *_: 1 << 30)
    memory = BASE_BYTES + 4 * WORKER_BYTES + (room << 30)  # three workers and one that reads ahead
    with Source.open(model) as source:
        few = cost.estimate(source, groups_of(source), stats=None, machine=Machine(3, memory_bytes=memory))
        assert most[0] == room
        monkeypatch.undo()
        assert few == cost.estimate(source, groups_of(source), stats=None, machine=ROOMY)


def test_a_limit_below_what_one_unit_needs_is_refused_with_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny.llama(layers=1, inner=1024)
    model = tiny.save(tmp_path / "wide", tensors)
    stats = write_statistics(tmp_path / "stats", model, inputs_of_llama(tensors, tokens=32))
    least = BASE_BYTES + WORKER_BYTES + 4 * 1024 * 1024 + 4 * 1024 * 128  # the moment, and the weight in float32
    with Source.open(model) as source, Statistics.open(stats) as opened:
        groups = groups_of(source)
        small = Machine(1, memory_bytes=least - 1)
        with pytest.raises(
            UsageError, match=rf"too small for model.layers.0.mlp.down_proj; give max_memory=.{-(-least >> 20)}MiB"
        ):
            cost.estimate(source, groups, stats=opened, machine=small)
        assert cost.estimate(source, groups, stats=opened, machine=Machine(1, memory_bytes=least))
    arguments = ["plan", str(model), "--budget", "6bits", "--stats", str(stats), "-o", str(tmp_path / "r.yaml")]
    told = CliRunner().invoke(main, [*arguments, "--max-memory", str(least - 1)])
    assert told.exit_code != 0
    assert "--max-memory" in told.output


def test_a_format_that_quantizes_inputs_costs_what_these_add_to_the_output(model: Path, stats: Path) -> None:
    schemes = schemes_of(("mxfp8", "mxfp8a16"))
    noise, inputs = input_noise(get_scheme("mxfp8").activation), inputs_of_llama(tiny.llama())
    quantize = InputQuantizer(get_scheme("mxfp8").activation)
    with Source.open(model) as source, Statistics.open(stats) as opened:
        groups = [group for group in find_groups(source, schemes) if len(group.members) == 1]  # one role in a group
        free = cost.estimate(source, groups, stats=None, machine=ROOMY)
        known = cost.estimate(source, groups, stats=opened, machine=ROOMY)
        followed = cost.estimate(source, groups, stats=opened, machine=ROOMY, follows=True)
        for group in groups:
            (member,) = group.members
            with_inputs, without = (group.id, "mxfp8"), (group.id, "mxfp8a16")
            assert free[with_inputs] > free[without] + noise / 2
            added = known[with_inputs] - known[without]
            w, x = source.reader.read(member.weight).float(), inputs[member.module].float()
            error = ((quantize(x) - x) @ w.T).square().mean() / (x @ w.T).square().mean()
            assert 0.5 < added / (cost.INPUTS * float(error)) < 2
            assert followed[with_inputs] - followed[without] == pytest.approx(added / cost.GPTQ_SHARE)
            assert followed[without] == known[without]
    assert groups


def test_rotated_weights_are_compared_rotated(tmp_path: Path) -> None:
    """By converting with the rotation: a weight with one loud column loses less where its columns are rotated."""
    tensors = tiny.llama()
    for name in tensors:
        if name.endswith("down_proj.weight"):
            tensors[name][:, 5] *= 20
    model = tiny.save(tmp_path / "model", tensors)
    found = {}
    with Source.open(model) as source:
        groups = [group for group in groups_of(source) if "down_proj" in group.id]
        for block in (0, 32):
            rotations = {"down_proj": block} if block else None
            found[block] = cost.estimate(source, groups, stats=None, machine=ROOMY, rotations=rotations)
        energies = [float(source.reader.read(group.members[0].weight).double().square().sum()) for group in groups]
    done = ptqpipe.convert(model, format="mxfp4a16", rotate="down_proj:32", out=tmp_path / "out", workers=1)
    assert done.record["weights"]
    with Source.open(model) as source:
        groups = [group for group in find_groups(source, schemes_of(("mxfp4a16", "fp8"))) if "down_proj" in group.id]
        costs = cost.estimate(source, groups, stats=None, machine=ROOMY, rotations={"down_proj": 32})
    for group in groups:
        error = done.record["weights"][group.members[0].weight]["squared_error"]
        assert costs[(group.id, "mxfp4a16")] == pytest.approx(error / (sum(energies) / len(energies)), rel=1e-6)
    assert all(found[32][key] != found[0][key] for key in found[0])


def test_moments_of_rotated_inputs(model: Path) -> None:
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 2, 64)
    full, turned = x.t() @ x / len(x), rotated(x, 32)
    expected = turned.t() @ turned / len(x)
    torch.testing.assert_close(cost._rotated(full, 32), expected, rtol=1e-4, atol=1e-4)
    diagonal = cost._rotated(full.diagonal().clone(), 32)
    assert diagonal.shape == (64,)
    torch.testing.assert_close(diagonal, expected.diagonal(), rtol=0.15, atol=0)  # columns are independent by sample
    assert cost._rotated(full, 0) is full


@pytest.mark.slow
@pytest.mark.parametrize("known", ["diagonal", "full"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_costs_by_windows_know_that_tokens_add_up(tokens: int, known: str) -> None:
    """Of a linear layer in windows with a topic, by the mean of (sum of d E)^2 over windows themselves. E has signs of
    its own, but for a hundredth of the weight. By tokens it is as much only where windows have one."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, windows = 24, 40, 6000
    w = torch.randn(rows, columns, generator=generator)
    x = torch.randn(windows, tokens, columns, generator=generator) * torch.linspace(0.2, 2, columns)
    topic = torch.randn(windows, 1, rows, generator=generator)  # of all tokens of a window
    g = topic + torch.randn(windows, tokens, rows, generator=generator) * torch.linspace(1, 2, rows)
    x, g = x + 0.7, g - 0.1 * (x @ w.t())
    d = torch.einsum("stn,stk->snk", g, x)
    squares, h = d.square().mean(0) / tokens, torch.einsum("stk,stl->kl", x, x) / (windows * tokens)
    along = (d * w).sum((1, 2)) / tokens**0.5
    moment = h if known == "full" else h.diagonal().clone()
    by_tokens = ByTokens(moment, h.diagonal(), g.square().mean((0, 1)).sqrt().unsqueeze(1))
    gradients = WeightGradients(squares.sum(1), squares.sum(0), along)
    by_windows = ByWindows.of(gradients, by_tokens, diagonal=h.diagonal())
    found = torch.zeros(3, dtype=torch.float64)
    for _ in range(100):
        error = 0.05 * torch.randn(rows, columns, generator=generator) - 0.01 * w
        halves = [(error[run], w[run], run.start, 0.0) for run in (slice(0, 10), slice(10, rows))]
        of = [sum(m.sums(*half) for half in halves) for m in (by_windows, by_tokens)]
        exact = (d * error).sum((1, 2)).square().mean() / tokens
        costs = [total.beside(total.follows) for total in (by_windows.total(of[0]), by_tokens.total(of[1]))]
        found += torch.tensor([exact, *costs], dtype=torch.float64)
    assert float(found[1] / found[0]) == pytest.approx(1, abs=0.1)
    assert (float(found[2] / found[0]) > 0.8) == (tokens == 1)
