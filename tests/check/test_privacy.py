"""The claim that what is published names no folder: every file of a whole pipeline is searched, byte by byte."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.pipeline import demo

MODEL = Path(demo.__file__).resolve().parent.parent / "demo_model"
TELLTALE = "telltale-7c1f"


def run(*arguments: object) -> str:
    """A command's output; it must succeed."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every command that writes, each given absolute paths below a folder with a telling name."""
    at = tmp_path_factory.mktemp("private") / TELLTALE / "customer"
    at.mkdir(parents=True)
    model = shutil.copytree(MODEL, at / "model")
    text, rows, recipe = model / "heldout.txt", at / "rows.jsonl", at / "recipe.yaml"
    small = ("--samples", 8, "--seqlen", 64)
    run("generate", model, *small, "-o", rows, "-q")
    run("calibrate", model, "--data", rows, "--data", text, *small, "-o", at / "stats", "-q")
    run("tune", model, "--data", text, *small, "--stats", at / "stats", "--method", "gptq", "-o", at / "codes", "-q")
    run("transform", model, "--transforms", "smoothquant", "--stats", at / "stats", "-o", at / "smooth", "-q")
    told = run("plan", model, "--budget", "5.5bits", "--stats", at / "stats", "-o", recipe)
    assert f"ptqpipe convert {model} --recipe {recipe} --stats {at / 'stats'}" in told  # the terminal may say it
    formats = ("--formats", "mxfp4,fp8")
    run("plan", model, "--budget", "6bits", *formats, "--measure", text, "--max-tokens", 64, "-o", at / "m.yaml", "-q")
    run("convert", model, "--recipe", recipe, "--stats", at / "stats", "-o", at / "mixed", "-q")
    run("convert", model, "--format", "nvfp4", "--stats", at / "stats", "-o", at / "gptq", "-q")
    run("convert", model, "--format", "nvfp4", "--codes", at / "codes", "-o", at / "tuned", "-q")
    run("relayout", at / "tuned", "--container", "modelopt", "-o", at / "modelopt", "-q")
    run("relayout", at / "gptq", "--container", "ptqpipe", "-o", at / "own", "-q")
    run("dequantize", at / "modelopt", "-o", at / "plain", "-q")
    score = ("--source", model, "--data", text, "--max-tokens", 256, "--seqlen", 64)
    run("eval", at / "gptq", *score, "--cache-dir", at / "cache", "-q", "-o", at / "gptq.eval.json")
    for kind in ("html", "md"):
        given = ("--source", model, "--eval", at / "gptq.eval.json")
        run("report", at / "gptq", *given, "-o", at / f"report.{kind}")
    return at


WRITTEN = (
    *("rows.jsonl", "stats/stats.json", "codes/rounding.json", "smooth/ptqpipe.json", "recipe.yaml", "m.yaml"),
    *("m.yaml.measured.jsonl", "mixed/ptqpipe.json", "gptq/ptqpipe.json", "gptq/config.json", "tuned/ptqpipe.json"),
    *("modelopt/ptqpipe.json", "modelopt/hf_quant_config.json", "own/ptqpipe.json", "plain/ptqpipe.json"),
    *("gptq.eval.json", "report.html", "report.md"),
)


@pytest.mark.slow
def test_no_file_of_a_pipeline_names_the_folder_that_it_ran_in(pipeline: Path) -> None:
    files = [path for path in pipeline.rglob("*") if path.is_file()]
    assert {pipeline / name for name in WRITTEN} <= set(files)
    assert [path for path in files if TELLTALE.encode() in path.read_bytes()] == []
    assert [path for path in pipeline.rglob("*") if path.name.endswith(".partial")] == []  # a journal may, and is gone


@pytest.mark.slow
@pytest.mark.parametrize("file", ["stats/stats.json", "codes/rounding.json", "gptq/ptqpipe.json", "tuned/ptqpipe.json"])
def test_data_are_known_by_base_name_and_sha256(file: str, pipeline: Path) -> None:
    content = json.loads((pipeline / file).read_text())
    made_with = content if "data" in content else content.get("rounding") or content["statistics"]
    text, rows = pipeline / "model" / "heldout.txt", pipeline / "rows.jsonl"
    given = [text] if file in ("codes/rounding.json", "tuned/ptqpipe.json") else [rows, text]
    found = [(entry["name"], entry["sha256"]) for entry in made_with["data"]["files"]]
    assert found == [(path.name, sha256(path.read_bytes()).hexdigest()) for path in given]


def test_an_eval_file_knows_text_and_models_by_name(pipeline: Path) -> None:
    content = json.loads((pipeline / "gptq.eval.json").read_text())
    assert (content["checkpoint"]["name"], content["baseline"]) == ("gptq", {"name": "model"})
    assert [row["data"] for row in (*content["perplexity"], *content["kl"])] == ["heldout.txt", "heldout.txt"]
