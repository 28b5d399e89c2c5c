"""Claims: every kind of data in memory becomes the rows that a file of them would hold."""

import json
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import DynamicCache

from ptqpipe.api import calibration_data as module
from ptqpipe.api.calibration_data import data_names, recorded
from ptqpipe.errors import UsageError

ROWS = torch.arange(12).reshape(3, 4)
TOKENS = [{"input_ids": row} for row in ROWS.tolist()]
CHAT = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]


def rows_of(data: Any) -> list[Any]:
    """The rows of the file that the commands are given for ``data``."""
    with data_names(data) as names:
        (name,) = names
        found = [json.loads(line) for line in Path(name).read_text().splitlines()]
    assert not Path(name).exists()
    return found


class Batch(UserDict[str, Any]):
    """As tokenizers return them."""


class Rows:
    """A data set with a length, as the ``datasets`` library has them: its rows are dicts."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def _stream() -> Iterator[str]:
    yield from ("one", "two")


SQUAD = {"question": "Why?", "answers": {"text": ["So."], "answer_start": [3]}}


def _table(library: str) -> Any:
    made = pytest.importorskip(library)
    columns = {"text": ["one", None], "id": [7, 8]}
    return made.DataFrame(columns) if library == "pandas" else made.table(columns)


KINDS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "texts": (lambda: ["one text", "two\nlines"], [{"text": "one text"}, {"text": "two\nlines"}]),
    "texts that are no names": (
        lambda: ["a long one " * 40, "see the config.json", "\0"],
        [{"text": "a long one " * 40}, {"text": "see the config.json"}, {"text": "\0"}],
    ),
    "a stream of texts": (_stream, [{"text": "one"}, {"text": "two"}]),
    "token lists": (lambda: ROWS.tolist(), TOKENS),
    "token lists of several lengths": (lambda: [[1, 2], [3]], [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
    "one tensor": (lambda: ROWS, TOKENS),
    "tensors": (lambda: [ROWS[0], ROWS[1:]], TOKENS),
    "one batch": (lambda: Batch(input_ids=ROWS), TOKENS),
    "batches": (lambda: [{"input_ids": ROWS[:1]}, {"input_ids": ROWS[1:].tolist()}], TOKENS),
    "padding": (
        lambda: [{"input_ids": ROWS, "attention_mask": torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])}],
        [{"input_ids": [0, 1]}, {"input_ids": [5, 6, 7]}],
    ),
    "a loader of tensors": (lambda: DataLoader(ROWS, batch_size=2), TOKENS),  # type: ignore[arg-type]
    "a loader of tuples": (lambda: DataLoader(torch.utils.data.TensorDataset(ROWS, ROWS), batch_size=2), TOKENS),
    "a loader of dicts": (lambda: DataLoader([{"input_ids": row} for row in ROWS], batch_size=2), TOKENS),  # type: ignore[arg-type]
    "a data set of texts": (lambda: Rows([{"text": "one", "id": 7, "image": b"x"}]), [{"text": "one", "id": 7}]),
    "a data set of tokens": (lambda: Rows([{"input_ids": row.tolist(), "id": 7} for row in ROWS]), TOKENS),
    "chats": (lambda: [CHAT], [{"messages": CHAT}]),
    "a data set of chats": (lambda: Rows([{"messages": CHAT}]), [{"messages": CHAT}]),
    "one chat": (lambda: CHAT, [{"messages": CHAT}]),
    "a table of pandas": (lambda: _table("pandas"), [{"text": "one", "id": 7}, {"text": None, "id": 8}]),
    "a table of Arrow": (lambda: _table("pyarrow"), [{"text": "one", "id": 7}, {"text": None, "id": 8}]),
    "a loader of texts": (
        lambda: DataLoader([{"text": t, "id": t * 2} for t in ("a", "b", "c")], batch_size=2),  # type: ignore[arg-type]
        [{"text": t, "id": t * 2} for t in ("a", "b", "c")],
    ),
    "answers": (lambda: Rows([SQUAD]), [SQUAD]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind(kind: str) -> None:
    made, expected = KINDS[kind]
    assert rows_of(made()) == expected


def test_files_and_data_sets_go_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("words")
    for data, expected in (
        (None, []),
        ("a.txt", ["a.txt"]),
        ("owner/name:config:train", ["owner/name:config:train"]),
        (Path("folder"), ["folder"]),
        (["a.jsonl", Path("b.txt")], ["a.jsonl", "b.txt"]),
        ([str(tmp_path / "words")], [str(tmp_path / "words")]),
    ):
        with data_names(data) as names:
            assert names == expected


class Splits(list[Any]):
    features: None = None


class Endless(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        while True:
            yield "words " * 10


@pytest.mark.parametrize("data", [iter(Endless()), DataLoader(Endless(), batch_size=None)], ids=["stream", "loader"])
def test_a_stream_without_an_end_is_cut(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    assert 13 <= len(rows_of(data)) <= 15


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data is a int; give files, texts, token ids or batches"),
        ([], "data has no rows"),
        ([0.5], r"data\[0\] is float, expected a text"),
        ([torch.zeros(2, 4)], r"data\[0\] is Tensor, expected a text"),
        ([{"input_ids": ["a"]}], r"data\[0\]\['input_ids'\] is list"),
        ([{"text": "a", "tags": [object()]}], r"data\[0\] cannot be written as JSON .*; give texts, messages"),
        ({"train": Splits(), "test": Splits()}, r"data has several data sets \(train, test\); give one of them"),
        (["a.txt", "and a text"], r"data has files \(a.txt\) and other rows; give one kind"),
    ],
)
def test_what_is_no_data_is_one_line(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message), data_names(data):
        raise AssertionError("not reached")


class Echo(torch.nn.Module):
    """A model that does nothing with its tokens."""

    def forward(self, input_ids: Any = None, **more: Any) -> Any:
        return input_ids


def test_a_loop_is_recorded_call_by_call() -> None:
    model = Echo()
    found = recorded(model, lambda called: [called(ROWS[:1]), called(input_ids=ROWS[1:], attention_mask=ROWS[1:] > 4)])
    assert found == [[0, 1, 2, 3], [5, 6, 7], [8, 9, 10, 11]]
    assert not model._forward_pre_hooks
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 0)
    steps = [(ROWS[:1], DynamicCache()), (ROWS[1:2, :1], cache)]
    assert recorded(model, lambda called: [called(ids, past_key_values=past) for ids, past in steps]) == [[0, 1, 2, 3]]
    with pytest.raises(UsageError, match="did not call the model"):
        recorded(model, lambda called: None)
    with pytest.raises(UsageError, match="without input_ids"):
        recorded(model, lambda called: called(inputs_embeds=torch.zeros(1, 2, 3)))
    assert not model._forward_pre_hooks
