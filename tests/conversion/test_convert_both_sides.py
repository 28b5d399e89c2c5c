"""Claims about convert --stats where calibrate has found what the model minds at outputs: codes cost less in that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.calibration.store import outputs_of
from ptqpipe.check.evaluate.tokenized_text import SAMPLE
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.input_moments import module_of
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline import demo
from ptqpipe.pipeline.tune import command as tune
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from tests.calibration.models import make_model, make_windows, write_windows

DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"
ONE = Machine(workers=1)
GPTQ = RecipeOptions("nvfp4", algorithm="gptq")
KINDS = {"one": ("diagonal", "full"), "both": ("diagonal", "full", "kl")}  # sides -> moments


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SAMPLE.read_text(encoding="utf-8")[:20000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of both kinds, and what NVFP4 makes of the demo model with them."""
    folder = tmp_path_factory.mktemp("made")
    for name, moments in KINDS.items():
        options = CalibrateOptions(samples=32, seqlen=64, moments=moments)
        calibrate(DEMO, [str(text)], folder / f"{name}-stats", options=options, machine=ONE)
        with prepare(DEMO, options=GPTQ, out=folder / name, stats=folder / f"{name}-stats") as prepared:
            convert(prepared, machine=ONE)
    return folder


def cost_of(folder: Path, stats: Path) -> float:
    """tr(G E H E^T) over all weights, from the bytes, float64."""
    source, total = load_file(DEMO / "model.safetensors"), 0.0
    with Statistics.open(stats) as known, ptqpipe.load_tensors(folder) as loaded:
        for name, w in source.items():
            q, module = loaded[name], name.removesuffix(".weight")
            runs = known.output_moments(module, len(w)) if isinstance(q, QTensor) else None
            if isinstance(q, QTensor) and runs is not None:
                error, moment = w.double() - q.dequantize().double(), known.of(module, full=True).full_moment
                assert moment is not None
                for g, e in zip(runs, torch.split(error, [len(g) for g in runs]), strict=True):
                    total += float(((g.double() @ e @ moment.double()) * e).sum())
    return total


@pytest.mark.slow
def test_codes_on_both_sides_cost_the_model_less(made: Path) -> None:
    one, both = (cost_of(made / name, made / "both-stats") for name in KINDS)
    assert 0 < both < 0.8 * one


@pytest.mark.slow
def test_the_record_says_in_which_metric_a_weight_was_quantized(made: Path) -> None:
    for name, metric in (("one", "output"), ("both", "kl")):
        record = json.loads((made / name / "ptqpipe.json").read_text())
        assert {entry["metric"] for entry in record["weights"].values()} == {metric}


def test_the_moments_on_disk_have_the_diagonal_that_plan_reads(made: Path) -> None:
    rows = {name.removesuffix(".weight"): len(w) for name, w in load_file(DEMO / "model.safetensors").items()}
    with Statistics.open(made / "both-stats") as stats:
        known = {module: stats.output_moments(module, rows[module]) for module in stats.modules if module in rows}
        runs = {module: found for module, found in known.items() if found is not None}
        assert len(runs) > 10
        for module, found in runs.items():
            squares = stats.output_moment(module, rows[module])
            assert squares is not None
            assert torch.equal(torch.cat([g.diagonal() for g in found]), squares)
            assert all(torch.equal(g, g.t()) for g in found)
            assert stats.output_moments(module, rows[module] + 1) is None
    with Statistics.open(made / "one-stats") as stats:
        assert not any(map(stats.knows_outputs, stats.modules))


@pytest.mark.slow
def test_verify_finds_codes_on_both_sides_again(made: Path) -> None:
    assert verify(made / "both", source=DEMO, statistics=made / "both-stats").faults == ()
    assert verify(made / "both", source=DEMO, statistics=made / "one-stats").faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "refine"),
    [("fp8", 3), ("fp8_dynamic", 0), ("int8_w8a8", 3), ("int4_g32", 3), ("mxfp8", 0), ("mxfp4", 0), ("nvfp4_w4a4", 0)],
)
def test_every_format_whose_rows_have_scales_of_their_own_is_done_so(
    scheme: str, refine: int, made: Path, tmp_path: Path
) -> None:
    options = RecipeOptions(scheme, algorithm="gptq", refine_passes=refine)
    with prepare(DEMO, options=options, out=tmp_path / "out", stats=made / "both-stats") as prepared:
        convert(prepared, machine=ONE)
    assert verify(tmp_path / "out", source=DEMO, statistics=made / "both-stats").faults == ()


@pytest.mark.slow
def test_layerwise_tune_has_the_codes_of_convert(made: Path, text: Path, tmp_path: Path) -> None:
    options = TuneOptions(samples=32, seqlen=64, method="layerwise", metric="kl")
    done = tune.tune(DEMO, [str(text)], tmp_path / "codes", recipe=RecipeOptions("nvfp4"), options=options, machine=ONE)
    assert done.content.get("metric") == "kl"
    codes = {k: t for file in (tmp_path / "codes").glob("*.safetensors") for k, t in load_file(file).items()}
    with ptqpipe.load_tensors(made / "both") as loaded:
        names = [name.removesuffix(".data") for name in codes if name.endswith(".data")]
        assert names
        for name in names:
            q = loaded[name]
            assert isinstance(q, QTensor)
            assert torch.equal(q.data.view(torch.uint8), codes[f"{name}.data"].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("suffix", "what"),
    [
        ("output_moments.0", "an output moment"),
        (".full_moment", "full_moment"),
        (".held_full_moment", "held_full_moment"),
    ],
)
def test_moments_that_are_not_finite_are_one_line(
    suffix: str, what: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[Statistics, str], torch.Tensor] = Statistics._read
    monkeypatch.setattr(
        Statistics, "_read", lambda self, name: real(self, name) * (float("nan") if name.endswith(suffix) else 1)
    )
    with (
        prepare(DEMO, options=GPTQ, out=tmp_path / "out", stats=made / "both-stats") as prepared,
        pytest.raises(CheckpointError, match=rf"has {what} of '.*' that is not finite; calibrate again"),
    ):
        convert(prepared, machine=ONE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"])
def test_experts_have_them_by_the_names_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    model, windows = make_model(tmp_path / "model", kind), make_windows(samples=16)
    tokens = write_windows(tmp_path / "tokens.jsonl", windows)
    options = CalibrateOptions(samples=16, seqlen=windows.shape[1], holdout=0, moments=KINDS["both"])
    calibrate(model, [str(tokens)], tmp_path / "stats", options=options, machine=ONE)
    recipe = RecipeOptions("nvfp4", algorithm="gptq", container="ptqpipe")  # which holds the experts of all
    with prepare(model, options=recipe, out=tmp_path / "out", stats=tmp_path / "stats") as prepared:
        stats = prepared.statistics
        assert stats is not None
        members = [m for unit in prepared.outputs.plan.units for m in unit.members if ".experts" in m.key]
        assert len(members) >= 8
        for member in members:
            runs = stats.output_moments(module_of(member), member.shape[0])
            squares = stats.output_moment(module_of(member), member.shape[0])
            assert runs is not None
            assert squares is not None  # a mean over all tokens, of which the expert is given some
            found = torch.cat([g.diagonal() for g in runs])
            share = squares / found
            assert torch.allclose(share, share.mean().expand_as(share), rtol=1e-3)
            assert 0 < float(share.mean()) <= 1.001
        done = convert(prepared, machine=ONE)
    assert done is not None


def test_statistics_without_full_moments_say_what_is_missing(text: Path, tmp_path: Path) -> None:
    options = CalibrateOptions(samples=8, seqlen=32, moments=("diagonal", "kl"))
    calibrate(DEMO, [str(text)], tmp_path / "stats", options=options, machine=ONE)
    assert not list((tmp_path / "stats").glob(f"{outputs_of('*')}.safetensors"))
    with pytest.raises(UsageError, match="diagonal,full"):
        prepare(DEMO, options=GPTQ, out=tmp_path / "out", stats=tmp_path / "stats")
