"""What a server has done lately, as a line for its log."""

import time
from collections.abc import Callable

from ptqpipe.engine import Service


class Throughput:
    """Measures from one line to the next. ``clock`` gives seconds."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._at, self._seen = clock(), self._tokens()

    def line(self) -> str | None:
        """Tokens per second since the last call, and how busy the engine is; None where there was no work at all."""
        now, tokens, load = self._clock(), self._tokens(), self._service.load()
        seconds = max(now - self._at, 1e-9)
        prompt, generated = ((new - old) / seconds for new, old in zip(tokens, self._seen, strict=True))
        self._at, worked, self._seen = now, tokens != self._seen, tokens
        if not worked and not load.running and not load.waiting:
            return None
        return (
            f"prompts {prompt:.1f}, generation {generated:.1f} tokens/s; running {load.running}, "
            f"waiting {load.waiting}; KV cache {100 * load.cache_use:.1f} %"
        )

    def _tokens(self) -> tuple[int, int]:
        """(tokens of prompts, generated tokens) that were computed since the start."""
        engine = self._service.engine
        return (engine.counters.prompt_tokens, engine.counters.generated_tokens) if engine is not None else (0, 0)
