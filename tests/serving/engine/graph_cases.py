"""The claims about recorded decode steps. ``test_graphs.py`` runs this file in a process.

Under Triton's interpreter on CPU tensors, where a recording is the model's own launches on the inputs that never move;
and on a CUDA device where there is one, with CUDA graphs.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ptqpipe.numerics.kernels.triton import interpreting
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.graphs import StepGraphs
from ptqpipe.serving.engine.model_runner import ModelRunner

BLOCK, MAX_LEN = 4, 24
DEVICE = "cpu" if interpreting() else "cuda"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False,
        )
    ).eval().to(DEVICE)  # fmt: skip
    made = ModelRunner(model, EngineOptions(1 << 24, MAX_LEN, 6, BLOCK))
    if DEVICE == "cpu":
        assert made.graphs is None
        monkeypatch.setattr(StepGraphs, "_graph", lambda self, size: lambda: self._compute(size))
        spare = made.blocks - 1  # the last sequence's last page, which these sequences do not come to
        made.graphs = StepGraphs(model, made.attention, max_len=MAX_LEN, max_seqs=6, spare=spare)
    return made


def pages(sequence: int, total: int) -> tuple[int, ...]:
    first = sequence * -(-(MAX_LEN + 1) // BLOCK)
    return tuple(range(first, first + -(-total // BLOCK)))


def decoded(run: ModelRunner, lengths: list[int], tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits of a prompt of each length, then of steps of one token for all."""
    found = []
    for at, length in enumerate(lengths):
        found.append(
            run.run(Batch(tokens[at, :length], torch.tensor([length - 1]), (Span(length, length, pages(at, length)),)))
        )
    for step in range(steps):
        totals = [length + step + 1 for length in lengths]
        spans = tuple(Span(1, total, pages(at, total)) for at, total in enumerate(totals))
        given = torch.stack([tokens[at, total - 1] for at, total in enumerate(totals)])
        found.append(run.run(Batch(given, torch.arange(len(given)), spans)))
    return found


@pytest.mark.parametrize("lengths", [[5], [3, 9], [1, 4, 7, 2, 6]])  # the last one in a recording for six
def test_a_recorded_step_gives_the_logits_of_the_models_own(runner: ModelRunner, lengths: list[int]) -> None:
    tokens = torch.randint(64, (len(lengths), MAX_LEN), generator=torch.Generator().manual_seed(1))
    made = decoded(runner, lengths, tokens, 6)
    graphs, runner.graphs = runner.graphs, None
    assert graphs is not None
    assert graphs._recorded.get({1: 1, 2: 2, 5: 6}[len(lengths)]) is not None
    for pages_of in runner.attention.pages.values():
        pages_of.keys.zero_()
        pages_of.values.zero_()
    for ours, own in zip(made, decoded(runner, lengths, tokens, 6), strict=True):
        assert ours.shape == own.shape
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)  # six rows where the model's own have five


def test_a_batch_that_grows_and_shrinks_takes_the_recording_of_its_size(runner: ModelRunner) -> None:
    assert runner.graphs is not None
    for count in (1, 2, 1, 6, 3):
        spans = tuple(Span(1, 1, pages(at, 1)) for at in range(count))
        tokens = torch.full((count,), 7)
        logits = runner.run(Batch(tokens, torch.arange(count), spans))
        torch.testing.assert_close(logits, logits[:1].expand(count, -1), rtol=1e-4, atol=1e-4)
    assert set(runner.graphs._recorded) == {1, 2, 4, 6}


def test_other_steps_are_the_models(runner: ModelRunner) -> None:
    assert runner.graphs is not None
    one = (Span(1, 1, pages(0, 1)), Span(2, 2, pages(1, 2)))
    assert runner.graphs.run(Batch(torch.tensor([1, 2, 3]), torch.tensor([0, 2]), one)) is None
    two = (Span(1, 1, pages(0, 1)), Span(1, 1, pages(1, 1)))
    assert runner.graphs.run(Batch(torch.tensor([1, 2]), torch.tensor([1]), two)) is None  # one prompt goes on
    assert not runner.graphs._recorded


def test_what_cannot_be_recorded_runs_as_before_and_is_told_once(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(self: StepGraphs, size: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    assert runner.graphs is not None
    monkeypatch.setattr(StepGraphs, "_graph", waits)
    batch = Batch(torch.tensor([3]), torch.tensor([0]), (Span(1, 1, pages(0, 1)),))
    with pytest.warns(RuntimeWarning) as told:
        first, second = runner.run(batch), runner.run(batch)
    assert torch.equal(first, second)
    assert [str(one.message) for one in told] == [
        "steps of 1 or fewer sequences are not recorded as a CUDA graph and take longer: operation not permitted when "
        "stream is capturing"
    ]


def test_a_recording_with_other_logits_is_not_used(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.graphs is not None
    monkeypatch.setattr(StepGraphs, "_graph", lambda self, size: lambda: self._compute(size) + 1)
    batch = Batch(torch.tensor([3]), torch.tensor([0]), (Span(1, 1, pages(0, 1)),))
    with pytest.warns(RuntimeWarning, match="their logits differ"):
        logits = runner.run(batch)
    assert runner.graphs._recorded == {1: None}
    runner.graphs = None
    assert torch.equal(runner.run(batch), logits)
