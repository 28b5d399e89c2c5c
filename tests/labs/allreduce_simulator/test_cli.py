"""Claims about `python -m labs.allreduce_simulator`: tables, JSON, plots, partials of files, one line for bad input."""

import io
import json
import math
import struct
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

simulator = import_module("labs.allreduce_simulator.__main__")

SMALL = ("--ranks", "2,8", "--elements", "4096")


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def _threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process, for later tests."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def run(*args: object) -> Result:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = simulator.main([*map(str, args)])
    return Result(code, out.getvalue(), err.getvalue())


def rows(*args: object) -> list[dict[str, object]]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def partials(tmp_path: Path) -> Path:
    """x [64, 96] and w [40, 96] of a linear layer, parts [4, 10, 64], one with NaN, one of integers."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "x": torch.randn(64, 96, generator=generator).bfloat16(),
        "w": torch.randn(40, 96, generator=generator),
        "parts": torch.randn(4, 10, 64, generator=generator),
        "nan": torch.full((4, 8), math.nan),
        "ids": torch.zeros(4, 8, dtype=torch.int64),
        "none": torch.zeros(4, 0),
    }
    path = tmp_path / "partials.safetensors"
    save_file(tensors, path)
    return path


def test_the_table_has_every_scheme_world_and_machine() -> None:
    text = run(*SMALL, "--topology", "pcie5,ethernet-2.5g").stdout
    for part in ("k=2", "k=8", "two-shot", "ring-bf16", "closed form: within", "pcie5", "ethernet-2.5g", "pays from"):
        assert part in text


def test_outliers_show_the_median_block_beside_all() -> None:
    (row,) = rows(
        "--ranks", "2", "--elements", "4096", "--values", "outliers", "--scheme", "two-shot", "--only", "error"
    )
    text = run(
        "--ranks", "2", "--elements", "4096", "--values", "outliers", "--scheme", "two-shot", "--only", "error"
    ).stdout
    assert "median block, outliers" in text
    assert f"{1000 * row['rel_l2']:.1f}/{1000 * row['rel_l2_block']:.1f}" in text


def test_json_lines_hold_what_the_table_shows() -> None:
    found = rows(
        *SMALL, "--codec", "int8,int4", "--scheme", "two-shot,ring-bf16", "--topology", "pcie5", "--size", "1MiB"
    )
    errors = [row for row in found if row["kind"] == "error"]
    assert [(r["ranks"], r["scheme"], r["codec"]) for r in errors] == [
        (k, scheme, codec)
        for k in (2, 8)
        for scheme, codec in (("two-shot", "int8/64"), ("two-shot", "int4/64"), ("ring-bf16", "bf16"))
    ]
    assert [(r["kind"], r["ranks"]) for r in found[6:]] == [
        ("time", 2),
        ("time", 8),
        ("break_even", 2),
        ("break_even", 8),
    ]
    assert all(r["bits"] == 8.25 for r in found[6:])


def test_the_same_seed_gives_the_same_errors_and_another_does_not() -> None:
    one, same, other = (rows(*SMALL, "--only", "error", "--seed", seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_a_range_of_ranks_doubles() -> None:
    found = rows("--ranks", "3..13,5", "--only", "time", "--topology", "ethernet-10g", "--size", "1MiB")
    assert [row["ranks"] for row in found if row["kind"] == "time"] == [3, 6, 12, 5]


def test_partials_of_a_file_are_reduced(partials: Path) -> None:
    found = rows(
        "--partials", partials, "--tensor", "parts", "--ranks", "2,4", "--only", "error", "--scheme", "two-shot"
    )
    assert [(r["data"], r["elements"], r["ranks"]) for r in found] == [("parts", 640, 2), ("parts", 640, 4)]
    assert all(0.004 < float(str(r["rel_l2"])) < 0.012 for r in found)


def test_inputs_and_weight_of_a_file_make_partials(partials: Path) -> None:
    found = rows(
        "--partials", partials, "--tensor", "x", "--weight", "w", "--ranks", "2,3,32", "--only", "error",
        "--scheme", "two-shot",
    )  # fmt: skip
    assert [(r["elements"], r["ranks"]) for r in found] == [(2560, 2), (2560, 3), (2560, 32)]
    assert all(0.004 < float(str(r["rel_l2"])) < 0.012 for r in found)


@pytest.mark.slow
def test_plots_are_written_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*SMALL, "--topology", "pcie5,tpu-v5e", "--plot", tmp_path / "plots")
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["error-gaussian.png", "speedup-2.png", "speedup-8.png"]
    for name in names:
        raw = (tmp_path / "plots" / name).read_bytes()
        assert raw[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", raw[16:24])) > 300
        assert name in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--ranks", "1"), "2..512"),
        (("--ranks", "8..1024"), "2..512"),
        (("--ranks", "16..8"), "backwards"),
        (("--ranks", "eight"), "8..512"),
        (("--ranks", ""), "8..512"),
        (("--codec", "int5"), "known are"),
        (("--codec", ","), "names nothing"),
        (("--block", "0"), "block"),
        (("--block", "100000000"), "block"),
        (("--scheme", "tree"), "known are"),
        (("--values", "cauchy"), "known are"),
        (("--elements", "0"), "at least 1"),
        (("--seed", "-1"), "negative"),
        (("--node", "0"), "node"),
        (("--topology", "token-ring"), "known are"),
        (("--topology", "ethernet-800g"), "1..400"),
        (("--topology", "pcie5", "--ranks", "16"), "no topology joins 16"),
        (("--tensor", "x"), "--partials"),
        (("--size", "1"), "bytes"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], says: str) -> None:
    result = run("--elements", "64", "--ranks", "2", "--topology", "pcie5", *args)
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert says in line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "name one with --tensor"),
        (("--tensor", "y"), "has no tensor"),
        (("--tensor", "nan"), "NaN"),
        (("--tensor", "ids"), "floating point"),
        (("--tensor", "none"), "expected [ranks, ...]"),
        (("--tensor", "parts", "--ranks", "3"), "choose --ranks among 2, 4"),
        (("--tensor", "x", "--weight", "parts"), "do not multiply"),
        (("--tensor", "x", "--weight", "w", "--ranks", "5"), "do not divide"),
    ],
)
def test_partials_that_do_not_fit_are_one_line(partials: Path, args: tuple[str, ...], says: str) -> None:
    result = run("--only", "error", "--ranks", "2", "--partials", partials, *args)
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.splitlines()
    assert says in line


def test_a_file_without_tensors_is_not_asked_for_a_name(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors")
    result = run("--only", "error", "--ranks", "2", "--partials", tmp_path / "none.safetensors")
    assert "holds no tensors; give a file with partials" in result.stderr
