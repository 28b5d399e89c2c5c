"""Claims about tokenizers that fail on a text, by a panic of Rust or a plain Exception: one line with the place."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ptqpipe.calibration.rows import Messages, row_tokens
from ptqpipe.cli import main
from ptqpipe.errors import UsageError, tokenizer_errors
from ptqpipe.runtime.loading import load_tokenizer
from tests import tiny

PANICS = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")  # Oniguruma gives up after ten million steps
LONG = "a" * 60


def words(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = PANICS if "[UNK]" in vocabulary else pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]" if "[UNK]" in vocabulary else None,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("vocabulary", "says"),
    [({"[UNK]": 0, "b": 1}, "retry-limit-in-match over"), ({"b": 1}, "Missing")],
    ids=["a panic", "an exception"],
)
@pytest.mark.parametrize("value", [LONG, Messages([{"role": "user", "content": LONG}])], ids=["text", "chat"])
def test_a_row_is_named(vocabulary: dict[str, int], says: str, value: object) -> None:
    tokenizer = words(vocabulary)
    with pytest.raises(UsageError, match=rf"^data.jsonl, line 7: .*tokenizer fails .*{says}.*shorten"):
        list(row_tokens(lambda: tokenizer, value, "data.jsonl, line 7"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, TypeError, UsageError])
def test_other_errors_keep_their_kind(error: type[BaseException]) -> None:
    with pytest.raises(error, match="x"), tokenizer_errors("a row"):
        raise error("x")


def test_a_tokenizer_that_panics_while_it_is_read_is_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    from ptqpipe.errors import CheckpointError

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **options: words({"[UNK]": 0})(LONG))
    with pytest.raises(CheckpointError, match="retry-limit"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("command", ["calibrate", "eval", "convert"])
def test_commands_say_it_in_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=32, inner=64))
    words({"[UNK]": 0, "b": 1}).save_pretrained("model")
    rows = [{"text": "b b b b"}] * 3 + [{"text": LONG}]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {
        "calibrate": ["--data", "data.jsonl", "-o", "out", "--samples", "4", "--seqlen", "8"],
        "eval": ["--data", "data.jsonl"],
        "convert": ["--data", "data.jsonl", "-o", "out", "--samples", "4", "--seqlen", "8"],
    }[command]
    done = CliRunner().invoke(main, [command, "model", *more])
    assert done.exit_code == 2, done.output
    assert "data.jsonl" in done.stderr
    assert "the model's tokenizer fails on this text" in done.stderr
    assert not Path("out").exists()
