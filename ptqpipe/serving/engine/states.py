"""States beside the paged cache, which linear attention, state-space layers and short convolutions keep for a sequence.

transformers' own modules compute them. Each that keeps states is called once for the sequences of a
step that have one token each, as a batch, and once for every longer chunk of a prompt, with the states of these
sequences as cache; for a sequence's first chunk there are none. So a module continues exactly as in transformers'
``generate``, and no family has code here. A sequence has a row (`Span.row`) of every state for as long as it runs; a
preempted one recomputes its states. Must not know attention, pages or the scheduler.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.serving.engine.batch import Batch

_CACHES = ("cache", "cache_params", "past_key_values")  # parameters of a module that take transformers' cache
_CONV, _RECURRENT = "conv_states", "recurrent_states"  # of a layer of that cache


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module has one state: entry ``key`` of a cache layer's ``name``, or an attribute of ``owner``."""

    name: str
    key: int = 0
    owner: Any = None


@dataclass(frozen=True, slots=True)
class _State:
    """One state: its place, shape of a sequence's (without a batch dimension) and dtype.

    flagged  whether transformers' cache says that there is a state before (conv states) once it was computed
    """

    place: _Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    flagged: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A module that keeps states.

    cache   the parameter that takes the cache; None for a module that keeps them in attributes
    count   how many states of each kind its cache layer has
    """

    module: Any
    cache: str | None
    count: int
    states: tuple[_State, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a step that are computed in one call: ``first`` to ``last``, of the sequences with these rows.

    fresh  whether they are a sequence's first
    """

    first: int
    last: int
    rows: tuple[int, ...]
    fresh: bool


@dataclass(slots=True)
class Pieces:
    """How far a token's output differs where it comes in pieces: of all modules and tokens the worst, as the root mean
    square in units of the outputs' spread.

    several  in pieces of several tokens; single: of one, behind the first
    """

    several: float = 0.0
    single: float = 0.0

    def compare(self, compute: Callable[[list[_Part]], Any], whole: _Part) -> None:
        """Records the error of computing ``whole`` in pieces."""
        expected = _tensor(compute([whole])).float()
        for name, cuts in (("several", (3, 4)), ("single", range(3, whole.last))):
            ends = [0, *cuts, whole.last]
            pieces = [_Part(a, b, whole.rows, a == 0) for a, b in itertools.pairwise(ends)]
            error = (_tensor(compute(pieces)).float() - expected).square().mean(dim=-1).max().sqrt() / expected.std()
            setattr(self, name, max(getattr(self, name), float(error.nan_to_num(nan=torch.inf))))


def _tensor(out: Any) -> torch.Tensor:
    """The first tensor of a module's output."""
    return out if isinstance(out, torch.Tensor) else _tensor(out[0])


_STEP: ContextVar[tuple[_Part, ...]] = ContextVar("ptqpipe_states_step")
_CHECK: ContextVar[Pieces | None] = ContextVar("ptqpipe_states_check", default=None)


class States:
    """The states of ``rows`` sequences, and the modules that work on them; their forward is replaced in place.

    by_tokens  whether later pieces of a prompt go through the modules token by token: some continue in no other way,
               since transformers' scan of several tokens begins with zeros (Mamba, Jamba)
    kept       all states, [rows, ...] each
    """

    def __init__(self, holders: Sequence[RecurrentState], rows: int, *, device: torch.device | str = "cpu") -> None:
        self.held = len(holders)
        self.by_tokens = any(holder.cache is None for holder in holders)
        self.kept: list[torch.Tensor] = []
        for holder in holders:
            kept = [torch.zeros(rows, *state.shape, dtype=state.dtype, device=device) for state in holder.states]
            holder.module.forward = _forward(holder, holder.module.forward, kept)
            self.kept += kept

    @contextmanager
    def in_pieces(self) -> Iterator["Pieces"]:
        """Within it, in a forward of one new sequence, each module computes its tokens in pieces, too."""
        check = Pieces()
        token = _CHECK.set(check)
        try:
            yield check
        finally:
            _CHECK.reset(token)

    @contextmanager
    def during(self, batch: Batch, *, alone: bool = False) -> Iterator[None]:
        """Within it a forward of the model's tokens is that of ``batch``; with ``alone`` each token is a sequence."""
        each = tuple(_Part(index, index + 1, (0,), fresh=True) for index in range(len(batch.tokens)))
        token = _STEP.set(each if alone else tuple(_parts(batch, by_tokens=self.by_tokens)))
        try:
            yield
        finally:
            _STEP.reset(token)


def _parts(batch: Batch, *, by_tokens: bool) -> list[_Part]:
    """Single tokens that lie beside each other are one part, if none is the first of its sequence."""
    parts: list[_Part] = []
    start, single = 0, False
    for span in batch.spans:
        last, fresh = start + span.count, span.count == span.total
        joins = span.count == 1 and not fresh
        if joins and single:
            before = parts.pop()
            parts.append(_Part(before.first, last, (*before.rows, span.row), fresh=False))
        elif fresh or not by_tokens:
            parts.append(_Part(start, last, (span.row,), fresh))
        else:
            parts += [_Part(token, token + 1, (span.row,), fresh=False) for token in range(start, last)]
        start, single = last, joins
    return parts


def _forward(holder: RecurrentState, own: Callable[..., Any], kept: list[torch.Tensor]) -> Callable[..., Any]:
    """A module's forward of the tokens of a step, [1, T, ...] in and out; outside of a step its own."""
    signature = inspect.signature(own)

    def forward(*args: Any, **options: Any) -> Any:
        parts = _STEP.get(())
        if not parts:
            return own(*args, **options)
        bound = signature.bind(*args, **options)
        arguments, total = dict(bound.arguments), parts[-1].last

        def compute(parts: Sequence[_Part]) -> Any:
            outputs = []
            for part in parts:
                bound.arguments = {name: _cut(value, part, total) for name, value in arguments.items()}
                outputs.append(_call(holder, own, bound, kept, part))
            return _join(outputs, [_shape(part) for part in parts])

        check = _CHECK.get()
        if check is not None:
            check.compare(compute, parts[0])
        return compute(parts)

    return forward


def _shape(part: _Part) -> tuple[int, int]:
    """(sequences, tokens of each) of a part."""
    return len(part.rows), (part.last - part.first) // len(part.rows)


def _cut(value: Any, part: _Part, total: int) -> Any:
    """What a part has of an argument: of tensors [1, T, ...] its tokens as a batch, also within tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if value.dim() < 2 or value.shape[0] != 1 or value.shape[1] != total:
            return value
        return value[0, part.first : part.last].reshape(*_shape(part), *value.shape[2:])
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(one, part, total) for one in value)
    if isinstance(value, dict):
        return {name: _cut(one, part, total) for name, one in value.items()}
    return value


def _join(outputs: list[Any], shapes: list[tuple[int, int]]) -> Any:
    """The outputs of parts as one: their tensors [sequences, tokens, ...] in one row, [1, T, ...]."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_join([one[index] for one in outputs], shapes) for index in range(len(first)))
    if isinstance(first, torch.Tensor) and first.dim() > 1 and tuple(first.shape[:2]) == shapes[0]:
        return torch.cat([one.reshape(1, -1, *one.shape[2:]) for one in outputs], dim=1)
    return first


def _call(
    holder: RecurrentState,
    own: Callable[..., Any],
    bound: inspect.BoundArguments,
    kept: list[torch.Tensor],
    part: _Part,
) -> Any:
    """One part through the module; its states are read before and written after."""
    start = part.rows[0]
    beside = part.rows == tuple(range(start, start + len(part.rows)))
    rows = torch.tensor(part.rows, device=kept[0].device)
    states = [one[start : start + len(part.rows)] if beside else one.index_select(0, rows) for one in kept]
    if part.fresh:
        for state in states:
            state.zero_()
    if holder.cache is not None:
        cache = _Cache(holder.count)
        for state, has in zip(states, holder.states, strict=True):
            cache.put(has, state, fresh=part.fresh)
        bound.arguments[holder.cache] = cache
        out = own(*bound.args, **bound.kwargs)
        after = [cache.get(has) for has in holder.states]
    else:
        for state, has in zip(states, holder.states, strict=True):
            setattr(has.place.owner, has.place.name, None if part.fresh else state)
        bound.arguments["use_cache"] = True
        out = own(*bound.args, **bound.kwargs)
        after = [getattr(has.place.owner, has.place.name) for has in holder.states]
    for one, state, new in zip(kept, states, after, strict=True):
        if not beside:
            one.index_copy_(0, rows, new.to(one.dtype))
        elif new is not state:
            state.copy_(new)
    return out


class _Cache:
    """What a module is given for transformers' cache: one layer of it, whatever number the module asks for."""

    def __init__(self, count: int, heard: "Callable[[], None] | None" = None) -> None:
        from transformers.cache_utils import LinearAttentionLayer

        self.layer: Any = LinearAttentionLayer(number_of_states=count)
        self._heard = heard  # of every update

    def put(self, has: _State, state: torch.Tensor, *, fresh: bool) -> None:
        """Gives the layer a state to work on, in place."""
        key = has.place.key
        getattr(self.layer, has.place.name)[key] = state
        getattr(self.layer, f"is_{has.place.name}_initialized")[key] = True
        if has.place.name == _CONV:
            self.layer.conv_kernel_size[key] = has.shape[-1]
        self.layer.dtype, self.layer.device = state.dtype, state.device
        self.layer.has_previous_state[key] = has.flagged and not fresh

    def get(self, has: _State) -> torch.Tensor:
        """The state after a forward."""
        state: torch.Tensor = getattr(self.layer, has.place.name)[has.place.key]
        return state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layer.conv_states[state_idx] if self.layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layer.recurrent_states[state_idx] if self.layer.has_previous_state[state_idx] else None

    def update_conv_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Any:
        self._update()
        return self.layer.update_conv_state(states, state_idx, **options)

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Any:
        self._update()
        return self.layer.update_recurrent_state(states, state_idx, **options)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        filled = self.layer.has_previous_state
        return all(filled.values()) if state_idx is None else bool(filled[state_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's, of its own cache."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, states: torch.Tensor) -> None:
        """MiniMax's, of its own cache."""
        self.update_recurrent_state(states, layer_idx)
        self.layer.has_previous_state[0] = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *rest: Any, **options: Any) -> Any:
        """transformers', of attention, whose keys and values are in pages."""
        return keys, values

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def _update(self) -> None:
        if self._heard is not None:
            self._heard()


@contextmanager
def listening(model: Any) -> Iterator[list[RecurrentState]]:
    """Within it a forward of one token fills the list with the modules that keep states."""
    holders: list[RecurrentState] = []
    count = int(getattr(model.config.get_text_config(), "number_of_conv_states", 1) or 1)
    replaced = []
    for module in list(model.modules()):
        cache = _cache_of(module) if _has_layers_with_states() else None
        if cache is not None and not any(_cache_of(part) for part in list(module.modules())[1:]):
            replaced.append(module)
            module.forward = _listener(module, cache, count, holders)
    try:
        yield holders
    finally:
        for module in replaced:
            del module.forward


def _has_layers_with_states() -> bool:
    """Whether this transformers has one kind of cache layer for all states; older ones have one for each model."""
    from transformers import cache_utils

    return hasattr(cache_utils, "LinearAttentionLayer")


def _cache_of(module: Any) -> str | None:
    """The parameter by which a module takes a cache, or is told to keep states."""
    if "forward" in vars(module):
        return None  # hooked by others: such modules have no states of their own
    names = inspect.signature(module.forward).parameters
    return next((name for name in (*_CACHES, "use_cache") if name in names), None)


def _listener(module: Any, cache: str, count: int, holders: list[RecurrentState]) -> Callable[..., Any]:
    own = module.forward
    signature = inspect.signature(own)

    def forward(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        heard: list[bool] = []
        probe_cache = _Cache(count, lambda: heard.append(True))
        before = [(part, name) for part in module.modules() for name, value in vars(part).items() if value is None]
        bound.arguments[cache] = probe_cache if cache in _CACHES else True
        out = own(*bound.args, **bound.kwargs)
        states = tuple(_kept(probe_cache.layer) if heard else _attributes(before))
        if states and all(other.module is not module for other in holders):
            holders.append(RecurrentState(module, cache if heard else None, count, states))
        return out

    return forward


def _kept(layer: Any) -> Iterator[_State]:
    for name in (_CONV, _RECURRENT):
        for key, state in getattr(layer, name).items():
            if state is not None:
                filled = layer.has_previous_state[key]
                yield _State(_Place(name, key), tuple(state.shape[1:]), state.dtype, filled)


def _attributes(before: list[tuple[Any, str]]) -> Iterator[_State]:
    """Attributes that were None and are tensors now; they are None again."""
    for owner, name in before:
        state = getattr(owner, name, None)
        if isinstance(state, torch.Tensor):
            setattr(owner, name, None)
            yield _State(_Place(name, 0, owner), tuple(state.shape[1:]), state.dtype)
