"""Claims about progress bars: one look in every command, where they start, and what they count."""

import re

import pytest

from ptqpipe.stages.common import Job, bar_title, counting_bar, progress_bar


def frames(drawn: str) -> list[str]:
    return [frame.strip() for frame in re.split(r"[\r\n]", drawn) if frame.strip()]


def test_a_bar_has_title_amounts_memory_and_what_is_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    with bar_title("[2/5] calibrate"), counting_bar(4000, "tokens", shown=True, title="a.txt") as advance:
        advance(1000, "layer 1 of 4")
        advance(3000, "layer 4 of 4")
    first, *_, last = frames(capsys.readouterr().err)
    assert first.startswith("[2/5] calibrate a.txt:   0% ")
    assert "0/4,000 tokens ?/s" in first
    assert "100% ██████████ 4,000/4,000 tokens" in last
    assert re.search(r"mem [\d.]+ [MG]iB, peak [\d.]+ [MG]iB \| layer 4 of 4", last)


def test_bytes_are_those_of_disks_and_large_counts_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    with counting_bar(4_500_000_000, "B", shown=True) as advance:
        advance(1_220_000_000, "")
    with counting_bar(12_600_000, "tokens", shown=True), counting_bar(32, "layers", shown=True) as advance:
        advance(2.4, "")
    drawn = capsys.readouterr().err
    assert "1.22 GB/4.50 GB" in drawn
    assert "0/12.6M tokens" in drawn
    assert "2.4/32 layers" in drawn


def test_a_resumed_run_starts_behind_what_is_done_and_its_rate_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job(f"layer.{i}", 0, 250_000) for i in range(4)]
    with progress_bar(jobs[3:], shown=True, done=jobs[:3]) as advance:
        advance(jobs[3])
    first, *_, last = frames(capsys.readouterr().err)
    assert first.startswith("75% ")
    assert "750 kB/1.00 MB ?/s" in first
    assert last.startswith("100% ")
    assert "layer.3" in last


def test_nothing_is_drawn_unless_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with counting_bar(10, "tokens", shown=False) as advance:
        advance(10, "x")
    assert capsys.readouterr().err == ""
