"""Claims about a sentence embedder from calibration to the page: what runs is the encoder, and every step works."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.calibration.backward import linear_modules, run_model_backward
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.models.embedder import Pooling
from ptqpipe.models.source import Source
from ptqpipe.runtime.skeleton import Skeleton
from tests.embedders import make_embedder, write_pairs, write_text
from tests.pipeline.runs import ran

COUNT, LENGTH = 16, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder") / "m")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "t.txt", 800)


def test_windows_are_as_long_as_the_embedder_reads_and_begin_and_end_like_a_text(model: Path, text: Path) -> None:
    windows = load_samples([str(text)], model, samples=COUNT, seqlen=LENGTH).windows
    assert windows[:, 0].tolist() == [2] * COUNT  # [CLS]
    assert windows[:, -1].tolist() == [3] * COUNT  # [SEP]
    assert not bool((windows == 0).any())  # no padding, whatever tokenizer.json asks for


def test_statistics_are_those_of_the_encoder_with_its_bidirectional_mask(
    model: Path, text: Path, tmp_path: Path
) -> None:
    from transformers import BertModel

    ran("calibrate", model, "--data", text, "-o", tmp_path / "s", "--samples", COUNT, "--holdout", 0)
    windows = load_samples([str(text)], model, samples=COUNT, seqlen=32, holdout=0).windows
    plain = BertModel.from_pretrained(model).eval()
    name, seen = "encoder.layer.1.output.dense", list[torch.Tensor]()
    plain.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        plain(input_ids=windows)
    statistics = Statistics.open(tmp_path / "s").of(name)
    torch.testing.assert_close(statistics.mean, torch.cat(seen).mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics.amax, torch.cat(seen).abs().amax(0), rtol=1e-4, atol=1e-5)


def test_slopes_are_those_of_the_embeddings_against_normal_vectors(model: Path, text: Path, tmp_path: Path) -> None:
    """The expected gradients: autograd through transformers' whole model."""
    from transformers import BertModel

    samples = load_samples([str(text)], model, samples=COUNT, seqlen=LENGTH, holdout=0)
    with Source.open(model) as source:
        options: dict[str, Any] = {"seed": 5, "device": torch.device("cpu"), "memory_bytes": 1 << 30, "spill": tmp_path}
        layers = dict(
            run_model_backward(Skeleton.of(source, dtype=torch.float32), samples, modules=linear_modules, **options)
        )
    plain, leaf = BertModel.from_pretrained(model).eval(), "encoder.layer.0.attention.self.value"
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain.get_submodule(leaf).register_forward_hook(lambda _, args, out: kept.append((args[0], out)))
    hidden = plain(input_ids=samples.windows).last_hidden_state
    vectors = torch.nn.functional.normalize(Pooling.of(model).pool(hidden))
    seeds = [5 * 1_000_003 + number for number in range(COUNT)]
    drawn = torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    x, out = kept[0]
    (g,) = torch.autograd.grad(vectors, out, drawn)
    g, energy = g.flatten(0, 1).double(), x.flatten(0, 1).double().square().mean(1)
    expected = (g * energy.unsqueeze(1)).t() @ g / energy.sum()
    got = layers["encoder.layer.0"].outputs["attention.self.value"][0].double()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4a16", "fp8", "nvfp4_w4a4"])
def test_every_step_that_a_command_prints_works(
    scheme: str, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the report goes
    out = tmp_path / "out"
    said = ran(
        "convert", model, "--format", scheme, "--data", text, "--quality", "best", "--samples", 8, "--workers", 1,
        "-o", out,
    )  # fmt: skip
    steps: list[str] = []
    while "Next: " in said and len(steps) < 4:
        call = shlex.split(said.partition("Next: ")[2].splitlines()[0])
        if call[0] != "ptqpipe":
            break
        steps.append(call[1])
        said = ran(*call[1:], *(["--pairs", write_pairs(tmp_path / "p.tsv", 20)] if call[1] == "eval" else []))
    assert steps == ["eval", "report"]
    row = json.loads((tmp_path / "out.eval.json").read_text())["embeddings"][0]
    assert 0.5 < row["cosine"] < 1
    assert "same nearest sentence" in (out / "README.md").read_text()
    assert "AutoModel.from_pretrained" in (out / "README.md").read_text()
    assert "ptqpipe serve" not in (out / "README.md").read_text()
    assert "Cosine of embeddings" in (tmp_path / "out.report.html").read_text()
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert "sound" in ran("verify", out, "--source", model)


def test_data_bring_the_embeddings_nearer(model: Path, text: Path, tmp_path: Path) -> None:
    cosines = {}
    for quality in ("nearest", "good", "best"):
        data: list[object] = [] if quality == "nearest" else ["--data", text, "--quality", quality, "--samples", 64]
        ran("convert", model, *data, "--eval", text, "--workers", 1, "-o", tmp_path / quality)
        record = json.loads((tmp_path / f"{quality}.eval.json").read_text())
        cosines[quality] = record["embeddings"][0]["cosine"]
    assert cosines["nearest"] < cosines["good"] < cosines["best"]
