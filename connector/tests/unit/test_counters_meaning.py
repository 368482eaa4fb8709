"""What the metrics say of turns whose course is known."""

from __future__ import annotations

from typing import Any

from connector.tests.unit.sim_contents import BLOCK
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.sim_pool import FakePool
from connector.tests.unit.simulation import World
from disagg_connector.brought import Brought
from disagg_connector.counters import DEFINITIONS, Counters, merge

PROMPT = list(range(100, 118))  # four full blocks and a half


def total(engine: SimEngine, name: str, label: str = "") -> Any:
    return engine.counts.get(f"disagg_kv_{name}", {}).get(label, 0)


def first_turn(world: World) -> list[int]:
    """A turn that is written back; returns the next turn's prompt."""
    key = world.turn(PROMPT, world.decodes[0])
    world.run()
    return PROMPT + world.decodes[0].done[f"{key}-{2:08x}"].generated + [7, 8, 9]


def test_a_written_back_block_that_the_next_turn_hits_is_counted_once() -> None:
    world = World()
    prompt = first_turn(world)
    assert total(world.prefill, "writeback_inserted_tokens") == BLOCK
    assert total(world.prefill, "writeback_hit_tokens") == 0
    for _ in range(2):
        world.turn(prompt, world.decodes[0])
        world.run()
    assert total(world.prefill, "writeback_hit_tokens") == BLOCK, "the second hit is nothing new"
    assert total(world.prefill, "writeback_evicted_unused_blocks") == 0


def test_a_written_back_block_that_is_evicted_before_any_hit_is_counted_as_unused() -> None:
    world = World(total=24)
    first_turn(world)
    for number in range(8):
        world.turn([1000 + number, *range(30)], world.decodes[0], tokens=1)
        world.run()
    inserted = total(world.prefill, "writeback_inserted_tokens") // BLOCK
    assert total(world.prefill, "writeback_evicted_unused_blocks") >= 1
    assert total(world.prefill, "writeback_hit_tokens") == 0
    assert total(world.prefill, "writeback_evicted_unused_blocks") <= inserted


def test_what_prefill_asked_for_is_counted_and_so_is_the_wait() -> None:
    world = World()
    prompt = first_turn(world)
    world.prefill.pool.reset()
    world.turn(prompt, world.decodes[0])
    world.run()
    asked = total(world.prefill, "ondemand_tokens")
    assert asked >= 4 * BLOCK
    assert total(world.prefill, "writeback_inserted_tokens") >= asked
    assert total(world.prefill, "writeback_hit_tokens") >= asked
    first, second = total(world.prefill, "prefill_wait_seconds")
    assert 0 < first < second <= 1.0, "a question that is answered with nothing is over sooner"
    assert len(total(world.decodes[0], "writeback_seconds")) <= 2, "an answer to a question ends no turn"


def test_a_prompt_that_was_not_held_back_has_no_wait() -> None:
    world = World()
    world.prefill.add(FakeRequest("local", PROMPT, 1))
    world.run()
    assert "disagg_kv_prefill_wait_seconds" not in world.prefill.counts


def test_times_are_those_of_the_clock() -> None:
    world = World()
    first_turn(world)
    decode = world.decodes[0]
    (grant,) = total(decode, "grant_seconds")
    (whole,) = total(decode, "writeback_seconds")
    assert 0 < grant < whole < 1.0
    assert total(decode, "write_seconds", "decode_to_prefill") == [0.001]
    assert total(world.prefill, "write_seconds", "prefill_to_decode") == [0.001]


def test_blocks_of_a_write_back_under_way_show_on_both_sides() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    for _ in range(30):
        for write in list(world.prefill.worker.posted):
            world.land(write)
        world.run_without_landing()
    assert len(decode.worker.posted) == 1
    assert total(decode, "writeback_pinned_blocks") == 1
    assert total(world.prefill, "landing_blocks") == 1
    world.run()
    assert total(decode, "writeback_pinned_blocks") == 0
    assert total(world.prefill, "landing_blocks") == 0


def test_the_reserve_shows() -> None:
    world = World(writeback_reserve_blocks=3)
    world.prefill.step()
    world.prefill.step()
    assert total(world.prefill, "reserve_blocks") == 3


def test_decode_which_is_written_nothing_back_holds_no_reserve() -> None:
    world = World(writeback_reserve_blocks=3)
    decode = world.decodes[0]
    decode.step()
    assert decode.pool.free() == decode.pool.total


def test_write_backs_that_come_to_nothing_are_counted_by_reason() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    for _ in range(30):
        for write in list(world.prefill.worker.posted):
            world.land(write)
        world.run_without_landing()
    world.land(decode.worker.posted[0], fail=True)
    world.run()
    assert world.prefill.counts["disagg_kv_writeback_aborted"] == {"writer": 1}
    first_turn(world)
    for _ in range(30):
        for write in list(world.prefill.worker.posted):
            world.land(write)
        world.run_without_landing()
    assert total(world.prefill, "writeback_inserted_tokens") == BLOCK
    world.turn([5, *PROMPT], decode)
    for _ in range(30):
        for write in list(world.prefill.worker.posted):
            world.land(write)
        world.run_without_landing()
    world.kill(decode)
    world.settle(100)
    assert world.prefill.counts["disagg_kv_writeback_aborted"] == {"writer": 1, "lease": 1}
    assert total(world.prefill, "blocks_quarantined") > 0


def test_an_idle_engine_goes_on_until_its_last_news_is_out() -> None:
    world = World()
    first_turn(world)
    for engine in world.engines:
        assert not engine.requests
        assert not engine.scheduler.needs_steps, "all of it is out, and the engine may sleep"
        engine.scheduler.context.counters.add("disagg_kv_push_blocks", 1, "prefill_to_decode")
        assert engine.scheduler.needs_steps
        before = total(engine, "push_blocks", "prefill_to_decode")
        engine.step()
        assert total(engine, "push_blocks", "prefill_to_decode") == before + 1
        assert not engine.scheduler.needs_steps


def test_a_gauge_that_comes_down_on_an_idle_engine_is_news() -> None:
    counters, value = Counters(), [0]
    counters.watch("disagg_kv_landing_blocks", lambda: value[0])
    assert not counters.has_news
    value[0] = 4
    assert counters.has_news
    assert counters.drain() == {"disagg_kv_landing_blocks": {"": 4}}
    assert not counters.has_news
    value[0] = 0
    assert counters.has_news
    assert counters.drain() == {"disagg_kv_landing_blocks": {"": 0}}
    assert counters.drain() == {}


def test_counts_of_two_steps_are_merged_by_kind() -> None:
    first: Any = {"disagg_kv_push_blocks": {"a": 1}, "disagg_kv_grant_seconds": {"": [0.1]}}
    merge(first, {"disagg_kv_push_blocks": {"a": 2}, "disagg_kv_grant_seconds": {"": [0.2]}})
    merge(first, {"disagg_kv_landing_blocks": {"": 7}})
    merge(first, {"disagg_kv_landing_blocks": {"": 3}})
    assert first == {
        "disagg_kv_push_blocks": {"a": 3},
        "disagg_kv_grant_seconds": {"": [0.1, 0.2]},
        "disagg_kv_landing_blocks": {"": 3},
    }


def test_what_is_remembered_of_brought_blocks_is_bounded_by_the_pool() -> None:
    pool = FakePool(8)
    brought = Brought(pool)
    gone = 0
    for number in range(100):
        (block,) = pool.take(1)
        pool.insert(bytes([number]), block, BLOCK)
        pool.unpin([block])
        gone += brought.published(bytes([number]), block)
        assert len(brought) <= 8
    while more := brought.look_after(8):
        gone += more
    assert gone + len(brought) == 100


def test_a_block_that_is_brought_again_was_evicted_unused_before() -> None:
    pool = FakePool(2)
    brought = Brought(pool)
    assert brought.published(b"a", 0) == 0
    assert brought.published(b"a", 1) == 1
    assert brought.found([b"a", b"a"]) == 1
    assert len(brought) == 0


def test_every_metric_is_explained_and_a_time_says_its_unit() -> None:
    for name, definition in DEFINITIONS.items():
        assert definition.help.endswith("."), name
        assert not name.endswith("_total"), f"{name}: Prometheus adds that itself"
        assert name.endswith("_seconds") == (definition.kind == "histogram"), name
