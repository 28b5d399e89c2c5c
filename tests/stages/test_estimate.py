"""Claims about the time that a dry run tells. Times are given, not taken: the sums are what is tested."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ptqpipe.algorithms import calibrated, lorc
from ptqpipe.plan import Unit
from ptqpipe.recipe import RecipeOptions
from ptqpipe.stages.common.machine import Machine
from ptqpipe.stages.convert import estimate
from ptqpipe.stages.convert.memory import extra_bytes
from ptqpipe.stages.convert.prepare import prepare
from tests import tiny
from tests.algorithms.inputs import inputs_of_llama, write_statistics

ROOMY = 64 << 30
GPTQ = RecipeOptions(scheme="nvfp4", algorithm="gptq")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama(hidden=256, inner=1024))


@pytest.fixture(scope="module")
def stats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = inputs_of_llama(tiny.llama(hidden=256, inner=1024), tokens=32)
    return write_statistics(tmp_path_factory.mktemp("stats") / "stats", model, inputs)


@pytest.fixture(autouse=True)
def many_processors_and_a_fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "processors", lambda: list(range(64)))
    monkeypatch.setattr(estimate, "_read_rate", lambda _: 1e30)


def timed_by(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Unit], float]) -> None:
    monkeypatch.setattr(estimate, "_time", lambda unit, *_args, **_kwargs: seconds(unit))


def test_every_rule_is_timed_and_not_only_its_format_and_search(
    model: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_by(monkeypatch, lambda unit: unit.elements * (300.0 if unit.rule.algorithm == "gptq" else 1.0))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nrules:\n"
        "  - {match: 're:.*down_proj', format: nvfp4, algorithm: gptq}\n"
        "  - {match: '*', format: nvfp4}\n"
    )
    with prepare(model, recipe_path=recipe, out=tmp_path / "out", stats=stats) as prepared:
        units = prepared.plan.units
        fed_back = sum(unit.elements for unit in units if unit.rule.algorithm == "gptq")
        rest = sum(unit.elements for unit in units) - fed_back
        assert fed_back > 0
        assert rest > 0
        told = estimate.estimate_seconds(prepared, Machine(1, memory_bytes=ROOMY))
    assert told == pytest.approx(300.0 * fed_back + rest)


def test_what_grows_faster_than_the_matrix_is_scaled_to_its_size(
    model: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(unit: Unit) -> float:
        return 3e-6 * unit.elements + 5e-9 * float(unit.elements**1.5)

    monkeypatch.setattr(estimate, "LEAST", 1 << 12)
    monkeypatch.setattr(estimate, "ENOUGH_SECONDS", 0.0)  # two samples, both smaller than the largest units
    timed_by(monkeypatch, seconds)
    with prepare(model, options=GPTQ, out=Path("nowhere"), stats=stats) as prepared:
        told = estimate.estimate_seconds(prepared, Machine(1, memory_bytes=ROOMY))
        assert told == pytest.approx(sum(map(seconds, prepared.plan.units)))


def test_the_time_is_divided_by_the_workers_that_memory_has_room_for(
    model: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_by(monkeypatch, lambda unit: float(unit.elements))
    with prepare(model, out=Path("nowhere")) as prepared:
        total = sum(unit.elements for unit in prepared.plan.units)
        for workers, memory, at_once in ((2, ROOMY, 2), (6, ROOMY, 6), (6, 1 << 30, 4)):
            told = estimate.estimate_seconds(prepared, Machine(workers, memory_bytes=memory))
            assert told == pytest.approx(total / at_once)
    with prepare(model, options=GPTQ, out=Path("nowhere"), stats=stats) as prepared:
        most = max(extra_bytes(unit, prepared) for unit in prepared.plan.units)
        monkeypatch.setattr("ptqpipe.stages.convert.memory.extra_bytes", lambda *_: 1 << 30)
        told = estimate.estimate_seconds(prepared, Machine(6, memory_bytes=(4 << 30) - 1))
        assert told == pytest.approx(total / 2)  # two units of 1 GiB, and not three beside the workers' own
    assert most > 0


def test_processors_that_are_not_there_compute_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, lambda unit: float(unit.elements))
    monkeypatch.setattr(estimate, "processors", lambda: [0, 1])
    with prepare(model, out=Path("nowhere")) as prepared:
        total = sum(unit.elements for unit in prepared.plan.units)
        assert estimate.estimate_seconds(prepared, Machine(6, memory_bytes=ROOMY)) == pytest.approx(total / 2)


@pytest.mark.parametrize(
    ("options", "module", "function"),
    [
        (GPTQ, calibrated, "quantize"),
        (RecipeOptions(algorithm="rtn", weighting="block"), calibrated, "quantize"),
        (RecipeOptions(algorithm="rtn", container="ptqpipe", low_rank=4), lorc, "correct"),
    ],
)
def test_what_is_timed_is_what_the_rule_runs(
    options: RecipeOptions, module: Any, function: str, model: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = getattr(module, function)

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, function, watched)
    monkeypatch.setattr(estimate, "ENOUGH_SECONDS", 0.0)
    with prepare(model, options=options, out=Path("nowhere"), stats=stats) as prepared:
        assert estimate.estimate_seconds(prepared, Machine(1, memory_bytes=ROOMY)) > 0
    assert calls
