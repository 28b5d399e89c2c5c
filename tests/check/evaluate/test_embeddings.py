"""Claims about how embedders are measured: the embeddings, the numbers, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ptqpipe
from ptqpipe.check.evaluate.embeddings import embed, embedding_row, spearman, spearman_interval
from ptqpipe.check.evaluate.sentence_pairs import MOST, SentencePairs, pairs_of_text, read_pairs
from ptqpipe.errors import CheckpointError, PtqError, UsageError
from ptqpipe.models.embedder import Pooling
from ptqpipe.models.language_model import embedder_model_of
from ptqpipe.runtime.loading import load_rank, load_tokenizer
from ptqpipe.runtime.parallel import TensorParallel
from tests.calibration.models import make_model
from tests.embedders import make_embedder, sentences, write, write_pairs, write_text

MODES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "lasttoken": "lasttoken"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder") / "m")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_vector_is_that_of_the_tokens_without_padding(mode: str, side: str, tmp_path: Path) -> None:
    pooling = Pooling.of(make_embedder(tmp_path / "m", mode=mode, normalize=False))
    assert pooling.mode == MODES[mode]
    hidden, lengths = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0)), [7, 1, 3, 6, 2]
    mask = torch.zeros(5, 7)
    for row, length in enumerate(lengths):
        mask[row, slice(7 - length, 7) if side == "left" else slice(length)] = 1
    pooled = pooling.pool(hidden, mask)
    for row in range(5):
        seen = hidden[row][mask[row] == 1]
        expected = {"mean": seen.mean(0), "cls": seen[0], "max": seen.amax(0), "lasttoken": seen[-1]}[MODES[mode]]
        torch.testing.assert_close(pooled[row], expected)


@pytest.mark.parametrize("pooler", [True, False])
def test_embeddings_are_those_of_transformers_model_one_sentence_at_a_time(pooler: bool, tmp_path: Path) -> None:
    """Also where the checkpoint has no pooler, which makes no embedding."""
    from transformers import BertModel

    folder = make_embedder(tmp_path / "m", pooler=pooler)
    texts = [*sentences(9), " ".join(["w1"] * 50)]
    loaded = load_rank(folder, TensorParallel(), packed=False, dtype="float32", model_of=embedder_model_of)
    with torch.no_grad():
        vectors = embed(loaded, load_tokenizer(folder), Pooling.of(folder), texts, longest=32, batch_size=4)
        plain, tokenizer = BertModel.from_pretrained(folder).eval(), load_tokenizer(folder)
        for text, vector in zip(texts, vectors, strict=True):
            ids = torch.tensor([tokenizer(text, truncation=True, max_length=32)["input_ids"]])
            assert ids.shape[1] <= 32
            mean = plain(input_ids=ids).last_hidden_state[0].mean(0).double()
            torch.testing.assert_close(vector, mean / mean.norm(), rtol=1e-4, atol=1e-5)


def _rank(values: list[float], i: int) -> float:
    return sum(v < values[i] for v in values) + (sum(v == values[i] for v in values) + 1) / 2


def test_rank_correlation_is_that_of_mean_ranks_and_counts_repeat_pairs() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 6, 15).astype(float), generator.normal(size=15)
    b[3], b[9] = b[4], b[4]
    counts = generator.integers(0, 4, (3, 15)).astype(float)
    for row, got in zip(counts, spearman(a, b, counts), strict=True):
        x, y = (np.repeat(side, row.astype(int)).tolist() for side in (a, b))
        ranks = [[_rank(side, i) for i in range(len(side))] for side in (x, y)]
        assert got == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)


def test_the_interval_of_a_rank_correlation_holds_it_and_narrows_with_pairs() -> None:
    generator = np.random.default_rng(1)
    a = generator.normal(size=2000)
    b = a + generator.normal(size=2000) / 4
    spans = []
    for count in (100, 2000):
        low, high = spearman_interval(a[:count], b[:count])
        assert low < spearman(a[:count], b[:count], np.ones((1, count)))[0] < high < 1
        spans.append(high - low)
    assert spans[1] < spans[0] / 3


def test_a_row_counts_what_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.functional.normalize(torch.randn(2, 20, 8, generator=generator, dtype=torch.float64), dim=2)
    ours = theirs.clone()
    ours[0, 3] = -ours[0, 3]
    row = embedding_row(SentencePairs("p", ("a",) * 20, ("b",) * 20), ours, theirs)
    assert row["cosine"] == pytest.approx(38 / 40)
    assert row["cosine_least"] == pytest.approx(-1)
    assert row["same_nearest"] == pytest.approx(19 / 20)
    assert row["cosine_interval"][0] < 38 / 40 <= row["cosine_interval"][1]


def test_pairs_of_a_text_use_a_sentence_once_and_half_are_neighbours(tmp_path: Path) -> None:
    every = [f"this is sentence number s{i} of all ." for i in range(5000)]
    (tmp_path / "t.txt").write_text("= = A heading = =\n" + " ".join(every))
    pairs = pairs_of_text(str(tmp_path / "t.txt"), "t")
    assert len(pairs.first) == MOST
    used = [*pairs.first, *pairs.second]
    assert len(set(used)) == len(used)
    assert set(used) <= set(every)
    numbers = [[every.index(text) for text in side] for side in (pairs.first, pairs.second)]
    assert sum(b - a == 1 for a, b in zip(*numbers, strict=True)) == pytest.approx(MOST / 2, abs=5)


def test_pairs_are_read_from_columns_and_from_json_lines(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text("a b\tc\n\nd\te\n")
    (tmp_path / "p.jsonl").write_text('{"sentence1": "a b", "sentence2": "c", "score": 3}\n["d", "e"]\n')
    for name in ("p.tsv", "p.jsonl"):
        pairs = read_pairs(tmp_path / name)
        assert (pairs.first, pairs.second) == (("a b", "d"), ("c", "e"))


BAD_PAIRS = {
    "": ("p.tsv", "is empty"),
    "only one sentence\n": ("p.tsv", "line 1 has 1 columns"),
    "a\tb\nc\td\te\n": ("p.tsv", "line 2 has 3 columns"),
    "a\t\n": ("p.tsv", "line 1 has 1 columns"),
    "a\tb\n": ("p.tsv", "has 1 pairs of sentences, expected 2"),
    '{"a": "b"\n': ("p.jsonl", "line 1 is no JSON"),
    '{"text": "b", "score": 1}\n': ("p.jsonl", "line 1 has 1 strings"),
    "5\n": ("p.jsonl", "line 1 has 0 strings"),
}


@pytest.mark.parametrize("content", BAD_PAIRS)
def test_bad_pairs_are_refused_in_a_line(content: str, model: Path, tmp_path: Path) -> None:
    name, words = BAD_PAIRS[content]
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words) as caught:
        ptqpipe.evaluate(model, source=model, pairs=[tmp_path / name], out=tmp_path / "e.json")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "e.json").exists()


def _no_modules(folder: Path) -> None:
    (folder / "1_Pooling/config.json").unlink()


def _no_pooling(folder: Path) -> None:
    write(folder / "modules.json", [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}])


def _two_modes(folder: Path) -> None:
    write(folder / "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})


def _dense(folder: Path) -> None:
    rows = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [*rows, {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}])


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no file of the pooling": (_no_modules, "config.json is not there"),
    "no pooling": (_no_pooling, "lists a Pooling"),
    "two modes": (_two_modes, "expected one of"),
    "a dense layer": (_dense, "'Dense', which ptqpipe does not compute"),
}


@pytest.mark.parametrize("damage", BAD_FOLDERS)
def test_a_pooling_that_is_not_understood_is_refused_in_a_line(damage: str, tmp_path: Path) -> None:
    change, words = BAD_FOLDERS[damage]
    folder, text = make_embedder(tmp_path / "m"), write_text(tmp_path / "t.txt")
    change(folder)
    calls: list[Any] = [
        lambda: ptqpipe.evaluate(folder, text, source=folder, out=tmp_path / "e.json"),
        lambda: ptqpipe.calibrate(folder, text, tmp_path / "s"),
        lambda: ptqpipe.convert(folder, data=text, out=tmp_path / "q", format="nvfp4"),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert not any((tmp_path / name).exists() for name in ("e.json", "s", "q"))


def test_what_is_not_for_an_embedder_is_refused_in_a_line(model: Path, tmp_path: Path) -> None:
    causal = make_model(tmp_path / "causal", "llama")
    other = make_embedder(tmp_path / "other", mode="cls_token")
    pairs, chats = write_pairs(tmp_path / "p.tsv"), tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "w1 w2"}]}) + "\n")
    words_file = write_text(tmp_path / "t.txt")
    calls: dict[str, Callable[[], Any]] = {
        "tasks is for models that continue text": lambda: ptqpipe.evaluate(model, source=model, tasks="local_piqa"),
        "max_tokens is for": lambda: ptqpipe.evaluate(model, source=model, max_tokens=5),
        "add source": lambda: ptqpipe.evaluate(model),
        "has no chat template": lambda: ptqpipe.evaluate(model, chats, source=model),
        "is none; give the model": lambda: ptqpipe.evaluate(model, source=causal),
        "in two ways": lambda: ptqpipe.evaluate(model, source=other),
        "pairs are for sentence embedders": lambda: ptqpipe.evaluate(causal, source=causal, pairs=[pairs]),
        "positions": lambda: ptqpipe.evaluate(model, source=model, pairs=[pairs], seqlen=49),
        "writes no text": lambda: ptqpipe.convert(model, data="self", out=tmp_path / "q", format="nvfp4"),
        r"method=.kl. need": lambda: ptqpipe.tune(
            model, words_file, tmp_path / "c", method="kl", samples=300, seqlen=8
        ),
        "gives no probabilities": lambda: ptqpipe.generate(model, tmp_path / "g.jsonl"),
        "chat template": lambda: ptqpipe.calibrate(model, chats, tmp_path / "s", samples=1, seqlen=4),
    }
    for words, call in calls.items():
        with pytest.raises(PtqError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_model_is_near_lossless_to_itself_and_damaged_by_other_weights(model: Path, tmp_path: Path) -> None:
    pairs, other = write_pairs(tmp_path / "p.tsv"), make_embedder(tmp_path / "other", seed=1)
    same = ptqpipe.evaluate(model, source=model, pairs=[pairs], out=tmp_path / "same.json")
    row = same.record["embeddings"][0]
    assert row["cosine"] == pytest.approx(1)
    assert row["spearman"] == 1
    assert row["pairs"] == 60
    assert same.verdict is not None
    assert same.verdict.level == "near-lossless"
    apart = ptqpipe.evaluate(other, source=model, pairs=[pairs], out=tmp_path / "apart.json")
    assert apart.verdict is not None
    assert apart.verdict.level == "damaged"
    assert json.loads((tmp_path / "apart.json").read_text())["verdict"]["level"] == "damaged"
