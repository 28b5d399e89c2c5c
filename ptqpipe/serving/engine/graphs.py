"""Decode steps on a GPU as recorded graphs: one launch in place of the thousand that a model's Python code makes.

A step in which every sequence has one token and wants its logits is recorded when a batch of its size first comes,
and replayed from then on. Batches go by sizes (`SIZES`): unused rows are padded with a dummy token in a spare
page. A step's inputs lie in one tensor that never moves. A recording counts only if its
logits are, bit for bit, those of the model's own launches; a model that cannot be recorded, because its code waits for
the GPU, runs by its own launches as before. Must not know sequences' owners or sampling.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ptqpipe.errors import PtqWarning
from ptqpipe.numerics.kernels.triton_attention import DeviceSpans
from ptqpipe.serving.engine.attention import PagedAttention, slots_of, tables_of
from ptqpipe.serving.engine.batch import Batch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class StepGraphs:
    """The recorded steps of a model whose pages are on a GPU.

    max_len  tokens of the longest sequence
    spare    a page that no sequence gets
    """

    def __init__(self, model: Any, attention: PagedAttention, *, max_len: int, max_seqs: int, spare: int) -> None:
        self._model, self._attention, self._max_len, self._spare = model, attention, max_len, spare
        self._sizes = [size for size in SIZES if size < max_seqs] + [max_seqs] * (max_seqs <= SIZES[-1])
        self._inputs: dict[int, _Inputs] = {}
        self._recorded: dict[int, Callable[[], torch.Tensor] | None] = {}
        self._pool: Any = None

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits ``[sequences, vocabulary]`` in the model's dtype, on the GPU, until the next step; None where the step
        is the model's."""
        count = len(batch.spans)
        if batch.images is not None or not len(batch.tokens) == count == len(batch.wanted):
            return None
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or (size in self._recorded and self._recorded[size] is None):
            return None
        if size not in self._inputs:
            pages = -(-(self._max_len + 1) // self._attention.block_size)
            self._inputs[size] = _Inputs(size, pages, self._model.device)
        self._inputs[size].fill(batch, self._attention.block_size, self._spare)
        if size not in self._recorded:
            self._recorded[size] = self._record(size)
        replay = self._recorded[size]
        return None if replay is None else replay()[:count]

    def _record(self, size: int) -> Callable[[], torch.Tensor] | None:
        """Captures the step as a CUDA graph; None where it cannot be captured or its replay gives other logits."""
        try:
            own = self._compute(size).clone()  # compiles what is not compiled yet, too
            replay = self._graph(size)
        except RuntimeError as error:
            _say_unrecorded(size, str(error).split("\n", 1)[0])
            return None
        if not torch.equal(replay(), own):
            _say_unrecorded(size, "their logits differ")
            return None
        return replay

    def _graph(self, size: int) -> Callable[[], torch.Tensor]:
        """The replay of a CUDA graph. RuntimeError where the model's code waits for the GPU."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._compute(size)
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _compute(self, size: int) -> torch.Tensor:
        """Logits ``[size, vocabulary]`` by the model's own launches."""
        inputs = self._inputs[size]
        batch = Batch(inputs.tokens, inputs.rows, ())
        with self._attention.during(batch, inputs.spans(self._max_len)):
            out = self._model(
                input_ids=inputs.tokens[None],
                position_ids=(inputs.totals - 1)[None],
                use_cache=False,
                logits_to_keep=inputs.rows,
            )
        logits: torch.Tensor = out.logits[0]
        return logits


def _say_unrecorded(size: int, why: str) -> None:
    """Warns that steps of this batch size are not recorded as CUDA graphs."""
    warnings.warn(
        f"steps of {size} or fewer sequences are not recorded as a CUDA graph and take longer: {why}",
        PtqWarning,
        stacklevel=2,
    )


class _Inputs:
    """Static inputs of a step of ``size`` sequences of up to ``pages`` pages: views of one int64 device tensor."""

    def __init__(self, size: int, pages: int, device: torch.device) -> None:
        self._host = torch.zeros(size * (3 + pages), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = self._host.to(device)
        self.tokens, self._slots, self.totals, self._tables = self._parts(self._device, size)
        self.rows, self._starts = (torch.arange(count, device=device) for count in (size, size + 1))

    @staticmethod
    def _parts(flat: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, slots of their keys and tokens that they see, ``[size]`` each, and pages ``[size, pages]``."""
        tokens, slots, totals = flat[: 3 * size].view(3, size)
        return tokens, slots, totals, flat[3 * size :].view(size, -1)

    def fill(self, batch: Batch, block_size: int, spare: int) -> None:
        """Puts a batch in, and rows of the spare page behind it."""
        tokens, slots, totals, tables = self._parts(self._host, len(self.rows))
        count, own = len(batch.spans), tables_of(batch.spans)
        tokens[:count], tokens[count:] = batch.tokens, 0
        slots[:count], slots[count:] = slots_of(batch, own, block_size), spare * block_size
        totals[:count], totals[count:] = batch.positions() + 1, 1
        tables[:count, : own.shape[1]], tables[count:, 0] = own, spare
        self._device.copy_(self._host, non_blocking=True)

    def spans(self, longest: int) -> DeviceSpans:
        """Their places for the kernels, whose launches are those of sequences of ``longest`` tokens."""
        return DeviceSpans(
            self._slots, self._starts, self.totals, self.rows, self._tables, len(self.rows), 1, longest, 0
        )
