"""Claims about which model statistics and codes are of: any copy of it, and no other; one message says so."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ptqpipe
from ptqpipe.errors import UsageError
from ptqpipe.stages.convert.prepare import prepare
from ptqpipe.stages.plan.run import Budget, plan_mixed
from ptqpipe.stages.transform.run import TransformOptions, transform
from tests.transforms.models import make_model, make_statistics, token_ids


def copy_of(model: Path, where: Path) -> Path:
    """As a second download makes one: the same bytes at another time."""
    shutil.copytree(model, where, copy_function=shutil.copyfile)
    for path in where.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    return where


def _convert(model: Path, stats: Path, out: Path) -> None:
    prepare(model, stats=stats, out=out).close()


def _plan(model: Path, stats: Path, out: Path) -> None:
    plan_mixed(model, Budget(bits=6), stats=stats, formats=("mxfp4", "fp8"))


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
    for source, out in ((model, tmp_path / "one"), (copy, tmp_path / "two")):
        ptqpipe.convert(source, stats=stats, out=out, format="mxfp4")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "ptqpipe.json" in names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
