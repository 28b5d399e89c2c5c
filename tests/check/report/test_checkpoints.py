"""Reports on every format, on stacks of experts, and on other tools' checkpoints."""

from pathlib import Path

import pytest

from ptqpipe.check.report.gather import gather
from ptqpipe.check.report.rendering import render_html, render_markdown
from tests.check.report.pages import Page, converted
from tests.tiny import fused_moe, llama


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "mxfp6", "fp8", "fp8_tensor", "fp8_block", "e2m1/8/ue5m3"])
def test_every_format_has_a_report(tmp_path: Path, fmt: str) -> None:
    source, out = converted(tmp_path, llama(layers=1), fmt)
    report = gather(out, source=source)
    assert all(w.sqnr_db is not None and 15 < w.sqnr_db < 50 for w in report.weights)
    assert report.proof.worse == 0
    assert "nan" not in render_markdown(report).lower().replace("provenance", "")
    assert render_html(report)


def test_stacks_of_experts_are_told_apart(tmp_path: Path) -> None:
    source, out = converted(tmp_path, fused_moe(), "nvfp4", container="ptqpipe")
    report = gather(out, source=source)
    experts = [w for w in report.weights if w.role == "experts.down_proj"]
    assert [w.expert for w in experts] == [0, 1, 2]
    assert len({w.squared_error for w in experts}) == 3
    assert all(w.layer == 0 for w in experts)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ct-nvfp4", "ct-mixed", "mo-mixed", "ds-fp8-block", "gptoss-mxfp4", "quark-mxfp4"])
def test_other_tools_checkpoints_have_reports_that_say_what_is_unknown(shared_dir: Path, name: str) -> None:
    report = gather(shared_dir / "golden" / name)
    assert report.errors_from == ""
    assert report.proof.claimed is None
    page = "".join(Page(render_html(report)).text)
    assert "unknown" in page
    assert "as ptqpipe.json records" not in page
    assert "unknown" in render_markdown(report)


@pytest.mark.shared
def test_other_tools_checkpoints_are_measured_against_their_source(shared_dir: Path) -> None:
    golden = shared_dir / "golden"
    report = gather(golden / "ct-nvfp4a16", source=golden / "bf16-llama")
    stored = [c.versus_absmax for w in report.weights for c in w.choices if c.name == "as stored"]
    assert len(stored) == len(report.weights)
    assert all(0.9 < v < 1.1 for v in stored)  # that tool writes abs-max scales
    assert all(c.versus_absmax < 0.9 for w in report.weights for c in w.choices if c.name == "exact")
