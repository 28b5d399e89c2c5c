"""Pieces of text put together are the decoding of all tokens, and no piece is half a character."""

import random
import re
from functools import cache
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from ptqpipe.serving.engine.detokenizer import Detokenizer, StopStrings
from ptqpipe.serving.engine.sequence import Finish
from tests.serving.engine.models import ask, encoded, engine, greedy, run_all, text_of, tokenizer

UNICODE = "naïve café — 東京タワー, 👩‍👩‍👧 and 🇫🇷; ½ × π ≈ 1.57; עברית, हिन्दी."


def pieces(tokens: list[int], prompt: list[int]) -> list[str]:
    made = Detokenizer(tokenizer(), prompt)
    return [*(made.push(token) for token in tokens), made.flush()]


def decode(tokens: list[int]) -> str:
    text: str = tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def test_characters_of_several_tokens_come_whole() -> None:
    tokens = tokenizer()(UNICODE, add_special_tokens=False).input_ids
    assert len(tokens) > len(UNICODE)  # the demo's vocabulary has bytes for these
    found = pieces(tokens, [0])
    assert "".join(found) == UNICODE
    assert not any("\ufffd" in piece for piece in found)


def test_an_incomplete_character_comes_at_the_end_as_its_sign() -> None:
    tokens = tokenizer()("ab東", add_special_tokens=False).input_ids[:-1]
    assert "".join(pieces(tokens, [0])) == decode(tokens)
    assert decode(tokens).endswith("\ufffd")


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_decode_piecewise_as_together(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(2, 1024) for _ in range(200)]
    text = "".join(pieces(tokens, [0, 5]))
    # A prompt in front may end a character; ours does not, so the pieces are the tokens' own decoding.
    assert text == decode([5, *tokens])[len(decode([5])) :]


@cache
def byte_fallback() -> Any:
    """A tokenizer as Llama's: words with their space, and bytes for what has no token."""
    words = ["▁the", "▁end", "▁", "a", "b"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + at for at, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token=None))
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def spelled(text: str) -> list[int]:
    """The tokens of a text of these words and of characters in bytes."""
    tokens: list[int] = []
    for word in re.findall(r" the| end| |a|b|[^ab ]", text):
        known = {" the": 256, " end": 257, " ": 258, "a": 259, "b": 260}.get(word)
        tokens += list(word.encode()) if known is None else [known]
    return tokens


@pytest.mark.parametrize("text", ["😀😀😀😀😀 the end", "a東京b 東京 the😀", "ééééééééé", "a" * 30 + "😀" * 9])
def test_runs_of_bytes_decode_piecewise_as_together(text: str) -> None:
    tokens = spelled(text)
    together = byte_fallback().decode(tokens)
    for cut in range(len(tokens)):
        made = Detokenizer(byte_fallback(), tokens[:cut])
        found = [*(made.push(token) for token in tokens[cut:]), made.flush()]
        said = byte_fallback().decode(tokens[:cut])
        if not said.endswith("\ufffd"):  # a prompt that ends inside of a character has no text to continue
            assert said + "".join(found) == together, cut
            assert not any("\ufffd" in piece for piece in found)


def test_bytes_that_are_no_characters_do_not_pile_up() -> None:
    made = Detokenizer(byte_fallback(), [256])
    found = [made.push(0x80) for _ in range(1000)]
    assert max(map(len, found)) < 100
    assert sum(map(len, found)) > 900


def test_text_of_a_generation_is_the_decoding_of_its_tokens() -> None:
    prompt, made = encoded()[0], engine()
    made.add(ask(prompt, 32))
    assert text_of(run_all(made)) == decode(greedy(prompt, 32))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one two three", ["two"], "one "),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("no stop here", ["xyz"], "no stop here"),
        ("ends with a beginn", ["beginning"], "ends with a beginn"),
        ("first of two", ["two", "of"], "first "),
        ("", ["a"], ""),
    ],
)
def test_stop_strings_are_found_across_pieces(size: int, text: str, stops: list[str], wanted: str) -> None:
    made, out = StopStrings(stops), ""
    for at in range(0, len(text), size):
        piece, stopped = made.push(text[at : at + size])
        out += piece
        assert wanted.startswith(out)  # nothing that would have to be taken back
        if stopped:
            break
    else:
        out += made.flush()
    assert out == wanted


def test_a_stop_string_ends_the_sequence_before_it() -> None:
    prompt = encoded()[0]
    whole = decode(greedy(prompt, 32))
    stop = whole[10:14]
    made = engine()
    made.add(ask(prompt, 32, stop=(stop,)))
    found = run_all(made)
    assert text_of(found) == whole[: whole.index(stop)]
    assert found[-1].finish is Finish.STOP
