"""Claims of the forms of data: each is mapped, with a line that says how, or refused with one line."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ptqpipe.calibration.rows import Notes, files_of, read_rows
from ptqpipe.errors import UsageError

TWO = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
THREE = [{"role": "system", "content": "Be."}, *TWO]
SHARED = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
SHAREGPT = "ShareGPT conversations (from/value)"
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
ALPACA = {"instruction": "Sort it.", "input": "b a", "output": "a b"}


def lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


# Of one row: what it is as (line or ""), value. The line is that of `Notes` without name and count.
ROWS: dict[str, tuple[Any, str, Any]] = {
    "text": ({"text": "Hi."}, "", "Hi."),
    "content": ({"content": "Hi."}, "", "Hi."),
    "prompt": ({"prompt": "Hi."}, "", "Hi."),
    "a text of JSON": ("Hi.", "", "Hi."),
    "text before its parts": (
        {"text": "b a: a b", **ALPACA}, "'text' alone (instruction, input, output left out)", "b a: a b",
    ),
    "messages": ({"messages": TWO}, "", TWO),
    "a list of messages": (TWO, "", TWO),
    "messages as JSON in a text": ({"messages": json.dumps(TWO)}, "", TWO),
    "messages in columns": ({"messages": {"role": ["user", "assistant"], "content": ["Why?", "So."]}}, "", TWO),
    "messages with nulls": ({"messages": [{**TWO[0], "name": None}, {**TWO[1], "tool_calls": None}]}, "", TWO),
    "a null content": (
        {"messages": [TWO[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "",
        [TWO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    "arguments as JSON in a text": (
        {"messages": [
            TWO[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        ]}, "", [TWO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "so?"}]}]},
        "", [{"role": "user", "content": "Why\nso?"}],
    ),
    "content as an object": ({"messages": [{"role": "user", "content": {"text": "Why?"}}]}, "", TWO[:1]),
    "parts with an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "text": None}]}]},
        "", [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
    ),
    "developer": (
        {"messages": [{"role": "developer", "content": "Be."}, *TWO]}, "messages (developer as system)", THREE,
    ),
    "tool": ({"messages": [*TWO, {"role": "tool", "content": "4"}]}, "", [*TWO, {"role": "tool", "content": "4"}]),
    "tools": ({"messages": TWO, "tools": [{"function": {"name": "f"}}]}, "messages with tools", TWO),
    "ShareGPT": ({"conversations": SHARED}, SHAREGPT, TWO),
    "ShareGPT with system": ({"conversations": SHARED, "system": "Be."}, f"{SHAREGPT} with system", THREE),
    "ShareGPT in messages": ({"messages": [{"from": "system", "value": "Be."}, *SHARED]}, SHAREGPT, THREE),
    "ShareGPT's tools": (
        {"conversations": [
            {"from": "function_call", "value": "f()"}, {"from": "observation", "value": "4"},
            {"from": "tool", "value": "5"}, {"from": "function", "value": "6"},
        ]}, SHAREGPT,
        [{"role": "assistant", "content": "f()"}, *({"role": "tool", "content": n} for n in "456")],
    ),
    "role and value": ({"conversations": [{"role": "user", "value": "Why?"}]}, "conversations (role/value)", TWO[:1]),
    "Alpaca": (
        ALPACA, "'instruction' and 'input' and 'output'",
        [{"role": "user", "content": "Sort it.\n\nb a"}, {"role": "assistant", "content": "a b"}],
    ),
    "Alpaca without input": (
        {"instruction": "Why?", "input": "", "output": "So."}, "'instruction' and 'output'", TWO,
    ),
    "Alpaca with history": (
        {"instruction": "Why?", "output": "So.", "history": [["How?", "Thus."]], "system": "Be."},
        "'instruction' and 'output'",
        [THREE[0], {"role": "user", "content": "How?"}, {"role": "assistant", "content": "Thus."}, *TWO],
    ),
    "Dolly": (
        {"instruction": "Why?", "context": "It is.", "response": "So.", "category": "qa"},
        "'instruction' and 'context' and 'response'",
        [{"role": "user", "content": "It is.\n\nWhy?"}, TWO[1]],
    ),
    "question and answer": ({"question": "Why?", "answer": "So."}, "'question' and 'answer'", TWO),
    "SQuAD": (
        {"context": "It is.", "question": "Why?", "answers": {"text": ["So.", "no"], "answer_start": [1, 2]}},
        "'question' and 'context' and 'answers'", [{"role": "user", "content": "It is.\n\nWhy?"}, TWO[1]],
    ),
    "a choice": (
        {"question": "Why?", "choices": ["So.", "No."], "answer": 1}, "'question' (choices, answer left out)", "Why?",
    ),
    "a number as answer": ({"question": "Why?", "answer": 42}, "'question' (answer left out)", "Why?"),
    "a history of messages": (
        {"query": "Why?", "response": "So.", "history": [{"role": "user", "content": "Ah."}]},
        "'query' and 'response'", [{"role": "user", "content": "Ah."}, *TWO],
    ),
    "roles in capitals": (
        {"messages": [{"role": "User", "content": "Why?"}, TWO[1]]}, "messages (User as user)", TWO,
    ),
    "keys of two forms in columns": (
        {"messages": [{"role": None, "content": None, "from": "human", "value": "Why?"}]}, SHAREGPT, TWO[:1],
    ),
    "messages as JSON in text": ({"text": json.dumps(TWO)}, "", TWO),
    "a prompt of messages and an answer of text": (
        {"prompt": TWO[:1], "completion": "So."}, "messages in 'prompt' and 'completion'", TWO,
    ),
    "a prompt and an answer as JSON": (
        {"prompt": json.dumps(TWO[:1]), "completion": json.dumps(TWO[1:])},
        "messages in 'prompt' and 'completion'", TWO,
    ),
    "a prompt of messages and an unknown answer": (
        {"prompt": TWO[:1], "target": "So it is."}, "messages (target left out)", TWO[:1],
    ),
    "OpenAI's older calls": (
        {"messages": [TWO[0], {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}}],
         "functions": [{"name": "f"}]}, "messages with tools",
        [TWO[0], {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **CALL}]}],
    ),
    "calls as JSON in a text": (
        {"messages": [TWO[0], {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}]}, "",
        [TWO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    "OpenOrca": ({"system_prompt": "Be.", "question": "Why?", "response": "So."}, "'question' and 'response'", THREE),
    "prompt and completion": (
        {"prompt": "The sky is", "completion": " blue."}, "'prompt' and 'completion'", "The sky is blue.",
    ),
    "prompt and completion of messages": (
        {"prompt": TWO[:1], "completion": TWO[1:]}, "messages in 'prompt' and 'completion'", TWO,
    ),
    "preferences": (
        {"prompt": "Why?", "chosen": "So.", "rejected": "No, no."}, "'prompt' and 'chosen' (rejected left out)", TWO,
    ),
    "preferences of conversations": (
        {"prompt": "Why?", "chosen": TWO, "rejected": TWO}, "messages in 'chosen' (rejected left out)", TWO,
    ),
    "preferences without a prompt": ({"chosen": TWO, "rejected": TWO}, "messages in 'chosen' alone", TWO),
    "token ids": ({"input_ids": [1, 2, 3]}, "", [1, 2, 3]),
    "token ids with padding": (
        {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}, "token ids that attention_mask leaves in", [1, 2],
    ),
}  # fmt: skip


def read(path: Path, **options: Any) -> tuple[list[Any], list[str]]:
    notes = Notes()
    return [value for _, value in read_rows(str(path), notes=notes, **options)], notes.lines()


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_form(name: str, tmp_path: Path) -> None:
    row, form, expected = ROWS[name]
    (tmp_path / "a.jsonl").write_text(lines(row))
    assert read(tmp_path / "a.jsonl") == ([expected], [f"a.jsonl: {form}, 1 of 1 rows"] if form else [])


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_an_array_are_those_of_lines(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([ROWS[name][0]] * 2, indent=1))
    assert read(tmp_path / "a.json")[0] == [ROWS[name][2]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_rows_of_tables_of_arrow_are_those_of_lines(suffix: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / f"a.{suffix}"
    for row, _, expected in ROWS.values():
        if not isinstance(row, dict) or row.get("rejected") == []:
            continue
        try:
            table = pyarrow.Table.from_pylist([row, row])
        except pyarrow.ArrowException:  # Arrow has no lists of text and objects
            continue
        if suffix == "parquet":
            parquet.write_table(table, file)
        else:
            opened = (pyarrow.ipc.new_stream if suffix == "arrow" else pyarrow.ipc.new_file)(str(file), table.schema)
            with opened as writer:
                writer.write_table(table)
        assert read(file)[0] == [expected] * 2


REFUSED_ROWS: dict[str, tuple[Any, str]] = {
    "unknown fields": ({"id": 3, "headline": "Hi."}, "has id, headline, not any of messages, .*text_field"),
    "a number": (5, "line 1 is int, expected an object"),
    "nested lists": ([[1, 2]], "line 1 is list, expected an object"),
    "a number as text": ({"text": 5}, "line 1, 'text' is int, expected a text"),
    "an object as text": ({"text": {"0": "a"}}, "'text' is dict, expected a text"),
    "texts as a text": ({"text": ["a", "b"]}, "'text' is a list of str, expected a text"),
    "turns of text": ({"messages": ["a", "b"]}, "'messages' is a list of str"),
    "turns of unknown keys": ({"messages": [{"speaker": "a", "says": "b"}]}, "message 1 has speaker, says, exp"),
    "turns by their roles": ({"conversations": [{"user": "a"}]}, "message 1 has user, expected role and content"),
    "a turn without content": ({"messages": [{"role": "user"}]}, "message 1 has role, expected role and content"),
    "a number as content": ({"messages": [{"role": "user", "content": 5}]}, "message 1 has content that is int"),
    "an unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a"}]}]}, "has a part of type 'audio'",
    ),
    "a part without type": ({"messages": [{"role": "user", "content": {"parts": []}}]}, "has a part with parts"),
    "images beside messages": ({"messages": TWO, "images": ["a.png"]}, "has 'images' beside its messages; put"),
    "images beside a prompt": ({"prompt": "Why?", "image": "a.png", "answer": "So."}, "has 'image' beside its text"),
    "messages as Python prints them": ({"messages": str(TWO)}, "'messages' is a text of objects that is no JSON list"),
    "an object of messages as JSON": ({"messages": json.dumps({"messages": TWO})}, "a text of objects that is no JSON"),
    "calls that are none": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "'tool_calls' is no list of objects",
    ),
    "a history in words": ({"prompt": "Why?", "output": "So.", "history": "Ah."}, "a 'history' that is no list of"),
    "a message a row": (TWO[0], r"is a single message \(role, content\); put all messages"),
    "tokens in words": ({"input_ids": "a b"}, "'input_ids' is a text, expected a list of token ids"),
    "tools in words": ({"messages": TWO, "tools": "f and g"}, "'tools' is str, expected a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_ROWS)
def test_rows_of_unknown_forms_are_refused_with_their_place(name: str, tmp_path: Path) -> None:
    row, message = REFUSED_ROWS[name]
    (tmp_path / "a.jsonl").write_text(lines(row))
    with pytest.raises(UsageError, match=f"a.jsonl, line 1.*{message}|{message}"):
        read(tmp_path / "a.jsonl")


def zstandard(raw: bytes) -> bytes:
    return bytes(pytest.importorskip("pyarrow").compress(raw, codec="zstd", asbytes=True))


ROW = lines({"text": "Grüße"}).encode()
FILES: dict[str, tuple[str, bytes | Callable[[], bytes], list[Any], list[str]]] = {
    "a text": ("a.txt", b"one\ntwo", ["one\ntwo"], []),
    "Markdown": ("a.md", b"# one", ["# one"], []),
    "a text without suffix": ("a", b"one", ["one"], []),
    "JSON that is no row": ("a.txt", b'{"a": 1}', ['{"a": 1}'], []),
    "CRLF": ("a.txt", b"one\r\ntwo", ["one\ntwo"], []),
    "UTF-8 with a mark": ("a.txt", b"\xef\xbb\xbfone", ["one"], []),
    "UTF-16 with a mark": ("a.txt", "Grüße".encode("utf-16"), ["Grüße"], []),
    "UTF-32 with a mark": ("a.txt", "Grüße".encode("utf-32"), ["Grüße"], []),
    "lines with a mark": ("a.jsonl", b"\xef\xbb\xbf" + ROW, ["Grüße"], []),
    "lines in UTF-16": ("a.jsonl", ROW.decode().encode("utf-16"), ["Grüße"], []),
    "an upper-case suffix": ("a.JSONL", ROW, ["Grüße"], []),
    "blank lines and CRLF": ("a.jsonl", b"\r\n \r\n" + ROW.replace(b"\n", b"\r\n"), ["Grüße"], []),
    "U+2028": ("a.jsonl", lines({"text": "a\u2028b"}).encode(), ["a\u2028b"], []),
    "JSON texts": ("a.jsonl", b'"one"\n"two"\n', ["one", "two"], []),
    "ndjson": ("a.ndjson", ROW, ["Grüße"], []),
    "jsonlines": ("a.jsonlines", ROW, ["Grüße"], []),
    "mixed forms": (
        "a.jsonl", lines({"text": "a"}, {"messages": TWO}, {"conversations": SHARED}).encode(), ["a", TWO, TWO],
        ["a.jsonl: text, 1 of 3 rows", "a.jsonl: messages, 1 of 3 rows", f"a.jsonl: {SHAREGPT}, 1 of 3 rows"],
    ),
    "null and empty": (
        "a.jsonl", lines(
            *({"text": t} for t in (None, "", " ", "a")), {"messages": []},
            {"messages": [{"role": "user", "content": ""}]},
        ).encode(),
        ["a"], ["5 of 6 rows have no text and are left out (first: FOLDER/a.jsonl, line 1)"],
    ),
    "lines in a .json": ("a.json", ROW * 2, ["Grüße"] * 2, []),
    "one row in a .json": ("a.json", json.dumps({"messages": TWO}, indent=1).encode(), [TWO], []),
    "an object with a list": ("a.json", b' {"version": 1, "data": [{"text": "a"}, {"text": "b"}]}', ["a", "b"], []),
    "what the hub's viewer answers": (
        "a.json", b'{"features": [], "rows": [{"row_idx": 0, "row": {"text": "a"}}]}', ["a"], [],
    ),
    "an array of texts": ("a.json", b'["a", "b"]', ["a", "b"], []),
    "an array of conversations": ("a.json", json.dumps([SHARED]).encode(), [TWO], [f"a.json: {SHAREGPT}, 1 of 1 rows"]),
    "CSV": (
        "a.csv", b'id,text\r\n1,"He said ""no"",\r\nthen left"\r\n2,plain\r\n', ['He said "no",\nthen left', "plain"],
        ["a.csv: column 'text', 2 of 2 rows"],
    ),
    "CSV with a mark and semicolons": (
        "a.csv", b'\xef\xbb\xbfprompt;id\n"a;b";1\n', ["a;b"], ["a.csv: column 'prompt', 1 of 1 rows"],
    ),
    "Excel's first line": ("a.csv", b"sep=;\ntext;id\na,b;1\n", ["a,b"], ["a.csv: column 'text', 1 of 1 rows"]),
    "CSV in UTF-16": (
        "a.csv", "text\tid\nGrüße\t1\n".encode("utf-16"), ["Grüße"], ["a.csv: column 'text', 1 of 1 rows"],
    ),
    "CSV with two columns of a pair": (
        "a.csv", b"question,answer\nWhy?,So.\n", [TWO], ["a.csv: 'question' and 'answer', 1 of 1 rows"],
    ),
    "a long field of CSV": (
        "a.csv", b"text\n" + b"x" * 200_000, ["x" * 200_000], ["a.csv: column 'text', 1 of 1 rows"],
    ),
    "TSV": ("a.tsv", b'text\tid\nHe said "no", he\t1\n', ['He said "no", he'], ["a.tsv: column 'text', 1 of 1 rows"]),
    "gzip": ("a.jsonl.gz", gzip.compress(ROW), ["Grüße"], []),
    "a text in gzip": ("a.txt.gz", gzip.compress(b"one"), ["one"], []),
    "bzip2": ("a.json.bz2", bz2.compress(b"[" + ROW + b"]"), ["Grüße"], []),
    "xz": ("a.csv.xz", lzma.compress(b"text\none\n"), ["one"], ["a.csv.xz: column 'text', 1 of 1 rows"]),
    "zstd": ("a.jsonl.zst", lambda: zstandard(ROW), ["Grüße"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_form(name: str, tmp_path: Path) -> None:
    file, content, expected, said = FILES[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content())
    assert read(tmp_path / file) == (expected, [line.replace("FOLDER", str(tmp_path)) for line in said])


REFUSED_FILES: dict[str, tuple[str, bytes, str]] = {
    "Latin-1": ("a.txt", "one\ndéf".encode("latin-1"), r"is not UTF-8 text \(byte 5\), line 2; .*iconv"),
    "Latin-1 far behind": (
        "a.jsonl", lines({"text": "x" * 3_000_000}).encode() + "é".encode("latin-1"), r"\(byte 3000013\), line 2",
    ),
    "half of UTF-16": ("a.txt", "one".encode("utf-16")[:-1], r"is not UTF-8 text, nor UTF-16 .* \(byte \d\)"),
    "UTF-16 without a mark": ("a.txt", "one".encode("utf-16-le"), "has a NUL character: .*iconv -f UTF-16LE"),
    "NUL in a line": ("a.jsonl", b'{"text": "a\0b"}', "line 1 has a NUL character"),
    "lines in a .txt": ("a.txt", ROW * 2, r"holds rows of JSON, .* let its name end in \.jsonl"),
    "an array in a .txt": ("a.txt", b"[" + ROW + b"]", "holds rows of JSON"),
    "an array in a .jsonl": ("a.jsonl", b'[{"text": "a"}]', "line 1 is list, expected an object"),
    "an object in several lines": ("a.jsonl", b'{\n "text": "a"\n}', "line 1 is not JSON .* name it .json"),
    "a config": ("config.json", b'{"model_type": "llama", "architectures": []}', "is an object with model_type, arch"),
    "a tokenizer": (
        "tokenizer.json", b'{"added_tokens": [{"id": 0, "content": "<s>"}], "model": {}}', "an object with added_tok",
    ),
    "a vocabulary": ("vocab.json", b'{"text": 17, "content": 18}', "'text' is int"),
    "SQuAD's own layout": ("a.json", b'{"data": [{"title": "a", "paragraphs": []}]}', "row 1 has title, paragraphs"),
    "columns": ("a.json", b'{"text": {"0": "a", "1": "b"}}', "'text' is dict"),
    "several lists": ("a.json", b'{"train": [{"text": "a"}], "data": []}', r"has several lists .*\(data, train\)"),
    "an array cut short": ("a.json", b'[{"text": "a"}, {"text": "b"', "behind row 1, is not JSON"),
    "words behind an array": ("a.json", b'[{"text": "a"}] b', "behind row 1, is not JSON .there is more behind"),
    "words in a .json": ("a.json", b"some words", "is not JSON .*; expected an array of rows"),
    "an empty array": ("a.json", b"[]", "is empty; give a file with text"),
    "deep JSON": ("a.json", b"[" * 100_000, "is not JSON"),
    "deep lines": ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    "rows without text": ("a.jsonl", b'{"text": null}\n{"text": ""}\n', "has 2 rows, all null or empty"),
    "CSV without a header": ("a.csv", b"Some words, and more\nanother, one\n", "has Some words, and more, not any of"),
    "CSV with a torn row": ("a.csv", b"text,id\na,1\nb,c,2\n", r"row 2 has 3 fields, its header has 2 \(text, id\)"),
    "CSV with an open quote": ("a.csv", b'text\n"a\nb\n', "row 1 is not CSV .*; check its quotes"),
    "CSV with a name twice": ("a.csv", b"text,text\na,b\n", "several columns named 'text'"),
    "CSV without rows": ("a.csv", b"text\n", "is empty"),
    "HTML": ("a.html", b"<p>a</p>", r"is a \.html file, of which markup would become text"),
    "a notebook": ("a.ipynb", b"{}", r"is a \.ipynb file"),
    "PNG": ("a.txt", b"\x89PNG\r\n\x1a\n", "is a PNG image, expected text"),
    "zip": ("a.jsonl", b"PK\x03\x04", "is a zip archive, expected text"),
    "PDF": ("a", b"%PDF-1.7 words", "is a PDF document"),
    "safetensors": ("a.txt", (16).to_bytes(8, "little") + b'{"a": 1}', "is a safetensors file, expected text"),
    "gzip without its suffix": ("a.txt", gzip.compress(b"a"), r"is compressed by gzip, .* end like \.jsonl\.gz"),
    "a suffix without gzip": ("a.txt.gz", b"words", "is damaged: Not a gzipped file"),
    "gzip cut short": ("a.txt.gz", gzip.compress(b"words" * 99)[:20], "is damaged: Compressed file ended"),
    "xz cut short": ("a.txt.xz", lzma.compress(b"words" * 99)[:40], "is damaged: Compressed file ended"),
    "no Parquet": ("a.parquet", b"PAR1 not", "is not a parquet file"),
    "no Arrow": ("a.arrow", b"not", "is not an Arrow file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_files_that_are_no_data_are_refused_with_one_line(name: str, tmp_path: Path) -> None:
    file, content, message = REFUSED_FILES[name]
    if file.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read(tmp_path / file)


def test_a_field_that_is_asked_for_is_mapped_like_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines({"text": "no", "talk": SHARED}))
    assert read(tmp_path / "a.jsonl", field="talk") == ([TWO], [f"a.jsonl: {SHAREGPT}, 1 of 1 rows"])


def test_a_folder_of_a_data_set_has_its_rows_and_not_their_description(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}]).save_to_disk(str(tmp_path / "train"))
    (arrow,) = files_of([str(tmp_path / "train")])
    assert read(Path(arrow))[0] == ["a", "b"]
    with pytest.raises(UsageError, match="name one of its folders: train"):
        files_of([str(tmp_path)])


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "jsonl.gz"])
def test_rows_are_read_in_bounded_memory(suffix: str, tmp_path: Path) -> None:
    file, rows = tmp_path / f"a.{suffix}", 40_000
    text = {
        "json": lambda: json.dumps([{"text": "word " * 40}] * rows),
        "csv": lambda: "text\n" + f"{'word ' * 40}\n" * rows,
    }
    raw = text.get(suffix, lambda: lines({"text": "word " * 40}) * rows)().encode()
    file.write_bytes(gzip.compress(raw, 1) if suffix.endswith("gz") else raw)
    assert len(raw) > 8_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(str(file))) == rows
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_no_more_of_an_array_is_read_than_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b"}, ' + " " * 1_000_000 + "broken")
    assert [value for _, value in islice(read_rows(str(tmp_path / "a.json")), 2)] == ["a", "b"]


@pytest.mark.parametrize("size", [1, 200, 300_000, 900_000])
def test_elements_of_any_size_are_whole(size: int, tmp_path: Path) -> None:
    """A number, or a text, may lie across what is read at once."""
    row = {"input_ids": [1234567] * (size // 9 + 1)}
    (tmp_path / "a.json").write_text(json.dumps([row, {"text": "é" * size}, row]))
    assert read(tmp_path / "a.json")[0] == [row["input_ids"], "é" * size, row["input_ids"]]
