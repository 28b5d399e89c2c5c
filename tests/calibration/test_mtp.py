"""Claims about statistics of multi-token prediction layers: they are of what enters the layer when it runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.moments import FIRST_WEIGHT
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.verify.command import verify
from ptqpipe.errors import CheckpointError
from ptqpipe.pipeline.tune.command import tune
from ptqpipe.pipeline.tune.options import Settings, TuneOptions
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.runtime import load
from tests import families

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next")
WINDOWS = CalibrateOptions(samples=4, seqlen=16, holdout=0)
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes each model once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = families.make_model(tmp_path_factory.mktemp("mtp") / kind, kind, mtp=True)
        return made[kind]

    return of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four windows of tokens."""
    return families.write_windows(tmp_path_factory.mktemp("data") / "windows.jsonl", samples=4)


def seen(folder: Path, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows that enter two linear layers of the whole model's layer, run at once."""
    model = load(folder, dtype="float32", mtp=True)
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, args: rows.__setitem__(name, args[0].flatten(0, 1))

    model.mtp.eh_proj.register_forward_pre_hook(keep("join"))
    model.mtp.block.self_attn.o_proj.register_forward_pre_hook(keep("o_proj"))
    with torch.no_grad():
        states = model.get_decoder()(windows).last_hidden_state
        model.mtp(model, model.mtp.pair(model, states[:, :-1], windows[:, 1:]))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_of_what_enters_the_layer(kind: str, make: Make, data: Path, tmp_path: Path) -> None:
    calibrate(make(kind), [str(data)], tmp_path / "stats", options=WINDOWS)
    rows = seen(make(kind), torch.tensor([json.loads(line)["input_ids"] for line in data.read_text().splitlines()]))
    base = families.mtp_base(kind)
    join = "mtp.fc" if kind == "qwen3_next" else f"{base}eh_proj"
    with Statistics.open(tmp_path / "stats") as stats:
        for name, module in (("join", join), ("o_proj", f"{base}self_attn.o_proj")):
            found = stats.of(module)
            assert found.tokens == len(rows[name]) == 4 * 15
            weights = torch.ones(4, 15)
            weights[:, 0] = FIRST_WEIGHT
            squares = weights.flatten() @ rows[name].square() / weights.sum()
            assert torch.allclose(found.second_moment, squares, rtol=1e-3, atol=1e-6)
            assert torch.allclose(found.amax, rows[name].abs().amax(0), rtol=1e-3)
        assert any(f"{base}mlp.experts." in module for module in stats.modules)
        if kind == "glm4_moe":
            assert f"{base}self_attn" in stats.attentions


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "layerwise"])
def test_tune_chooses_the_codes_of_the_layer_behind_the_tuned_model(
    method: str, make: Make, data: Path, tmp_path: Path
) -> None:
    model = make("glm4_moe")
    options = TuneOptions(samples=4, seqlen=16, method=method, settings=Settings(steps=2))
    given = RecipeOptions("nvfp4", mtp="nvfp4", scale_search="absmax", global_scale="absmax")
    tune(model, [str(data)], tmp_path / "codes", recipe=given, options=options)
    out = ptqpipe.convert(model, out=tmp_path / "out", codes=tmp_path / "codes", workers=1).out
    plain = ptqpipe.convert(model, out=tmp_path / "plain", format="nvfp4", mtp="nvfp4", workers=1).out
    name = f"{families.mtp_base('glm4_moe')}self_attn.o_proj.weight"
    tuned, nearest = (load_file(folder / "model.safetensors") for folder in (out, plain))
    changed = [part for part in tuned if part.startswith(name.removesuffix("weight"))]
    assert any(not torch.equal(tuned[part], nearest[part]) for part in changed)
    report = verify(out, source=model, workers=1)
    assert report.ok, [fault.message for fault in report.faults]


@pytest.mark.slow
def test_a_layer_that_is_quantized_and_calibrated_is_verified_with_its_statistics(
    make: Make, data: Path, tmp_path: Path
) -> None:
    model, stats = make("deepseek_v3"), tmp_path / "stats"
    calibrate(model, [str(data)], stats, options=WINDOWS)
    done = ptqpipe.convert(model, out=tmp_path / "out", format="nvfp4_w4a4", mtp="fp8", stats=stats, workers=1)
    assert any(name.startswith(families.mtp_base("deepseek_v3")) for name in dict(done.record)["weights"])
    report = verify(done.out, source=model, statistics=stats, workers=1)
    assert report.ok, [fault.message for fault in report.faults]


def test_a_layer_without_one_of_its_parts_is_refused_before_anything_runs(
    make: Make, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(make("glm4_moe"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    lost = f"{families.mtp_base('glm4_moe')}hnorm.weight"
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"multi-token prediction layer without '{lost}'"):
        calibrate(tmp_path / "model", [str(data)], tmp_path / "stats", options=WINDOWS)
    assert not (tmp_path / "stats").exists()
