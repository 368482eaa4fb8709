"""Which blocks that decode brought are told of, and with which tokens."""

from __future__ import annotations

from typing import Any

import pytest

from connector.tests.unit.sim_contents import BLOCK, chain
from connector.tests.unit.sim_pool import FakePool
from connector.tests.unit.simulation import World
from disagg_connector import offers
from disagg_connector.events import pack_tokens, tell_stored, unpack_tokens
from disagg_connector.protocol import MAX_TOKENS_BYTES

PROMPT = list(range(100, 118))  # four full blocks and a half


def first_turn(world: World) -> list[int]:
    """A turn that is written back; returns its tokens."""
    key = world.turn(PROMPT, world.decodes[0])
    world.run()
    return PROMPT + world.decodes[0].done[f"{key}-{2:08x}"].generated


def expected(tokens: list[int], first: int, end: int) -> list[tuple[bytes | None, bytes, list[int]]]:
    hashes = chain(tokens)
    return [
        (hashes[i - 1] if i else None, hashes[i], tokens[i * BLOCK : (i + 1) * BLOCK])
        for i in range(first, end)
    ]


def test_a_written_back_block_is_told_of_with_its_tokens_and_its_parent() -> None:
    world = World(kv_events=True)
    tokens = first_turn(world)
    assert world.prefill.pool.events == expected(tokens, 4, 5)


def test_blocks_that_prefill_asked_for_are_told_of_with_the_tokens_of_its_own_prompt() -> None:
    world = World(kv_events=True)
    tokens = first_turn(world)
    world.prefill.pool.reset()
    assert world.prefill.pool.events is not None
    world.prefill.pool.events.clear()
    world.turn([*tokens, 7, 8, 9], world.decodes[0])
    world.run()
    assert world.prefill.pool.events[:5] == expected(tokens, 0, 5)


def test_no_tokens_travel_to_an_engine_that_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(tokens: object) -> bytes:
        raise AssertionError("tokens were packed")

    monkeypatch.setattr(offers, "pack_tokens", never)
    world = World()
    first_turn(world)
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"] == {"": BLOCK}


def test_tokens_that_the_hash_does_not_prove_are_not_told_but_the_block_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offers, "pack_tokens", lambda tokens: pack_tokens([t + 1 for t in tokens]))
    world = World(kv_events=True)
    first_turn(world)
    assert world.prefill.pool.events == []
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"] == {"": BLOCK}


def test_a_block_that_decode_publishes_itself_at_a_turns_end_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(kv_events=True)
    decode = world.decodes[0]
    finished = decode.scheduler.finished

    def before_it_is_published(view: Any, blocks: list[int], kind: Any) -> None:
        decode.pool._forget(blocks[0])
        finished(view, blocks, kind)

    monkeypatch.setattr(decode.scheduler, "finished", before_it_is_published)
    first_turn(world)
    assert decode.pool.events == expected(PROMPT, 0, 1)


TOKENS = list(range(50, 50 + 6 * BLOCK))
HASHES = chain(TOKENS)


def told(inserted: list[int], tokens: list[int]) -> list[tuple[bytes | None, bytes, list[int]]]:
    pool = FakePool(1)
    pool.events = []
    tell_stored(pool, HASHES, {HASHES[index] for index in inserted}, tokens, BLOCK)
    return pool.events


def test_blocks_that_were_there_already_part_the_runs() -> None:
    events = expected(TOKENS, 0, 6)
    assert told([0, 1, 3, 5], TOKENS) == [events[0], events[1], events[3], events[5]]


def test_tokens_of_the_chains_end_are_enough_for_the_blocks_there() -> None:
    events = expected(TOKENS, 0, 6)
    assert told([1, 2, 3, 4, 5], TOKENS[4 * BLOCK :]) == events[4:]
    assert told([1, 2], TOKENS[4 * BLOCK :]) == []
    assert told([5], []) == []


def test_more_tokens_than_blocks_do_no_harm() -> None:
    assert told([0, 5], [1, 2, *TOKENS]) == [expected(TOKENS, 0, 6)[0], expected(TOKENS, 0, 6)[5]]
    assert told([0, 5], [*range(BLOCK), *TOKENS]) == [expected(TOKENS, 0, 6)[0], expected(TOKENS, 0, 6)[5]]


def test_tokens_survive_the_way() -> None:
    assert unpack_tokens(pack_tokens([0, 1, 2**32 - 1])) == (0, 1, 2**32 - 1)
    assert unpack_tokens(pack_tokens([7])[:-1]) == ()


def test_what_cannot_be_sent_costs_only_the_events() -> None:
    assert pack_tokens([-1]) == b""
    assert pack_tokens([2**32]) == b""
    assert pack_tokens([1] * (MAX_TOKENS_BYTES // 4 + 1)) == b""
