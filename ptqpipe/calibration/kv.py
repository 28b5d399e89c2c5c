"""Observes the largest keys and values of each attention module, where they enter the KV cache.

The observer stands in for transformers' cache: ``update`` is given keys and values exactly as a server would store
them, keys after the rotary embedding and before they are repeated for the query heads, and returns them unchanged.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ptqpipe.errors import UsageError, arg, not_finite
from ptqpipe.models.language_model import cache_name

_PLAIN = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WATCHED = _PLAIN | {"attention", "hybrid"}  # beside layers, or parts of one, of other kinds


class KeyValueObserver:
    """max |k| and max |v| by key-value head, of the calls since `start`. Threads may show it what they see."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self.k_amax: torch.Tensor | None = None
        self.v_amax: torch.Tensor | None = None

    def start(self, name: str) -> None:
        """Begins to watch the attention module ``name``."""
        self._name, self.k_amax, self.v_amax = name, None, None

    def stop(self) -> None:
        """Stops observing; the maxima so far stay."""
        self._name = None

    def look_away(self, away: bool) -> None:
        """Whether what the calling thread shows from now on counts for nothing."""
        self._of_thread.away = away

    def see(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [samples, heads, tokens, head size]. NumericsError where one is not finite."""
        if self._name is None or getattr(self._of_thread, "away", False):
            return
        k, v = self._largest("keys", keys), self._largest("values", values)
        with self._lock:
            self.k_amax = k if self.k_amax is None else torch.maximum(self.k_amax, k)
            self.v_amax = v if self.v_amax is None else torch.maximum(self.v_amax, v)

    def _largest(self, what: str, x: torch.Tensor) -> torch.Tensor:
        amax = x.detach().abs().amax(dim=(0, 2, 3)).float().cpu()
        if not bool(torch.isfinite(amax).all()):
            raise not_finite(f"the {what} of '{self._name}' are not finite", x.dtype)
        return amax


def make_cache(observer: KeyValueObserver, config: Any) -> Any:
    """A cache that stores nothing and passes keys and values to the observer.

    None for models with layers that are no attention, whose cache holds more than keys and values.
    """
    return _observed_cache(observer) if set(_kinds(config)) <= _PLAIN else None


def check_seen(modules: Iterable[str], config: Any) -> None:
    """UsageError for an attention module, by its name in the checkpoint, whose keys and values `watching` cannot see:
    the layer's kind of attention keeps more than them, or something else."""
    kinds = _kinds(config)
    for module in modules:
        index = next((int(part) for part in module.split(".") if part.isdigit()), 0)
        if index < len(kinds) and kinds[index] not in _WATCHED:
            raise UsageError(
                f"{arg('kv_cache')}: calibrate sees no keys or values of '{module}', a layer of kind {kinds[index]!r}; "
                f"leave {arg('kv_cache')} out"
            )


@contextmanager
def watching(module: torch.nn.Module, observer: KeyValueObserver, config: Any) -> Iterator[None]:
    """Shows the observer what an attention module would store while it is open, where its model has no `make_cache`:
    it alone is given a cache, and the layers beside it, whose states a cache holds, are not."""
    kinds, index = _kinds(config), getattr(module, "layer_idx", None) or 0

    def give(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args, {**kwargs, name: cache}

    name = cache_name(module) or ""
    if not name or (index < len(kinds) and kinds[index] not in _WATCHED):
        yield
        return
    cache = _observed_cache(observer)
    hook = module.register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _kinds(config: Any) -> Sequence[str]:
    """The kinds of a model's decoder layers, in order; none where they are all of the plain kind."""
    return getattr(config.get_text_config(), "layer_types", None) or ()


def _observed_cache(observer: KeyValueObserver) -> Any:
    from transformers import DynamicCache

    class ObservedCache(DynamicCache):  # type: ignore[misc]
        """Always empty, so every batch is a beginning."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Shows keys and values, and returns them."""
            if key_states.ndim == 4 and value_states.ndim == 4:
                observer.see(key_states, value_states)
            return key_states, value_states

        def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
            """The keys of a sparse attention's indexer (DeepSeek V3.2), which are not of the KV cache's format."""
            return indexer_key_states

    return ObservedCache()
