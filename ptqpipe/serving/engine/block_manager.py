"""The pages of the KV cache: which sequence uses which page, sharing of prefixes, eviction.

A page (block) holds the keys and values of ``block_size`` consecutive tokens in every layer. A full block is known by a
digest of all tokens and images up to its end, so that another sequence with the same beginning takes it instead of
computing it again. A block that nobody holds keeps its content until it is needed for something else, least recently
used first. Must not know tensors: it deals in numbers of blocks.
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b

from ptqpipe.serving.engine.sequence import Sequence


class BlockManager:
    """``count`` blocks of ``block_size`` tokens.

    prefix_caching  whether full blocks are found again
    """

    def __init__(self, count: int, *, block_size: int, prefix_caching: bool = True) -> None:
        self.count, self.block_size, self.prefix_caching = count, block_size, prefix_caching
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # the first is used up first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of blocks without a reference."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def share(self, seq: Sequence) -> None:
        """Gives a sequence without blocks those of its beginning that the cache still holds.

        At least one token is left to compute, since the next one is sampled from its logits.
        """
        assert not seq.blocks
        if not self.prefix_caching or seq.needs_prompt_logits:
            return
        for index in range((len(seq.tokens) - 1) // self.block_size):
            block = self._block_of.get(self._digest(seq, index))
            if block is None:
                break
            self._take(block)
            seq.blocks.append(block)
        seq.computed = len(seq.blocks) * self.block_size

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Gives a sequence blocks for its first ``tokens`` tokens; False, and nothing changes, if there are too few."""
        missing = self.blocks_for(tokens) - len(seq.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = next(iter(self._free))
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            self._take(block)
            seq.blocks.append(block)
        return True

    def seal(self, seq: Sequence, start: int) -> None:
        """Makes the blocks that became full since ``start`` computed tokens available to later sequences."""
        if not self.prefix_caching:
            return
        for index in range(start // self.block_size, seq.computed // self.block_size):
            digest, block = self._digest(seq, index), seq.blocks[index]
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def release(self, seq: Sequence) -> None:
        """Frees a sequence's pages; their content is computed again if it is needed after it was overwritten."""
        for block in reversed(seq.blocks):  # the end of a prefix goes first: without its beginning it is of no use
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)
        seq.blocks.clear()
        seq.computed = 0

    def _take(self, block: int) -> None:
        self._holders[block] += 1
        self._free.pop(block, None)

    def _digest(self, seq: Sequence, index: int) -> bytes:
        """Digest of all tokens up to the end of the sequence's block ``at`` (prefix caching)."""
        for i in range(len(seq.digests), index + 1):
            tokens = array("q", seq.keys(i * self.block_size, (i + 1) * self.block_size))
            parent = seq.digests[-1] if seq.digests else b""
            seq.digests.append(blake2b(parent + tokens.tobytes(), digest_size=16).digest())
        return seq.digests[index]
