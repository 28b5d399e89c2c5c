"""The engine: requests in, pieces of text and tokens out, one step at a time.

A step is: the scheduler chooses tokens, the model computes them, the sampler adds one token to each sequence that is up
to date, and new text is returned as `TokenOutput`. Deterministic and single-threaded; ``service.py`` runs it
beside a server. Must not know HTTP or how the model was loaded.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ptqpipe.errors import PtqError, UsageError
from ptqpipe.serving.engine.batch import Batch, make_batch
from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.detokenizer import Detokenizer, StopStrings
from ptqpipe.serving.engine.prompt_images import Images, See
from ptqpipe.serving.engine.sampler import logprobs_of, sample
from ptqpipe.serving.engine.scheduler import Chunk, Scheduler
from ptqpipe.serving.engine.sequence import Finish, SamplingParams, Sequence, TokenLogprob

if TYPE_CHECKING:
    from ptqpipe.serving.engine.speculative import Drafter


class ContextTooLong(UsageError):
    """A prompt and what is to follow it have more tokens together than a sequence can."""


class ModelExecutor(Protocol):
    """Runs a model's forward for the engine: `runner.ModelRunner`, or rank 0 of several."""

    blocks: int
    block_size: int
    max_seqs: int  # that it has room for in a step
    state_bytes: int  # of a sequence's states; 0 for a model of attention alone

    def run(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [wanted, vocabulary]."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine.

    max_bytes         size of the KV cache
    max_len           longest sequence, prompt and output
    max_seqs          most sequences in a step
    block_size        tokens of a page of the cache
    max_batch_tokens  most tokens in a step: longer prompts are computed in pieces
    prefix_caching    whether the keys and values of a common beginning are computed once
    """

    max_bytes: int
    max_len: int
    max_seqs: int
    block_size: int = 16
    max_batch_tokens: int = 1024
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """``n`` continuations of one prompt, of tokens and images. ``id`` is the caller's, unique among those under way."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    images: Images | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The output of one step for one sequence (vLLM's RequestOutput).

    text             what may be shown; it lags behind ``tokens`` while a character or a stop string is incomplete
    finish           why this is the last piece; None if it is not
    cached           tokens of the prompt that were found in the cache
    begun            when its first token was computed, on the monotonic clock; None for one that was never computed
    prompt_logprobs  of every token of the prompt (None for the first), in the first piece, if asked
    error            why the sequence ended where ``finish`` cannot say it
    """

    request: str
    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    cached: int = 0
    begun: float | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None


@dataclass(slots=True)
class Counters:
    """Counters since the start, for metrics. Tokens are counted when they are computed or sampled.

    drafts           how often a sequence had drafts in a step; ``draft_tokens`` how many
    accepted_tokens  how many of them were sampled, by their place among a sequence's drafts
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: dict[int, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Stream:
    """One sequence with the text that goes out of it."""

    seq: Sequence
    detokenizer: Detokenizer
    stops: StopStrings
    siblings: list[Sequence] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    damaged: bool = False  # logits of its prompt are not finite


class Engine:
    """Requests under way on one model.

    tokenizer   transformers' (``decode`` alone is used)
    end_tokens  tokens that end a sequence
    drafter     what guesses the next tokens; None: nothing does
    see         the model's tower; None where it takes no images
    """

    def __init__(
        self,
        runner: ModelExecutor,
        tokenizer: Any,
        *,
        options: EngineOptions,
        vocabulary: int,
        end_tokens: Iterable[int],
        drafter: "Drafter | None" = None,
        see: See | None = None,
    ) -> None:
        self.drafter, self.see = drafter, see
        self.runner, self.tokenizer, self.options = runner, tokenizer, options
        self.vocabulary = vocabulary
        self.end_tokens = frozenset(token for token in end_tokens if 0 <= token < vocabulary)
        # Where a page ends nobody has kept the states, so what follows a common beginning cannot start from there.
        sharing = options.prefix_caching and not runner.state_bytes
        self.blocks = BlockManager(runner.blocks, block_size=runner.block_size, prefix_caching=sharing)
        if self.blocks.blocks_for(options.max_len + 1) > runner.blocks:
            raise UsageError(
                f"the kv cache holds {runner.blocks * runner.block_size} tokens, expected more than {options.max_len}"
            )
        most = min(options.max_seqs, runner.max_seqs)
        self.scheduler = Scheduler(self.blocks, max_seqs=most, max_tokens=options.max_batch_tokens)
        self.counters = Counters()
        self._streams: dict[Sequence, _Stream] = {}
        self._requests: dict[str, set[Sequence]] = {}

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check(self, request: Request) -> None:
        """UsageError for a request that cannot be computed; ContextTooLong for one that is too long."""
        n, most = len(request.prompt), self.options.max_len
        if n == 0:
            raise UsageError("the prompt has no tokens; expected one at least")
        if n + request.params.max_tokens > most:
            raise ContextTooLong(
                f"the prompt has {n} tokens and max_tokens is {request.params.max_tokens}, together "
                f"{n + request.params.max_tokens}; this model's context is {most} tokens"
            )
        wrong = next((token for token in request.prompt if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is not in the vocabulary of {self.vocabulary}")
        if request.images is not None and self.see is None:
            raise UsageError("this model takes no images; send text")
        biased = [token for token, _ in request.params.logit_bias]
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", request.params.stop_token_ids)):
            wrong = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                raise UsageError(f"{name} has token {wrong}, which is not in the vocabulary of {self.vocabulary}")

    def add(self, request: Request) -> None:
        """Queues a request. Its sequences after the first one wait for its prompt, which they then share."""
        self.check(request)
        params = request.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_tokens)
        seqs = [self._sequence(request, index, params, ends) for index in range(request.n)]
        for seq in seqs:
            detokenizer = Detokenizer(self.tokenizer, request.prompt)
            self._streams[seq] = _Stream(seq, detokenizer, StopStrings(params.stop))
        self._streams[seqs[0]].siblings = seqs[1:]
        self._requests[request.id] = set(seqs)
        self.scheduler.add(seqs[0])

    def _sequence(self, request: Request, index: int, params: SamplingParams, ends: frozenset[int]) -> Sequence:
        return Sequence(request.id, index, list(request.prompt), params, ends, images=request.images)

    def cancel(self, request: str) -> list[TokenOutput]:
        """Ends all sequences of a request; their last pieces (none for an unknown request)."""
        seqs = sorted(self._requests.get(request, ()), key=lambda seq: seq.index)
        return [self._end(self._streams[seq], TokenOutput(request, seq.index, finish=Finish.CANCELLED)) for seq in seqs]

    def step(self) -> list[TokenOutput]:
        """Computes the next tokens: one output for each sequence, in the order of their sequences' arrival."""
        refused = self._see_next()
        if refused:
            return refused
        chunks = self.scheduler.step()
        if not chunks:
            return []
        self.counters.steps += 1
        now = time.monotonic()
        for chunk in chunks:
            chunk.seq.begun = now if chunk.seq.begun is None else chunk.seq.begun
        if self.drafter is not None:
            self.drafter.begin(chunks)
        logits = self.runner.run(make_batch(chunks, self.runner.block_size))
        end, sampling = 0, []
        for chunk in chunks:
            every, start = chunk.seq.needs_prompt_logits, end
            end += chunk.count if every else int(chunk.samples) + len(chunk.drafts)
            self._count(chunk)
            if every:
                self._add_prompt_logprobs(chunk, logits[start:end])
            chunk.seq.computed = chunk.start + chunk.count
            self.blocks.seal(chunk.seq, chunk.start)
            if chunk.samples:
                sampling.append((chunk, end - 1 - len(chunk.drafts)))
        pieces = []
        for depth in range(1 + max(len(chunk.drafts) for chunk in chunks)):
            if sampling:
                rows = [row + depth for _, row in sampling]
                whole = rows == list(range(len(logits)))  # as in a step that generates alone: nothing to copy
                pieces += self._sample([chunk.seq for chunk, _ in sampling], logits if whole else logits[rows])
                sampling = [(chunk, row) for chunk, row in sampling if self._accepts(chunk, depth)]
        if self.drafter is not None:
            self.drafter.draft(chunks, self.blocks)
        return pieces

    def _accepts(self, chunk: Chunk, depth: int) -> bool:
        """Whether a sequence goes on within the step: what was sampled last is the draft number ``depth``."""
        seq, counters = chunk.seq, self.counters
        if depth == 0 and chunk.drafts:
            counters.drafts += 1
            counters.draft_tokens += len(chunk.drafts)
        if depth >= len(chunk.drafts) or seq not in self._streams or seq.tokens[-1] != chunk.drafts[depth]:
            return False
        counters.accepted_tokens[depth] = counters.accepted_tokens.get(depth, 0) + 1
        seq.computed += 1
        self.blocks.seal(seq, chunk.start)
        return True

    def _see_next(self) -> list[TokenOutput]:
        """Lets the tower see the images of the next sequence that waits, one prompt per step, so that those under way
        advance in between; the last pieces of a request whose images the model does not take."""
        seq = self.scheduler.waiting[0] if self.scheduler.waiting else None
        if seq is None or not seq.unseen or len(self.scheduler.running) >= self.options.max_seqs:
            return []
        assert self.see is not None
        assert seq.images is not None
        try:
            seq.seen, seq.images = self.see(seq.tokens[: seq.prompt_len], seq.images), None
        except PtqError as error:
            pieces = self.cancel(seq.request)
            return [replace(piece, finish=Finish.STOP, error=str(error)) for piece in pieces]
        return []

    def _count(self, chunk: Chunk) -> None:
        seq, counters = chunk.seq, self.counters
        if seq.preemptions == 0 or chunk.start >= seq.prompt_len:
            counters.prompt_tokens += max(0, min(seq.prompt_len, chunk.start + chunk.count) - chunk.start)
        else:
            counters.recomputed_tokens += chunk.count
        if chunk.start == seq.cached and seq.preemptions == 0:
            counters.cached_tokens += seq.cached

    def _add_prompt_logprobs(self, chunk: Chunk, logits: torch.Tensor) -> None:
        seq, top = chunk.seq, chunk.seq.params.prompt_logprobs
        assert top is not None
        del seq.prompt_logprobs[chunk.start + 1 :]  # computed before it was preempted
        if not seq.prompt_logprobs:
            seq.prompt_logprobs.append(None)
        following = seq.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, seq.prompt_len)]
        if following and not bool(logits[: len(following)].amax(dim=-1).isfinite().all()):
            self._streams[seq].damaged = True
            logits = logits.nan_to_num()
        for first in range(0, len(following), 64):  # a float32 row of a large vocabulary is half a megabyte
            some = following[first : first + 64]
            seq.prompt_logprobs += logprobs_of(logits[first : first + len(some)], some, top)

    def _sample(self, seqs: list[Sequence], logits: torch.Tensor) -> list[TokenOutput]:
        finite = logits.amax(dim=-1).isfinite().tolist()  # the largest is NaN where one is
        broken = [not whole or self._streams[seq].damaged for whole, seq in zip(finite, seqs, strict=True)]
        logits = logits if all(finite) else logits.nan_to_num()
        tokens = sample(logits, seqs)
        logprobs: dict[int, TokenLogprob] = {}
        wanted = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
        if wanted:
            top = max(seqs[row].params.logprobs or 0 for row in wanted)
            entries = logprobs_of(logits[wanted], [tokens[row] for row in wanted], top)
            logprobs = dict(zip(wanted, entries, strict=True))
        pieces = []
        for row, seq in enumerate(seqs):
            stream = self._streams[seq]
            if broken[row]:
                error = "the model's logits are not finite; the checkpoint or its scales are damaged"
                pieces.append(self._end(stream, TokenOutput(seq.request, seq.index, finish=Finish.STOP, error=error)))
                continue
            pieces.append(self._advance(stream, tokens[row], logprobs.get(row)))
        return pieces

    def _advance(self, stream: _Stream, token: int, logprob: TokenLogprob | None) -> TokenOutput:
        """A sequence with one more token (unless it wanted none), and its piece."""
        seq, params = stream.seq, stream.seq.params
        for sibling in reversed(stream.siblings):
            sibling.seen, sibling.images = seq.seen, None
            self.scheduler.add(sibling, first=True)
        stream.siblings = []
        wanted = not stream.prompt_logprobs_sent and params.prompt_logprobs is not None
        prompt, stream.prompt_logprobs_sent = tuple(seq.prompt_logprobs) if wanted else None, True
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        text, finish = "", Finish.LENGTH if params.max_tokens == 0 else None
        if finish is None:
            seq.append(token)
            self.counters.generated_tokens += 1
            tokens = (token,)
            if logprob is not None:
                logprobs = (replace(logprob, top=logprob.top[: params.logprobs]),)
            text, finish = self._text_of(stream, token)
        piece = TokenOutput(
            seq.request, seq.index, text, tokens, logprobs, finish, cached=seq.cached, begun=seq.begun,
            prompt_logprobs=prompt,
        )  # fmt: skip
        return piece if finish is None else self._end(stream, piece)

    def _text_of(self, stream: _Stream, token: int) -> tuple[str, Finish | None]:
        """The new text of a sequence after its last token, and the finish reason if it ends."""
        seq, params, stops, detokenizer = stream.seq, stream.seq.params, stream.stops, stream.detokenizer
        may_end = seq.generated >= params.min_tokens
        if token in seq.end_tokens and may_end:
            return stops.push(detokenizer.flush(), active=may_end)[0] + stops.flush(), Finish.STOP
        text, stopped = stops.push(detokenizer.push(token), active=may_end)
        if stopped:
            return text, Finish.STOP
        if seq.generated < params.max_tokens and len(seq.tokens) < self.options.max_len:
            return text, None
        rest, stopped = stops.push(detokenizer.flush(), active=may_end)
        return text + rest + ("" if stopped else stops.flush()), Finish.STOP if stopped else Finish.LENGTH

    def _end(self, stream: _Stream, piece: TokenOutput) -> TokenOutput:
        """Forgets a sequence; returns its last piece."""
        seq = stream.seq
        assert piece.finish is not None
        self.counters.finished[piece.finish] = self.counters.finished.get(piece.finish, 0) + 1
        self.scheduler.remove(seq)
        del self._streams[seq]
        self._requests[seq.request].discard(seq)
        if not self._requests[seq.request]:
            del self._requests[seq.request]
        return piece
