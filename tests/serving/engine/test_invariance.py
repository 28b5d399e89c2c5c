"""Batch invariance: the logits of a token have the same bits whatever is computed with it, and what cannot promise that
is refused by name."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ptqpipe
from ptqpipe.errors import UsageError
from ptqpipe.runtime import load
from ptqpipe.runtime.compiled import make_batch_invariant
from ptqpipe.runtime.packed import PackedWeight, packed_linear
from ptqpipe.serving.engine import EngineOptions, invariance
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.model_runner import ModelRunner
from tests.runtime.models import quantized, save_source
from tests.serving.engine.models import DEMO, has_one_order

pytestmark = pytest.mark.skipif(not has_one_order(), reason="this machine has no products of bfloat16, or a faster way")
LENGTHS = (1, 5, 17, 64, 130, 33)
BLOCK = 16


def runner(path: Path, *, invariant: bool = True) -> ModelRunner:
    model = load(path, dtype="bfloat16").eval()
    if invariant:
        make_batch_invariant(model)
    return ModelRunner(model, EngineOptions(1 << 24, max_len=160, max_seqs=len(LENGTHS), block_size=BLOCK))


class Sequences:
    """Random sequences with pages of their own, computed in any pieces."""

    def __init__(self, run: ModelRunner) -> None:
        self.run, at = run, 0
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(run.config.vocab_size, (n,), generator=generator) for n in LENGTHS]
        self.pages: list[tuple[int, ...]] = []
        for n in LENGTHS:
            self.pages.append(tuple(range(at, at + -(-n // BLOCK))))
            at += -(-n // BLOCK)

    def step(self, pieces: list[tuple[int, int, int]]) -> dict[int, torch.Tensor]:
        """Logits of pieces (sequence, first, last), those of one token in front as the scheduler has them."""
        pieces = sorted(pieces, key=lambda piece: piece[2] - piece[1] != 1)
        tokens = torch.cat([self.tokens[i][a:b] for i, a, b in pieces])
        spans = tuple(Span(b - a, b, self.pages[i][: -(-b // BLOCK)]) for i, a, b in pieces)
        logits = self.run.run(Batch(tokens, torch.arange(len(tokens)), spans))
        return dict(zip((i for i, _, _ in pieces), logits.split([b - a for _, a, b in pieces]), strict=True))

    def differing(self, trials: int) -> int:
        """How many rows of logits differ from those of each sequence alone and whole, over random schedules."""
        alone = [self.step([(i, 0, len(x))])[i] for i, x in enumerate(self.tokens)]
        rng, count = random.Random(1), 0
        for _ in range(trials):
            done = [0] * len(LENGTHS)
            while any(at < n for at, n in zip(done, LENGTHS, strict=True)):
                pieces = []
                for i, n in enumerate(LENGTHS):
                    if done[i] < n and rng.random() < 0.6:
                        last = min(n, done[i] + rng.choice([1, 1, 1, 2, 3, 7, 16, 40, 64, 100]))
                        pieces.append((i, done[i], last))
                for i, logits in self.step(pieces).items() if pieces else ():
                    first, last = next((a, b) for j, a, b in pieces if j == i)
                    count += int((logits != alone[i][first:last]).any(-1).sum())
                    done[i] = last
        return count


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in several formats."""
    folder = tmp_path_factory.mktemp("invariant")
    formats = ("nvfp4", "nvfp4_w4a4", "mxfp4", "fp8", "mxfp8")
    return {name: ptqpipe.convert(DEMO, format=name, out=folder / name).out for name in formats} | {"float": DEMO}


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_w4a4", "mxfp4", "fp8", "mxfp8", "float"])
def test_a_sequences_logits_do_not_depend_on_its_company_or_its_pieces(fmt: str, demo: dict[str, Path]) -> None:
    run = runner(demo[fmt])
    assert Sequences(run).differing(trials=3) == 0
    invariance.check(run)


@pytest.mark.parametrize("kind", ["tied", "biased", "qwen3", "gemma3"])
def test_other_architectures_too(kind: str, tmp_path: Path) -> None:
    source = save_source(kind, tmp_path / "source")
    assert (
        Sequences(runner(quantized(source, "compressed_tensors", "nvfp4").save(tmp_path / "packed"))).differing(3) == 0
    )


@pytest.mark.parametrize("kept", [True, False], ids=["one order", "the faster ones"])
def test_few_and_many_rows_of_nvfp4_have_one_order_where_it_is_asked_for(kept: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = PackedWeight.from_qtensor(
        ptqpipe.quantize(torch.randn(2048, 768, generator=generator), "nvfp4")
    ).arranged()
    x = torch.randn(256, 768, generator=generator).bfloat16()
    assert weight.operand is not None
    if kept:
        weight.operand.keep_order()
    many = packed_linear(x, weight)
    sizes = [1, 3, 4, 7, 8, 9, 16] + [16] * 13
    few = torch.cat([packed_linear(rows, weight) for rows in x.split(sizes)])
    assert int((few != many).sum()) == 0 if kept else 0 < int((few != many).sum()) < 1e-3 * many.numel()


def test_the_check_sees_a_model_that_is_not_invariant(demo: dict[str, Path]) -> None:
    run = runner(demo["nvfp4"], invariant=False)

    def uneven(module: Any, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out * (1 + 2.0**-7) if out.shape[1] < 9 else out  # as a library that has another kernel for few rows

    run.model.model.layers[1].mlp.register_forward_hook(uneven)
    with pytest.raises(UsageError, match="logits of tokens 0 to 0 of 96 depend on how"):
        invariance.check(run)


def test_what_torch_multiplies_is_refused_by_name(tmp_path: Path) -> None:
    source = save_source("mixtral", tmp_path / "source")
    model = load(quantized(source, "compressed_tensors", "nvfp4").save(tmp_path / "packed"), dtype="bfloat16")
    with pytest.raises(UsageError, match=r"model\.layers\.0\.\S+ \(\w*Router\) multiplies its weight by torch"):
        make_batch_invariant(model)
