"""Checks that a runner's logits of a sequence are the same bits in one step and in several, alone and with others.

Run once at the start of a service that promises it (``runtime/compiled.py``): what nobody has thought of, an attention
without a compiled kernel for instance, shows here and not in an answer.
"""

import torch

from ptqpipe.errors import UsageError, arg
from ptqpipe.run.quantities import number
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.model_runner import ModelRunner

_TOKENS = 96
_CUTS = (1, 2, 9, 26, 59)  # where the steps end: one token, few, and more than the kernels' tiles
_OTHERS = 3  # sequences of a token that go along


def check(runner: ModelRunner) -> None:
    """UsageError where the bits differ. Writes to the cache's first pages; every rank of a group calls it."""
    if runner.state_bytes:
        raise UsageError(
            f"{arg('batch_invariant')}: {type(runner.model).__name__} has layers with states, which sum a prompt in an "
            "order that depends on where it is cut; serve without it"
        )
    size, vocabulary = runner.block_size, int(runner.config.vocab_size)
    blocks = runner.blocks - _OTHERS
    count = min(_TOKENS, blocks * size)
    tokens = torch.randint(vocabulary, (count + _OTHERS,), generator=torch.Generator().manual_seed(0))
    own, others = tokens[:count], tokens[count:]
    pages = tuple(range(-(-count // size)))
    beside = tuple(Span(1, 1, (blocks + index,)) for index in range(_OTHERS))
    whole = runner.run(Batch(own, torch.arange(count), (Span(count, count, pages),)))
    cuts = [cut for cut in _CUTS if cut < count]
    for first, last in zip([0, *cuts], [*cuts, count], strict=True):
        wanted = torch.arange(_OTHERS, _OTHERS + last - first)
        span = Span(last - first, last, pages[: -(-last // size)])
        logits = runner.run(Batch(torch.cat([others, own[first:last]]), wanted, (*beside, span)))
        if not torch.equal(logits, whole[first:last]):
            raise UsageError(
                f"{arg('batch_invariant')}: the logits of tokens {first} to {last - 1} of {count} depend on how they "
                f"are computed, by {number(float((logits - whole[first:last]).abs().max()), 3)}; serve without it"
            )
