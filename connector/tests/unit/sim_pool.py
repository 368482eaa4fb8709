"""A block pool without vLLM, with contents in its blocks."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from connector.tests.unit.sim_contents import BLOCK, ViolationError, digest


class FakePool:
    """Reference counts, a prefix cache in LRU order, and contents."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.refs = [0] * total
        self.content: list[bytes] = [b""] * total
        self.hash_of: dict[int, bytes] = {}
        self.by_hash: dict[bytes, list[int]] = {}
        self.published_as: dict[int, object] = {}
        self.landed: set[int] = set()
        """Published by the connector, and used by no request since."""
        self.events: list[tuple[bytes | None, bytes, list[int]]] | None = None
        """Parent's hash, hash and tokens of blocks that were told of, where anybody listens."""
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(total))

    @property
    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return len(self._free)

    @property
    def pristine(self) -> bool:
        return self.free() == self.total and not self.hash_of

    def find(self, block_hash: bytes) -> int | None:
        blocks = self.by_hash.get(block_hash)
        return blocks[0] if blocks else None

    def held(self, hashes: Sequence[bytes]) -> tuple[list[int], list[object | None]]:
        blocks: list[int] = []
        for block_hash in hashes:
            block = self.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks, self.stamps(blocks)

    def stamps(self, blocks: Sequence[int]) -> list[object | None]:
        return [self.published_as.get(block) for block in blocks]

    def pin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                del self._free[block]
            self.refs[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self.refs[block] <= 0:
                raise ViolationError(f"block {block} is freed twice")
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if block not in self.hash_of:
                    self._free.move_to_end(block, last=False)

    def take(self, count: int, spare: int = 0) -> list[int]:
        if count > len(self._free) - spare:
            raise ViolationError(
                f"{count} blocks are taken, {len(self._free)} are free, {spare} to be spared"
            )
        used = (block for block in reversed(self._free) if block in self.hash_of and block not in self.landed)
        hot = set(islice(used, spare))
        taken = list(islice((block for block in self._free if block not in hot), count))
        for block in taken:
            del self._free[block]
            self._forget(block)
            self.refs[block] = 1
        return taken

    def used(self, blocks: Sequence[int]) -> None:
        self.landed.difference_update(blocks)

    def insert(self, block_hash: bytes, block: int, num_tokens: int) -> None:
        if block in self.hash_of:
            return
        self.hash_of[block] = block_hash
        self.published_as[block] = object()
        self.by_hash.setdefault(block_hash, []).append(block)
        self.landed.add(block)

    @property
    def tells(self) -> bool:
        return self.events is not None

    def tell_stored(self, parent: bytes | None, hashes: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Engines without salts and images: every hash is that of its tokens."""
        assert self.events is not None
        for index, block_hash in enumerate(hashes):
            run = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            if digest(parent or b"", run) != block_hash:
                return
            self.events.append((parent, block_hash, list(run)))
            parent = block_hash

    def _forget(self, block: int) -> None:
        self.landed.discard(block)
        self.published_as.pop(block, None)
        block_hash = self.hash_of.pop(block, None)
        if block_hash is not None:
            self.by_hash[block_hash].remove(block)

    def reset(self) -> None:
        self.hash_of.clear()
        self.by_hash.clear()
        self.published_as.clear()
        self.landed.clear()

    def check_cache(self, weights: int = 0) -> None:
        """What can be hit must be what its hash says, computed with these weights."""
        for block, block_hash in self.hash_of.items():
            content = hashlib.sha256(block_hash + b"%d" % weights).digest() if weights else block_hash
            if self.content[block] != content:
                raise ViolationError(f"cached block {block} holds something else than its hash says")
