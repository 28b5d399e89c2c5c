"""Reports on calibrated models, which are judged by the error of their outputs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ptqpipe.check.report.command import make_report
from ptqpipe.check.report.compare_command import compare
from ptqpipe.check.report.gather import gather
from ptqpipe.check.report.rendering import render_html, render_markdown
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.prepare import prepare
from ptqpipe.recipe.options import RecipeOptions
from tests.check.report.pages import Page, titles


def test_what_calibration_did_is_shown_and_its_scales_are_not_held_to_the_unweighted_error(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "calibrated"
    folder.mkdir()
    for file in pair[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "ptqpipe.json").read_text())
    for index, entry in enumerate(record["weights"].values()):
        entry |= {"algorithm": "gptq", "weighting": "diagonal", "versus_rtn": 0.5, "reverted": index == 0}
    record["statistics"] = {"digest": "d" * 64}
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    report = gather(folder, source=pair[0])
    assert report.proof.weights == 1  # the reverted one
    page, text = "".join(Page(render_html(report)).text), render_markdown(report)
    assert "What calibration gained" in page
    assert f"1 of {len(report.weights)} weights keep plain rounding" in page
    assert "d" * 64 in page
    assert "| 0.500 |" in text
    assert "What calibration gained" not in "".join(Page(render_html(gather(pair[1]))).text)


@pytest.mark.slow
def test_calibrated_models_are_judged_by_their_output_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Card, first tile and first section; nothing counts proofs or weight error where they have no meaning."""
    folder = tmp_path / "calibrated"
    shutil.copytree(pair[1], folder)
    record = json.loads((folder / "ptqpipe.json").read_text())
    gptq = {"algorithm": "gptq", "weighting": "diagonal", "versus_rtn": 0.25, "reverted": False, "proven": False}
    for entry in record["weights"].values():
        entry |= gptq | {"held_out": True}
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    report = gather(folder, source=pair[0])
    assert report.notes == gather(pair[1], source=pair[0]).notes  # that nothing keeps plain rounding is no warning
    page = Page(render_html(report))
    heads, text = titles(render_html(report)), "".join(page.text)
    assert heads[:3] == ["Quality not measured", "Output error", "Bits per weight"]
    assert "Weight error" not in heads
    assert "Scales proven optimal" not in heads
    bought = heads.index("What calibration gained")
    assert bought < heads.index("Weight error by layer and role") < heads.index("What each choice gained")
    assert "0.250 of rounding" in text
    assert "on held-out samples" in text
    assert "because calibration accepts more weight error for less output error" in text
    told = render_markdown(report)
    assert "output error 0.250" in told
    assert "weight error" not in told
    assert "proven" not in told
    plain = titles(render_html(gather(pair[1], source=pair[0])))
    assert plain[:4] == ["Quality not measured", "Bits per weight", "Weight error", "Scales proven optimal"]
    assert not {"Output error", "What calibration gained"} & set(plain)
    _, summary = make_report(folder, source=pair[0], out=tmp_path / "x.html")
    assert "output error 0.250 times plain rounding's, on held-out samples\n" in summary
    for entry in record["weights"].values():
        entry["held_out"] = False
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    assert "on the calibration samples" in render_html(gather(folder))


def test_blocks_of_learned_codes_are_judged_by_what_tune_measured(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(pair[1], folder)
    record = json.loads((folder / "ptqpipe.json").read_text())
    for entry in record["weights"].values():
        entry |= {"algorithm": "learned", "proven": False}
    blocks = {
        "model.layers.0": {"start_loss": 2.0, "learned_loss": 0.5, "kept": True, "held_out": True},
        "model.layers.1": {"start_loss": 2.0, "learned_loss": 3.0, "kept": False, "held_out": True},
        "model.layers.2": {"start_loss": None, "learned_loss": None, "kept": False, "held_out": True},
        "damaged": 3,
    }
    record["rounding"] = {"digest": "d" * 64, "blocks": blocks}
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    report = gather(folder, source=pair[0])
    assert [(block.name, block.ratio) for block in report.blocks] == [("model.layers.0", 0.25), ("model.layers.1", 1.0)]
    heads, text = titles(render_html(report)), "".join(Page(render_html(report)).text)
    assert heads[1] == "Output error of layers"
    assert "Scales proven optimal" not in heads
    assert "0.625" in text
    assert "times that of plain rounding" in text
    assert "decoder layers 0.625 times that of plain rounding, on held-out samples" in render_markdown(report)
    record["recipe"]["rules"][0]["algorithm"] = "gptq"
    record["rounding"]["blocks"]["model.layers.0"]["held_out"] = False
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    told = render_markdown(gather(folder))
    assert "that of the codes before tuning, on held-out samples where there were any" in told
    record["rounding"]["blocks"] = ["no", "mapping"]
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    assert "does not show what their layers gained" in render_html(gather(folder))
    record["rounding"] = {
        "digest": "d" * 64,
        "method": "layerwise",
        "blocks": {"model.layers.2": blocks["model.layers.2"]},
    }
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    told = "".join(Page(render_html(gather(folder))).text)
    assert "GPTQ chose the codes of each layer independently" in told
    assert "ptqpipe eval tuned --source MODEL measures" in " ".join(told.split())


def judged(
    pair: tuple[Path, Path], folder: Path, *, calibrated: float = 0.0, tuned: float = 0.0, start: str = "rtn"
) -> Path:
    """A copy of a checkpoint, with the record of one whose codes data chose: at an output error of each weight, or of
    each decoder layer."""
    shutil.copytree(pair[1], folder)
    record = json.loads((folder / "ptqpipe.json").read_text())
    for entry in record["weights"].values() if calibrated or tuned else ():
        entry |= {"algorithm": "gptq" if calibrated else "learned", "weighting": "diagonal", "proven": False}
        entry |= {"versus_rtn": calibrated, "reverted": False, "held_out": True} if calibrated else {}
    if tuned:
        block = {"start_loss": 2.0, "learned_loss": 2.0 * tuned, "kept": True, "held_out": True}
        record["rounding"] = {"digest": "d" * 64, "blocks": {f"model.layers.{i}": block for i in range(2)}}
        record["recipe"]["rules"][0]["algorithm"] = start
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("kinds", "lines", "in_roles"),
    [
        (({}, {}), ["a", "b"], "SQNR, dB"),
        (({"calibrated": 0.25}, {}), ["a", "b"], "output error, plain rounding = 1"),
        (({"tuned": 0.25}, {}), ["a", "b"], ""),
        (({"tuned": 0.25, "start": "gptq"}, {}), [], ""),
        (({"calibrated": 0.25}, {"tuned": 0.5}), ["a"], "output error, plain rounding = 1"),
    ],
    ids=["no data", "calibrated", "tuned", "tuned from other codes", "both"],
)
def test_checkpoints_of_data_are_never_compared_by_the_error_of_their_weights(
    kinds: tuple[dict[str, Any], dict[str, Any]],
    lines: list[str],
    in_roles: str,
    pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """Which is larger where the model is better."""
    folders = [judged(pair, tmp_path / name, **kind) for name, kind in zip("ab", kinds, strict=True)]
    compare(folders, out=tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    page, data = Page(text), any(kinds)
    drawn = [attributes["data-series"] for tag, attributes in page.tags if tag == "g" and "data-series" in attributes]
    assert sorted(set(drawn)) == lines
    assert ("SQNR" in "".join(page.text)) is not data
    assert f"<caption>Formats{' and ' + in_roles if in_roles else ''}</caption>" in text
    tips = [attributes["data-tip"] or "" for _, attributes in page.tags if "data-tip" in attributes]
    if data and lines:
        assert {tip.rpartition(" ")[2] for tip in tips if tip.startswith("layer 0  a")} == {"0.250"}


def test_output_errors_of_different_formats_are_not_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each is relative to plain rounding in its own format."""
    prepared = prepare(pair[0], options=RecipeOptions(format="fp8"), out=tmp_path / "fp8")
    with prepared:
        convert(prepared)
    compare([judged(pair, tmp_path / "a", calibrated=0.25), tmp_path / "fp8"], out=tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "Layer by layer" not in text
    assert "<caption>Formats</caption>" in text
