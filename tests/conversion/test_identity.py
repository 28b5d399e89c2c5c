"""Claims about which model it is: what it is called, and that statistics are of every copy of it and no other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.checkpoint import hub as source, name_of
from ptqpipe.cli import main
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import UsageError
from ptqpipe.pipeline import demo
from ptqpipe.pipeline.budget.command import Budget, plan_mixed
from tests.quantization.transforms.models import make_model, make_statistics, token_ids

DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("models/acme-7b", "acme-7b"),
        ("models/acme-7b/", "acme-7b"),
        ("link", "link"),
        ("models/acme-7b/sub/..", "acme-7b"),
        ("models/acme-7b/.", "acme-7b"),
        ("link/..", "models"),  # as the system reads it: above what the link leads to
        ("hub/models--acme--tiny-1.5/snapshots/0f1e2d", "tiny-1.5"),
        ("hub/models--gpt2/snapshots/0f1e2d", "gpt2"),
        ("snapshots/0f1e2d", "0f1e2d"),
        ("/", "model"),
    ],
)
def test_a_model_is_called_as_its_path_was_typed_and_a_hub_model_as_its_repository(
    typed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("models/acme-7b/sub", "snapshots/0f1e2d"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("models/acme-7b")
    assert name_of(Path(typed)) == name


def test_a_model_in_the_working_folder_is_called_as_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert name_of(Path(".")) == "here"


@pytest.mark.slow
def test_outputs_and_records_have_the_name_that_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command's default output, and the name in its record, through a link to a folder of another name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO, tmp_path / "store" / "hf")
    Path("bench").symlink_to("store/hf")

    def run(*arguments: str) -> None:
        done = CliRunner().invoke(main, [*arguments])
        assert done.exit_code == 0, done.output

    run("convert", "bench", "-q")
    record = json.loads(Path("bench-NVFP4A16/ptqpipe.json").read_text())
    assert record["source"]["name"] == "bench"
    Path("packed").symlink_to("bench-NVFP4A16")
    run("relayout", "packed", "--container", "modelopt", "-q")
    run("dequantize", "packed", "-q")
    run("report", "packed")
    run("eval", "packed", "--data", "bench/heldout.txt", "--max-tokens", "64", "--seqlen", "32", "-q")
    made = {"bench-NVFP4A16", "packed-modelopt", "packed-bf16", "packed.eval.json"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    assert any(path.name.startswith("packed") and path.suffix == ".html" for path in tmp_path.iterdir())
    assert json.loads(Path("packed.eval.json").read_text())["checkpoint"]["name"] == "packed"
    run("transform", "bench", "--transforms", "rotate", "--untie", "-o", "turned", "-q")
    assert json.loads(Path("turned/ptqpipe.json").read_text())["transformed_from"]["name"] == "bench"
    run("plan", "bench", "--budget", "6bits", "--formats", "mxfp4,fp8", "-o", "recipe.yaml", "-q")
    assert "ptqpipe convert bench --recipe recipe.yaml\n" in Path("recipe.yaml").read_text()


def test_a_hub_model_gives_its_repository_s_name_to_output_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "cache" / "models--acme--tiny-1.5" / "snapshots" / "0f1e2d"
    shutil.copytree(DEMO, snapshot)
    monkeypatch.setattr(source, "_download", lambda model, revision: snapshot)
    monkeypatch.chdir(tmp_path)
    done = ptqpipe.convert("acme/tiny-1.5", format="mxfp4")
    assert (done.out, done.record["source"]["name"]) == (Path("tiny-1.5-MXFP4"), "tiny-1.5")


def copy_of(model: Path, where: Path) -> Path:
    """As a second download makes one: the same bytes at another time."""
    shutil.copytree(model, where, copy_function=shutil.copyfile)
    for path in where.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    return where


def _convert(model: Path, stats: Path, out: Path) -> None:
    prepare(model, stats=stats, out=out).close()


def _plan(model: Path, stats: Path, out: Path) -> None:
    plan_mixed(model, Budget(bits=6), sensitivity=stats, formats=("mxfp4", "fp8"))


def _transform(model: Path, stats: Path, out: Path) -> None:
    transform(model, out, stats=stats, options=TransformOptions("smoothquant"))


USES: dict[str, Callable[[Path, Path, Path], None]] = {"convert": _convert, "plan": _plan, "transform": _transform}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and statistics of it."""
    root = tmp_path_factory.mktemp("measured")
    model = make_model(root / "original", "llama")
    return model, make_statistics(model, root / "stats", token_ids())


@pytest.mark.parametrize("use", USES)
def test_statistics_hold_for_every_copy_of_the_model(use: str, measured: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = measured
    USES[use](copy_of(model, tmp_path / "copy"), stats, tmp_path / "out")


@pytest.mark.parametrize("use", USES)
def test_statistics_of_another_model_are_refused_in_the_same_words(
    use: str, measured: tuple[Path, Path], tmp_path: Path
) -> None:
    _, stats = measured
    other = make_model(tmp_path / "other", "llama", seed=3)
    with pytest.raises(UsageError) as caught:
        USES[use](other, stats, tmp_path / "out")
    with ptqpipe.checkpoint.reader.CheckpointReader.open(other) as reader:
        theirs, ours = json.loads((stats / "stats.json").read_text())["model"]["fingerprint"], reader.fingerprint()
    assert str(caught.value) == (
        f"the statistics in {stats} belong to the model original (fingerprint {theirs[:12]}), this is other "
        f"(fingerprint {ours[:12]}); name the folder with that model's files, or calibrate this one"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use", USES)
def test_a_changed_config_is_said_to_be_what_differs(use: str, measured: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = measured
    copy = copy_of(model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UsageError, match=r"with another config\.json .*same weights.*put that config\.json back"):
        USES[use](copy, stats, tmp_path / "out")


def test_a_copy_gives_the_same_bytes_down_to_the_record(measured: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = measured
    copy = copy_of(model, tmp_path / "copy" / "original")
    for folder, out in ((model, tmp_path / "one"), (copy, tmp_path / "two")):
        ptqpipe.convert(folder, stats=stats, out=out, format="mxfp4")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "ptqpipe.json" in names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
