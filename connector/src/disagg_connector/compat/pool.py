"""vLLM's block pool as the connector uses it: `ports.Pool`, and notice of its resets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core import kv_cache_utils

from disagg_connector.compat.landed import Landed
from disagg_connector.compat.stored import tell_stored

_GROUP = 0  # `refusals` admits exactly one KV cache group


class EnginePool:
    """`ports.Pool` over vLLM's block pool."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._landed = Landed(block_pool)

    @property
    def total(self) -> int:
        return int(self._pool.num_gpu_blocks) - 1  # less the null block

    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def pristine(self) -> bool:
        return self.free() == self.total and len(self._pool.cached_block_hash_to_block) == 0

    def find(self, block_hash: bytes) -> int | None:
        key = kv_cache_utils.make_block_hash_with_group_id(block_hash, _GROUP)
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        return None if block is None else int(block.block_id)

    def held(self, hashes: Sequence[bytes]) -> tuple[list[int], list[object | None]]:
        blocks: list[int] = []
        stamps: list[object | None] = []
        get, key_of = (
            self._pool.cached_block_hash_to_block.get_one_block,
            kv_cache_utils.make_block_hash_with_group_id,
        )
        for block_hash in hashes:
            block = get(key_of(block_hash, _GROUP))
            if block is None:
                break
            blocks.append(block.block_id)
            stamps.append(block.block_hash)
        return blocks, stamps

    def stamps(self, blocks: Sequence[int]) -> list[object | None]:
        # vLLM makes a new key each time that it publishes a block, so the key itself tells one time from another.
        known = self._pool.blocks
        return [known[block].block_hash for block in blocks]

    def pin(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        last_first = blocks[::-1]
        self._pool.free_blocks([self._pool.blocks[block] for block in last_first])
        self._landed.freed(last_first)

    def take(self, count: int, spare: int) -> list[int]:
        return [int(block.block_id) for block in self._landed.take(count, spare)]

    def used(self, blocks: Sequence[int]) -> None:
        self._landed.used(blocks)

    def insert(self, block_hash: bytes, block: int, num_tokens: int) -> None:
        key = kv_cache_utils.make_block_hash_with_group_id(block_hash, _GROUP)
        self._pool._insert_block_hash(key, self._pool.blocks[block], num_tokens=num_tokens)
        self._landed.add(block)

    @property
    def tells(self) -> bool:
        return bool(self._pool.enable_kv_cache_events)

    def tell_stored(self, parent: bytes | None, hashes: Sequence[bytes], tokens: Sequence[int]) -> None:
        tell_stored(self._pool, parent, hashes, tokens, _GROUP)


def on_cache_reset(block_pool: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have `before` called when the prefix cache is about to be reset, and `after` when it has been.

    vLLM tells a connector only if the caller asks for it, and only afterwards; by then held blocks have
    made the reset fail.
    """
    reset = block_pool.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        before()
        done = reset()
        if done:
            after()
        return done

    block_pool.reset_prefix_cache = reset_prefix_cache
