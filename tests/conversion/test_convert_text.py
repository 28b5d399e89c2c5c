"""Claims about what convert says before it runs: where scales come from, how many units run at once and why."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Option

from ptqpipe.checkpoint.layouts import container_names, get_container
from ptqpipe.cli import main
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.convert_summary import header_text, plan_text
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.numerics.schemes import SCHEMES
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine
from ptqpipe.run.quantities import memory_size
from tests import tiny
from tests.quantization.inputs import inputs_of_llama, write_statistics

LAYERS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama(layers=LAYERS))


@pytest.fixture(scope="module")
def stats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats") / "stats"
    return write_statistics(folder, model, inputs_of_llama(tiny.llama(layers=LAYERS), tokens=32))


@pytest.fixture
def plain(model: Path) -> Iterator[Conversion]:
    with prepare(model, out=Path("nowhere")) as prepared:
        yield prepared


def test_static_input_scales_are_said_to_come_from_the_statistics_where_they_do(model: Path, stats: Path) -> None:
    options = RecipeOptions(format="nvfp4_w4a4", input_scale="percentile", headroom=1.5)
    with prepare(model, options=options, out=Path("nowhere"), stats=stats) as prepared:
        told = header_text(prepared, Machine())
        assert "no calibration" not in told
        assert "from the statistics, percentile x 1.5 of its activations" in told


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("nvfp4_w4a4", "activations up to 2928 do not clip, blocks below 0.1 lose precision (input_amax)"),
        ("fp8_static", "activations up to 336 do not clip, values below 0.012 lose precision (input_amax)"),
    ],
)
def test_without_text_static_input_scales_are_said_to_be_one_constant(model: Path, scheme: str, said: str) -> None:
    with prepare(model, options=RecipeOptions(format=scheme), out=Path("nowhere")) as prepared:
        told = header_text(prepared, Machine())
        assert f"input_global_scale: no calibration, so one constant for every layer: {said}" in told


def test_where_memory_has_no_room_for_the_workers_that_were_asked_for_it_says_what_has(plain: Conversion) -> None:
    for tell in (header_text, plan_text):
        told = tell(plain, Machine(workers=64, memory_bytes=2 << 30))
        found = re.search(r'(\d+) units at a time, not 64: max_memory="2GiB" .*; max_memory="(\d+)MiB" would', told)
        assert found is not None, told
        assert int(found[1]) == ((2 << 30) - BASE_BYTES) // WORKER_BYTES
        assert "at a time" not in tell(plain, Machine(workers=64, memory_bytes=int(found[2]) << 20))
    assert "at a time" not in header_text(plain, Machine(workers=12, memory_bytes=2 << 30))


def test_units_that_need_much_memory_are_said_to_run_fewer_at_a_time(model: Path, stats: Path) -> None:
    with prepare(model, options=RecipeOptions(algorithm="gptq"), out=Path("nowhere"), stats=stats) as prepared:
        most = max(prepared.extra_bytes(job) for job in prepared.jobs)
        own = BASE_BYTES + 5 * WORKER_BYTES + sum(job.source_bytes for job in prepared.jobs)  # four, one ahead
        told = header_text(prepared, Machine(4, memory_bytes=own + 2 * most))
        assert re.search(r"\n  units that need as much memory as model\.layers\.\S+ run 2 at a time; raise", told)
        assert "at a time" not in header_text(prepared, Machine(4, memory_bytes=own + 4 * most))


@pytest.mark.parametrize(("gib", "at_once"), [(4, 2), (5, 3), (64, 6)])
def test_as_many_units_run_at_once_as_memory_has_room_for(
    gib: int, at_once: int, model: Path, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 1 GiB: a limit of four holds two of them, and not three in addition to what the workers have."""
    monkeypatch.setattr(Conversion, "extra_bytes", lambda _, job: (1 << 30) * isinstance(job, QuantizeUnit))
    with prepare(model, options=RecipeOptions(algorithm="gptq"), out=Path("nowhere"), stats=stats) as prepared:
        _, neediest = prepared.least_memory()
        assert neediest is not None
        share = prepared.share_of(Machine(6, memory_bytes=(gib << 30) - 1), prepared.jobs)
        assert prepared.at_once(neediest, share) == at_once


def test_the_dry_run_counts_what_the_run_may_take_and_no_more_than_it_may(plain: Conversion) -> None:
    roomy, least = Machine(workers=2, memory_bytes=64 << 30), Machine(workers=1, memory_bytes=BASE_BYTES + WORKER_BYTES)
    assert BASE_BYTES + 3 * WORKER_BYTES < plain.most_memory(roomy) < BASE_BYTES + 3 * WORKER_BYTES + (8 << 20)
    assert plain.most_memory(least) == least.memory_bytes
    assert f"at most {memory_size(plain.most_memory(roomy))} of memory with 2 workers" in plan_text(plain, roomy)


@pytest.mark.parametrize(
    ("built", "reason"),
    [((None, 0), "not built"), ((object(), cpu_library.ABI - 1), f"built for ABI {cpu_library.ABI - 1}, expected")],
)
def test_missing_kernels_are_told_with_the_reason(
    built: tuple[object, int], reason: str, plain: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "_built", lambda: built)
    told = [line for line in header_text(plain, Machine()).splitlines() if "compiled kernels" in line]
    assert len(told) == 1
    assert reason in told[0]
    assert "pip install ." in told[0]


@pytest.mark.skipif(not cpu_library.known_isas(), reason="no compiled kernels")
def test_kernels_that_are_there_are_not_mentioned(plain: Conversion) -> None:
    assert "compiled kernels" not in header_text(plain, Machine())


def test_every_container_that_is_written_is_in_the_help() -> None:
    schemes = SCHEMES.values()
    written = {name for name in container_names() if any(get_container(name).supports(s) is None for s in schemes)}
    told = next(option for option in main.commands["convert"].params if option.name == "container")
    assert isinstance(told, Option)
    listed = re.search(r": ([^.]+)\.", told.help or "")
    assert listed is not None
    assert set(re.split(", | or ", listed[1])) == written
