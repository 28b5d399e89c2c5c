"""Claims about how likely data are under a model: the loss is transformers' own, and text of another kind is told."""

import math
from pathlib import Path

import pytest
import torch

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import DataFile, Samples, load_samples
from ptqpipe.calibration.likeness import UNLIKE, Likeness, lines_of
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.pipeline.command import pipeline
from ptqpipe.pipeline.demo import MODEL
from ptqpipe.pipeline.tune.command import tune
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions


def samples_of(every: int | None = None) -> Samples:
    """Of one file."""
    none = torch.zeros(0, 4, dtype=torch.int64)
    return Samples(none, none, "", (DataFile("a.txt", None, 9, 9, every=every),), 9)


@pytest.mark.slow
def test_calibrate_tells_the_perplexity_of_each_source(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    known, noise = tmp_path / "known.txt", tmp_path / "noise.txt"
    known.write_text((Path(MODEL) / "heldout.txt").read_text()[:4000])
    noise.write_text("".join(chr(33 + (7 * n * n) % 90) for n in range(4000)))
    options = CalibrateOptions(samples=8, seqlen=16, holdout=0, moments=("diagonal",))
    done = calibrate(MODEL, [f"{known}=1", f"{noise}=1"], tmp_path / "stats", options=options)
    assert done is not None
    line, *warnings = done.notes
    assert line.startswith("perplexity of the data under the model: known.txt ")
    found = float(line.split("noise.txt ")[1])
    model = ptqpipe.load_model(MODEL, dtype="fp32")
    ids = AutoTokenizer.from_pretrained(MODEL)(noise.read_text(), return_tensors="pt")["input_ids"][0]
    with torch.no_grad():
        windows = ids[: len(ids) // 16 * 16].view(-1, 16)
        losses = [float(model(input_ids=one[None], labels=one[None]).loss) for one in windows]
    assert min(losses) < float(torch.tensor(found).log()) < max(losses)
    assert [one for one in warnings if one.startswith("warning: noise.txt is unlike what the model knows")]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "layerwise"])
def test_tune_tells_the_same_as_calibrate(method: str, tmp_path: Path) -> None:
    text = tmp_path / "noise.txt"
    text.write_text("".join(chr(33 + (7 * n * n) % 90) for n in range(4000)))
    windows = {"samples": 8, "seqlen": 16}
    of_calibrate = CalibrateOptions(**windows, holdout=0, moments=("diagonal",))
    known = calibrate(MODEL, [str(text)], tmp_path / "stats", options=of_calibrate)
    assert known is not None
    assert len(known.notes) == 2
    done = tune(MODEL, [str(text)], tmp_path / "codes", options=TuneOptions(**windows, method=method))
    assert done.notes == known.notes


@pytest.mark.slow
def test_convert_says_once_what_several_stages_see(tmp_path: Path) -> None:
    text, lines = tmp_path / "known.txt", []
    text.write_text((Path(MODEL) / "heldout.txt").read_text()[:4000])
    work = PipelineOptions(data=(str(text),), samples=8, seqlen=16)
    pipeline(MODEL, recipe=RecipeOptions("nvfp4_w4a4"), out=tmp_path / "out", work=work, say=lines.append)
    found = [line for line in lines if "perplexity of the data" in line]
    assert len(found) == 1


def test_a_warning_goes_by_what_the_model_expects() -> None:
    like, unlike = Likeness(3.0, 3.0 - UNLIKE + 0.01), Likeness(3.0, 3.0 - UNLIKE - 0.01)
    line = "perplexity of the data under the model: a.txt 20.1"
    assert lines_of({"a.txt": like}, samples_of()) == [line]
    assert lines_of({"a.txt": like}, samples_of(every=8)) == [f"{line}, from one of every 8 rows"]
    assert lines_of({"a.txt": unlike}, samples_of())[1].startswith(
        "warning: a.txt is unlike what the model knows: perplexity 20.1"
    )
    assert lines_of({}, samples_of()) == []


def test_a_model_that_gives_nan_gets_a_warning_instead_of_a_perplexity() -> None:
    found = lines_of({"a.txt": Likeness(3.0, 3.0), "b.txt": Likeness(math.nan, 3.0)}, samples_of())
    assert found == ["warning: the model's logits are not finite; check the weights of its last norm and its head"]


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    known, noise = tmp_path / "a" / "text.txt", tmp_path / "b" / "text.txt"
    for file, text in (
        (known, (Path(MODEL) / "heldout.txt").read_text()[:4000]),
        (noise, "".join(chr(33 + (7 * n * n) % 90) for n in range(4000))),
    ):
        file.parent.mkdir()
        file.write_text(text)
    options = CalibrateOptions(samples=8, seqlen=16, holdout=0, moments=("diagonal",))
    done = calibrate(MODEL, [f"{known}=1", f"{noise}=1"], tmp_path / "stats", options=options)
    assert done is not None
    assert "model: text.txt (1) " in done.notes[0]
    assert [line for line in done.notes if line.startswith("warning: text.txt (2) is unlike what the model knows")]


def test_a_source_whose_weight_gives_it_no_window_is_said(tmp_path: Path) -> None:
    names = [tmp_path / f"{n}.jsonl" for n in (5, 6)]
    for file in names:
        file.write_text('{"input_ids": [5, 6, 7, 8, 9, 10, 11, 12]}\n' * 100)
    few, all_of_them = (
        load_samples([f"{names[0]}={weight}", str(names[1])], Path(MODEL), samples=60, seqlen=4)
        for weight in ("1e-6", "1")
    )
    assert [line.split(",")[0] for line in lines_of({}, few)] == ["warning: no text of 5.jsonl is used"]
    assert lines_of({}, all_of_them) == []
