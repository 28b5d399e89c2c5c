"""Images in a prompt: what a request brings, what the model's own tower makes of it, and the part of both that is in a
step.

The tokens of an image are places of the prompt whose embeddings the tower gives. Some families count positions of
their own there (three axes), add further features behind the first layers, or let the tokens of an image see each
other. Must not know towers or files.
"""

from collections.abc import Callable, Mapping, Sequence as Row
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any

import torch

DEEP = ("visual_pos_masks", "deepstack_visual_embeds")
"""What a decoder of transformers calls the places of images, bool [1, T], and what is added to them behind its first
layers, a list of [I, hidden]: of the Qwen3-VL kinds."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of a request.

    inputs   what the model's processor made of them: pixel values and their like, by name
    digests  of each image, in the order of the prompt
    token    stands in the prompt for each token of an image
    """

    inputs: Mapping[str, Any]
    digests: tuple[bytes, ...]
    token: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.inputs.values() if isinstance(x, torch.Tensor))

    def keys(self, prompt: Row[int]) -> dict[int, int]:
        """By place of an image's token: what stands for the token and the image in keys of the prefix cache.

        Where the images cannot be told apart by their runs of tokens, each place stands for all of them.
        """
        places = [index for index, token in enumerate(prompt) if token == self.token]
        runs = [[place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
        digests = self.digests
        if len(runs) != len(digests):
            runs, digests = [places], (b"".join(digests),)
        numbers = [int.from_bytes(blake2b(digest, digest_size=8).digest(), signed=True) for digest in digests]
        return {place: number for run, number in zip(runs, numbers, strict=True) for place in run}


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The features of the images of a prompt of T tokens.

    places     int64 [I], ascending: tokens whose embeddings these are
    rows       [I, hidden]
    deep       [L, I, hidden]: what is added to those tokens behind each of the first L layers
    positions  int64 [3, T] of all of the prompt's tokens; None where they are counted from 0
    groups     (first, end) of tokens that see each other, whole
    layers     in which they do
    """

    places: torch.Tensor
    rows: torch.Tensor
    deep: torch.Tensor
    positions: torch.Tensor | None = None
    groups: tuple[tuple[int, int], ...] = ()
    layers: tuple[int, ...] = ()

    def positions_of(self, start: int, end: int) -> torch.Tensor:
        """Positions, int64 [3, end - start], of tokens ``start`` to ``end``, behind the prompt as well."""
        if self.positions is None:
            return torch.arange(start, end).expand(3, -1)
        length = self.positions.shape[1]
        after = int(self.positions.max()) + 1 + torch.arange(max(start, length) - length, max(end, length) - length)
        return torch.cat([self.positions[:, start:end], after.expand(3, -1)], dim=1)

    def whole(self, end: int) -> int:
        """``end``, or the end of the group of tokens within which it falls."""
        return next((last for first, last in self.groups if first < end < last), end)


See = Callable[[Row[int], Images], Seen]
"""(prompt, its images) -> their features. PtqError for images that the model does not take."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """The image tokens of a step: their places in its row of tokens, and the rest as in `Seen`.

    positions  int64 [3, T], or None
    groups     of each span, first and end of each group by turns, in its sequence
    """

    places: torch.Tensor
    rows: torch.Tensor
    deep: torch.Tensor
    positions: torch.Tensor | None
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]

    def pack(self) -> torch.Tensor:
        """Serializes it as one int64 tensor."""
        numbers = [len(self.rows), self.rows.shape[-1], len(self.deep), _DTYPES.index(self.rows.dtype)]
        numbers += [0 if self.positions is None else self.positions.shape[1], len(self.layers), *self.layers]
        numbers.append(len(self.groups))
        for group in self.groups:
            numbers += [len(group), *group]
        positions = [] if self.positions is None else [self.positions.flatten()]
        features = torch.cat([self.rows[None], self.deep]).contiguous().view(torch.uint8).flatten()
        padded = torch.cat([features, features.new_zeros(-len(features) % 8)]).view(torch.int64)
        return torch.cat([torch.tensor(numbers, dtype=torch.int64), self.places, *positions, padded])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "ImageRows":
        count, hidden, deep, dtype, tokens, n_layers = packed[:6].tolist()
        layers, offset = tuple(packed[6 : 6 + n_layers].tolist()), 7 + n_layers
        groups = []
        for _ in range(int(packed[offset - 1])):
            size = int(packed[offset])
            groups.append(tuple(packed[offset + 1 : offset + 1 + size].tolist()))
            offset += 1 + size
        places, offset = packed[offset : offset + count], offset + count
        positions = packed[offset : offset + 3 * tokens].view(3, tokens) if tokens else None
        features = packed[offset + 3 * tokens :].contiguous().view(torch.uint8)
        size = (1 + deep) * count * hidden * _DTYPES[dtype].itemsize
        rows = features[:size].view(_DTYPES[dtype]).view(1 + deep, count, hidden)
        return cls(places, rows[0], rows[1:], positions, tuple(groups), layers)


def rows_of(parts: Row[tuple[Seen | None, int, int]]) -> ImageRows | None:
    """What images are in a step of tokens ``start`` to ``end`` of sequences, (seen, start, end) each; None if none are,
    and no positions follow from them."""
    seen = [part for part, _, _ in parts if part is not None]
    if not any(one.positions is not None or bool((one.places >= start).any()) for one, start, _ in parts if one):
        return None
    offset, places, rows, deep = 0, [], [], []
    for one, start, end in parts:
        if one is not None:
            within = (one.places >= start) & (one.places < end)
            places.append(one.places[within] - start + offset)
            rows.append(one.rows[within])
            deep.append(one.deep[:, within])
        offset += end - start
    positions = None
    if any(one.positions is not None for one in seen):
        each = [torch.arange(a, b).expand(3, -1) if one is None else one.positions_of(a, b) for one, a, b in parts]
        positions = torch.cat(each, dim=1)
    groups = tuple(
        tuple(token for group in (one.groups if one else ()) if start < group[1] and group[0] < end for token in group)
        for one, start, end in parts
    )
    return ImageRows(
        torch.cat(places), torch.cat(rows), torch.cat(deep, dim=1), positions, groups, max(one.layers for one in seen)
    )
