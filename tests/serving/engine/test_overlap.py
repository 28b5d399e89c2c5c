"""Claims about steps in halves: the same logits as in one piece, the sums in one order, errors that end both halves.

On ranks: two processes joined by gloo; the same runner computes each batch in one piece and in halves. In float32 torch
attends to a whole prompt and to a part of one by different kernels, so logits agree up to the order of float32 sums of
256 terms at most, 2^-16 of numbers below 1; in bfloat16 the kernels' sums do not depend on the other rows, and bits are
compared.
"""

import gc
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from click.testing import CliRunner
from hypothesis import given, strategies as st

from ptqpipe.cli import main
from ptqpipe.errors import PtqError
from ptqpipe.numerics.kernels.cpu_attention import PagedSpans, paged_prefill
from ptqpipe.runtime import load_model
from ptqpipe.runtime.loading import load_rank
from ptqpipe.runtime.parallel import TensorParallel
from ptqpipe.serving import command as serve
from ptqpipe.serving.collectives import QuantAllReduce
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.engine import Engine, EngineOptions
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.overlap import Overlap, _Half, halves, least_tokens
from ptqpipe.serving.engine.ranks import Leader, follow
from tests.runtime.models import quantized, save_source
from tests.serving.collectives.ranks import on_ranks
from tests.serving.engine.models import DEMO, ask, generate, greedy_of

BLOCK = 8
LEAST = 16
VOCABULARY = 96
LAYERS = 2
CLOSE = 2.0**-16


def batch_of(*parts: tuple[int, int, tuple[int, ...]], every: bool = True) -> Batch:
    """Spans (count, total, blocks) of seeded tokens; logits of every token, or of the spans' last ones."""
    spans = tuple(Span(*part) for part in parts)
    ends = torch.tensor([span.count for span in spans]).cumsum(0)
    count = int(ends[-1])
    tokens = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count))
    return Batch(tokens, torch.arange(count) if every else ends - 1, spans)


# One after the other on one cache: a prompt; a decode step of it beside a new prompt and one that shares the beginning
# of the first, in which the middle falls; two of these as decode steps; a prompt behind the same beginning. Halves have
# more than 16 tokens, up to which the kernels of NVFP4 sum in another order.
STEPS = (
    batch_of((48, 48, (0, 1, 2, 3, 4, 5))),
    batch_of((1, 49, (0, 1, 2, 3, 4, 5, 6)), (20, 20, (7, 8, 9)), (31, 47, (0, 1, 10, 11, 12, 13))),
    batch_of((1, 50, (0, 1, 2, 3, 4, 5, 6)), (1, 48, (0, 1, 10, 11, 12, 13))),
    batch_of((37, 53, (0, 1, 14, 15, 16, 17, 18)), every=False),
)
HALVES = ((24, 24), (26, 26), None, (18, 19))


# ---- where a batch is cut ----


@st.composite
def batches(draw: Any) -> Batch:
    counts = sorted(draw(st.lists(st.integers(1, 200), min_size=1, max_size=12)), key=lambda count: count > 1)
    behind = [draw(st.integers(0, 40)) for _ in counts]
    spans = tuple(Span(count, count + more, (at,)) for at, (count, more) in enumerate(zip(counts, behind, strict=True)))
    total = sum(counts)
    wanted = sorted(draw(st.sets(st.integers(0, total - 1), max_size=8)))
    return Batch(torch.arange(total), torch.tensor(wanted, dtype=torch.int64), spans)


@given(batches(), st.integers(1, 600))
def test_halves_are_the_batch_and_no_prompt_ends_up_as_a_single_token(batch: Batch, least: int) -> None:
    prompts = sum(span.count for span in batch.spans if span.count > 1)
    parts = halves(batch, least)
    if parts is None:
        assert prompts < max(least, 4) or len(batch.tokens) < 6
        return
    first, second = parts
    assert prompts >= least
    assert torch.equal(torch.cat([first.tokens, second.tokens]), batch.tokens)
    assert torch.equal(torch.cat([first.wanted, second.wanted + len(first.tokens)]), batch.wanted)
    assert torch.equal(torch.cat([first.positions(), second.positions()]), batch.positions())
    for part in parts:
        assert sum(span.count for span in part.spans) == len(part.tokens) > 0
    whole = {span.blocks: span.count for span in batch.spans}
    assert all(span.count > 1 or whole[span.blocks] == 1 for part in parts for span in part.spans)
    assert abs(len(first.tokens) - len(second.tokens)) <= 2 * 64 + 2


def test_decode_steps_and_short_prompts_are_left_in_one_piece() -> None:
    singles = [(1, 30, (at,)) for at in range(64)]
    assert halves(batch_of(*singles), 1) is None
    assert halves(batch_of(*singles, (255, 255, (0,))), 256) is None
    assert halves(batch_of(*singles, (256, 256, (0,))), 256) is not None


def test_a_step_is_worth_two_halves_from_256_tokens_and_a_mebibyte_on() -> None:
    assert [least_tokens(2 * hidden) for hidden in (256, 1000, 2048, 8192)] == [2048, 525, 256, 256]


# ---- two halves in one process ----

SEEN: ContextVar[str] = ContextVar("seen")


class Steps:
    """A forward of three layers that notes what is computed and summed, and where."""

    def __init__(self, fail: Callable[[str], None] = lambda _: None) -> None:
        self.overlap, self.fail = Overlap(least_tokens=LEAST), fail
        self.log: list[str] = []
        self.threads: set[str] = set()
        self.ended: list[str] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        name = "A" if int(batch.tokens[0]) == 0 else "B"
        SEEN.set(name)
        try:
            for layer in range(3):
                self.log.append(f"{name}{layer}")
                self.fail(f"{name}{layer}")
                x = self.overlap(lambda at=f"{name}{layer}": self.sum(at))  # type: ignore[misc]
                assert SEEN.get() == name
                assert float(x) == layer
            return batch.tokens[batch.wanted].float()[:, None]
        finally:
            self.ended.append(name)

    def sum(self, at: str) -> torch.Tensor:
        self.fail(f"sum {at}")
        self.log.append(f"sum {at}")
        self.threads.add(threading.current_thread().name)
        return torch.tensor(float(at[1]))

    def run(self, wanted: list[int]) -> list[float]:
        batch = Batch(torch.arange(40), torch.tensor(wanted, dtype=torch.int64), (Span(40, 40, (0,)),))
        return self.overlap.run(batch, self.forward).flatten().tolist()


def test_the_halves_take_turns_and_the_sums_are_in_their_order_in_one_other_thread() -> None:
    steps = Steps()
    steps.run([39])
    order = [f"{name}{layer}" for layer in range(3) for name in "AB"]
    assert [x for x in steps.log if not x.startswith("sum")] == order
    assert [x for x in steps.log if x.startswith("sum")] == [f"sum {x}" for x in order]
    assert steps.threads == {"ptqpipe-overlap"}


def test_a_sum_is_under_way_while_the_other_half_computes() -> None:
    computed = {name: threading.Event() for name in ("B0", "A1", "B1", "A2", "B2")}
    beside = dict(zip(("sum A0", "sum B0", "sum A1", "sum B1", "sum A2"), computed, strict=True))

    def wait(at: str) -> None:
        if at in computed:
            computed[at].set()
        if at in beside:  # a sum that ends only when the other half has computed beside it
            assert computed[beside[at]].wait(20)

    steps = Steps(wait)
    assert steps.run([0, 39]) == [0, 39]
    assert len(steps.log) == 12


@pytest.mark.parametrize("wanted", [[39], [0], [5, 19, 20, 39], [30, 2, 25]])
def test_logits_come_back_in_the_order_that_was_asked(wanted: list[int]) -> None:
    assert Steps().run(wanted) == wanted


@pytest.mark.parametrize("where", ["A0", "B0", "A1", "B2", "sum A0", "sum B0", "sum A2", "sum B2"])
def test_an_error_in_a_half_or_its_sum_ends_both_and_the_next_step_is_good(where: str) -> None:
    broken = [True]

    def fail(at: str) -> None:
        if at == where and broken[0]:
            raise RuntimeError(f"{where} broke")

    steps = Steps(fail)
    with pytest.raises(RuntimeError, match=f"^{where} broke$"):
        steps.run([39])
    assert sorted(steps.ended) == sorted("A" if where == "A0" else "AB")  # with A0, B has not begun
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is _Half and not x.dead]
    broken[0], steps.log[:] = False, []
    assert steps.run([39]) == [39]
    assert len(steps.log) == 12


def test_the_second_thread_ends_with_its_overlap() -> None:
    before = set(threading.enumerate())
    steps = Steps()
    steps.run([39])
    (courier,) = set(threading.enumerate()) - before
    del steps
    gc.collect()
    courier.join(60)
    assert not courier.is_alive()


def test_the_number_of_threads_that_compute_stays() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Steps().run([39])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# ---- two ranks ----

FLOAT32 = {"dtype": "float32", "activations": "none"}
MODELS = ("llama", "tied", "biased", "qwen3_moe", "gemma3", "gpt_oss")


class Reduce:
    """gloo's sum, which notes how many tokens it was given and in which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        behind = threading.current_thread().name == "ptqpipe-overlap"
        self.calls.append((x.numel() // x.shape[-1], behind))
        dist.all_reduce(x)
        return x


def runner_of(path: Path, rank: int, reduce: Any, overlap: Overlap | None, **options: Any) -> ModelRunner:
    ranks = TensorParallel(2, rank, all_reduce=reduce, run=overlap)
    model = load_rank(path, ranks, **options)
    return ModelRunner(model, EngineOptions(1 << 22, 64, 4, BLOCK), overlap=overlap)


def both_ways(path: Path, rank: int, reduce: Any, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of each step in one piece and in halves, on caches of their own."""
    whole = runner_of(path, rank, reduce, None, **options)
    cut = runner_of(path, rank, reduce, Overlap(least_tokens=LEAST), **options)
    return [(whole.run(step), cut.run(step)) for step in STEPS]


def by_models(rank: int, world: int, paths: dict[str, Path], packed: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, path in paths.items():
        reduce = Reduce()
        found[name] = both_ways(path, rank, reduce, **FLOAT32), reduce.calls
    found["packed"] = both_ways(packed, rank, None), []
    found["int8"] = both_ways(packed, rank, QuantAllReduce(codec="int8", min_bytes=0)), []
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_source(name, folder / name) for name in MODELS}


@pytest.fixture(scope="module")
def packed(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(paths["llama"], "compressed_tensors", "nvfp4").save(tmp_path_factory.mktemp("packed") / "llama")


@pytest.fixture(scope="module")
def found(paths: dict[str, Path], packed: Path) -> list[dict[str, Any]]:
    return on_ranks(2, by_models, paths, packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_halves_give_the_logits_of_the_whole_step(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        for whole, cut in rank[name][0]:
            assert whole.shape == cut.shape
            assert float(whole.abs().max()) > 0.05
            torch.testing.assert_close(cut, whole, rtol=0, atol=CLOSE)
            assert torch.equal(whole.argmax(-1), cut.argmax(-1))


def has_prefill_kernel() -> bool:
    """Attention to a part of a prompt that has the bits of attention to all of it."""
    x = torch.zeros(2, 1, 32, dtype=torch.bfloat16)
    pages = torch.zeros(1, BLOCK, 1, 32, dtype=torch.bfloat16)
    one = torch.zeros(1, 1, dtype=torch.int64)
    where = PagedSpans(one, torch.tensor([2]), torch.tensor([0, 2]), 4)
    return paged_prefill(x, pages, pages, where, scaling=1.0) is not None


@pytest.mark.slow
def test_packed_halves_have_the_bits_of_the_whole_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for whole, cut in rank["packed"][0]:
            if has_prefill_kernel():
                assert torch.equal(whole, cut)
            assert float((whole - cut).abs().max()) <= 2.0**-5 * float(whole.abs().max())


def test_quantized_sums_of_halves_are_the_same_on_both_ranks_and_near_the_plain_ones(
    found: list[dict[str, Any]],
) -> None:
    for (_, first), (_, second), (plain, _) in zip(
        found[0]["int8"][0], found[1]["int8"][0], found[0]["packed"][0], strict=True
    ):
        assert torch.equal(first, second)
        assert not torch.equal(first, plain)
        assert float((first - plain).norm() / plain.norm()) < 0.05


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_halves_alternate_and_decode_steps_stay_whole(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        calls = rank[name][1]
        while calls[0] in ((1, False), (4, False)):  # the probes
            calls = calls[1:]
        sums = 2 * LAYERS
        expected: list[tuple[int, bool]] = []
        for step, cut in zip(STEPS, HALVES, strict=True):
            expected += [(len(step.tokens), False)] * sums
            expected += [(len(step.tokens), False)] * sums if cut is None else [(n, True) for n in cut] * sums
        assert calls == expected


class NoText:
    """A tokenizer of no words."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return ""


def served(rank: int, world: int, path: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The leader's tokens; prompts come one by one, so that the later ones find the beginning of the first."""
    runner = runner_of(path, rank, None, Overlap(least_tokens=LEAST), **FLOAT32)
    if rank:
        follow(runner)
        return []
    leader = Leader(runner)
    limits = replace(runner.options, max_batch_tokens=40)
    engine = Engine(leader, NoText(), options=limits, vocabulary=VOCABULARY, end_tokens=[])
    tokens = [generate(engine, [ask(prompt, 12)])["a"][0] for prompt in prompts]
    assert engine.counters.cached_tokens > 0
    leader.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_greedy_tokens_are_those_of_one_process_of_transformers(paths: dict[str, Path], name: str) -> None:
    first = tuple(STEPS[3].tokens.tolist())
    prompts = [first, (*first[:17], *STEPS[0].tokens.tolist()[:30]), (*first, *first[:12])]
    model = load_model(paths[name], activations="none")
    tokens, _ = on_ranks(2, served, paths[name], prompts)
    assert tokens == [greedy_of(model, prompt, 12) for prompt in prompts]


def until_death(rank: int, folder: Path, path: Path) -> None:
    """Rank 1 ends within a sum of a half; what the leader then says goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    calls = [0]

    def reduce(x: torch.Tensor) -> torch.Tensor:
        calls[0] += threading.current_thread().name == "ptqpipe-overlap"
        if rank and calls[0] == 3:
            os._exit(0)
        dist.all_reduce(x)
        return x

    runner = runner_of(path, rank, reduce, Overlap(least_tokens=LEAST), **FLOAT32)
    if rank:
        follow(runner)
    try:
        Leader(runner).run(STEPS[0])
    except PtqError as error:
        (folder / "said").write_text(str(error))
    os._exit(0)


def test_a_rank_that_dies_in_a_half_is_an_error_of_the_leader(paths: dict[str, Path], tmp_path: Path) -> None:
    context = mp.get_context("fork")
    ranks = [context.Process(target=until_death, args=(rank, tmp_path, paths["llama"])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        alive = process.is_alive()
        process.kill()
        assert not alive
    assert "a rank does not answer" in (tmp_path / "said").read_text()


# ---- the option ----


@pytest.mark.parametrize(("words", "expected"), [((), True), (("--overlap",), True), (("--no-overlap",), False)])
def test_serve_overlaps_unless_told(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(serve, "serve", lambda options, place, **_: asked.append(options.overlap))
    done = CliRunner().invoke(main, ["serve", str(DEMO), "--tp", "2", *words])
    assert done.exit_code == 0, done.output
    assert asked == [expected]
