"""Claims about progress bars: one look in every command, where they start, and what they count."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.check.report.command import make_report
from ptqpipe.cli import main
from ptqpipe.conversion import job as rewriting
from ptqpipe.run.machine import Job, Machine, counting_bar, progress_bar, progress_prefix
from tests import tiny

NAME = "model.layers.31.mlp.down_proj.weight"


def frames(drawn: str) -> list[str]:
    return [frame.strip() for frame in re.split(r"[\r\n]", drawn) if frame.strip()]


def test_a_bar_has_title_amounts_memory_and_what_is_under_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("LINES", "24")
    with progress_prefix("[2/5] calibrate"), counting_bar(4000, "tokens", shown=True, title="a.txt") as advance:
        advance(1000, "layer 1 of 4")
        advance(3000, "layer 4 of 4")
    first, *_, last = frames(capsys.readouterr().err)
    assert first.startswith("[2/5] calibrate a.txt:   0% ")
    assert "0/4,000 tokens ?/s" in first
    assert "100% ██████████ 4,000/4,000 tokens" in last
    assert re.search(r"layer 4 of 4 \| mem [\d.]+ [MG]iB, peak [\d.]+ [MG]iB", last)


def test_a_narrow_terminal_shows_the_peak_of_memory_behind_a_long_title(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    with (
        progress_prefix("[12/14] eval"),
        counting_bar(250_000, "tokens", shown=True, title="source, held-out.jsonl") as advance,
    ):
        advance(250_000, "a window")
    last = frames(capsys.readouterr().err)[-1]
    assert last.startswith("[12/14] eval: 100% ")  # no half of a word
    assert re.search(r"250k/250k tokens .*ETA .*, peak [\d.]+ [MG]iB", last[:80])


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    ("stage", "title", "total", "unit", "note"),
    [
        ("", "source, sample text", 42_032, "tokens", ""),
        ("", "codes and errors", 280, "weights", ""),
        ("", "errors", 160, "units", NAME),
        ("", "", 4, "layers", "layer 3 of 4, moments of model.layers.3"),
        ("[1/5] tune", "backwards", 80, "layers", "model.layers.79"),
        ("[14/14] report", "choices of scales", 28_000, "weights", ""),
        ("", "", 140_000_000_000, "B", NAME),
    ],
)
def test_every_bar_is_there_and_no_line_is_cut_inside_a_word(
    stage: str, title: str, total: int, unit: str, note: str, columns: int,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_prefix(stage), counting_bar(total, unit, shown=True, title=title) as advance:
        for part in (total // 2, total - total // 2):
            now[0] += 0.11  # tqdm draws ten times a second
            advance(part, note)
    for frame in frames(capsys.readouterr().err)[1:]:
        assert len(frame) < columns
        assert re.search(r"\d+% [█▏▎▍▌▋▊▉ ]{3,10} \d", frame), frame
        assert re.search(r"ETA 00:\d\d.* peak [\d.]+ [MG]iB( \||$)", frame), frame
        shown = [part for part in frame.partition("ETA ")[2].partition(", ")[2].split(" | ") if "peak" not in part]
        said = "".join(shown)
        if said:
            whole = (
                note.endswith(said[2:]) if said.startswith("..") else f"{note},".startswith((f"{said},", f"{said} "))
            )
            assert whole, frame
        assert said or " " not in note, frame


def test_a_tensor_whose_name_does_not_fit_is_shown_by_its_end_or_not_at_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "24")
    for columns, shown in ((80, ""), (114, "..yers.31.mlp.down_proj.weight"), (200, NAME)):
        monkeypatch.setenv("COLUMNS", str(columns))
        with counting_bar(1_000_000, "B", shown=True) as advance:
            advance(1_000_000, NAME)
        last = frames(capsys.readouterr().err)[-1]
        assert len(last) <= columns
        assert last.partition(" | ")[2] == shown, last


def test_bytes_are_those_of_disks_and_large_counts_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    with counting_bar(4_500_000_000, "B", shown=True) as advance:
        advance(1_220_000_000, "")
    with counting_bar(12_600_000, "tokens", shown=True), counting_bar(32, "layers", shown=True) as advance:
        advance(2.4, "")
    drawn = capsys.readouterr().err
    assert "1.22 GB/4.50 GB" in drawn
    assert "0/12.6M tokens" in drawn
    assert "2.4/32 layers" in drawn


def test_a_resumed_run_starts_behind_what_is_done_and_its_rate_is_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # names are shown where they fit
    monkeypatch.setenv("LINES", "24")
    jobs = [Job(f"layer.{i}", 0, 250_000) for i in range(4)]
    with progress_bar(jobs[3:], shown=True, done=jobs[:3]) as advance:
        advance(jobs[3])
    first, *_, last = frames(capsys.readouterr().err)
    assert first.startswith("75% ")
    assert "750 kB/1.00 MB ?/s" in first
    assert last.startswith("100% ")
    assert "layer.3" in last


def test_plan_verify_and_report_say_what_they_do_before_they_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(Path("model"), tiny.llama(layers=1, hidden=64, inner=64))
    Path("model/tokenizer.json").write_text("{}")  # whose absence is a warning
    calls = {
        "convert model -o out": "",
        "plan model --budget 5bits --formats nvfp4,keep -o r.yaml": r"model, 7 weights in \d groups, ",
        "verify out --source model": r"checking out, \d+ tensors in [\d.]+ kB, against model$",
        "report out --source model": r"report on out, against model$",
        "report out out": r"reading out\nreading out$",
    }
    for line, header in calls.items():
        done = CliRunner().invoke(main, line.split())
        assert done.exit_code == 0, done.output
        assert re.match(header, done.stderr.strip()), (line, done.stderr)
        assert CliRunner().invoke(main, [*line.split(), "--quiet", *["--overwrite"] * ("convert" in line)]).stderr == ""


def test_a_report_has_a_bar_for_each_part_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=64, inner=64))
    made = ptqpipe.convert(model, format="nvfp4", out=tmp_path / "out")
    make_report(made.path, source=model, out=tmp_path / "r.html", machine=Machine(workers=1, progress=True))
    drawn = [frame for frame in frames(capsys.readouterr().err) if "100%" in frame]
    for title, amount in (
        ("codes and errors", "7/7 weights"),
        ("choices of scales", "7/7"),
        ("proof", ""),
        ("", "checks"),
    ):
        assert any(frame.startswith(title) and amount in frame for frame in drawn), (title, drawn)


def test_nothing_is_drawn_unless_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with counting_bar(10, "tokens", shown=False) as advance:
        advance(10, "x")
    assert capsys.readouterr().err == ""


def test_tensors_come_in_the_order_of_their_numbers_and_a_resumed_run_counts_those_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(layers=11, hidden=64, inner=64))
    bars: list[tuple[list[str], list[str]]] = []

    @contextmanager
    def bar(jobs: Sequence[Job], *, shown: bool, done: Sequence[Job]) -> Iterator[Callable[[Job], None]]:
        bars.append(([job.id for job in jobs], [job.id for job in done]))

        def advance(job: Job) -> None:
            if len(bars) == 1 and "layers.2." in job.id:
                raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(rewriting, "progress_bar", bar)
    with pytest.raises(KeyboardInterrupt):
        ptqpipe.convert(model, format="nvfp4", out=tmp_path / "out", workers=1)
    ptqpipe.convert(model, format="nvfp4", out=tmp_path / "out", workers=1, resume=True)
    (first, nothing), (rest, done) = bars
    parts = [re.split(r"layers\.(\d+)\.", name) for name in first]  # what is done, the layer, the tensor
    for kind in {part[0] for part in parts if len(part) == 3}:
        layers = [int(part[1]) for part in parts if part[0] == kind and len(part) == 3]
        assert layers == sorted(layers)
        assert {2, 10} < set(layers)
    assert nothing == []
    assert done
    assert sorted(done + rest) == sorted(first)
