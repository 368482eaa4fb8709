"""Whether what decode brought was worth bringing. Pure.

Every block that a landing published is remembered until the first prompt finds it, or until it has left the
prefix cache without that. vLLM tells nobody of an eviction, so the blocks are looked after in turn, a few a
step; there are never more of them than the engine has blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from disagg_connector.ports import Pool

# Looked at in a step, for some two microseconds: 100,000 blocks take a quarter of an hour of steps.
CHECKED_PER_STEP = 2


class Brought:
    """Blocks that came from decode and that nothing has used yet. Engine thread only."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._unused: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unused)

    def published(self, block_hash: bytes, block: int) -> int:
        """A block has entered the prefix cache. Returns how many turn out to have left it unused."""
        # Nothing is published that is there: if it is known here, its first copy has left meanwhile.
        gone = int(block_hash in self._unused)
        self._unused[block_hash] = block
        self._unused.move_to_end(block_hash)
        while len(self._unused) > self._pool.total:
            # More than there are blocks: some are gone for certain.
            gone += self.look_after(CHECKED_PER_STEP)
        return gone

    def found(self, hashes: Sequence[bytes]) -> int:
        """A prompt hits these blocks. Returns how many of them are being used for the first time."""
        if not self._unused:
            return 0
        return sum(self._unused.pop(block_hash, None) is not None for block_hash in hashes)

    def look_after(self, count: int = CHECKED_PER_STEP) -> int:
        """See to the next `count` blocks. Returns how many have left the prefix cache unused."""
        gone = 0
        for _ in range(min(count, len(self._unused))):
            block_hash, block = self._unused.popitem(last=False)
            if self._pool.find(block_hash) == block:
                self._unused[block_hash] = block
            else:
                gone += 1
        return gone
