"""The command: what it refuses, and that it writes one file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ptqpipe.check.report.command import make_report
from ptqpipe.check.report.gather import gather
from ptqpipe.cli import main
from ptqpipe.errors import OutputError, UsageError
from tests.tiny import LLAMA_CONFIG, Tensors, save


@pytest.mark.slow
def test_a_file_that_is_no_report_is_not_replaced(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("my notes")
    with pytest.raises(OutputError, match="not a report"):
        make_report(pair[1], out=out)
    assert out.read_text() == "my notes"
    out.unlink()
    make_report(pair[1], out=out)
    out.write_text(out.read_text() + "<!-- old -->")
    make_report(pair[1], out=out)  # an earlier report is
    assert "<!-- old -->" not in out.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_command_writes_one_file_and_fails_in_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    runner = CliRunner()
    out = tmp_path / "card.md"
    done = runner.invoke(main, ["report", str(pair[1]), "--source", str(pair[0]), "-o", str(out)])
    assert done.exit_code == 0
    assert "dB" in done.output
    assert out.read_text().startswith("<!-- ptqpipe report -->")
    for arguments in (
        [str(pair[0])],  # plain
        [str(pair[1]), "-o", str(pair[1] / "config.json" / "x.html")],
        [str(pair[1]), "-o", str(tmp_path)],
    ):
        failed = runner.invoke(
            main, ["report", *arguments, *([] if "-o" in arguments else ["-o", str(tmp_path / "x.html")])]
        )
        assert failed.exit_code in (1, 2), arguments
        assert failed.output.startswith("Error: "), failed.output
        assert len(failed.output.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["card.md"]


def test_a_source_of_another_model_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    t = Tensors(9)
    t.add("other.layers.0.x_proj.weight", 32, 64)
    other = save(tmp_path / "other", t.made, config=LLAMA_CONFIG)
    with pytest.raises(UsageError, match="none of this checkpoint's weights"):
        gather(pair[1], source=other)
