"""Divides a message among ranks: one stripe per rank, and the chunks in which stripes are sent.

Stripes are equal runs of units, the last ones shorter or empty, so every size and number of ranks works. Chunk j takes
the same part of every stripe. Stripes decide results (the owner's own partial is exact); chunks decide time alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """How ``elements`` are cut.

    ranks, unit  as they say
    stripe       units of a stripe
    chunk        units of a stripe in a chunk
    """

    elements: int
    ranks: int
    unit: int
    stripe: int
    chunk: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.stripe // self.chunk)

    def span(self, rank: int, chunk: int) -> range:
        """The elements that chunk ``chunk`` of the stripe of ``rank`` covers; may be empty."""
        begin = rank * self.stripe + chunk * self.chunk
        end = rank * self.stripe + min((chunk + 1) * self.chunk, self.stripe)
        return range(min(begin * self.unit, self.elements), min(end * self.unit, self.elements))


def cut(elements: int, ranks: int, *, unit: int, chunk_elements: int, least_chunks: int = 1, least: int = 1) -> Layout:
    """Chunks of ``chunk_elements`` over all stripes together, and ``least_chunks`` of them if each has ``least``."""
    stripe = max(1, -(-elements // (unit * ranks)))
    wanted = max(min(chunk_elements, elements // least_chunks), least)
    chunk = max(1, wanted // (unit * ranks))
    return Layout(elements, ranks, unit, stripe, min(chunk, stripe))
