"""What a request asks for, and one sequence on its way from prompt to end.

Must not know pages' contents, models or text; `Sequence` is the engine's only mutable record of a request.
"""

import random
from dataclasses import dataclass, field
from enum import StrEnum

from ptqpipe.errors import UsageError
from ptqpipe.serving.engine.prompt_images import Images, Seen

MOST_LOGPROBS = 20
MOST_STOPS, MOST_STOP_LENGTH = 16, 1024
MOST_BIASES, LARGEST_BIAS = 1024, 100.0
_GREEDY_BELOW = 1e-5  # temperatures: quotients of logits would no longer be finite


class Finish(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"  # whoever asked has left


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a sequence.

    max_tokens       most tokens to generate; 0 computes the prompt alone
    min_tokens       tokens before an end token or a stop string may end it
    temperature      0, and below a hundred-thousandth, is greedy
    top_p, top_k     nucleus and count that are sampled from; 1.0 and 0 are everything
    seed             of this sequence's own random numbers; None draws one
    stop             strings that end the text; they are not part of it
    ignore_eos       end tokens are tokens like others
    logprobs         how many most likely tokens to report beside each generated one; None reports nothing
    prompt_logprobs  the same for the prompt's tokens
    presence_penalty, frequency_penalty  subtracted from logits of generated tokens: once, and per occurrence
    logit_bias       (token, bias) pairs, added to logits
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ranges = (
            ("max_tokens", self.max_tokens, 0, 2**31),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("top_k", self.top_k, 0, 2**31),
            ("logprobs", self.logprobs or 0, 0, MOST_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, MOST_LOGPROBS),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("the number of stop strings", len(self.stop), 0, MOST_STOPS),
            ("the length of a stop string", max(map(len, self.stop), default=0), 0, MOST_STOP_LENGTH),
            ("the number of tokens in logit_bias", len(self.logit_bias), 0, MOST_BIASES),
            *(("a bias in logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS) for _, bias in self.logit_bias),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:  # false for NaN
                raise UsageError(f"{name} is {value}, expected {low} to {high}")
        if self.top_p == 0:
            raise UsageError("top_p is 0, expected more; temperature 0 is greedy")
        if "" in self.stop:
            raise UsageError("a stop string is empty; leave it out")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def penalizes(self) -> bool:
        """Whether generated tokens change logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log probability (of the model's own distribution, before temperature and penalties).

    top  the most likely tokens at this place, the best first
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: the prompt, what was generated, and how much of both the cache holds.

    request, index  the request's name, and which of its ``n`` sequences this is
    tokens          prompt and output; `append` adds to them
    counts          how often each token was generated, where penalties ask for it
    prompt_len      how many of them are the prompt's
    blocks          its pages of the cache, in order
    row             of the states of a model that has some, while it runs
    computed        how many tokens have their keys and values in the cache
    cached          how many of the prompt's tokens were found in the cache
    digests         of its full blocks, as far as they were needed
    begun           when it was first computed, on the monotonic clock
    drafts          guesses of the tokens that follow the last one (``speculative.py``)
    images, seen    of its prompt: as they came, and what the tower made of them once it has
    """

    request: str
    index: int
    tokens: list[int]
    params: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    counts: dict[int, int] = field(default_factory=dict)
    prompt_len: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int = 0
    computed: int = 0
    cached: int = 0
    digests: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    preemptions: int = 0
    begun: float | None = None
    drafts: tuple[int, ...] = ()
    rng: random.Random = field(default_factory=random.Random)
    images: Images | None = None
    seen: Seen | None = None
    image_keys: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        if self.params.seed is not None:
            self.rng = random.Random(f"{self.params.seed}/{self.index}")
        if self.images is not None:
            self.image_keys = self.images.keys(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.drafts = ()
        if self.params.penalizes:
            self.counts[token] = self.counts.get(token, 0) + 1

    def keys(self, start: int, end: int) -> list[int]:
        """Keys of tokens in the prefix cache: the token, or the digest of the image at its place."""
        tokens = self.tokens[start:end]
        if not self.image_keys:
            return tokens
        return [self.image_keys.get(position, token) for position, token in enumerate(tokens, start)]

    @property
    def unseen(self) -> bool:
        """Whether it has images that the tower must see before it can be computed."""
        return self.images is not None and self.seen is None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether logits of the whole prompt are still needed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len
