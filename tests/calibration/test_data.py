"""Claims of the samples: what each kind of file gives, that a seed decides, and one line for everything bad."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.calibration import data
from ptqpipe.calibration.data import DataFile, check_samples, load_samples
from ptqpipe.calibration.rows.tokens import PIECE
from ptqpipe.errors import CheckpointError, UsageError

WORDS = [f"w{i}" for i in range(50)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer: one token a word, <bos> before each text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", "user", "assistant", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<bos>")
    fast.save_pretrained(folder)
    return folder


def ids(text: str) -> list[int]:
    """The tokens of words, by hand."""
    return [["<unk>", "<bos>", "user", "assistant", *WORDS].index(word) for word in text.split()]


def sampled(file: Path | str, model: Path, **changes: Any) -> list[int]:
    """All tokens of a file as one window."""
    settings = {"samples": 1, "seqlen": 4} | changes
    return load_samples([str(file)], model, **settings).windows.flatten().tolist()  # type: ignore[no-any-return]


def lines(file: Path, *rows: Any) -> Path:
    """A .jsonl file."""
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


@pytest.mark.parametrize("suffix", [".txt", ".raw", ".md"])
def test_text_files_are_tokenized_with_the_models_tokenizer(suffix: str, tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_text("w3 w4\nw5\n")
    assert sampled(file, tokenizer) == ids("<bos> w3 w4 w5")


@pytest.mark.parametrize("field", ["text", "content", "prompt"])
def test_rows_of_text_follow_each_other(field: str, tokenizer: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"id": 1, field: "w1 w2"}, {field: "w3"})
    assert sampled(file, tokenizer, seqlen=5) == ids("<bos> w1 w2 <bos> w3")


def test_the_field_can_be_named(tokenizer: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "w1 w2 w3", "answer": "w7 w8 w9"})
    assert sampled(file, tokenizer, field="answer") == ids("<bos> w7 w8 w9")


@pytest.mark.slow
def test_parquet_rows_are_those_of_jsonl(tokenizer: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["w1 w2", "w3"]}), tmp_path / "a.parquet")
    assert sampled(tmp_path / "a.parquet", tokenizer, seqlen=5) == ids("<bos> w1 w2 <bos> w3")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(UsageError, match=r"b\.parquet is not a parquet file"):
        sampled(tmp_path / "b.parquet", tokenizer)


def test_messages_go_through_the_chat_template(tokenizer: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    file = lines(tmp_path / "a.jsonl", {"messages": messages})
    with pytest.raises(
        UsageError, match="line 1 is a list of messages, and the model's tokenizer has no chat template"
    ):
        sampled(file, tokenizer)
    model = tmp_path / "model"
    model.mkdir()
    for path in tokenizer.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert sampled(file, model, seqlen=5) == ids("user w1 w2 assistant w3")
    (model / "chat_template.jinja").write_text("{{ bos_token }} " + TEMPLATE)
    assert sampled(file, model, samples=2, seqlen=3) == ids("<bos> user w1 <bos> assistant w3")


def test_a_folder_means_its_files_by_name(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("w3")
    lines(tmp_path / "a.jsonl", {"text": "w1 w2"})
    (tmp_path / "notes.md").write_text("w9")
    found = load_samples([str(tmp_path)], tokenizer, samples=1, seqlen=5)
    assert found.windows.flatten().tolist() == ids("<bos> w1 w2 <bos> w3")
    assert [file.name for file in found.files] == ["a.jsonl", "b.txt"]


def test_every_window_of_text_begins_as_the_tokenizer_begins_a_text(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(WORDS[:11]))
    made = load_samples([str(tmp_path / "a.txt")], tokenizer, samples=3, seqlen=4)
    assert made.windows.tolist() == [ids("<bos> w0 w1 w2"), ids("<bos> w4 w5 w6"), ids("<bos> w8 w9 w10")]
    tokens = lines(tmp_path / "b.jsonl", {"input_ids": [*range(4, 12)]})
    assert load_samples([str(tokens)], tokenizer, samples=2, seqlen=4).windows[:, 0].tolist() == [4, 8]


def test_windows_of_a_tokenizer_that_begins_no_text_stay_as_they_are(tokenizer: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tokenizer.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    (tmp_path / "a.txt").write_text(" ".join(WORDS[:8]))
    made = load_samples([str(tmp_path / "a.txt")], model, samples=2, seqlen=4)
    assert made.windows.tolist() == [ids("w0 w1 w2 w3"), ids("w4 w5 w6 w7")]


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"input_ids": [7, 8]}, {"input_ids": [9, 10]})
    assert sampled(file, tmp_path) == [7, 8, 9, 10]
    text = lines(tmp_path / "b.jsonl", {"text": "w1"})
    with pytest.raises(CheckpointError, match="has no tokenizer that transformers reads"):
        sampled(text, tmp_path)


def test_long_texts_in_pieces_are_the_same_tokens(tokenizer: Path, tmp_path: Path) -> None:
    words = [WORDS[i * i % 50] for i in range(PIECE // 3)]
    (tmp_path / "lines.txt").write_text("".join(f"{word}\n" for word in words))
    (tmp_path / "one.txt").write_text(" ".join(words))  # no line ends: never cut
    size = len(words) + 1
    assert (tmp_path / "one.txt").stat().st_size > 1.2 * PIECE
    cut = sampled(tmp_path / "lines.txt", tokenizer, seqlen=size)
    assert cut == sampled(tmp_path / "one.txt", tokenizer, seqlen=size) == ids("<bos>") + ids(" ".join(words))


def test_a_seed_chooses_windows_without_replacement(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"input_ids": list(range(403))})
    first = load_samples([str(file)], tmp_path, samples=20, seqlen=4, seed=1)
    starts = first.windows[:, 0].tolist()
    assert first.candidates == 100
    assert len(set(starts)) == 20
    assert all(start % 4 == 0 for start in starts)
    assert torch.equal(first.windows, first.windows[:, :1] + torch.arange(4))
    assert load_samples([str(file)], tmp_path, samples=20, seqlen=4, seed=1).sha256 == first.sha256
    other = load_samples([str(file)], tmp_path, samples=20, seqlen=4, seed=2)
    assert other.sha256 != first.sha256
    assert first.files == (DataFile("a.jsonl", hashlib.sha256(file.read_bytes()).hexdigest(), 1, 403),)


def test_of_long_data_rows_evenly_spread_are_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit: of 100 rows of 40 tokens, at most 1,000, so every fourth."""
    monkeypatch.setattr(data, "LONG", 1000)
    files = [lines(tmp_path / f"{n}.jsonl", *({"input_ids": [n + row] * 40} for row in range(50))) for n in (0, 50)]
    names = [str(file) for file in files]
    made = load_samples(names, tmp_path, samples=5, seqlen=4)
    assert made.candidates == 25 * 40 // 4
    assert [(file.rows, file.tokens, file.every) for file in made.files] == [(50, 13 * 40, 4), (50, 12 * 40, 4)]
    assert made.files[0].to_json()["every"] == 4
    assert made.thinned == ", from one of every 4 rows"
    assert bool((made.windows % 4 == 0).all())
    assert made.sha256 == load_samples(names, tmp_path, samples=5, seqlen=4).sha256
    wanted = load_samples(names, tmp_path, samples=20, seqlen=4)  # 32 for each of their tokens
    assert (wanted.candidates, wanted.files[0].every) == (500, 2)
    alike = [load_samples(names, tmp_path, samples=29, seqlen=4, holdout=holdout) for holdout in (0, 3, None)]
    assert {(one.candidates, one.files[0].every, one.sha256) for one in alike} == {(1000, None, alike[0].sha256)}
    every = load_samples(names, tmp_path, samples=1000, seqlen=4)
    assert (every.candidates, every.files[0].every, every.thinned) == (1000, None, "")
    assert "every" not in every.files[0].to_json()


@pytest.mark.slow
def test_a_long_text_is_thinned_by_its_pieces(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LONG", 5 * PIECE)
    file = tmp_path / "a.txt"
    file.write_text("".join(f"{WORDS[i // (PIECE // 2) % 50]}\n" for i in range(5 * PIECE)))  # ten texts of one word
    made = load_samples([str(file)], tokenizer, samples=1000, seqlen=4)
    assert (made.files[0].rows, made.files[0].every) == (1, 4)
    assert len(set(made.windows[:, 1].tolist())) in (4, 5, 6)
    assert bool((made.windows[:, 0] == 1).all())
    assert not bool((made.windows[:, 1:] == 1).any())  # special tokens stand where the text and windows begin


def test_where_rows_of_long_data_are_too_little_all_are_read(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a token has 200 characters."""
    monkeypatch.setattr(data, "LONG", 1000)
    file = lines(tmp_path / "a.jsonl", *({"text": f"{' ' * 200}w1"} for _ in range(100)))
    made = load_samples([str(file)], tokenizer, samples=40, seqlen=4)
    assert (made.candidates, made.files[0].every) == (50, None)
    with pytest.raises(UsageError, match="give 200 tokens, 50 windows of 4, expected 51"):
        load_samples([str(file)], tokenizer, samples=51, seqlen=4)


def test_of_a_data_set_by_name_the_first_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def rows(_name: str) -> Iterator[tuple[int, Any]]:
        for number in range(1, 501):
            read.append(number)
            yield number, {"input_ids": [number] * 100}

    monkeypatch.setattr(data, "LONG", 1000)
    monkeypatch.setattr("ptqpipe.calibration.rows.forms.dataset_rows", rows)
    made = load_samples(["owner/texts"], tmp_path, samples=5, seqlen=4)
    assert (len(read), made.files[0].rows, made.files[0].every) == (11, 11, 2)
    load_samples(["owner/texts"], tmp_path, samples=12_000, seqlen=4)  # more than the first ones of so many give
    assert read[-1] == 500


def test_of_many_rows_with_images_some_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def shown(_see: Any, _tokenizer: Any, _messages: Any, where: str, **_: Any) -> Any:
        seen.append(where)
        return data._Shown((1, 2, 3), {}, b"0")

    for name in ("load_tokenizer", "read_config", "Processor"):
        monkeypatch.setattr(data, name, lambda *_: None)
    monkeypatch.setattr(data, "_with_images", shown)
    message = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    file = lines(tmp_path / "a.jsonl", *({"messages": [message]} for _ in range(1000)))
    made = load_samples([str(file)], tmp_path, samples=10, seqlen=8, images=True)
    assert len(seen) == made.candidates == 32
    assert made.files[0].every == 32
    assert len(made.images) == 10


def bad_files() -> Iterator[tuple[str, bytes | None, str]]:
    """(name, content, what the message says)."""
    yield "none.txt", None, r"none\.txt does not exist"
    yield "empty.txt", b" \n", r"empty\.txt is empty"
    yield "empty.jsonl", b"", r"empty\.jsonl is empty"
    yield "binary.txt", b"ab\xff", r"binary\.txt is not UTF-8 text \(byte 2\)"
    yield "bad.jsonl", b'{"text": "w1"}\n{"text": \n', r"bad\.jsonl, line 2 is not JSON"
    yield "list.jsonl", b"[1]\n", r"list\.jsonl, line 1 is list, expected an object"
    yield "field.jsonl", b'\n{"id": 3}\n', r"field\.jsonl, line 2 has id, not any of messages, .*text_field"
    yield "number.jsonl", b'{"text": 5}\n', r"number\.jsonl, line 1, 'text' is int, expected a text"
    yield "negative.jsonl", b'{"input_ids": [1, -2]}\n', r"line 1 has token id -2"
    yield "short.txt", b"w1 w2", r"give 3 tokens, 0 windows of 4, expected 1; give more data"


@pytest.mark.parametrize(("name", "content", "message"), list(bad_files()))
def test_bad_data_is_one_line(name: str, content: bytes | None, message: str, tokenizer: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        sampled(tmp_path / name, tokenizer)


def test_too_few_rows_of_one_length_say_what_to_ask_for(tokenizer: Path, tmp_path: Path) -> None:
    """As `generate` writes them: 16 windows and 2 more to hold out, of 8 tokens each."""
    rows = tmp_path / "own.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [*range(8)]}) + "\n" for _ in range(18)))
    said = "give 144 tokens, 9 windows of 16, expected 128.*; the rows are 18 windows of 8 tokens: "
    said += "use samples=16 seqlen=8$"
    with pytest.raises(UsageError, match=said):
        load_samples([str(rows)], tokenizer, samples=128, seqlen=16)
    with pytest.raises(UsageError, match=said):
        check_samples([str(rows)], tokenizer, samples=128, seqlen=16)
    found = load_samples([str(rows)], tokenizer, samples=16, seqlen=8, holdout=None)
    assert (len(found.windows), len(found.held_out)) == (16, 2)


def test_a_missing_field_is_named(tokenizer: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "w1"}, {"txt": "w2"})
    with pytest.raises(UsageError, match=r"line 2 has txt, not 'text'; choose one with text_field"):
        sampled(file, tokenizer, field="text")


def test_no_data_says_what_to_give(tokenizer: Path) -> None:
    with pytest.raises(UsageError, match=r"no data to calibrate on; give data=.FILE"):
        load_samples([], tokenizer, samples=1, seqlen=4)


def test_a_data_set_that_cannot_be_loaded_is_one_line(tokenizer: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UsageError, match="nobody/nothing is no file, and as a data set it cannot be loaded"):
        sampled("nobody/nothing", tokenizer)


def test_a_data_set_that_cannot_be_loaded_is_perhaps_a_file_beside_it(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("w1")
    with pytest.raises(UsageError, match=r"did you mean 'text\.txt'\?"):
        sampled("text.tx", tokenizer)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="the hub is out of reach, or HF_HUB_OFFLINE is 1: give data a"):
        sampled("owner/other", tokenizer)


def test_weights_decide_how_many_windows_each_source_gives(tokenizer: Path, tmp_path: Path) -> None:
    first, second = (lines(tmp_path / f"{n}.jsonl", {"input_ids": [n] * 4000}) for n in (5, 6))
    made = load_samples([f"{first}=3", f"{second}"], tokenizer, samples=80, seqlen=4, holdout=None)
    for windows, share in ((made.windows, 60), (made.held_out, 8)):
        assert int((windows[:, 0] == 5).sum()) == share
        assert bool((windows == windows[:, :1]).all()), "a window of two sources"
    assert [file.weight for file in made.files] == [3.0, 1.0]
    every = torch.cat([made.windows, made.held_out])[:, 0].tolist()
    assert [made.files[n].name for n in made.origin.tolist()] == [f"{token}.jsonl" for token in every]
    assert made.files[0].to_json()["weight"] == 3.0
    again = load_samples([f"{first}=3", f"{second}"], tokenizer, samples=80, seqlen=4, holdout=None)
    assert again.sha256 == made.sha256


def test_windows_of_several_sources_are_mixed_evenly(tokenizer: Path, tmp_path: Path) -> None:
    """Who judges by the last windows judges by all sources."""
    names = [str(lines(tmp_path / f"{n}.jsonl", {"input_ids": list(range(n, n + 400))})) for n in (1000, 2000)]
    made = load_samples([f"{names[0]}=3", names[1]], tokenizer, samples=80, seqlen=4, holdout=10)
    firsts = made.windows[:, 0]
    assert (firsts // 1000).view(20, 4).eq(2).sum(1).tolist() == [1] * 20
    assert (made.held_out[:, 0] // 1000).view(2, 5).eq(2).sum(1).tolist() == [1, 1]
    for of in (1, 2):  # each source in its own order
        own = firsts[firsts // 1000 == of].tolist()
        assert own == sorted(own)
    alone = load_samples([names[0]], tokenizer, samples=80, seqlen=4, holdout=10)
    assert alone.windows[:, 0].tolist() == sorted(alone.windows[:, 0].tolist())


def test_without_weights_all_text_is_one_stream_and_the_record_has_no_weight(tokenizer: Path, tmp_path: Path) -> None:
    files = [str(lines(tmp_path / f"{n}.jsonl", {"input_ids": [n] * 6})) for n in (5, 6)]
    made = load_samples(files, tokenizer, samples=3, seqlen=4)
    assert made.windows.tolist() == [[5] * 4, [5, 5, 6, 6], [6] * 4]
    assert made.origin.tolist() == [0, 0, 1]
    assert "weight" not in made.files[0].to_json()


def test_too_many_windows_to_hold_out_are_a_cause_that_is_named(tokenizer: Path, tmp_path: Path) -> None:
    rows = lines(tmp_path / "a.jsonl", {"input_ids": [5] * 40})
    with pytest.raises(UsageError, match=r"10 windows of 4, expected 2 and 9 held out; .*, holdout or"):
        load_samples([str(rows)], tokenizer, samples=2, seqlen=4, holdout=9)


def test_a_folder_shares_its_weight_and_a_name_that_exists_has_none(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    lines(folder / "a.jsonl", {"input_ids": [5] * 4000})
    lines(folder / "b.jsonl", {"input_ids": [6] * 4000})
    other = lines(tmp_path / "c=2.jsonl", {"input_ids": [7] * 4000})
    made = load_samples([f"{folder}=1", str(other)], tokenizer, samples=80, seqlen=4)
    assert [int((made.windows[:, 0] == token).sum()) for token in (5, 6, 7)] == [20, 20, 40]


@pytest.mark.parametrize(
    ("weight", "words"),
    [("0", "has the weight 0, expected a number above 0"), ("-1", "has the weight -1"), ("x", "does not exist"),
     ("1e6", "gives 8 tokens, 2 windows of 4, expected 4; give more data, or lower its weight, samples")],
)  # fmt: skip
def test_a_bad_weight_is_one_line(tokenizer: Path, tmp_path: Path, weight: str, words: str) -> None:
    few, many = (lines(tmp_path / f"{n}.jsonl", {"input_ids": [5] * n}) for n in (8, 800))
    for check in (load_samples, check_samples):
        with pytest.raises(UsageError) as caught:
            check([f"{few}={weight}", str(many)], tokenizer, samples=4, seqlen=4)
        assert words in str(caught.value).replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf", "1e10", "1e400", "+0"])
def test_a_weight_that_no_sum_holds_is_refused_as_a_weight(tokenizer: Path, tmp_path: Path, weight: str) -> None:
    file = lines(tmp_path / "a.jsonl", {"input_ids": [5] * 800})
    for check in (load_samples, check_samples):
        with pytest.raises(UsageError, match=r"has the weight .*, expected a number above 0, at most 1000000000"):
            check([f"{file}={weight}"], tokenizer, samples=4, seqlen=4)


@pytest.mark.parametrize("weight", [".5", "5E-1", "0.5", "+.5"])
def test_a_weight_is_any_number_as_people_write_it(tokenizer: Path, tmp_path: Path, weight: str) -> None:
    first, second = (lines(tmp_path / f"{n}.jsonl", {"input_ids": [n] * 4000}) for n in (5, 6))
    made = load_samples([f"{first}={weight}", str(second)], tokenizer, samples=60, seqlen=4)
    assert int((made.windows[:, 0] == 5).sum()) == 20


def test_a_text_that_is_given_twice_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"input_ids": [5] * 800})
    (tmp_path / "link.jsonl").symlink_to(file)
    for names in ([file, file], [file, tmp_path], [f"{file}=2", file], [file, tmp_path / "link.jsonl"]):
        with pytest.raises(UsageError, match=r"twice; give it once, .*=2 for twice its share of the windows"):
            load_samples([str(name) for name in names], tokenizer, samples=4, seqlen=4)


def test_an_empty_file_of_a_folder_with_a_weight_is_called_empty(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    lines(folder / "a.jsonl", {"input_ids": [5] * 4000})
    (folder / "b.txt").write_text("")
    with pytest.raises(UsageError, match=r"b\.txt is empty; give a file with text"):
        load_samples([f"{folder}=2"], tokenizer, samples=4, seqlen=4)
