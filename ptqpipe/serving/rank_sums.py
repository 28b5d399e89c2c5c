"""How the ranks of a service sum: the all-reduce, and what runs it beside a prefill's computation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ptqpipe.runtime.loading import dtype_of, read_config
from ptqpipe.runtime.parallel import RunCollective, TensorParallel
from ptqpipe.serving.collectives import NEVER, QuantAllReduce, Thresholds
from ptqpipe.serving.engine.overlap import Overlap, least_tokens
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.rank_processes import RankInfo
from ptqpipe.serving.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class RankSums:
    """Both None for one rank.

    all_reduce  of this service. Decode steps are never quantized: they are latency-bound
    overlap     of the all-reduces of long steps with their computation; None on GPUs
    """

    all_reduce: QuantAllReduce | None = None
    overlap: Overlap | None = None

    @classmethod
    def of(cls, options: ServeOptions, place: RankInfo) -> Self:
        """Those of a service; all ranks call it together. "auto" measures."""
        if place.size == 1:
            return cls()
        config = read_config(Path(options.ckpt)).get_text_config()
        row_bytes = config.hidden_size * dtype_of(options.dtype, config).itemsize
        overlap = Overlap(least_tokens=least_tokens(row_bytes)) if options.overlap and options.device == "cpu" else None
        group = place.group_of_sums(place.device(options.device))
        return cls(_all_reduce(options, place, group, options.max_num_seqs * row_bytes), overlap)

    def parallel(self, place: RankInfo, watchdog: Watchdog | None) -> TensorParallel:
        """This rank as the model sees it; the watchdog sees each collective where it really happens."""
        if self.all_reduce is None:
            return TensorParallel(place.size, place.rank)
        reduce, overlap = self.all_reduce, self.overlap
        run: RunCollective | None = overlap or watchdog
        if overlap is not None and watchdog is not None:
            run = lambda collective: overlap(lambda: watchdog(collective))  # noqa: E731
        return TensorParallel(place.size, place.rank, reduce.group, lambda x: reduce(x, x), run)

    def counts(self) -> dict[str, int] | None:
        """Counters of the all-reduces so far, for ``/metrics``."""
        if self.all_reduce is None:
            return None
        stats = self.all_reduce.stats()
        return {
            "quantized": stats.calls,
            "plain": stats.plain_calls,
            "values": stats.value_bytes,
            "wire": stats.wire_bytes,
        }


def _all_reduce(options: ServeOptions, place: RankInfo, group: Any, decode_bytes: int) -> QuantAllReduce:
    """ "off" is one that never quantizes, so that its sums are counted, too.

    decode_bytes  of the largest decode step
    """
    if options.allreduce == "off":
        plain = QuantAllReduce(group, min_bytes=NEVER)
        if options.batch_invariant and place.size > 2:  # in the order of ranks; of two numbers there is but one sum
            plain.thresholds = Thresholds(NEVER, ((NEVER, "two_shot"),))
        return plain
    one_shot = place.size == 2 and options.device == "cpu"  # as many bytes, one message and one rounding less
    if options.allreduce == "auto":
        measured = QuantAllReduce(group, min_bytes="auto", one_shot=one_shot)
        least = max(measured.thresholds.quantized, decode_bytes + 1)
        measured.thresholds = replace(measured.thresholds, quantized=least)
        return measured
    return QuantAllReduce(group, options.allreduce, min_bytes=decode_bytes + 1, one_shot=one_shot)
