"""The model card of every output: what it says, that it is the hub's, and what may change in it afterwards."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard

import ptqpipe
from ptqpipe.check.evaluate.card_section import write_quality
from ptqpipe.check.verify.command import verify
from ptqpipe.cli import main
from ptqpipe.conversion.card import LARGEST_ORIGINAL, card_sha256, front_matter
from tests.tiny import LLAMA_CONFIG, bytes_of, llama, save

THEIRS = """---
license: other
license_name: tiny-community
license_link: https://example.com/license
language: [en, de]
base_model: somebody/older
tags: [theirs]
---
# Tiny

Their own words.
"""
RESULT: dict[str, Any] = {
    "baseline": {"name": "tiny"},
    "kl": [{"data": "a|b.txt", "tokens": 1000, "mean": 0.00156, "interval": [0.0015, 0.0016], "top1_agreement": 0.96}],
    "perplexity": [{"data": "a|b.txt", "baseline": 12.0, "difference": 0.06, "interval": [0.01, 0.1]}],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot in a hub's cache, with a card of its own."""
    folder = tmp_path_factory.mktemp("hub") / "models--owner--tiny" / "snapshots" / "0123"
    config = LLAMA_CONFIG
    save(folder, llama(), config=config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(THEIRS)
    return folder


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    ptqpipe.convert(source, format="nvfp4", out=out)
    return out


def test_the_hub_reads_the_card(made: Path) -> None:
    card = ModelCard.load(made / "README.md")
    data = card.data.to_dict()
    assert data["base_model"] == "owner/tiny"
    assert data["base_model_relation"] == "quantized"
    assert (data["license"], data["license_name"]) == ("other", "tiny-community")
    assert data["license_link"] == "https://example.com/license"
    assert data["language"] == ["en", "de"]
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["ptqpipe", "nvfp4"]


def test_the_card_says_what_was_done_and_how_to_run_it(made: Path) -> None:
    record = json.loads((made / "ptqpipe.json").read_text())
    text = (made / "README.md").read_text()
    assert f"{len(record['weights'])} weights ({len(record['weights'])} nvfp4), 4.5" in text
    assert f"{len(record['kept'])} tensors: language-model head (1); embedding (1); not a matrix" in text
    assert "ptqpipe convert MODEL --format nvfp4 --container compressed_tensors" in text
    assert "vllm serve PATH" in text
    assert "https://huggingface.co/owner/tiny" in text
    assert record["run_id"][:12] in text
    assert (made / "README.original.md").read_text() == THEIRS
    assert str(made) not in text


def test_the_size_is_the_one_that_the_terminal_tells(source: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["convert", str(source), "-o", str(tmp_path / "out"), "-q"])
    size = re.search(r"^Done: \S+ ([\d.]+ \w+) ", done.output, re.MULTILINE)
    assert size is not None, done.output
    assert f"| size | {size[1]} of weights and index, from " in (tmp_path / "out" / "README.md").read_text()


def test_the_same_conversion_writes_the_same_card(source: Path, made: Path, tmp_path: Path) -> None:
    ptqpipe.convert(source, format="nvfp4", out=tmp_path / "other name")
    assert bytes_of(tmp_path / "other name") == bytes_of(made)


def test_what_is_measured_goes_into_the_card_and_what_a_person_wrote_stays(
    source: Path, made: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(made, tmp_path / "out")
    fresh = card_sha256(out / "README.md")
    for mean, word in ((0.00156, "Near-lossless"), (0.3, "Damaged")):
        assert write_quality(out, RESULT | {"kl": [RESULT["kl"][0] | {"mean": mean}]})
        text = (out / "README.md").read_text()
        assert text.count("## Quality") == 1
        assert f"**{word}**" in text
        assert "1.50e-3 to 1.60e-3" in text
        assert "perplexity +0.50 %" in text
        assert card_sha256(out / "README.md") == fresh
        assert ModelCard.load(out / "README.md").data.base_model == "owner/tiny"
    odd = {"kl": [RESULT["kl"][0] | {"data": "a<!-- end -->.txt"}]}  # the name of a text is anyone's
    assert write_quality(out, RESULT | odd)
    assert card_sha256(out / "README.md") == fresh
    assert write_quality(out, RESULT)
    text = (out / "README.md").read_text()
    report = verify(out, source=source)
    assert not report.faults
    assert not [note for note in report.notes if note.check == "files"]
    (out / "README.md").write_text(text + "\nI like it.\n")
    assert write_quality(out, RESULT)
    assert (out / "README.md").read_text().endswith("\nI like it.\n")
    notes = [note.where for note in verify(out, source=source).notes if note.check == "files"]
    assert notes == ["README.md"]  # it was changed
    (out / "README.md").write_text("Mine alone.")
    assert not write_quality(out, RESULT)
    assert (out / "README.md").read_text() == "Mine alone."


@pytest.mark.parametrize(
    ("head", "read"),
    [
        ("license: mit\nlanguage: [en, de]", {"license": "mit", "language": ["en", "de"]}),
        ("license: mit\ntags: [" + "en, " * (LARGEST_ORIGINAL // 4) + "en]", {}),
        ("license: &a mit\nlanguage: *a", {}),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}\nlicense: mit", {}),
        ("license: " + "[" * 20_000, {}),
    ],
    ids=["short", "longer than is parsed", "an alias", "merged mappings", "deep"],
)
def test_front_matter_that_would_take_long_is_not_parsed(head: str, read: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n\n# A model\n")
    assert front_matter(tmp_path / "README.md") == read


def test_every_stage_passes_the_origin_on(made: Path, tmp_path: Path) -> None:
    for command, name in (("relayout --container modelopt", "modelopt"), ("dequantize", "plain")):
        done = CliRunner().invoke(main, [*command.split(), str(made), "-o", str(tmp_path / name), "-q"])
        assert done.exit_code == 0, done.output
        data = ModelCard.load(tmp_path / name / "README.md").data.to_dict()
        assert (data["base_model"], data["license"]) == ("owner/tiny", "other")
        assert (tmp_path / name / "README.original.md").read_text() == THEIRS
        assert not verify(tmp_path / name).faults
    assert "import ptqpipe" in (tmp_path / "modelopt" / "README.md").read_text()
    assert "ptqpipe dequantize CKPT --dtype bf16" in (tmp_path / "plain" / "README.md").read_text()
    same = CliRunner().invoke(main, ["diff", str(made), str(tmp_path / "modelopt")])
    assert "the same numbers in another layout" in same.output


@pytest.mark.parametrize("theirs", ["---\n[\n---\n", "---\nlicense: 3\n---\n", "---\nlicense: [1]\n---", "none", ""])
def test_any_card_of_the_source_is_survived(tmp_path: Path, theirs: str) -> None:
    source = save(tmp_path / "source", llama())
    (source / "README.md").write_text(theirs)
    ptqpipe.convert(source, format="mxfp4", out=tmp_path / "out")
    data = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert "license" not in data
    assert "base_model" not in data  # a local folder
