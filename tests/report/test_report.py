"""The report stage and its two renderings, on tiny checkpoints converted here and on other tools' golden ones."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.errors import CheckpointError, OutputError, UsageError
from ptqpipe.formats import get_format
from ptqpipe.global_scale import absmax_global, sample_rows
from ptqpipe.qtensor import encode
from ptqpipe.recipe import RecipeOptions
from ptqpipe.report import errors, roles
from ptqpipe.report.content import Report, Weight
from ptqpipe.report.html import render_html
from ptqpipe.report.markdown import render_markdown
from ptqpipe.search import get_search
from ptqpipe.source import Source
from ptqpipe.stages.common import Machine
from ptqpipe.stages.convert.prepare import prepare
from ptqpipe.stages.convert.run import convert
from ptqpipe.stages.report.compare import compare
from ptqpipe.stages.report.run import gather, make_report
from tests.tiny import LLAMA_CONFIG, Tensors, fused_moe, llama, save

NASTY = "model.layers.0.mlp.<script>alert(1)</script>&\"'`|.weight"


def converted(folder: Path, tensors: dict[str, torch.Tensor], fmt: str, **options: str) -> tuple[Path, Path]:
    """(source, checkpoint) folders."""
    source = save(folder / "source", tensors)
    out = folder / "out"
    prepared = prepare(source, options=RecipeOptions(scheme=fmt, **options), out=out)
    try:
        convert(prepared)
    finally:
        prepared.close()
    return source, out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tensors = llama()
    t = Tensors(5)
    t.add(NASTY, 32, 128)
    return converted(tmp_path_factory.mktemp("report"), tensors | t.made, "nvfp4")


@pytest.fixture(scope="module")
def sourced(pair: tuple[Path, Path]) -> Report:
    return gather(pair[1], source=pair[0])


def by_name(report: Report) -> dict[str, Weight]:
    return {weight.name: weight for weight in report.weights}


class Page(HTMLParser):
    """Tags, script texts and the text of a page, by the standard library's parser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text.append(data)


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


def test_what_calibration_did_is_shown_and_its_scales_are_not_held_to_the_unweighted_error(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "calibrated"
    folder.mkdir()
    for file in pair[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "ptqpipe.json").read_text())
    for index, entry in enumerate(record["weights"].values()):
        entry |= {"algorithm": "gptq", "weighting": "diagonal", "versus_rtn": 0.5, "reverted": index == 0}
    record["statistics"] = {"digest": "d" * 64}
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    report = gather(folder, source=pair[0])
    assert report.proof.weights == 1  # the reverted one
    page, text = "".join(Page(render_html(report)).text), render_markdown(report)
    assert "What calibration gained" in page
    assert f"1 of {len(report.weights)} weights keep plain rounding" in page
    assert "d" * 64 in page
    assert "| 0.500 |" in text
    assert "What calibration gained" not in "".join(Page(render_html(gather(pair[1]))).text)


def test_calibrated_models_are_judged_by_their_output_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Card, first tile and first section; nothing counts proofs or weight error where they have no meaning."""
    folder = tmp_path / "calibrated"
    shutil.copytree(pair[1], folder)
    record = json.loads((folder / "ptqpipe.json").read_text())
    gptq = {"algorithm": "gptq", "weighting": "diagonal", "versus_rtn": 0.25, "reverted": False, "proven": False}
    for entry in record["weights"].values():
        entry |= gptq | {"held_out": True}
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    report = gather(folder, source=pair[0])
    assert report.notes == gather(pair[1], source=pair[0]).notes  # that nothing keeps plain rounding is no warning
    page = Page(render_html(report))
    heads, text = titles(render_html(report)), "".join(page.text)
    assert heads[:3] == ["Quality not measured", "Output error", "Bits per weight"]
    assert "Weight error" not in heads
    assert "Scales proven optimal" not in heads
    bought = heads.index("What calibration gained")
    assert bought < heads.index("Weight error by layer and role") < heads.index("What each choice gained")
    assert "0.250 of rounding" in text
    assert "on held-out samples" in text
    assert "because they give up weight error for output error" in text
    told = render_markdown(report)
    assert "output error 0.250" in told
    assert "weight error" not in told
    assert "proven" not in told
    plain = titles(render_html(gather(pair[1], source=pair[0])))
    assert plain[:4] == ["Quality not measured", "Bits per weight", "Weight error", "Scales proven optimal"]
    assert not {"Output error", "What calibration gained"} & set(plain)
    _, summary = make_report(folder, source=pair[0], out=tmp_path / "x.html")
    assert "output error 0.250 of plain rounding's on held-out samples\n" in summary
    for entry in record["weights"].values():
        entry["held_out"] = False
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    assert "on the calibration samples" in render_html(gather(folder))


def test_blocks_of_learned_codes_are_judged_by_what_tune_measured(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(pair[1], folder)
    record = json.loads((folder / "ptqpipe.json").read_text())
    for entry in record["weights"].values():
        entry |= {"algorithm": "learned", "proven": False}
    blocks = {
        "model.layers.0": {"start_loss": 2.0, "learned_loss": 0.5, "kept": True, "held_out": True},
        "model.layers.1": {"start_loss": 2.0, "learned_loss": 3.0, "kept": False, "held_out": True},
        "model.layers.2": {"start_loss": None, "learned_loss": None, "kept": False, "held_out": True},
        "damaged": 3,
    }
    record["rounding"] = {"digest": "d" * 64, "blocks": blocks}
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    report = gather(folder, source=pair[0])
    assert [(block.name, block.ratio) for block in report.blocks] == [("model.layers.0", 0.25), ("model.layers.1", 1.0)]
    heads, text = titles(render_html(report)), "".join(Page(render_html(report)).text)
    assert heads[1] == "Output error of layers"
    assert "Scales proven optimal" not in heads
    assert "0.625" in text
    assert "of that of plain rounding" in text
    assert "decoder layers 0.625 of that of plain rounding on held-out samples" in render_markdown(report)
    record["recipe"]["rules"][0]["algorithm"] = "gptq"
    record["rounding"]["blocks"]["model.layers.0"]["held_out"] = False
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    told = render_markdown(gather(folder))
    assert "of the calibrated codes that tune started from on held-out samples where there were any" in told
    record["rounding"]["blocks"] = ["no", "mapping"]
    (folder / "ptqpipe.json").write_text(json.dumps(record))
    assert "does not show what their layers gained" in render_html(gather(folder))


def titles(page: str) -> list[str]:
    """The texts of h2, in order."""
    return [re.sub(r"<[^>]+>", "", text) for text in re.findall(r"<h2>(.*?)</h2>", page)]


def test_the_sample_that_choices_are_compared_on_is_the_one_that_is_told(sourced: Report) -> None:
    found = re.search(r"all rows of weights of up to ([\d,]+) elements", "".join(Page(render_html(sourced)).text))
    assert found is not None
    most, fmt = int(found[1].replace(",", "")), get_format("nvfp4")
    rows = most // 16
    assert sample_rows((rows, 16), fmt) == [(0, rows)]
    assert sum(stop - start for start, stop in sample_rows((4 * rows, 16), fmt)) < 4 * rows


def test_names_from_files_stay_text_in_the_page(pair: tuple[Path, Path], sourced: Report) -> None:
    text = render_html(sourced)
    page = Page(text)
    assert len(page.scripts) == 3  # the theme, the data, the page's own
    assert all("alert(1)" not in script for script in (page.scripts[0], page.scripts[2]))
    data = json.loads(page.scripts[1])
    assert NASTY in {row[0] for row in data["rows"]}
    assert "<" not in page.scripts[1]
    assert not any(name.lower().startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert" in "".join(page.text) or "<script>alert" in "".join(str(a) for _, a in page.tags)


def test_the_page_loads_nothing(sourced: Report) -> None:
    page = Page(render_html(sourced))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        href = attributes.get("href")
        assert href is None or href.startswith("#")
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_the_policys_hashes_are_those_of_the_scripts(sourced: Report) -> None:
    import base64
    import hashlib

    page = Page(render_html(sourced))
    allowed = set(
        re.findall(r"sha256-([A-Za-z0-9+/=]+)", next(str(a["content"]) for t, a in page.tags if "http-equiv" in a))
    )
    ran = {base64.b64encode(hashlib.sha256(page.scripts[i].encode()).digest()).decode() for i in (0, 2)}
    assert allowed == ran


def test_markdown_names_cannot_break_out_of_tables(sourced: Report) -> None:
    text = render_markdown(sourced)
    assert "<script>" not in text
    widths: dict[str, int] = {}
    header = ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert widths.setdefault(header, cells) == cells, line
        else:
            header = line if line.startswith("#") else header


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to run the page in")
def test_the_page_runs_in_a_browser(sourced: Report, tmp_path: Path) -> None:
    """The script runs under the page's policy, fills the table, and nothing is reported to the console."""
    (tmp_path / "page.html").write_text(render_html(sourced), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    tables = done.stdout[done.stdout.index('<table id="all">') :]
    rows = tables[: tables.index("</table>")].count("<tr")
    assert rows == 1 + len(sourced.weights) + len(sourced.kept)
    assert "&lt;script&gt;" in tables


def test_every_tensor_is_in_the_table_once(pair: tuple[Path, Path], sourced: Report) -> None:
    rows = json.loads(Page(render_html(sourced)).scripts[1])["rows"]
    with Source.open(pair[0]) as source:
        assert sorted(row[0] for row in rows) == sorted(source.tensors)


def test_a_report_is_the_same_bytes_for_any_number_of_workers(pair: tuple[Path, Path]) -> None:
    one, three = (render_html(gather(pair[1], source=pair[0], machine=Machine(workers=n))) for n in (1, 3))
    assert one == three


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


EVAL: dict[str, Any] = {
    "version": 1,
    "ptqpipe": "0",
    "checkpoint": {"name": "out", "path": "/p", "run_id": None},
    "baseline": {"name": "<b>base</b>", "path": "/q"},
    "settings": {"dtype": "float32", "activations": "simulated"},
    "perplexity": [
        {"data": "held.txt", "sha256": "0", "tokens": 1000, "window": 64, "stride": 32, "checkpoint": 12.5,
         "baseline": 12.25, "nll": 2.5, "nll_baseline": 2.4, "difference": 0.25, "interval": [0.125, 0.375]}
    ],
    "kl": [
        {"data": "/some/folder/held.txt", "tokens": 1000, "mean": 0.0175, "standard_error": 0.001,
         "interval": [0.016, 0.019],
         "percentiles": {"50": 0.01, "99": 0.2}, "max": 1.5, "top1_agreement": 0.925}
    ],
    "tasks": [
        {"task": "arc", "metric": "acc", "higher_is_better": True, "samples": 100, "checkpoint": 0.41, "stderr": 0.05,
         "baseline": 0.42, "baseline_stderr": 0.05, "recovery": 97.62, "difference": -0.01, "interval": None}
    ],
}  # fmt: skip


def test_an_eval_file_is_shown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(EVAL))
    report = gather(pair[1], evaluation=file)
    page = "".join(Page(render_html(report)).text)
    for shown in ("0.0175", "12.500", "12.250", "97.6", "92.5 %", "<b>base</b>", "+0.2500"):
        assert shown in page
    assert "/some/folder" not in page  # a report goes to others
    assert "97.62 %" in render_markdown(report)
    assert "one task metric, 100 samples" in page


def measured(folder: Path, mean: float, **kl: Any) -> None:
    """An eval file beside a checkpoint, of that checkpoint's run."""
    run_id = json.loads((folder / "ptqpipe.json").read_text())["run_id"]
    row = EVAL["kl"][0] | {"mean": mean, "interval": [0.9 * mean, 1.1 * mean], "top1_agreement": 0.965} | kl
    content = EVAL | {"checkpoint": {"name": folder.name, "run_id": run_id}, "kl": [row]}
    (folder.parent / f"{folder.name}.eval.json").write_text(json.dumps(content))


WHERE: dict[str, Any] = {
    "histogram": {"first": 1e-8, "per_decade": 4, "counts": [3, *(41 * [0]), 7]},
    "positions": [
        {"first": 1, "last": 1, "tokens": 4, "mean": 0.25, "standard_error": 0.125},
        {"first": 2, "last": 3, "tokens": 8, "mean": 0.0625, "standard_error": None},
    ],
    "worst": [
        {"kl": 1.25, "context": 3, "before": "the <b>cat</b> sat", "token": " onx", "checkpoint": 0.5, "baseline": 0.25,
         "checkpoint_top": "xA", "baseline_top": "xB"}
    ],
}  # fmt: skip


@pytest.mark.parametrize(("mean", "word"), [(0.002, "near-lossless"), (0.05, "good"), (0.4, "damaged")])
def test_the_verdict_comes_first_in_colour_and_word(
    pair: tuple[Path, Path], tmp_path: Path, mean: float, word: str
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "ckpt")
    measured(folder, mean)
    _, told = make_report(folder, out=tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert titles(text)[0] == word.capitalize()
    assert f'class="verdict v-{word}"' in text
    assert f": {word}\n" in told
    shown = "".join(Page(text).text)
    assert "no fault" in shown
    assert "+2.04 %" in shown


def test_where_the_model_diverges_is_drawn_and_texts_are_shown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "ckpt")
    measured(folder, 0.0175, **WHERE)
    file = tmp_path / "ckpt.eval.json"
    samples = [{"data": "/a/held.txt", "prompt": "Once", "baseline": " upon a time", "checkpoint": " upon <i>a</i>"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"samples": samples}))
    text = render_html(gather(folder, evaluation=file))
    page = Page(text)
    tips = [attributes["data-tip"] or "" for _, attributes in page.tags if "data-tip" in attributes]
    assert "KL below 1.00e-8: 3 tokens, 30.00 %" in tips
    assert "1 tokens of context: 0.250, 4 tokens" in tips
    shown = "".join(page.text)
    assert "the <b>cat</b> sat" in shown
    assert "<mark>&lt;i&gt;a&lt;/i&gt;</mark>" in text
    assert not {"b", "i"} & {tag for tag, attributes in page.tags if not attributes}
    assert re.search("1.25.*25.0 %.*50.0 %.*xB.*xA", shown, re.DOTALL)


def test_the_source_and_the_eval_file_are_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "ckpt")
    _, told = make_report(folder, out=tmp_path / "a.md")
    assert "source: not found; give it with --source MODEL" in told
    assert "eval file: not found" in told
    shutil.copytree(pair[0], tmp_path / "source")
    measured(folder, 0.002)
    _, told = make_report(folder, out=tmp_path / "a.md")
    assert f"source: {tmp_path / 'source'}" in told
    assert f"eval file: {tmp_path / 'ckpt.eval.json'}" in told
    assert f"written to {tmp_path / 'a.md'}" in told
    config = tmp_path / "source" / "model.safetensors"
    raw = bytearray(config.read_bytes())
    raw[-2] ^= 1
    config.write_bytes(raw)  # another model of that name
    content = json.loads((tmp_path / "ckpt.eval.json").read_text())
    content["checkpoint"]["run_id"] = "f" * 64
    (tmp_path / "ckpt.eval.json").write_text(json.dumps(content))
    _, told = make_report(folder, out=tmp_path / "a.md")
    assert "source: not found" in told
    assert "eval file: not found" in told


def test_a_role_has_one_colour_everywhere_and_formats_share_an_axis(pair: tuple[Path, Path]) -> None:
    report = gather(pair[1])
    mixed = replace(
        report,
        weights=tuple(replace(w, format="mxfp8") if w.layer == 1 and "attn" in w.name else w for w in report.weights),
    )
    rows = roles.by_role(mixed)
    colours = {row.role: row.index for row in rows}
    assert len(set(colours.values())) == len(colours)
    assert all(row.index == colours[row.role] for row in rows)
    drawn = errors.error_lines(rows)
    assert drawn is not None
    assert drawn[0].count("<polyline") == len(colours)
    assert "mxfp8" in drawn[0]
    assert 'class="mark ring' in drawn[0]


def test_checkpoints_of_one_model_are_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = (shutil.copytree(pair[1], tmp_path / name) for name in ("a", "b"))
    measured(a, 0.002)
    measured(b, 0.05)
    done = CliRunner().invoke(main, ["report", str(a), str(b), "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 0, done.output
    assert "near-lossless" in done.output.splitlines()[0]
    assert done.output.splitlines()[1].endswith(": good")
    page = Page((tmp_path / "x.html").read_text())
    shown = "".join(page.text)
    assert "2 checkpoints compared" in shown
    assert "1.80e-3 to 2.20e-3" in shown
    tips = [attributes["data-tip"] or "" for _, attributes in page.tags if "data-tip" in attributes]
    assert any(tip.startswith("b: 0.0500 nats") for tip in tips)
    content = json.loads((tmp_path / "b.eval.json").read_text())
    content["perplexity"][0]["sha256"] = "1"
    (tmp_path / "b.eval.json").write_text(json.dumps(content))
    _, told = compare([a, b], out=tmp_path / "x.md")
    assert "note: the divergences are of different texts" in told
    assert "| a | near-lossless | nvfp4 |" in (tmp_path / "x.md").read_text()


def test_checkpoints_of_different_models_are_not_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = shutil.copytree(pair[1], tmp_path / "other")
    record = json.loads((other / "ptqpipe.json").read_text())
    record["source"] = {"name": "another", "fingerprint": "0" * 64}
    (other / "ptqpipe.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match="was made from another"):
        compare([pair[1], other], out=tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_the_mean_recovery_says_how_sure_it_is(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    one = EVAL["tasks"][0] | {"baseline": 0.4, "checkpoint": 0.4, "recovery": 100.0, "interval": [-0.08, 0.04]}
    file.write_text(json.dumps(EVAL | {"tasks": [one, one | {"metric": "acc_norm", "interval": [-0.04, 0.04]}]}))
    page = "".join(Page(render_html(gather(pair[1], evaluation=file))).text)
    # By hand: -20 to +10 % and -10 to +10 % of the baseline, on the same 100 samples.
    assert "mean over 2 task metrics, 100 samples, 95 % interval 85.0 to 110.0 %" in page


def test_where_no_scale_is_claimed_optimal_the_source_is_not_asked_for(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "absmax"
    with prepare(pair[0], options=RecipeOptions(scheme="nvfp4", search="absmax"), out=out) as prepared:
        convert(prepared)
    for report in (gather(out), gather(out, source=pair[0])):
        assert report.proof.claimed == 0
        assert "no search that proves it chose them" in "".join(Page(render_html(report)).text)
    assert "--source checks it" in "".join(Page(render_html(gather(pair[1]))).text)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to run the page in")
@pytest.mark.slow
def test_on_a_narrow_page_sections_fold_and_what_is_cut_can_be_scrolled_and_says_so(
    sourced: Report, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    import asyncio

    from tests.server import browser

    (tmp_path / "page.html").write_text(render_html(sourced), encoding="utf-8")

    async def main() -> None:
        async with browser.opened(f"file://{tmp_path}/page.html", width=400, height=800, dark=False) as page:
            await page.until("document.readyState === 'complete'")
            folds = "[...document.querySelectorAll('details.fold')]"
            assert await page.value(f"{folds}.length") >= 5
            assert await page.value(f"{folds}.every(x => !x.open)")
            await page.value("document.querySelector('.links a[href=\"#tensors\"]').click()")
            await page.until("document.querySelector('#tensors .fold').open")
            await page.value(f"{folds}.forEach(x => {{ x.open = true }})")
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
            wide = "[...document.querySelectorAll('table, .links')].filter(x => x.getClientRects().length)"
            held = f"{wide}.map(x => x.closest('.scroll, .links')).filter(x => x.scrollWidth > x.clientWidth)"
            assert await page.value(f"{held}.length") > 3
            assert await page.value(f"{held}.every(x => getComputedStyle(x).overflowX === 'auto')")
            assert await page.value(f"{held}.every(x => getComputedStyle(x).backgroundImage.includes('gradient'))")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"version": 2}, CheckpointError, "version 2"),
        ({"checkpoint": {"name": "x", "run_id": "f" * 64}}, UsageError, "measured run ffff"),
        ({"kl": [{"data": "a"}]}, CheckpointError, "damaged"),
        ({"kl": 3}, CheckpointError, "damaged"),
        (
            {"kl": [EVAL["kl"][0] | {"histogram": {"first": 0, "per_decade": 4, "counts": [1, 2, 3]}}]},
            CheckpointError,
            "damaged",
        ),
        (
            {"kl": [EVAL["kl"][0] | {"positions": [{"first": 1, "last": 1, "tokens": 1, "mean": "inf"}]}]},
            CheckpointError,
            "damaged",
        ),
    ],
)
def test_an_eval_file_of_something_else_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, object], error: type[Exception], match: str
) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(EVAL | change))
    with pytest.raises(error, match=match):
        gather(pair[1], evaluation=file)


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
