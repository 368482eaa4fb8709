"""Which of vLLM's blocks a landing takes, so that what peers bring does not drive out what requests use.

vLLM's free queue starts with blocks that hold nothing and goes on with cached ones, the least recently used
first. A landing takes from its head like a request. But a block that was written back goes to the queue's hot
end without anybody having asked for it, so a storm of write-backs would push all else out, however often that
is used. Therefore blocks that landed and were not used since are known here: the hottest blocks of the others
are spared, and the landings' own unused ones, the coldest first, are taken in their place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

# A look at all landed blocks takes half a microsecond each: after one, so many of them pass for each block that
# is taken before the next one.
PASSED_PER_TAKE = 64


class Landed:
    """Blocks of a `BlockPool` that peers wrote and no request has used since, the coldest first."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        # Block id -> the hash under which it was published. Evicted ones are found out when they are looked at.
        self._hashes: OrderedDict[int, Any] = OrderedDict()
        self._busy = 0
        self._takes_to_next_look = 0

    def add(self, block: int) -> None:
        """A landed block has been published."""
        self._hashes[block] = self._pool.blocks[block].block_hash
        self._hashes.move_to_end(block)

    def used(self, blocks: Iterable[int]) -> None:
        """A request has used these blocks."""
        if self._hashes:
            for block in blocks:
                self._hashes.pop(block, None)

    def freed(self, blocks: Iterable[int]) -> None:
        """These went back into the free queue, in this order."""
        for block in blocks:
            if block in self._hashes:
                self._hashes.move_to_end(block)

    def take(self, count: int, spare: int) -> list[Any]:
        """Own this many blocks, at most the free ones less `spare`; see `ports.Pool.take`."""
        pool = self._pool
        head = list(islice(self._queue(), count))
        used = [
            index for index, block in enumerate(head) if block.block_hash is not None and not self._has(block)
        ]
        cold = self._count_cold(head, len(used), spare) if used else 0
        if len(used) <= cold:
            return list(pool.get_new_blocks(count))
        taken = list(pool.get_new_blocks(used[cold]))
        own = [pool.blocks[block] for block in islice(self._free(), count - len(taken))]
        pool.touch(own)
        pool.evict_blocks({block.block_id for block in own})
        self.used([block.block_id for block in own])
        taken += own
        # Nothing is left to take here if `count` was as agreed; a caller that has none would not get on.
        return taken + list(pool.get_new_blocks(count - len(taken)))

    # --- Inside -----------------------------------------------------------------------------------

    def _count_cold(self, head: list[Any], wanted: int, spare: int) -> int:
        """How many blocks that requests have used may go; not exact if that is `wanted` or more, nor with many landed
        blocks, of which it is found out only now and then how many are in use or gone."""
        empty = sum(block.block_hash is None for block in head)
        others = self._pool.get_num_free_blocks() - empty
        if others - len(self._hashes) - spare >= wanted:
            return wanted
        self._takes_to_next_look -= 1
        if self._takes_to_next_look < 0:
            self._look()
        return max(0, int(others) - (len(self._hashes) - self._busy) - spare)

    def _look(self) -> None:
        for block, block_hash in list(self._hashes.items()):
            if self._pool.blocks[block].block_hash != block_hash:
                del self._hashes[block]
        self._busy = len(self._hashes) - sum(1 for _ in self._free())
        self._takes_to_next_look = len(self._hashes) // PASSED_PER_TAKE

    def _has(self, block: Any) -> bool:
        return bool(self._hashes.get(block.block_id) == block.block_hash)

    def _free(self) -> Iterator[int]:
        """Those that nobody uses now."""
        blocks = self._pool.blocks
        return (
            block
            for block, block_hash in self._hashes.items()
            if blocks[block].ref_cnt == 0 and blocks[block].block_hash == block_hash
        )

    def _queue(self) -> Iterator[Any]:
        """vLLM's free queue from its head on."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block
            block = block.next_free_block
