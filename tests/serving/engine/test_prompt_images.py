"""Prompts with images: the tokens are those of transformers' `generate`, however the work is cut and shared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.errors import UsageError
from ptqpipe.runtime import load, load_model
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.batch import Batch, Span, unpack
from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.engine import Engine, Request
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.overlap import halves
from ptqpipe.serving.engine.prompt_images import ImageRows, Images, Seen, rows_of
from ptqpipe.serving.engine.sequence import SamplingParams
from ptqpipe.serving.engine.speculative import Drafter
from ptqpipe.serving.tower import Tower
from tests.serving.engine import images
from tests.serving.engine.models import ask, engine, generate, greedy_of, run_all, tokenizer, tokens_of

COUNT = 8
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each model once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = images.make(tmp_path_factory.mktemp("images") / kind.replace(" ", "_"), kind)
        return made[kind]

    return of


def make_engine(path: Path, *, max_batch_tokens: int = 64) -> Engine:
    """On pages of four tokens."""
    runner = ModelRunner(load_model(path), EngineOptions(1 << 24, 64, 4, 4))
    made = engine(runner, max_len=64, max_seqs=4, max_batch_tokens=max_batch_tokens, tokens=tokenizer())
    made.see = Tower(path, torch.float32, "cpu", lambda line: None).see
    return made


def asked(kind: str, config: Any, name: str, *, seed: int = 5, n: int = 1) -> Request:
    """A request with two images."""
    prompt, made = images.inputs(kind, config, seed=seed)
    return Request(name, prompt, GREEDY, n, Images(made, (b"%d" % seed, b"second"), images.IMAGE))


@pytest.mark.slow
@pytest.mark.parametrize("kind", images.CHANGES)
def test_tokens_are_those_of_generate_however_prompts_are_cut(model: Callable[[str], Path], kind: str) -> None:
    path = model(kind)
    whole = images.reference(path)
    prompt, made = images.inputs(kind, whole.config)
    expected, text = images.greedy(whole, prompt, made, COUNT), greedy_of(load_model(path), images.TEXT, COUNT)
    for most in (64, 7):
        run = make_engine(path, max_batch_tokens=most)
        requests = [
            asked(kind, whole.config, "a", n=2),
            ask(images.TEXT, COUNT, name="b"),
            asked(kind, whole.config, "c"),
        ]
        assert generate(run, requests) == {"a": [expected] * 2, "b": [text], "c": [expected]}
        assert (run.counters.cached_tokens > 0) == (kind != "qwen3_5")  # a hybrid's pages are not shared


def test_drafts_beside_images_change_no_token(tmp_path: Path) -> None:
    path = images.make(tmp_path / "model", "qwen3_5")
    file, last = path / "model.safetensors", "model.language_model.layers.1."
    tensors = load_file(file)
    width = tensors["lm_head.weight"].shape[1]
    added = {f"mtp.layers.0.{name.removeprefix(last)}": x for name, x in tensors.items() if name.startswith(last)}
    added |= {f"mtp.{norm}.weight": torch.zeros(width).bfloat16() for norm in NORMS}
    added["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(4)).bfloat16() / 10
    save_file({**tensors, **{name: x.clone() for name, x in added.items()}}, file, metadata={"format": "pt"})
    whole = images.reference(path)
    expected = images.greedy(whole, *images.inputs("qwen3_5", whole.config), COUNT)
    text = greedy_of(load_model(path), images.TEXT, COUNT)
    for most in (64, 7):
        runner = ModelRunner(load(path, dtype="float32", packed=False, mtp=True), EngineOptions(1 << 24, 64, 4, 4))
        run = engine(runner, max_len=64, max_seqs=4, max_batch_tokens=most, tokens=tokenizer())
        run.drafter, run.see = Drafter(runner, most=2, max_len=64), Tower(path, torch.float32, "cpu", print).see
        requests = [asked("qwen3_5", whole.config, "a", n=2), ask(images.TEXT, COUNT, name="b")]
        assert generate(run, requests) == {"a": [expected] * 2, "b": [text]}
        assert run.counters.draft_tokens > 0


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_other_images_share_no_pages_but_those_before_them(model: Callable[[str], Path], kind: str) -> None:
    path = model(kind)
    whole = images.reference(path)
    run = make_engine(path)
    found = generate(run, [asked(kind, whole.config, "a")])["a"]
    assert run.counters.cached_tokens == 0
    other = images.inputs(kind, whole.config, seed=6)
    assert (
        generate(run, [asked(kind, whole.config, "b", seed=6)])["b"] == [images.greedy(whole, *other, COUNT)] != found
    )
    assert run.counters.cached_tokens == 0  # the first page has tokens of the first image


def test_a_sequence_that_is_put_out_keeps_what_the_tower_saw(model: Callable[[str], Path]) -> None:
    path = model("gemma3")
    whole = images.reference(path)
    expected = images.greedy(whole, *images.inputs("gemma3", whole.config), COUNT)
    run = make_engine(path)
    run.blocks = BlockManager(17, block_size=4, prefix_caching=False)
    run.scheduler.blocks = run.blocks
    requests = [asked("gemma3", whole.config, name) for name in "abc"]
    assert generate(run, requests) == {name: [expected] for name in "abc"}
    assert run.scheduler.preemptions > 0


def test_images_that_the_model_does_not_take_end_their_request_alone(model: Callable[[str], Path]) -> None:
    path = model("llava")
    run, config = make_engine(path), images.reference(path).config
    prompt, made = images.inputs("llava", config)
    fewer = {"pixel_values": made["pixel_values"][:1]}
    run.add(Request("a", prompt, GREEDY, 2, Images(fewer, (b"1",), images.IMAGE)))
    run.add(ask(images.TEXT, COUNT, name="b"))
    pieces = run_all(run)
    errors = [piece.error or "" for piece in pieces if piece.request == "a"]
    assert len(errors) == 2
    assert all("LlavaForConditionalGeneration does not take these images" in error for error in errors)
    assert tokens_of(pieces, "b") == greedy_of(load_model(path), images.TEXT, COUNT)
    run.see = None
    with pytest.raises(UsageError, match="takes no images"):
        run.add(asked("llava", config, "c"))


def test_the_key_of_an_image_is_its_own_where_runs_of_tokens_tell_images_apart() -> None:
    apart, together = (1, 90, 90, 2, 90, 3), (1, 90, 90, 90, 3)
    one, other = (Images({}, digests, 90) for digests in ((b"a", b"b"), (b"a", b"c")))
    assert one.keys(apart).keys() == {1, 2, 4}
    assert [one.keys(apart)[at] == other.keys(apart)[at] for at in (1, 2, 4)] == [True, True, False]
    assert set(one.keys(together).values()).isdisjoint(other.keys(together).values())


def test_a_batch_with_images_is_the_same_on_other_ranks() -> None:
    places = torch.tensor([1, 2, 3])
    positions = torch.stack([torch.arange(5)] * 3)
    seen = Seen(places, torch.rand(3, 5).bfloat16(), torch.rand(2, 3, 5).bfloat16(), positions, ((1, 4),), (1,))
    rows = rows_of([(None, 3, 4), (seen, 2, 6)])
    assert rows is not None
    assert rows.places.tolist() == [1, 2]
    assert rows.positions is not None
    assert rows.positions[0].tolist() == [3, 2, 3, 4, 5]
    assert rows.groups == ((), (1, 4))
    batch = Batch(torch.arange(5), torch.tensor([4]), (Span(1, 4, (0,)), Span(4, 6, (1, 2))), rows)
    found = unpack(batch.pack())
    assert (found.spans, found.tokens.tolist(), found.wanted.tolist()) == (batch.spans, [0, 1, 2, 3, 4], [4])
    assert isinstance(found.images, ImageRows)
    for name in ("places", "rows", "deep", "positions"):
        assert torch.equal(getattr(found.images, name), getattr(rows, name))
    assert (found.images.groups, found.images.layers) == (rows.groups, (1,))
    assert halves(batch, 0) is None
    assert unpack(Batch(batch.tokens, batch.wanted, batch.spans).pack()).images is None
