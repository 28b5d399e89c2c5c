"""Records what a model passes to its decoder layers: the input of the first, further arguments of each, the head's
input.

While it runs, the blocks compute nothing: their ``forward`` is set aside. Must not know weights or batches' order.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ptqpipe.errors import CheckpointError, first_line, is_no_memory, one_line
from ptqpipe.models.language_model import with_cache
from ptqpipe.runtime.creating import without_run

Arguments = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""What each block is given beside hidden states: by place, and by name."""
Added = dict[int, torch.Tensor]
"""By block: what the model adds to the hidden states [samples, tokens, hidden] that leave it."""


class StopForward(Exception):  # no error: a way out
    """Leaves a model's forward where nothing after it is of use."""


class _ShapeError(Exception):
    """A block was given something else than the hidden states that the one before it returned, or the model wanted more
    of it."""


class ModelShell:
    """A model without the work of its blocks. ``cache`` is what its attention gets as a key-value cache, or None."""

    def __init__(
        self, model: Any, blocks: Sequence[torch.nn.Module], *, device: torch.device, cache: object | None
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._device = device
        self._cache = cache
        self._tuples = False  # whether the model takes what its blocks return as a tuple

    def capture(
        self, ids: torch.Tensor, images: Mapping[str, Any] | None = None
    ) -> tuple[torch.Tensor, Arguments, Added]:
        """The hidden states [samples, tokens, hidden] that enter the first block, every block's further arguments, and
        what the model adds behind blocks, given images.

        images  the model's inputs beside tokens, of one sample

        CheckpointError for a model that changes hidden states between its blocks, carries more than them from one to
        the next, or does not run all of them.
        """
        try:
            return self._capture_once(ids, images)
        except _ShapeError:  # the model takes the first item of what a block returns
            self._tuples = True
        name = type(self._model).__name__
        try:
            return self._capture_once(ids, images)
        except _ShapeError:
            raise CheckpointError(
                f"{name} changes hidden states between its decoder layers, or passes more than them from one to the "
                f"next; it cannot be run layer by layer (calibrate, tune); {without_run()}"
            ) from None

    def _capture_once(
        self, ids: torch.Tensor, images: Mapping[str, Any] | None
    ) -> tuple[torch.Tensor, Arguments, Added]:
        arguments: Arguments = []
        first: list[torch.Tensor] = []
        added: Added = {}
        last: list[torch.Tensor] = []

        def note(*args: Any, **kwargs: Any) -> Any:
            rest = dict(kwargs)
            x = args[0] if args else rest.pop("hidden_states")
            if not first:
                first.append(x)
            if x.shape != first[0].shape:
                raise _ShapeError
            if images is not None and last and not torch.equal(x, last[-1]):
                added[len(arguments) - 1] = x - last[-1]
            last[:] = [x]
            arguments.append((args[1:], rest))
            if len(arguments) == len(self._blocks):
                raise StopForward
            return (x,) if self._tuples else x

        for module in self._blocks:
            module.forward = note
        try:
            with torch.no_grad():
                self._call(ids, images)
        except (TypeError, ValueError) as error:
            if not arguments:
                raise CheckpointError(
                    f"{type(self._model).__name__} cannot be run on tokens alone ({first_line(error)}); {without_run()}"
                ) from error
            raise _ShapeError from None  # it takes apart what the block before returned
        finally:
            for module in self._blocks:
                del module.forward
        if len(arguments) != len(self._blocks):
            raise CheckpointError(
                f"{type(self._model).__name__} ran {len(arguments)} of {len(self._blocks)} decoder layers; it "
                f"cannot be run layer by layer (calibrate, tune); {without_run()}"
            )
        if first[0].dim() != 3:
            raise CheckpointError(
                f"{type(self._model).__name__} passes several hidden states a token between its decoder layers; it "
                f"cannot be run layer by layer (calibrate, tune); {without_run()}"
            )
        return first[0], arguments, added

    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """The hidden states [samples, tokens, hidden] that enter the first block. Records gradients unless under
        ``torch.no_grad``; the weights of the embedding must be loaded."""
        inputs: list[torch.Tensor] = []

        def stop(*args: Any, **kwargs: Any) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])
            raise StopForward

        self._blocks[0].forward = stop
        try:
            self._call(ids)
        finally:
            del self._blocks[0].forward
        return inputs[0]

    def head_input(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The input of the language-model head where the last layer returned ``x``; both [samples, tokens, hidden]."""
        inputs: list[torch.Tensor] = []

        def stop(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs.append(args[0])
            raise StopForward

        hook = self._model.get_output_embeddings().register_forward_pre_hook(stop)
        try:
            with self._returning(x), torch.no_grad():
                self._call(ids)
        finally:
            hook.remove()
        return inputs[0]

    def logits(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Logits [samples, tokens, vocabulary] where the last block returned ``x``. Records gradients unless under
        ``torch.no_grad``; the head's weights must be loaded."""
        with self._returning(x):
            logits: torch.Tensor = self._call(ids).logits
        return logits

    def last_hidden(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What a model without a head returns [samples, tokens, hidden] where the last block returned ``x``. Records
        gradients unless under ``torch.no_grad``."""
        with self._returning(x):
            hidden: torch.Tensor = self._call(ids).last_hidden_state
        return hidden

    @contextlib.contextmanager
    def _returning(self, x: torch.Tensor) -> Iterator[None]:
        """The last block returns ``x`` while it is open, whatever the model is given."""
        embedding = self._model.get_input_embeddings()
        weight = embedding.weight
        if weight.is_meta:  # not loaded; Gemma 4 looks at a row of it, for the blocks, which compute nothing here
            zeros = torch.zeros((), dtype=weight.dtype, device=self._device).expand(weight.shape)
            embedding.weight = torch.nn.Parameter(zeros, requires_grad=False)
        embedding.forward = lambda _ids: x
        for module in self._blocks:
            module.forward = lambda *_args, **_kwargs: (x,) if self._tuples else x
        try:
            yield
        finally:
            embedding.weight = weight
            for module in (embedding, *self._blocks):
                del module.forward

    def _call(self, ids: torch.Tensor, images: Mapping[str, Any] | None = None) -> Any:
        inputs = {name: _on(value, self._device) for name, value in (images or {}).items()}
        try:
            with contextlib.suppress(StopForward):
                cached = with_cache(self._model, self._cache)
                return self._model(input_ids=ids.to(self._device), **cached, **inputs)
            return None
        except RuntimeError as error:  # its forward does something between the blocks that nothing here foresees
            if is_no_memory(error):
                raise
            raise CheckpointError(
                f"{type(self._model).__name__} cannot be run layer by layer (calibrate, tune): "
                f"{one_line(str(error), limit=200)}; {without_run()}"
            ) from error


def moved(arguments: Arguments, device: torch.device) -> Arguments:
    """The arguments with their tensors on a device."""
    return [(_on(args, device), _on(kwargs, device)) for args, kwargs in arguments]


def _on(value: Any, device: torch.device) -> Any:
    """An argument with its tensors on a device, whatever plain containers nest them."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _on(item, device) for key, item in value.items()}
    return type(value)(_on(item, device) for item in value) if type(value) in (list, tuple) else value


def same(a: Any, b: Any) -> bool:
    """Whether two captured arguments are equal, whatever they nest."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or bool(a == b)
