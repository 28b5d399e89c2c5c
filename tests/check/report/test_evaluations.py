"""Eval files in reports: the verdict, where the model diverges, and checkpoints compared."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptqpipe.check.report.command import make_report
from ptqpipe.check.report.compare_command import compare
from ptqpipe.check.report.gather import gather
from ptqpipe.check.report.quality import sample_texts
from ptqpipe.check.report.rendering import render_html, render_markdown
from ptqpipe.cli import main
from ptqpipe.errors import CheckpointError, UsageError
from tests.check.report.pages import EVAL, WHERE, Page, measured, titles


def test_an_eval_file_is_shown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(EVAL))
    report = gather(pair[1], evaluation=file)
    page = "".join(Page(render_html(report)).text)
    for shown in ("0.0175", "12.500", "12.250", "97.6", "92.5 %", "<b>base</b>", "+0.2500"):
        assert shown in page
    assert "/some/folder" not in page  # a report goes to others
    assert "97.62 %" in render_markdown(report)
    assert "one task metric, 100 samples" in page


@pytest.mark.parametrize(("mean", "word"), [(0.002, "acceptable"), (0.1, "visibly worse"), (0.4, "damaged")])
def test_the_verdict_comes_first_in_colour_and_word(
    pair: tuple[Path, Path], tmp_path: Path, mean: float, word: str
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "ckpt")
    measured(folder, mean)
    _, told = make_report(folder, out=tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert titles(text)[0] == word.capitalize()
    assert f'class="verdict v-{word.replace(" ", "-")}"' in text
    assert f": {word}\n" in told
    shown = "".join(Page(text).text)
    assert "no fault" in shown
    assert "+2.04 %" in shown


def test_where_the_model_diverges_is_drawn_and_texts_are_shown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "ckpt")
    measured(folder, 0.0175, **WHERE)
    file = tmp_path / "ckpt.eval.json"
    samples = [{"data": "/a/held.txt", "prompt": "Once", "baseline": " upon a time", "checkpoint": " upon <i>a</i>"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"samples": samples}))
    text = render_html(gather(folder, evaluation=file))
    page = Page(text)
    tips = [attributes["data-tip"] or "" for _, attributes in page.tags if "data-tip" in attributes]
    assert "KL below 1.00e-8: 3 tokens, 30.00 %" in tips
    assert "1 tokens of context: 0.250, 4 tokens" in tips
    shown = "".join(page.text)
    assert "the <b>cat</b> sat" in shown
    assert "<mark>&lt;i&gt;a&lt;/i&gt;</mark>" in text
    assert not {"b", "i"} & {tag for tag, attributes in page.tags if not attributes}
    assert re.search("1.25.*25.0 %.*50.0 %.*xB.*xA", shown, re.DOTALL)


def test_the_source_and_the_eval_file_are_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "alone" / "in" / "ckpt")
    _, told = make_report(folder, out=tmp_path / "a.md")
    assert "source: not found; give it with source" in told
    assert "eval file: not found" in told
    shutil.copytree(pair[0], folder.parent / "source")
    measured(folder, 0.002)
    _, told = make_report(folder, out=tmp_path / "a.md")
    assert f"source: {folder.parent / 'source'}" in told
    assert f"eval file: {folder.parent / 'ckpt.eval.json'}" in told
    assert f"written to {tmp_path / 'a.md'}" in told
    config = folder.parent / "source" / "model.safetensors"
    raw = bytearray(config.read_bytes())
    raw[-2] ^= 1
    config.write_bytes(raw)  # another model of that name
    content = json.loads((folder.parent / "ckpt.eval.json").read_text())
    content["checkpoint"]["run_id"] = "f" * 64
    (folder.parent / "ckpt.eval.json").write_text(json.dumps(content))
    _, told = make_report(folder, out=tmp_path / "a.md")
    assert "source: not found" in told
    assert "eval file: not found" in told


def test_checkpoints_of_one_model_are_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = (shutil.copytree(pair[1], tmp_path / name) for name in ("a", "b"))
    measured(a, 0.002)
    measured(b, 0.1)
    done = CliRunner().invoke(main, ["report", str(a), str(b), "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].endswith(": acceptable")  # its perplexity has risen by 2 %
    assert done.stdout.splitlines()[1].endswith(": visibly worse")
    page = Page((tmp_path / "x.html").read_text())
    shown = "".join(page.text)
    assert "2 checkpoints compared" in shown
    assert "1.80e-3 to 2.20e-3" in shown
    tips = [attributes["data-tip"] or "" for _, attributes in page.tags if "data-tip" in attributes]
    assert any(tip.startswith("b: 0.100 nats") for tip in tips)
    content = json.loads((tmp_path / "b.eval.json").read_text())
    content["perplexity"][0]["sha256"] = "1"
    (tmp_path / "b.eval.json").write_text(json.dumps(content))
    _, told = compare([a, b], out=tmp_path / "x.md")
    assert "note: the divergences are of different texts" in told
    assert "| a | acceptable | nvfp4 |" in (tmp_path / "x.md").read_text()


def test_a_checkpoint_with_quantized_inputs_is_not_called_like_one_without(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["convert", str(pair[0]), "--format", "nvfp4_w4a4", "-o", str(tmp_path / "w4a4")])
    assert done.exit_code == 0, done.output
    compare([pair[1], tmp_path / "w4a4"], out=tmp_path / "x.md")
    assert re.findall(r"\| not measured \| (\w+) \|", (tmp_path / "x.md").read_text()) == ["nvfp4", "nvfp4_w4a4"]


def test_checkpoints_of_different_models_are_not_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = shutil.copytree(pair[1], tmp_path / "other")
    record = json.loads((other / "ptqpipe.json").read_text())
    record["source"] = {"name": "another", "fingerprint": "0" * 64}
    (other / "ptqpipe.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match="was made from another"):
        compare([pair[1], other], out=tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_the_mean_recovery_says_how_sure_it_is(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    one = EVAL["tasks"][0] | {"baseline": 0.4, "checkpoint": 0.4, "recovery": 100.0, "interval": [-0.08, 0.04]}
    file.write_text(json.dumps(EVAL | {"tasks": [one, one | {"metric": "acc_norm", "interval": [-0.04, 0.04]}]}))
    page = "".join(Page(render_html(gather(pair[1], evaluation=file))).text)
    # By hand: -20 to +10 % and -10 to +10 % of the baseline, on the same 100 samples.
    assert "mean over 2 task metrics, 100 samples, 95 % interval 85.0 to 110.0 %" in page


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"version": 2}, CheckpointError, "version 2"),
        ({"checkpoint": {"name": "x", "run_id": "f" * 64}}, UsageError, "measured run ffff"),
        ({"kl": [{"data": "a"}]}, CheckpointError, "damaged"),
        ({"kl": 3}, CheckpointError, "damaged"),
        (
            {"kl": [EVAL["kl"][0] | {"histogram": {"first": 0, "per_decade": 4, "counts": [1, 2, 3]}}]},
            CheckpointError,
            "damaged",
        ),
        (
            {"kl": [EVAL["kl"][0] | {"positions": [{"first": 1, "last": 1, "tokens": 1, "mean": "inf"}]}]},
            CheckpointError,
            "damaged",
        ),
    ],
)
def test_an_eval_file_of_something_else_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, object], error: type[Exception], match: str
) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(EVAL | change))
    with pytest.raises(error, match=match):
        gather(pair[1], evaluation=file)


def test_a_file_that_is_no_eval_file_is_not_of_another_version(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"results": {}}))
    with pytest.raises(CheckpointError, match=r"eval\.json is no result of ptqpipe eval; give a file"):
        gather(pair[1], evaluation=file)


def test_texts_of_both_models_part_at_a_word(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """ "father" and "friends" begin alike, but they are not the same word."""
    rows = [("the father went", "the friends left"), ("same all along", "same all along, and on"), ("now", "new")]
    samples = [{"data": "a.txt", "prompt": "p", "baseline": a, "checkpoint": b} for a, b in rows]
    folder = shutil.copytree(pair[1], tmp_path / "ckpt")
    measured(folder, 0.0175, **WHERE)
    file = tmp_path / "ckpt.eval.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"samples": samples}))
    found = sample_texts(gather(folder, evaluation=file))
    assert [one[1:] for one in found] == [
        ("the ", "father went", "friends left"),
        ("same all along", "", ", and on"),
        ("", "now", "new"),
    ]
