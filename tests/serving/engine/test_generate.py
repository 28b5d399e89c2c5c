"""The engine's greedy tokens are those of transformers' generate, however the work is cut.

Both compute in float32 with the same weights; different orders of sums differ by parts in 10^6 of a logit, and no step
of these texts has two candidates that near.
"""

from pathlib import Path

import pytest

from ptqpipe.errors import UsageError
from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.runtime import load_model
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.sequence import Finish
from tests.serving.engine import models
from tests.serving.engine.models import ask, encoded, engine, generate, greedy, run_all, runner, tokens_of

COUNT = 24


@pytest.mark.parametrize("at", range(len(models.PROMPTS)))
def test_one_sequence_equals_generate(at: int) -> None:
    prompt = encoded()[at]
    assert generate(engine(), [ask(prompt, COUNT)])["a"][0] == greedy(prompt, COUNT)


@pytest.mark.parametrize("isa", cpu_library.known_isas())
def test_every_instruction_set_equals_generate(isa: str) -> None:
    cpu_library.force_isa(isa)
    try:
        found = generate(engine(), [ask(prompt, COUNT, name=str(at)) for at, prompt in enumerate(encoded())])
    finally:
        cpu_library.force_isa(None)
    assert [found[str(at)][0] for at in range(len(encoded()))] == [greedy(prompt, COUNT) for prompt in encoded()]


@pytest.mark.parametrize(
    ("max_seqs", "max_batch_tokens"),
    [(8, 512), (8, 16), (2, 512), (3, 7), (5, 5)],
    ids=["together", "chunks of 16", "two at a time", "tiny chunks", "a token each"],
)
def test_batches_and_chunks_equal_generate(max_seqs: int, max_batch_tokens: int) -> None:
    prompts = encoded()
    found = generate(
        engine(max_seqs=max_seqs, max_batch_tokens=max_batch_tokens),
        [ask(prompt, COUNT, name=str(at)) for at, prompt in enumerate(prompts)],
    )
    assert [found[str(at)][0] for at in range(len(prompts))] == [greedy(prompt, COUNT) for prompt in prompts]


def test_sequences_that_come_later_join_the_batch() -> None:
    prompts, made = encoded(), engine()
    pieces = []
    for at, prompt in enumerate(prompts):
        made.add(ask(prompt, COUNT, name=str(at)))
        for _ in range(3):
            pieces += made.step()
    pieces += run_all(made)
    for at, prompt in enumerate(prompts):
        assert tokens_of(pieces, str(at)) == greedy(prompt, COUNT)


@pytest.mark.parametrize("chunk", [512, 24])
def test_a_prefix_from_the_cache_equals_generate(chunk: int) -> None:
    long = encoded()[2]
    made = engine(max_batch_tokens=chunk)
    generate(made, [ask(long, 4)])
    other = (*long[:40], *encoded()[0])
    made.add(ask(other, COUNT))
    pieces = run_all(made)
    assert pieces[0].cached == 32  # two full blocks of 16 among the 40 tokens in common
    assert tokens_of(pieces) == greedy(other, COUNT)
    made.add(ask(long, COUNT, name="b"))
    again = run_all(made)
    assert again[0].cached == 16 * ((len(long) - 1) // 16)
    assert tokens_of(again, "b") == greedy(long, COUNT)


def test_without_prefix_caching_nothing_is_found() -> None:
    made = engine(prefix_caching=False)
    generate(made, [ask(encoded()[2], 4)])
    made.add(ask(encoded()[2], 4))
    assert run_all(made)[0].cached == 0


def test_several_choices_share_the_prompt_and_its_blocks() -> None:
    prompt, made = encoded()[2], engine()
    made.add(ask(prompt, COUNT, n=3))
    pieces = run_all(made)
    assert [tokens_of(pieces, index=index) for index in range(3)] == [greedy(prompt, COUNT)] * 3
    computed = len(prompt) + 2 * (len(prompt) - 16 * ((len(prompt) - 1) // 16))
    assert made.counters.prompt_tokens == computed


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_tokens", [512, 20])
def test_preempted_sequences_equal_generate(max_batch_tokens: int) -> None:
    small = ModelRunner(load_model(models.DEMO), EngineOptions(256 * 9 * 3 * 128 * 2 * 4 // 8, 120, 8, 8))
    made = engine(small, max_len=120, max_batch_tokens=max_batch_tokens)
    prompts = [prompt[:60] for prompt in encoded()]
    for at, prompt in enumerate(prompts):
        made.add(ask(prompt, COUNT * 2, name=str(at)))
    pieces = run_all(made)
    assert made.scheduler.preemptions > 0
    assert made.counters.recomputed_tokens > 0
    for at, prompt in enumerate(prompts):
        assert tokens_of(pieces, str(at)) == greedy(prompt, COUNT * 2)
    assert made.blocks.free == made.blocks.count


def test_a_cancelled_sequence_leaves_the_others_and_its_blocks() -> None:
    prompts, made = encoded(), engine()
    for at in (0, 2):
        made.add(ask(prompts[at], COUNT, name=str(at)))
    pieces = [*made.step(), *made.step()]
    (last,) = made.cancel("0")
    assert last.finish is Finish.CANCELLED
    assert made.cancel("0") == []
    pieces += run_all(made)
    assert tokens_of(pieces, "2") == greedy(prompts[2], COUNT)
    assert tokens_of(pieces, "0") == greedy(prompts[0], 2)
    assert made.blocks.free == made.blocks.count


def test_the_context_ends_a_sequence() -> None:
    prompt = (encoded()[2] * 8)[:250]
    made = engine(max_len=256)
    made.add(ask(prompt, 6))
    pieces = run_all(made)
    assert pieces[-1].finish is Finish.LENGTH
    assert tokens_of(pieces) == greedy(prompt, 6)
    with pytest.raises(UsageError, match=r"250 tokens and max_tokens is 7, together 257.*context is 256"):
        made.add(ask(prompt, 7))


@pytest.mark.parametrize("prompt", [(), (1024,), (-1, 3)], ids=["empty", "too large", "negative"])
def test_prompts_that_are_none_are_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        engine().add(ask(prompt, 1))


def test_an_end_token_ends_unless_ignored_or_too_early() -> None:
    prompt = encoded()[0]
    wanted = greedy(prompt, COUNT)
    end = wanted[5]
    first = wanted.index(end)
    made = engine(end_tokens=[end])
    assert generate(made, [ask(prompt, COUNT)])["a"][0] == wanted[: first + 1]
    assert generate(made, [ask(prompt, COUNT, ignore_eos=True)])["a"][0] == wanted
    late = generate(made, [ask(prompt, COUNT, min_tokens=8)])["a"][0]
    assert end not in late[:8]
    assert len(late) >= 8
    by_request = generate(engine(), [ask(prompt, COUNT, stop_token_ids=(end,))])["a"][0]
    assert by_request == wanted[: first + 1]


@pytest.mark.slow
@pytest.mark.shared
def test_bench_4m_equals_generate(shared_dir: Path) -> None:
    path = shared_dir / "assets/models/bench-4m/hf"
    made = engine(runner(path, max_len=1024), max_len=1024, max_batch_tokens=64, tokens=models.tokenizer(path))
    prompts = encoded(path=path)
    found = generate(made, [ask(prompt, 48, name=str(at)) for at, prompt in enumerate(prompts)])
    for at, prompt in enumerate(prompts):
        assert found[str(at)][0] == greedy(prompt, 48, path=path)
