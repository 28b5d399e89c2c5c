"""scripts/make_tiny_model.py: what counts as text, that nothing held out is trained on, that a seed fixes the bytes."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/make_tiny_model.py"


def load_script() -> ModuleType:
    """The script as a module, without running it."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tiny_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tiny = load_script()

SOURCE = b'''
"""The module is described in one sentence here."""

raise SystemExit("this module must not be run")  # a trailing comment that explains the line

# The first line of a comment
# goes on in the second line.

def f():
    """Return the answer to a question, always."""
'''


def test_docstrings_are_found_without_running_the_module() -> None:
    assert list(tiny.docstrings(SOURCE)) == [
        "The module is described in one sentence here.",
        "Return the answer to a question, always.",
    ]


def test_adjacent_comment_lines_are_one_text_and_trailing_ones_are_none() -> None:
    assert [text for text in tiny.comments(SOURCE) if text] == [
        "The first line of a comment goes on in the second line."
    ]


@pytest.mark.parametrize(
    "paragraph",
    [
        "x = f(a, b) + g[1:2] - h(c) * k(d) .",
        ">>> from the prompt on it is a doctest.",
        "Too short a sentence.",
        "no closing full stop here, so it is a fragment",
        "Caf\u00e9 au lait is not within the ASCII letters.",
    ],
)
def test_what_is_not_prose_is_left_out(paragraph: str) -> None:
    assert tiny.prose(paragraph) == []


def test_a_wrapped_paragraph_becomes_one_line() -> None:
    assert tiny.prose("Return the number of items\n    in the queue.\n\nx = 1") == [
        "Return the number of items in the queue."
    ]


def corpus() -> dict[str, str]:
    """Forty modules of distinct sentences, every other one with comments."""
    docs = {}
    for index in range(40):
        words = ["queue", "socket", "parser", "stream", "module"]
        sentences = [f"Return the {words[(index + k) % 5]} number {index * 100 + k} of the set." for k in range(30)]
        docs[f"m{index}.py"] = "\n\n".join(sentences)
        if index % 2:
            docs[f"m{index}.py comments"] = f"This remark belongs to the module {index} alone."
    return docs


def test_no_module_is_both_trained_on_and_held_out() -> None:
    docs = corpus()
    train, heldout = tiny.split(docs, tiny.Config(heldout_chars=5_000))
    held_modules = [name for name, text in docs.items() if text in heldout]
    assert len(heldout) >= 5_000
    assert held_modules
    assert not any(f"{name} comments" in docs and docs[f"{name} comments"] in train for name in held_modules)
    assert not set("\n\n".join(train).split("\n\n")) & set(heldout.strip().split("\n\n"))
    comments_of_held = sum(f"{name} comments" in docs for name in held_modules)
    assert len(train) == len(docs) - len(held_modules) - comments_of_held


def test_the_learning_rate_rises_to_one_and_falls_to_nothing() -> None:
    config = tiny.Config(steps=100, warmup_steps=10, decay_fraction=0.5)
    factors = [tiny.lr_factor(step, config) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9:51] == [1.0] * 42
    assert factors[51:] == sorted(factors[51:], reverse=True)
    assert factors[99] == pytest.approx(0.02)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny, "documents", corpus)
    config = tiny.Config(
        vocab_size=300, hidden_size=32, intermediate_size=32, layers=1, heads=2, kv_heads=1, head_dim=16,
        context=32, batch=4, steps=12, warmup_steps=2, heldout_chars=3_000, threads=1,
    )  # fmt: skip
    losses = [tiny.make(tmp_path / name, config) for name in ("a", "b")]
    assert losses[0] == losses[1] < math.log(300)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "heldout.txt"} <= set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert '"heldout_loss"' in capsys.readouterr().out


def test_the_tokenizer_gives_every_text_back() -> None:
    tokenizer = tiny.train_tokenizer(list(corpus().values()), tiny.Config(vocab_size=300))
    for text in (
        "Return the queue.",
        "def f(x):\n\treturn {x: '\u00e9\u4e2d\U0001f600'}",
        "  two  spaces , and a comma",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_batches_cover_the_tokens_and_hold_each_window_once_an_epoch() -> None:
    config = tiny.Config(context=7, batch=2)
    tokens = torch.arange(8 * 10)
    stream = tiny.batches(tokens, config)
    windows = torch.cat([next(stream) for _ in range(4)])
    assert windows.shape == (8, 8)
    assert torch.equal(windows, windows[:, :1] + torch.arange(8))
    assert windows.unique().numel() == windows.numel()
