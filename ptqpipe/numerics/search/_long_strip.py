"""Long blocks as strips of rows whose blocks are searched together, read in segments that stay in cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import to_blocks
from ptqpipe.numerics.search.objective import FLUSH, LANES

SEGMENT = 1 << 17  # elements converted and scored at a time


@dataclass(frozen=True, slots=True)
class Strip:
    """Whole blocks of some rows of the weight.

    blocks  ``[n, elements]`` in the weight's dtype
    h       float32 ``[n or 1, columns of a block]``, or None: element e of a block has column e mod columns
    """

    blocks: torch.Tensor
    h: torch.Tensor | None

    def segments(self) -> Iterator[tuple[int, int]]:
        """Runs of elements [start, stop) that start on multiples of LANES."""
        n, elements = self.blocks.shape
        width = max(1, SEGMENT // max(n, 1) // LANES) * LANES
        return ((start, min(start + width, elements)) for start in range(0, elements, width))

    def magnitudes(self, start: int, stop: int, *, amax: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """float32: flushed |w| of the elements [start, stop) of these ``rows`` (None: all), a tensor of its own."""
        part = self.blocks[:, start:stop]
        x = (part if rows is None else part.index_select(0, rows)).float()
        x = x.abs() if x.data_ptr() == part.data_ptr() else x.abs_()
        below = (x - (amax * FLUSH).unsqueeze(1)).view(torch.int32).bitwise_right_shift_(31)
        x.view(torch.int32).bitwise_and_(below.bitwise_not_())
        return x

    def weights(self, start: int, stop: int, *, rows: torch.Tensor | None) -> torch.Tensor | None:
        """float32, broadcasting with :meth:`magnitudes`, or None."""
        if self.h is None:
            return None
        columns = torch.arange(start, stop, device=self.h.device) % self.h.shape[1]
        h = self.h if rows is None or len(self.h) == 1 else self.h.index_select(0, rows)
        return h.index_select(1, columns)


def strips(w: torch.Tensor, fmt: Format, *, h: torch.Tensor | None, largest: int) -> Iterator[Strip]:
    """The weight as strips of about ``largest`` elements, top to bottom; strips of tiles are one tile high."""
    rows, cols = fmt.block_extent((w.shape[0], w.shape[1]))
    tiles = -(-w.shape[1] // cols)
    height = rows if tiles > 1 else max(1, largest // (rows * cols)) * rows
    if h is not None:
        h = torch.nn.functional.pad(h, (0, tiles * cols - len(h))).reshape(tiles, cols)
    for start in range(0, w.shape[0], height):
        yield Strip(to_blocks(w[start : start + height], fmt), h)
