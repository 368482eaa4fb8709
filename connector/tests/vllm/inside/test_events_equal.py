"""What is told of brought blocks is what vLLM's own block pool would have told of them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from disagg_connector.compat import load
from disagg_connector.events import pack_tokens, tell_stored, unpack_tokens

BLOCK = 16
TOKENS = list(range(1000, 1000 + 5 * BLOCK + 3))


@pytest.fixture(autouse=True)
def hash_seed() -> None:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))


def request(**options: Any) -> Request:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    return Request("r", TOKENS, SamplingParams(max_tokens=4), None, block_hasher=hasher, **options)


def computed(made: Request, cached: int, full: int) -> list[Any]:
    """Events of a pool that caches blocks `cached` to `full` of a request itself."""
    pool = BlockPool(10, True, BLOCK, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(full)
    pool.cache_full_blocks(made, blocks, cached, full, BLOCK, 0)
    return list(pool.take_events())


def brought(made: Request, cached: int, full: int, tokens: bytes) -> list[Any]:
    """Events of a pool that a peer writes these blocks into."""
    block_pool = BlockPool(10, True, BLOCK, enable_kv_cache_events=True)
    pool = load().EnginePool(block_pool)
    assert pool.tells
    hashes = list(made.block_hashes[:full])
    blocks = pool.take(full - cached, 0)
    for index, block in zip(range(cached, full), blocks, strict=True):
        pool.insert(hashes[index], block, (index + 1) * BLOCK)
    tell_stored(pool, hashes, set(hashes[cached:]), unpack_tokens(tokens), BLOCK)
    return list(block_pool.take_events())


@pytest.mark.parametrize(("cached", "full"), [(0, 5), (3, 5), (4, 5)])
def test_brought_blocks_are_told_of_like_computed_ones(cached: int, full: int) -> None:
    made = request()
    (event,) = brought(made, cached, full, pack_tokens(TOKENS[: full * BLOCK]))
    assert isinstance(event, BlockStored)
    assert len(event.block_hashes) == full - cached
    assert [event] == computed(made, cached, full)


def test_a_salted_prompts_first_block_is_not_told_of_the_rest_is() -> None:
    """The salt is one of the first block's keys, and is not known here."""
    made = request(cache_salt="tenant")
    assert brought(made, 0, 5, pack_tokens(TOKENS[: 5 * BLOCK])) == []
    assert brought(made, 1, 5, pack_tokens(TOKENS[: 5 * BLOCK])) == computed(made, 1, 5)


def test_only_what_the_hashes_prove_is_told() -> None:
    made = request()
    wrong = [*TOKENS[: 3 * BLOCK], 7, *TOKENS[3 * BLOCK + 1 : 5 * BLOCK]]
    assert brought(made, 1, 5, pack_tokens(wrong)) == computed(made, 1, 3)
    assert brought(made, 0, 5, b"") == []
    assert brought(made, 0, 5, pack_tokens(TOKENS[1 : 5 * BLOCK + 1])) == []


def test_an_eviction_is_told_after_the_block_that_it_evicts() -> None:
    block_pool = BlockPool(4, True, BLOCK, enable_kv_cache_events=True)
    pool = load().EnginePool(block_pool)
    made = request()
    (block,) = pool.take(1, 0)
    pool.insert(made.block_hashes[0], block, BLOCK)
    pool.tell_stored(None, made.block_hashes[:1], TOKENS[:BLOCK])
    pool.unpin([block])
    block_pool.get_new_blocks(3)
    assert [type(event) for event in block_pool.take_events()] == [BlockStored, BlockRemoved]


def test_a_pool_without_followers_tells_nothing() -> None:
    assert not load().EnginePool(BlockPool(4, True, BLOCK)).tells


def test_requests_know_their_tokens() -> None:
    made = request()
    made.append_output_token_ids([5, 6])
    view = load().EngineRequest(made, BLOCK)
    assert list(view.token_ids(0, len(TOKENS) + 2)) == [*TOKENS, 5, 6]
