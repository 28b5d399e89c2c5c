"""The numbers of a report: errors, codes, scales and choices, against what is computed by hand."""

import re
from pathlib import Path

import pytest
import torch

from ptqpipe.check.report.content import Report
from ptqpipe.check.report.gather import gather
from ptqpipe.check.report.rendering import render_html, render_markdown
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.prepare import prepare
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.global_scale import absmax_global, sample_rows
from ptqpipe.numerics.qtensor import encode
from ptqpipe.numerics.search import get_search
from ptqpipe.recipe.options import RecipeOptions
from tests.check.report.pages import Page, by_name, converted
from tests.tiny import Tensors


def test_errors_recomputed_from_the_source_are_those_of_float64_by_hand(
    pair: tuple[Path, Path], sourced: Report
) -> None:
    with Source.open(pair[1]) as ckpt, Source.open(pair[0]) as source:
        for name, weight in by_name(sourced).items():
            w = source.reader.read(name).double()
            error = (ckpt.quantized(name).dequantize().double() - w).square().sum()
            assert weight.squared_error == pytest.approx(float(error), rel=1e-12)
            assert weight.energy == pytest.approx(float(w.square().sum()), rel=1e-12)


def test_without_a_source_the_errors_are_the_records(pair: tuple[Path, Path], sourced: Report) -> None:
    recorded = gather(pair[1])
    assert recorded.errors_from == "record"
    assert recorded.worst == ()
    for name, weight in by_name(recorded).items():
        assert weight.relative_mse == pytest.approx(by_name(sourced)[name].relative_mse, rel=1e-9)


def test_codes_are_counted_as_unpacked_codes_say(pair: tuple[Path, Path], sourced: Report) -> None:
    with Source.open(pair[1]) as ckpt:
        for name, weight in by_name(sourced).items():
            q = ckpt.quantized(name)
            magnitude = q.codes & 7
            assert weight.codes.elements == magnitude.numel()
            assert weight.codes.largest == int((magnitude == 7).sum())
            assert weight.codes.zero == int((magnitude == 0).sum())
            codes = q.scales.int()
            assert weight.codes.saturated == int((codes == 126).sum())
            assert weight.codes.subnormal == int(((codes >= 1) & (codes < 8)).sum())
            assert weight.codes.blocks == codes.numel()


def test_histograms_hold_every_block_scale_once(pair: tuple[Path, Path], sourced: Report) -> None:
    assert sum(sum(h.counts) for h in sourced.histograms) == sum(w.codes.blocks for w in sourced.weights)
    assert all(h.values[1] == 2.0**-9 and h.values[-1] == 448.0 for h in sourced.histograms)


def test_subnormal_scales_are_counted(tmp_path: Path) -> None:
    t = Tensors(2)
    t.add("model.layers.0.mlp.up_proj.weight", 32, 64)
    t.made["model.layers.0.mlp.up_proj.weight"][:16] *= 2e-5  # beside rows of full size: their scales underflow
    source, out = converted(tmp_path, t.made, "nvfp4")
    codes = gather(out, source=source).weights[0].codes
    assert codes.subnormal is not None
    assert codes.subnormal >= 16 * 4
    assert codes.saturated == 0


def test_choices_are_what_the_searches_give(pair: tuple[Path, Path], sourced: Report) -> None:
    """By decoding what each search chooses, at the abs-max global scale of the fused group (4/6: amax / 1536)."""
    fmt = get_format("nvfp4")
    base = "model.layers.1.mlp."
    with Source.open(pair[0]) as source:
        group = [source.reader.read(f"{base}{leaf}.weight") for leaf in ("gate_proj", "up_proj")]
        amax = max(float(w.abs().max()) for w in group)
    w = group[1]

    def left(search: str, g: torch.Tensor) -> float:
        scales = get_search(search).search(w, fmt, global_scale=g)
        q = encode(w, scales, fmt=fmt, global_scale=g)
        return float((q.dequantize().double() - w.double()).square().sum())

    plain = absmax_global(amax, fmt)
    absmax = left("absmax", plain)
    found = {c.name: c.versus_absmax for c in by_name(sourced)[f"{base}up_proj.weight"].choices}
    assert found["abs-max"] == 1.0
    assert found["exact"] == pytest.approx(left("exact", plain) / absmax, rel=1e-5)
    assert found["four over six"] == pytest.approx(left("four_over_six", torch.tensor(amax / 1536)) / absmax, rel=2e-2)
    stored = by_name(sourced)[f"{base}up_proj.weight"].squared_error
    assert stored is not None
    assert found["as stored"] == pytest.approx(stored / absmax, rel=1e-5)
    assert found["as stored"] <= found["exact"] * (1 + 1e-5) < found["four over six"] < 1


def test_the_worst_block_is_the_one_with_the_largest_share(pair: tuple[Path, Path], sourced: Report) -> None:
    worst = sourced.worst[0]
    with Source.open(pair[1]) as ckpt, Source.open(pair[0]) as source:
        best = 0.0
        for name in by_name(sourced):
            w = source.reader.read(name)
            error = (ckpt.quantized(name).dequantize().double() - w.double()).square().reshape(-1, 16).sum(dim=1)
            best = max(best, float(error.max() / error.mean()))
        w = source.reader.read(worst.weight)
        decoded = ckpt.quantized(worst.weight).dequantize()
    assert worst.ratio == pytest.approx(best, rel=1e-9)
    rows = slice(worst.column, worst.column + 16)
    assert worst.source == tuple(w[worst.row, rows].float().tolist())
    assert worst.decoded == tuple(decoded[worst.row, rows].tolist())


def test_the_proof_is_checked_by_brute_force_and_a_spoiled_scale_is_seen(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert gather(pair[1], source=pair[0]).proof.worse == 0
    folder = tmp_path / "spoiled"
    folder.mkdir()
    for file in pair[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with Source.open(folder) as ckpt:
        part = next(p for p in ckpt.stored["model.layers.0.mlp.down_proj.weight"].parts if p.name.endswith("_scale"))
        entry = ckpt.reader.entries[part.name]
    raw = bytearray(entry.file.read_bytes())
    for i in range(entry.offset, entry.offset + entry.nbytes):
        raw[i] = min(raw[i] + 3, 0x7E)
    entry.file.write_bytes(raw)
    proof = gather(folder, source=pair[0]).proof
    assert proof.worse > 100
    assert "that are not" in render_markdown(gather(folder, source=pair[0]))


def test_the_sample_that_choices_are_compared_on_is_the_one_that_is_told(sourced: Report) -> None:
    found = re.search(r"all rows of weights of up to ([\d,]+) elements", "".join(Page(render_html(sourced)).text))
    assert found is not None
    most, fmt = int(found[1].replace(",", "")), get_format("nvfp4")
    rows = most // 16
    assert sample_rows((rows, 16), fmt) == [(0, rows)]
    assert sum(stop - start for start, stop in sample_rows((4 * rows, 16), fmt)) < 4 * rows


def test_where_no_scale_is_claimed_optimal_the_source_is_not_asked_for(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "absmax"
    with prepare(pair[0], options=RecipeOptions(format="nvfp4", scale_search="absmax"), out=out) as prepared:
        convert(prepared)
    for report in (gather(out), gather(out, source=pair[0])):
        assert report.proof.claimed == 0
        assert "no search that proves it chose them" in "".join(Page(render_html(report)).text)
    assert "with the source checks it" in "".join(Page(render_html(gather(pair[1]))).text)


def test_illegal_scales_are_a_note_and_no_number(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    folder.mkdir()
    for file in pair[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with Source.open(folder) as ckpt:
        entry = ckpt.reader.entries["model.layers.0.mlp.down_proj.weight_scale"]
    raw = bytearray(entry.file.read_bytes())
    raw[entry.offset] = 0x7F  # NaN in E4M3
    entry.file.write_bytes(raw)
    report = gather(folder, source=pair[0])
    assert by_name(report)["model.layers.0.mlp.down_proj.weight"].relative_mse is None
    assert any("no quantizer may write" in note for note in report.notes)
    assert render_html(report)
