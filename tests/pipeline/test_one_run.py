"""Claims about two calls at one output: a run of several stages is one, and nothing of it is touched while it lives."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.checkpoint import Paths
from ptqpipe.cli import main
from ptqpipe.errors import AlreadyComplete, OutputError, WrongOutput
from ptqpipe.pipeline import check_stages, output_stages
from ptqpipe.recipe.options import PipelineOptions
from tests.checkpoint.holding import another_process_in
from tests.checkpoint.runs import snapshot
from tests.pipeline.runs import files_of, made, stops, work_of

BUDGET = PipelineOptions(budget="6.5bits")


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
@pytest.mark.parametrize("folder", ["stages", "partial"])
@pytest.mark.parametrize("kind", [("--budget", "6.5bits"), ("--format", "nvfp4")])
def test_a_call_is_refused_by_one_line_while_another_process_is_at_the_output(
    more: tuple[str, ...], folder: str, kind: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    held = getattr(Paths.of(tmp_path / "out"), folder)
    with another_process_in(held) as pid:
        (held / "codes").mkdir()
        (held / "codes" / "rounding.json").write_text("hours of work")
        before = snapshot(tmp_path)
        call = ["convert", str(model), *kind, "-o", str(tmp_path / "out"), "-q", *more]
        done = CliRunner().invoke(main, call)
        assert done.exit_code == 1
        assert f"is being written by process {pid} on " in done.output
        assert done.output.strip().endswith("wait for it, or choose another --out")
        assert len(done.output.strip().splitlines()) == 1
        assert "--overwrite" not in done.output
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["calibrate", "tune"])
@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
def test_so_are_calls_of_the_stages_alone(
    command: str, more: tuple[str, ...], model: Path, text: Path, tmp_path: Path
) -> None:
    with another_process_in(Paths.of(tmp_path / "out").partial) as pid:
        before = snapshot(tmp_path)
        words = ["--data", str(text), "--samples", "2", "--seqlen", "24", "-o", str(tmp_path / "out"), "-q", *more]
        done = CliRunner().invoke(main, [command, str(model), *words])
        assert done.exit_code == 1
        assert f"is being written by process {pid} on " in done.output
        assert "--overwrite" not in done.output
        assert snapshot(tmp_path) == before


def test_the_stages_that_are_kept_are_of_one_run_at_a_time(model: Path, tmp_path: Path) -> None:
    work = PipelineOptions(budget="6.5bits", work_dir=str(tmp_path / "kept"))
    with another_process_in(tmp_path / "kept") as pid:
        (tmp_path / "kept" / "pipeline.json").write_text("{}")
        with pytest.raises(OutputError, match=f"by process {pid} on"):
            made(model, tmp_path / "out", work)
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}


def test_a_run_holds_its_lock_over_all_stages_and_leaves_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out", list[str]()
    real = check_stages.verify

    def look(*args: object, **kwargs: object) -> object:  # the last stage, behind the locks of all others
        done = CliRunner().invoke(main, ["convert", str(model), "-o", str(out), "--resume"])
        seen.append(done.output)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(check_stages, "verify", look)
    made(model, out, BUDGET)
    assert len(seen) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def left_by_a_run(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a run that was stopped in its last stage, and its output's."""
    with monkeypatch.context() as patch:
        patch.setattr(check_stages, "verify", stops(check_stages.verify, at=1))
        with pytest.raises(KeyboardInterrupt):
            made(model, out, BUDGET)
    return files_of(out)


def test_what_a_killed_clean_up_left_ends_in_already_complete(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    files, paths = left_by_a_run(model, out, monkeypatch), Paths.of(out)
    paths.stages.rename(paths.gone)
    (paths.gone / "journal-0.jsonl").unlink()
    with pytest.raises(AlreadyComplete):
        made(model, out, BUDGET, mode="resume")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    paths.stages.mkdir()  # as it is left by a kill before the first line of the journal
    with pytest.raises(AlreadyComplete):
        made(model, out, BUDGET, mode="resume")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert files_of(out) == files


@pytest.mark.parametrize("damage", [b"", b"version: 1\nrules: []\n"])
def test_a_stage_whose_output_is_damaged_is_done_again(
    damage: bytes, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "out", list[str]()
    files = left_by_a_run(model, out, monkeypatch)
    (Paths.of(out).stages / "recipe.yaml").write_bytes(damage)
    made(model, out, BUDGET, mode="resume", say=said.append)
    assert any("recipe.yaml is not as it was written; what it is a part of is made again" in line for line in said)
    assert files_of(out) == files


def test_statistics_and_codes_that_are_damaged_are_made_again(
    model: Path, text: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(output_stages.conversion, "convert", stops(output_stages.conversion.convert, at=1))
        with pytest.raises(KeyboardInterrupt):
            made(model, out, work_of(text))
        for name in ("model.layers.1.safetensors", "rounding.json"):
            file = Paths.of(out).stages / "codes" / name
            raw = file.read_bytes()
            file.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
            patch.setattr(output_stages.conversion, "convert", stops(output_stages.conversion.convert, at=1))
            with pytest.raises(KeyboardInterrupt):
                made(model, out, work_of(text), mode="resume")
            assert file.read_bytes() == raw
    made(model, out, work_of(text), mode="resume")
    assert files_of(out) == files_of(undisturbed)


def test_an_output_of_another_call_is_refused_before_any_work(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be refused by the last stage but a few, hours later, each time."""
    left_by_a_run(model, tmp_path / "out", monkeypatch)
    (tmp_path / ".out.stages" / "recipe.yaml").rename(tmp_path / "recipe.yaml")
    record = tmp_path / "out" / "ptqpipe.json"
    record.write_text(record.read_text().replace('"pipeline"', '"another"'))
    with pytest.raises(WrongOutput, match="is no output of this run; overwrite=True replaces it"):
        made(model, tmp_path / "out", BUDGET, mode="resume")
    assert not (tmp_path / ".out.stages" / "recipe.yaml").exists()


def test_a_call_that_was_killed_before_it_had_begun_is_not_spoken_of(model: Path, tmp_path: Path) -> None:
    """Half a line of its journal is all that there is; the output is another one's."""
    ptqpipe.convert(model, format="fp8", out=tmp_path / "out", workers=1)
    files = files_of(tmp_path / "out")
    (tmp_path / ".out.stages").mkdir()
    (tmp_path / ".out.stages" / "journal-0.jsonl").write_text('{"crc32":"0')
    done = CliRunner().invoke(
        main, ["convert", str(model), "--budget", "6.5bits", "-o", str(tmp_path / "out"), "--resume"]
    )
    assert done.exit_code == 2
    assert done.output.strip().endswith("is no output of this run; --overwrite replaces it, or choose another --out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert files_of(tmp_path / "out") == files


def test_a_run_whose_folder_is_taken_away_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = output_stages.write_recipe

    def taken(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        (tmp_path / ".out.stages").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(output_stages, "write_recipe", taken)
    with pytest.raises(OutputError, match=r"\.out\.stages' was removed, renamed or unmounted while this run"):
        made(model, tmp_path / "out", BUDGET)
