"""Runs the model of a checkpoint one decoder layer at a time, with the weights of one layer in memory.

    with Runner.open(Skeleton.of(source, dtype=...), windows) as runner:
        for layer in runner.layers():       # weights of this layer loaded
            layer.inputs(i), layer.forward(x, i), layer.module, layer.origins ...
            layer.advance()                 # outputs of all batches become the next layer's inputs
        for x in runner.head_inputs(): ...  # what the language-model head sees

Public for algorithms that need a layer with its inputs and outputs. How it works: the model itself is run over every
batch with layers that only record their inputs (``capture.py``). The hidden states of every batch are kept; the further
arguments once for each batch size where they depend on the shape alone, as masks and position embeddings do, else of
every batch. Each layer is then run alone.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.activations import Activations, InMemory, OnDisk
from ptqpipe.calibration.experts import check_known, is_stacked, observe
from ptqpipe.calibration.kv import KeyValueObserver, make_cache
from ptqpipe.errors import CheckpointError, UsageError, not_finite
from ptqpipe.runtime.capture import Added, Arguments, ModelShell, moved, same
from ptqpipe.runtime.creating import without_run
from ptqpipe.runtime.loading import check_length
from ptqpipe.runtime.skeleton import Skeleton

BATCH_TOKENS = 2048  # tokens of one forward of a layer, at least one window


@dataclass(slots=True)
class Layer:
    """One decoder layer with its weights loaded.

    index, name  its place and its name in the model ("model.layers.0")
    module       of transformers
    origins      parameter of the layer (by its name in the model) -> checkpoint tensors that make it
    device       where the weights are
    """

    index: int
    name: str
    module: torch.nn.Module
    origins: Mapping[str, tuple[str, ...]]
    _runner: "Runner"
    device: torch.device
    advanced: bool = field(default=False)

    @property
    def batches(self) -> int:
        return len(self._runner.batches)

    def windows(self, batch: int) -> tuple[int, int]:
        """Samples and tokens of a batch."""
        samples, tokens = self._runner.batches[batch].shape
        return samples, tokens

    def inputs(self, batch: int) -> torch.Tensor:
        """Hidden states [samples, tokens, hidden] that enter this layer, on the device. Before `advance` only."""
        if self.advanced:
            raise ValueError(f"the inputs of {self.name} are gone: advance() has replaced them")
        return self._runner.activations.get(batch).to(self.device)

    def forward(
        self, x: torch.Tensor, batch: int, *, parameters: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Hidden states [samples, tokens, hidden] that leave this layer when ``x`` enters it, with some ``parameters``
        (by their names in the layer) instead of its own. Records gradients unless the caller is under
        ``torch.no_grad``."""
        args, kwargs = self._runner.arguments_on(self.device)[batch][self.index]
        if parameters:
            out = torch.func.functional_call(self.module, dict(parameters), (x, *args), kwargs)
        else:
            out = self.module(x, *args, **kwargs)
        if isinstance(out, tuple):
            out = out[0]
        if not isinstance(out, torch.Tensor) or out.shape != x.shape:
            raise CheckpointError(
                f"'{self.name}' does not turn hidden states into hidden states and cannot be run alone; {without_run()}"
            )
        added = self._runner.added.get(batch, {}).get(self.index)
        return out if added is None else out + added.to(out.device)

    def on(self, device: torch.device) -> "Layer":
        """A copy of this layer on another device, for `advance_together`."""
        module = copy.deepcopy(self.module).to(device)
        return Layer(self.index, self.name, module, self.origins, self._runner, device)

    def advance(self, before: Callable[[int], None] | None = None, *, share: slice | None = None) -> None:
        """Runs every batch; the outputs become the inputs of the next layer. Once: later calls do nothing.

        before  is called with the number of each batch before it runs
        share   of the batches, where copies run the others

        NumericsError for an output that is not finite.
        """
        if self.advanced:
            return
        with torch.no_grad():
            for batch in range(self.batches)[share or slice(None)]:
                if before is not None:
                    before(batch)
                out = self.forward(self.inputs(batch), batch)
                if not bool(torch.isfinite(out).all()):
                    raise not_finite(f"the outputs of '{self.name}' are not finite", out.dtype)
                self._runner.activations.put(batch, out)
                self._runner.on_tokens(out.shape[0] * out.shape[1])
        self.advanced = True


class MtpLayer(Layer):
    """The multi-token prediction layer, behind the last layer. A window has a place less in it: its last token is
    followed by none."""

    def windows(self, batch: int) -> tuple[int, int]:
        """Samples and tokens of what enters it."""
        samples, tokens = super().windows(batch)
        return samples, tokens - 1

    def inputs(self, batch: int) -> torch.Tensor:
        """What enters it [samples, tokens - 1, 2 * hidden]: embeddings of the next tokens, and what the head sees."""
        return self.pairs(batch, self._runner.activations.get(batch))

    def pairs(self, batch: int, x: torch.Tensor) -> torch.Tensor:
        """The same where the last layer returned ``x``."""
        runner = self._runner
        states, ids = runner.head_input(batch, x)[:, :-1], runner.batches[batch][:, 1:].to(self.device)
        with torch.no_grad():
            pairs: torch.Tensor = runner.skeleton.model.mtp.pair(runner.skeleton.model, states, ids)
        return pairs

    def forward(
        self, x: torch.Tensor, batch: int, *, parameters: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What the head sees for the token after the next [samples, tokens - 1, hidden]."""
        runner = self._runner
        args = (runner.skeleton.model, x, None, runner.cache)
        out: torch.Tensor = torch.func.functional_call(self.module, dict(parameters or {}), args)
        return out


def advance_together(copies: Sequence[Layer], before: Sequence[Callable[[int], None] | None]) -> None:
    """Advances a layer by its copies on several devices at once: each runs every ``len(copies)``-th batch, in order.

    before  of each copy, as `Layer.advance` has it; called on that copy's thread
    """
    if len(copies) == 1:
        copies[0].advance(before[0])
        return
    with ThreadPoolExecutor(max_workers=len(copies), thread_name_prefix="device") as pool:
        runs = [
            pool.submit(layer.advance, call, share=slice(number, None, len(copies)))
            for number, (layer, call) in enumerate(zip(copies, before, strict=True))
        ]
    for run in runs:
        run.result()


def in_batches(windows: torch.Tensor) -> list[torch.Tensor]:
    """Windows int64 [samples, tokens] as a runner takes them, one batch after the other."""
    return list(torch.split(windows, max(1, BATCH_TOKENS // windows.shape[1]))) if len(windows) else []


class Runner:
    """A model that is run layer by layer; use as a context manager, or `close` it."""

    def __init__(
        self,
        skeleton: Skeleton,
        batches: Sequence[torch.Tensor],
        *,
        device: torch.device,
        activations: Activations,
        held_from: int,
        images: Sequence[Mapping[str, Any] | None] = (),
    ) -> None:
        """Use `open`."""
        self.skeleton = skeleton
        self.batches = batches
        self.held_from = held_from
        self.device = device
        self.activations = activations
        self.images = images
        self.arguments: dict[int, Arguments] = {}  # of every batch; one and the same where they are equal
        self.of_tokens = False  # whether they depend on more than the size of a batch, as Gemma 4's do on its tokens
        self.added: dict[int, Added] = {}
        self.key_values = KeyValueObserver()
        self.on_tokens: Callable[[int], None] = lambda tokens: None  # after each batch of a layer, on any thread
        self._moved: dict[torch.device, dict[int, Arguments]] = {}
        modules = [module for _, module in skeleton.blocks]
        self.cache = make_cache(self.key_values, skeleton.model.config)
        self._around = ModelShell(skeleton.model, modules, device=device, cache=self.cache)

    @classmethod
    def open(
        cls,
        skeleton: Skeleton,
        windows: torch.Tensor,
        *,
        held_out: torch.Tensor | None = None,
        device: torch.device | None = None,
        memory_bytes: int | None = None,
        spill: Path | None = None,
        streams: int = 1,
        images: Sequence[Mapping[str, Any] | None] = (),
    ) -> "Runner":
        """Reads the embeddings and runs them; no layer yet.

        skeleton      of the model, which is this runner's from now on
        windows       [samples, tokens] int64
        held_out      further windows [held out, tokens], in batches of their own after the others: from number
                      ``held_from`` on
        memory_bytes  what weights of a layer and hidden states may take together; hidden states that do not fit go to
                      a file in ``spill``, which is a folder that exists
        streams       how many sets of hidden states the caller keeps, this runner's own among them
        images        of each window and each further one: what the model takes beside its tokens. Such windows are
                      batches of their own, as long as their tokens are 0 or more. None: there are no images

        Raises UsageError for tokens that the model does not have, CheckpointError for a model that cannot be run so.
        """
        device = device or torch.device("cpu")
        held_out = windows[:0] if held_out is None else held_out
        both = torch.cat((windows, held_out))
        _check_windows(both[both >= 0][None] if images else both, both.shape[1], skeleton)
        for name, module in skeleton.model.named_modules():
            if is_stacked(module):
                check_known(module, name)
                observe(module, None)
        activations: Activations = InMemory()
        if memory_bytes and spill and not skeleton.has_room(both.numel(), memory_bytes, streams):
            activations = OnDisk(spill)
        batches = [*in_batches(windows), *in_batches(held_out)]
        held_from = len(in_batches(windows))
        if images:
            batches, held_from = [row[row >= 0][None] for row in both], len(windows)
        runner = cls(skeleton, batches, device=device, activations=activations, held_from=held_from, images=images)
        try:
            runner._embed()
        except BaseException:
            runner.close()
            raise
        return runner

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.skeleton.blocks)

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in self.batches)

    def arguments_on(self, device: torch.device) -> dict[int, Arguments]:
        """``arguments`` with their tensors on a device; those that batches share stay shared."""
        if device == self.device:
            return self.arguments
        if device not in self._moved:
            there = {id(shared): moved(shared, device) for shared in self.arguments.values()}
            self._moved[device] = {batch: there[id(shared)] for batch, shared in self.arguments.items()}
        return self._moved[device]

    def layers(self) -> Iterator[Layer]:
        """Every layer, its weights loaded while it is the current one; those that the caller did not advance are."""
        for index in range(len(self.names)):
            with self.loaded(index) as layer:
                yield layer
                layer.advance()

    @contextlib.contextmanager
    def all_layers(self) -> Iterator[Sequence[Layer]]:
        """Every layer and the head, all with their weights loaded while it is open; no layer has inputs."""
        self.skeleton.require_head()
        with contextlib.ExitStack() as opened:
            layers = [opened.enter_context(self.loaded(index)) for index in range(len(self.names))]
            opened.enter_context(self.head())
            for layer in layers:
                layer.advanced = True
            yield layers

    @contextlib.contextmanager
    def loaded(self, index: int) -> Iterator[Layer]:
        """One layer, its weights loaded while it is open; its inputs are there if all before it have advanced."""
        skeleton = self.skeleton
        name, module = skeleton.blocks[index]
        names = skeleton.names_in(name)
        skeleton.load(names, self.device)
        module.to(self.device)  # buffers
        origins = {n: skeleton.origins[n] for n in names if n in skeleton.origins}
        yield Layer(index, name, module, origins, self, self.device)
        skeleton.free(names)

    @contextlib.contextmanager
    def embeddings(self) -> Iterator[None]:
        """The embedding's weights are loaded while it is open; those of a head that is the embedding may be already."""
        names = [name for name in self._of_embedding() if self.skeleton.model.get_parameter(name).is_meta]
        self.skeleton.load(names, self.device)
        yield
        self.skeleton.free(names)

    def embedded(self, batch: int) -> torch.Tensor:
        """Hidden states [samples, tokens, hidden] that enter the first layer; inside of `embeddings`. Records gradients
        unless under ``torch.no_grad``."""
        return self._around.entering(self.batches[batch])

    def _of_embedding(self) -> list[str]:
        skeleton = self.skeleton
        embedding = skeleton.model.get_input_embeddings()
        return [name for name in skeleton.outside if skeleton.model.get_submodule(name.rpartition(".")[0]) is embedding]

    @contextlib.contextmanager
    def head(self) -> Iterator[None]:
        """The language-model head's weights are loaded while it is open; a head that is the embedding gets its."""
        skeleton = self.skeleton
        skeleton.require_head()
        name = str(skeleton.head_name)
        names = [n for n in skeleton.names_in(name) if n in skeleton.origins]
        tied = f"{name}.weight" not in names
        embedding = skeleton.model.get_input_embeddings()
        if tied:
            names += self._of_embedding()
        skeleton.load(names, self.device)
        if tied:
            skeleton.model.get_output_embeddings().weight = embedding.weight
        yield
        skeleton.free([*names, f"{name}.weight"])

    def logits(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Logits [samples, tokens, vocabulary] of tokens ``ids`` for which the last layer returned ``x``; inside of
        `head`. Each token's are its own, so any part of a batch will do. Records gradients unless under
        ``torch.no_grad``."""
        return self._around.logits(ids, x)

    def embeddings_of(self, batch: int, x: torch.Tensor) -> torch.Tensor:
        """A sentence embedder's vectors [samples, hidden] of a batch for which the last layer returned ``x``. Records
        gradients unless under ``torch.no_grad``."""
        pooling = self.skeleton.pooling
        assert pooling is not None
        return pooling.pool(self._around.last_hidden(self.batches[batch], x))

    def mtp_layers(self) -> Iterator[MtpLayer]:
        """The multi-token prediction layer, if there is one, its weights loaded; after the last layer and the head."""
        skeleton, embedding = self.skeleton, self.skeleton.model.get_input_embeddings()
        for name, module in skeleton.mtp:
            tokens = next(each for each, submodule in skeleton.model.named_modules() if submodule is embedding)
            names = (*skeleton.names_in(name), *skeleton.names_in(tokens))
            skeleton.load(names, self.device)
            module.to(self.device)
            origins = {n: skeleton.origins[n] for n in skeleton.names_in(name) if n in skeleton.origins}
            yield MtpLayer(len(skeleton.blocks), name, module, origins, self, self.device)
            skeleton.free(names)

    def head_inputs(self) -> Iterator[torch.Tensor]:
        """What the language-model head sees, [samples, tokens, hidden] a batch; after the last layer."""
        for index in range(len(self.batches)):
            yield self.head_input(index, self.activations.get(index))

    def head_input(self, batch: int, x: torch.Tensor) -> torch.Tensor:
        """The same of one batch where the last layer returned ``x``."""
        return self._around.head_input(self.batches[batch], x.to(self.device))

    def close(self) -> None:
        self.activations.close()
        self.skeleton.free(tuple(self.skeleton.model.state_dict()))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _embed(self) -> None:
        """Notes the hidden states that enter the first layer, and the further arguments of every layer."""
        skeleton = self.skeleton
        outside = skeleton.outside
        skeleton.load(outside, self.device)
        for name, module in skeleton.model.named_modules():
            if not any(name == layer or name.startswith(f"{layer}.") for layer in self.names):
                for leaf, buffer in list(module._buffers.items()):
                    module._buffers[leaf] = None if buffer is None else buffer.to(self.device)
        by_size: dict[int, Arguments] = {}  # by the size of a batch
        for index, ids in enumerate(self.batches):
            shown = self.images[index] if self.images else None
            hidden, arguments, added = self._around.capture(ids, shown)
            if not bool(torch.isfinite(hidden).all()):
                raise not_finite("the hidden states behind the embedding are not finite", hidden.dtype)
            self.activations.put(index, hidden)
            self.added |= {index: added} if added else {}
            first = by_size.setdefault(ids.shape[0], arguments)
            shared = same(first, arguments)
            self.arguments[index] = first if shared else arguments
            self.of_tokens |= not shared
        skeleton.free(self._of_embedding())


def _check_windows(windows: torch.Tensor, seqlen: int, skeleton: Skeleton) -> None:
    rows = skeleton.model.get_input_embeddings().weight.shape[0]
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or high >= rows:
        worst = low if low < 0 else high
        raise UsageError(
            f"the data have token id {worst}, the model's embedding has {rows} rows; use data and tokenizer of this "
            "model"
        )
    check_length(skeleton.model.config, seqlen)
