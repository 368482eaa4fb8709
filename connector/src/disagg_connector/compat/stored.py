"""vLLM's KV events (`vllm.distributed.kv_events`) for blocks that it did not cache itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils


def tell_stored(
    block_pool: Any, parent: bytes | None, hashes: Sequence[bytes], tokens: Sequence[int], group: int
) -> None:
    """Queue what `BlockPool.cache_full_blocks` would have, for consecutive blocks after the one of hash `parent`.

    Into the pool's own queue, so that it stands before the event of a later eviction. The tokens come from a
    peer: only blocks whose hash they give are told of, and those after the first that is not are left out. So are
    blocks with extra keys (the first of a salted prompt, images, LoRA), whose keys are not known here.
    """
    size = block_pool.hash_block_size
    proven: list[bytes] = []
    before = parent
    for index, block_hash in enumerate(hashes):
        block_tokens = tokens[index * size : (index + 1) * size]
        if kv_cache_utils.hash_block_tokens(_sha256, before, block_tokens, None) != block_hash:
            break
        proven.append(block_hash)
        before = block_hash
    if not proven:
        return
    convert = kv_cache_utils.maybe_convert_block_hash
    block_pool.kv_event_queue.append(
        BlockStored(
            block_hashes=[convert(block_hash) for block_hash in proven],
            parent_block_hash=None if parent is None else convert(parent),
            token_ids=list(tokens[: len(proven) * size]),
            block_size=size,
            lora_id=None,
            medium=block_pool.medium,
            lora_name=None,
            extra_keys=kv_cache_utils.to_event_extra_keys([None] * len(proven)),
            group_idx=group,
        )
    )


_sha256 = get_hash_fn_by_name("sha256")
