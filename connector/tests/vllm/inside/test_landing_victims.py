"""What landings take from vLLM's real block pool, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool

from disagg_connector.compat import load

BLOCK, TOTAL = 16, 100
compat = load()


def name(number: int) -> bytes:
    """A block hash."""
    return number.to_bytes(32, "big")


class Prefill:
    """A prefill engine's blocks, with requests and landings that come and go."""

    def __init__(self) -> None:
        self.vllm: Any = BlockPool(TOTAL + 1, True, BLOCK)  # one is the null block
        self.pool = compat.EnginePool(self.vllm)
        self.names = iter(range(1, 10**6))

    def request(self, count: int) -> list[bytes]:
        """A prompt of `count` new blocks is computed; its hashes."""
        blocks = self.vllm.get_new_blocks(count)
        hashes = [name(next(self.names)) for _ in blocks]
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            key = kv_cache_utils.make_block_hash_with_group_id(block_hash, 0)
            self.vllm._insert_block_hash(key, block, num_tokens=(index + 1) * BLOCK)
        self.vllm.free_blocks(reversed(blocks))
        return hashes

    def hit(self, hashes: list[bytes]) -> int:
        """A request with this prefix: how many of its blocks are found, and used."""
        found = [block for block in map(self.pool.find, hashes) if block is not None]
        self.pool.pin(found)
        self.pool.used(found)
        self.pool.unpin(found)
        return len(found)

    def land(self, count: int, spare: int) -> list[bytes]:
        """A write-back; its hashes."""
        blocks = self.pool.take(count, spare)
        assert len(set(blocks)) == count
        hashes = [name(next(self.names)) for _ in blocks]
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            assert self.vllm.blocks[block].ref_cnt == 1
            assert self.vllm.blocks[block].block_hash is None, "nobody may find what is being written"
            self.pool.insert(block_hash, block, (index + 1) * BLOCK)
        self.pool.unpin(blocks)
        return hashes

    def cached(self, hashes: list[bytes]) -> int:
        return sum(self.pool.find(block_hash) is not None for block_hash in hashes)


def test_blocks_that_hold_nothing_are_taken_first() -> None:
    prefill = Prefill()
    hashes = prefill.request(60)
    prefill.land(40, spare=10)
    assert prefill.cached(hashes) == 60


def test_then_the_coldest_go() -> None:
    prefill = Prefill()
    old, young = prefill.request(50), prefill.request(50)
    prefill.land(20, spare=10)
    assert (prefill.cached(old), prefill.cached(young)) == (30, 50)


@pytest.mark.parametrize(("spare", "left"), [(10, 10), (0, 0)])
def test_a_storm_of_write_backs_leaves_a_bystanders_hot_prefix_alone(spare: int, left: int) -> None:
    prefill = Prefill()
    prefill.request(90)
    bystander = prefill.request(10)
    for _ in range(200):
        prefill.land(5, spare)
    # Without anything spared they are gone: the test would notice.
    assert prefill.hit(bystander) == left
    assert prefill.pool.free() == TOTAL


def test_a_bystander_that_keeps_coming_is_always_hit() -> None:
    prefill = Prefill()
    prefill.request(80)
    bystander = prefill.request(20)
    hits = 0
    for _ in range(50):
        for _ in range(4):
            prefill.land(30, spare=20)
        hits += prefill.hit(bystander)
    assert hits == 50 * 20


def test_what_a_request_used_after_it_had_landed_is_spared_too() -> None:
    prefill = Prefill()
    prefill.request(100)
    conversation = prefill.land(10, spare=10)
    assert prefill.hit(conversation) == 10
    for _ in range(100):
        prefill.land(5, spare=10)
    assert prefill.cached(conversation) == 10


def test_of_what_landed_and_was_never_used_the_oldest_goes_first_and_its_tail_before_its_head() -> None:
    prefill = Prefill()
    prefill.request(100)
    first = prefill.land(45, spare=50)
    second = prefill.land(5, spare=50)
    assert (prefill.cached(first), prefill.cached(second)) == (45, 5)
    prefill.land(15, spare=50)
    assert prefill.cached(second) == 5
    assert [prefill.pool.find(h) is not None for h in first] == [True] * 30 + [False] * 15


def test_all_that_may_be_taken_can_be_taken_at_once() -> None:
    prefill = Prefill()
    prefill.request(30)
    prefill.land(60, spare=20)
    prefill.request(15)
    hot = prefill.request(20)
    blocks = prefill.pool.take(TOTAL - 20, 20)
    assert len(set(blocks)) == TOTAL - 20
    assert prefill.cached(hot) == 20
    assert prefill.pool.free() == 20
    prefill.pool.unpin(blocks)
    assert prefill.vllm.reset_prefix_cache()
    assert prefill.land(TOTAL, spare=0)


def test_a_landing_does_not_look_at_all_that_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: most of a large cache has landed and was not used, and the cold end is in use."""
    prefill = Prefill()
    prefill.vllm = BlockPool(20_001, True, BLOCK)
    prefill.pool = compat.EnginePool(prefill.vllm)
    landed = prefill.pool._landed
    prefill.request(1000)
    for _ in range(19):
        prefill.land(1000, spare=1000)
    looks = 0
    look = landed._look

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()

    monkeypatch.setattr(landed, "_look", counted)
    hot = prefill.request(900)
    for _ in range(1000):
        prefill.land(1, spare=1900)
    assert 1 <= looks < 10
    assert prefill.cached(hot) == 900
