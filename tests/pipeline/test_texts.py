"""convert --data and --eval: files, folders, data sets, and text that the model writes itself."""

import json
import shutil
from pathlib import Path

import pytest

import ptqpipe
from ptqpipe.errors import WrongOutput
from ptqpipe.recipe.options import PipelineOptions
from tests.pipeline.runs import LENGTH, made, ran, weights_of, work_of


@pytest.mark.slow
def test_the_field_of_the_rows_can_be_named(model: Path, text: Path, tmp_path: Path) -> None:
    """In text and in what is measured on; a run with one field is not continued with another."""
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"input_ids": row[::-1], "body": row}) + "\n" for row in rows))
    plain = made(model, tmp_path / "plain", work_of(text, quality="fast", eval=(str(text),)))
    named = made(model, tmp_path / "named", work_of(other, quality="fast", text_field="body", eval=(str(other),)))
    assert weights_of(named.out) == weights_of(plain.out)
    assert named.evaluation is not None
    assert plain.evaluation is not None
    assert named.evaluation["kl"][0]["mean"] == plain.evaluation["kl"][0]["mean"]
    with pytest.raises(WrongOutput):
        made(model, tmp_path / "named", work_of(other, quality="fast", text_field="input_ids"), mode="resume")


@pytest.mark.slow
def test_the_models_own_text_is_half_of_what_four_bit_inputs_learn_from_unless_the_call_says_otherwise(
    model: Path, text: Path, tmp_path: Path
) -> None:
    half = made(model, tmp_path / "half", work_of(text), "mxfp4")
    asked = PipelineOptions(data=(str(text), "self"), samples=8, seqlen=LENGTH)
    assert weights_of(half.out) == weights_of(made(model, tmp_path / "asked", asked, "mxfp4").out)
    said: list[str] = []
    fields = made(model, tmp_path / "fields", work_of(text, text_field="input_ids"), "mxfp4", say=said.append)
    assert "own text is left out: field input_ids is in no row of it" in fields.record["pipeline"]["without"][0]
    assert any("warning: the model's own text is left out" in line for line in said)
    assert not any("the model generates text to calibrate on" in line for line in said)
    assert weights_of(half.out) != weights_of(fields.out)


def test_the_model_writes_its_own_text(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("--data", "self", "--samples", 8, "--seqlen", LENGTH, "--quality", "good", "--workers", 1)
    printed = ran("convert", model, *words, "--work-dir", kept, "-o", tmp_path / "out")
    assert "1 generate: the model generates text to calibrate on" in printed
    assert len((kept / "own-text.jsonl").read_text().splitlines()) == 9
    again = ("--data", kept / "own-text.jsonl", *words[2:])
    ran("convert", model, *again, "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(("own", "lines"), [("self", 4), ("self=3", 6)])
def test_a_text_is_mixed_with_the_models_own_by_weights(
    own: str, lines: int, model: Path, text: Path, tmp_path: Path
) -> None:
    kept, weight = tmp_path / "kept", own.removeprefix("self").removeprefix("=") or "1"
    words = ("--samples", 8, "--seqlen", LENGTH, "--quality", "good", "--workers", 1)
    ran("convert", model, "--data", text, "--data", own, *words, "--work-dir", kept, "-o", tmp_path / "out")
    written = kept / "own-text.jsonl"
    assert len(written.read_text().splitlines()) == lines
    ran("convert", model, "--data", f"{text}=1", "--data", f"{written}={weight}", *words, "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    ran("convert", model, "--data", text, *words, "-o", tmp_path / "plain")
    assert weights_of(tmp_path / "out") != weights_of(tmp_path / "plain")


def test_a_folder_stands_for_the_texts_in_it_and_python_takes_the_same_options(
    model: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(text.read_bytes())
    (folder / "notes.md").write_text("no text to calibrate on")
    options = {"samples": 8, "seqlen": LENGTH, "quality": "good", "workers": 1}
    done = ptqpipe.convert(model, data=folder, out=tmp_path / "out", **options)
    two = ptqpipe.convert(model, data=[text], out=tmp_path / "two", **options)
    assert weights_of(done.out) == weights_of(two.out)


@pytest.mark.slow
def test_a_folder_and_a_data_set_are_texts_to_measure_on_as_they_are_texts_to_learn_from(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: rows)
    (tmp_path / "texts").mkdir()
    shutil.copy(text, tmp_path / "texts" / "a.jsonl")
    kl = {}
    for name in (str(text), str(tmp_path / "texts"), "owner/name:config:test"):
        ran("convert", model, "--eval", name, "-o", tmp_path / "out", "--workers", 1, "--overwrite")
        found = json.loads((tmp_path / "out.eval.json").read_text())["kl"]
        kl[name] = found[0]["mean"]
    assert len(set(kl.values())) == 1, kl
