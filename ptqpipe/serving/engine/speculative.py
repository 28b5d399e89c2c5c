"""Self-speculation: drafts of a sequence's next tokens by the model's own multi-token prediction layer.

After a step the layer runs over the places that the step computed, each with the token that follows it, so that its own
keys and values (a further layer of the same pages) cover what the model's do. Where a sequence ends its answer is a
draft; for more drafts it runs on from its own states. In the next step the model computes the drafts behind the last
token, and the engine samples place by place as ever: a draft that is what was sampled there saved a step, the first
that is not ends the step for its sequence. So tokens are the model's own, greedy or sampled, whatever was drafted.

A model with states (``states.py``) has seen drafts that were not accepted: the states of before the step come back, and
the tokens that were are computed again, in a step without drafts.

The last slot of a page that several sequences share knows the token that followed in the first of them: drafts may be
worse for it, tokens never.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.scheduler import Chunk
from ptqpipe.serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _DraftStart:
    """Where a sequence's drafts begin: ``total`` tokens of it have states, and it may get ``room`` drafts."""

    seq: Sequence
    total: int
    room: int

    def span(self, count: int, more: int, block_size: int) -> Span:
        """Its last ``count`` places with ``more`` behind them."""
        total = self.total + more
        return Span(count, total, tuple(self.seq.blocks[: -(-total // block_size)]))


class Drafter:
    """Drafts for the sequences of an engine, from the runner of its model, which has ``model.mtp``.

    most     drafts of a sequence in a step
    max_len  longest sequence
    """

    def __init__(self, runner: ModelRunner, *, most: int, max_len: int) -> None:
        self._model, self._attention, self._size = runner.model, runner.attention, runner.block_size
        self.most, self._max_len = most, max_len
        self._states = torch.empty(0)  # behind the final norm
        self._kept = runner.states.kept  # beside the cache
        self._before: list[torch.Tensor] = []
        runner.model.get_decoder().register_forward_hook(self._note)

    def _note(self, _module: Any, _inputs: Any, out: Any) -> None:
        """Keeps the states [tokens, hidden] of a step."""
        self._states = out[0][0]

    def begin(self, chunks: Row[Chunk]) -> None:
        """Copies the states of the sequences that get drafts computed."""
        rows = [chunk.seq.row for chunk in chunks if chunk.drafts]
        self._before = [one[rows] for one in self._kept] if rows else []

    def _put_back(self, chunks: Row[Chunk]) -> None:
        """Gives sequences whose drafts were not all accepted the states of before the step."""
        drafted = [chunk for chunk in chunks if chunk.drafts] if self._before else []
        for index, chunk in enumerate(drafted):
            seq = chunk.seq
            if seq.blocks and seq.computed < chunk.start + chunk.size:
                for one, before in zip(self._kept, self._before, strict=True):
                    one[seq.row] = before[index]
                seq.computed, seq.drafts = chunk.start, ()

    @torch.inference_mode()
    def draft(self, chunks: Row[Chunk], blocks: BlockManager) -> None:
        """Gives the sequences of a step that was computed and sampled their drafts. Those that ended have no blocks."""
        places: list[_DraftStart] = []
        rows: list[torch.Tensor] = []
        tokens: list[int] = []
        spans: list[Span] = []
        offset = 0
        for chunk in chunks:
            seq, count = chunk.seq, chunk.seq.computed - chunk.start
            if seq.blocks:
                place = _DraftStart(seq, seq.computed, self._room(seq, blocks))
                places.append(place)
                rows.append(self._states[offset : offset + count])
                tokens += seq.tokens[chunk.start + 1 : seq.computed + 1]
                spans.append(place.span(count, 0, self._size))
            offset += chunk.size
        if not places:
            return
        ends = [end - 1 for end in torch.tensor([span.count for span in spans]).cumsum(0).tolist()]
        states, next_tokens = self._run(torch.cat(rows), tokens, spans, ends)
        drafts = [[token] for token in next_tokens]
        for depth in range(1, max(place.room for place in places)):
            going = [index for index, place in enumerate(places) if place.room > depth]
            spans = [places[index].span(1, depth, self._size) for index in going]
            tokens = [drafts[index][-1] for index in going]
            some, next_tokens = self._run(states[going], tokens, spans, list(range(len(going))))
            states[going] = some
            for index, token in zip(going, next_tokens, strict=True):
                drafts[index].append(token)
        for place, tokens_of_one in zip(places, drafts, strict=True):
            place.seq.drafts = tuple(tokens_of_one[: place.room])
        self._put_back(chunks)

    def _room(self, seq: Sequence, blocks: BlockManager) -> int:
        """Number of useful drafts: the token after them is the model's own. None during prefill."""
        left = min(seq.params.max_tokens - seq.generated, self._max_len - len(seq.tokens)) - 1
        room = max(0, min(self.most, left)) if seq.remaining == 1 else 0
        return room if room < 2 or blocks.grow(seq, len(seq.tokens) + room) else 1

    def _run(
        self, states: torch.Tensor, tokens: list[int], spans: Row[Span], wanted: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """One pass of the layer over ``states`` [tokens, hidden]: its states at the ``wanted`` places, and the most
        likely token of each."""
        device = self._model.device
        batch = Batch(torch.tensor(tokens, dtype=torch.int64), torch.tensor(wanted), tuple(spans))
        with self._attention.during(batch):
            following, positions = batch.tokens[None].to(device), batch.positions()[None].to(device)
            pairs = self._model.mtp.pair(self._model, states[None], following)
            out = self._model.mtp(self._model, pairs, positions)[0][wanted]
        return out, self._model.get_output_embeddings()(out).argmax(dim=-1).tolist()
