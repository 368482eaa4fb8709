"""Write-backs of a decode engine that is busy with a long step: what the control thread and the ranks do alone."""

from __future__ import annotations

from typing import Any

import pytest

from connector.tests.unit.sim_contents import BLOCK, answer
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.simulation import World
from disagg_connector.offers import OfferSide, TurnEnd
from disagg_connector.ports import WorkerReport

PROMPT = list(range(100, 118))  # four full blocks and a half
WRITTEN_BACK = 2
"""Blocks that prefill lacks of a turn with `TOKENS` tokens."""
TOKENS = 10


def offered(prefill_forgets: bool = False, earlier: list[int] | None = None, **config: Any) -> World:
    """A turn has ended, its offer is on its way; of an `earlier` one's prompt decode's cache has all."""
    world = World(**config)
    if earlier:
        world.turn(earlier, world.decodes[0], 2)
        world.run(60)
    world.turn(PROMPT, world.decodes[0], TOKENS)
    while not pending(world, "Offer"):
        for engine in world.engines:
            engine.step()
            if pending(world, "Offer"):
                break
        else:
            world.network.deliver_all()
            for write in [write for engine in world.engines for write in engine.worker.posted]:
                world.land(write)
        world.clock.now += 0.01
        assert world.clock.now < 1010
    if prefill_forgets:
        world.prefill.pool.reset()
    return world


def pending(world: World, kind: str) -> bool:
    return any(message.text == kind for message in world.network.messages)


def without_decode(world: World, rounds: int = 10, *, fail: bool = False) -> list[str]:
    """Everything goes on but decode's engine thread. Returns the messages that were delivered."""
    seen = []
    for _ in range(rounds):
        world.prefill.step()
        while world.network.messages:
            seen.append(world.network.messages[0].text)
            world.network.messages.pop(0).deliver()
        for write in [write for engine in world.engines for write in engine.worker.posted]:
            world.land(write, fail=fail)
        world.clock.now += 0.01
    return seen


def inserted(world: World) -> int:
    return int(sum(world.prefill.counts.get("disagg_kv_writeback_inserted_tokens", {}).values())) // BLOCK


def finish(world: World) -> SimEngine:
    """Without trouble to the end. Returns decode."""
    world.run()
    world.check()
    world.settle(100)
    world.check_nothing_leaks()
    return world.decodes[0]


def test_a_write_back_reaches_prefills_cache_during_one_step_of_decode() -> None:
    world = offered()
    seen = without_decode(world)
    assert inserted(world) == WRITTEN_BACK
    assert seen.count("Commit") == 1
    for _ in range(3):
        world.decodes[0].step()
        assert not pending(world, "Commit"), "decode's engine thread has nothing to add"
    decode = finish(world)
    assert inserted(world) == WRITTEN_BACK, "once"
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}
    assert decode.counts["disagg_kv_push_blocks"] == {"decode_to_prefill": WRITTEN_BACK}
    assert decode.counts["disagg_kv_push_bytes"]["decode_to_prefill"] == WRITTEN_BACK * 10


def test_without_a_link_it_waits_for_decodes_steps() -> None:
    world = offered(link=False)
    without_decode(world)
    assert not inserted(world)
    finish(world)
    assert inserted(world) == WRITTEN_BACK


def test_the_time_of_a_write_back_ends_when_prefill_says_so() -> None:
    world = offered()
    without_decode(world, rounds=10)
    world.clock.now += 5
    decode = finish(world)
    (seconds,) = decode.counts["disagg_kv_writeback_seconds"][""]  # type: ignore[misc]
    (granted,) = decode.counts["disagg_kv_grant_seconds"][""]  # type: ignore[misc]
    assert granted <= seconds < 0.2


def test_the_next_turn_is_right() -> None:
    world = offered()
    without_decode(world)
    prompt = PROMPT + answer(PROMPT, TOKENS) + [7, 8, 9]
    key = world.turn(prompt, world.decodes[0])
    decode = finish(world)
    assert decode.done[f"{key}-{2:08x}"].generated == answer(prompt, 6)


def test_only_what_prefill_is_taken_to_lack_is_reserved() -> None:
    world = offered()
    assert world.decodes[0].pool.total - world.decodes[0].pool.free() == WRITTEN_BACK


def test_a_grant_of_other_blocks_waits_for_decodes_step() -> None:
    world = offered(prefill_forgets=True)
    without_decode(world)
    assert not inserted(world)
    assert world.decodes[0].worker.link.orders == 0
    finish(world)
    assert inserted(world) == 4 + WRITTEN_BACK


def test_the_end_of_a_write_that_a_step_has_ordered_is_committed_at_once() -> None:
    world = offered(prefill_forgets=True)
    without_decode(world, rounds=3)
    while not world.decodes[0].worker.posted:
        world.decodes[0].step()
    assert "Commit" in without_decode(world)
    assert inserted(world) == 4 + WRITTEN_BACK
    finish(world)
    assert inserted(world) == 4 + WRITTEN_BACK, "once"


def test_what_prefill_asks_for_is_committed_at_once() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    world.run()
    prompt = PROMPT + decode.done[f"{key}-{2:08x}"].generated + [7, 8, 9]
    world.prefill.pool.reset()
    before = inserted(world)
    world.turn(prompt, decode)
    for _ in range(100):
        world.run_without_landing()
        if decode.worker.posted:
            break
    assert decode.worker.posted
    without_decode(world)
    assert inserted(world) == before + 5
    finish(world)


def test_the_end_of_a_stream_does_not_wait_either() -> None:
    world = World(writeback_mode="streaming", writeback_batch_blocks=100)
    world.turn(PROMPT, world.decodes[0], TOKENS)
    world.run()
    assert world.decodes[0].worker.link.orders == 1
    finish(world)


def test_a_request_gets_what_is_only_reserved() -> None:
    world = offered()
    decode = world.decodes[0]
    request = decode.add(FakeRequest("big", [9] * (decode.pool.total * BLOCK - 2), 1))
    decode.step()
    assert request.id in decode.done
    without_decode(world)
    assert decode.worker.link.orders == 0
    assert not inserted(world)
    finish(world)
    assert decode.counts["disagg_kv_writeback_offers"] == {"evicted": 1}


def test_a_request_that_hits_free_blocks_gets_what_is_only_reserved() -> None:
    """It takes its hits from the free blocks, too, so that it needs more of them than it lacks."""
    earlier = [number % 47 for number in range(150 * BLOCK)]
    world = offered(earlier=earlier, total=200)
    decode = world.decodes[0]
    assert decode.pool.free() == 200 - WRITTEN_BACK
    request = decode.add(FakeRequest("big", earlier + [9] * (50 * BLOCK - 2), 1))
    decode.step()
    assert request.id in decode.done
    finish(world)


def test_an_idle_decode_gives_back_what_is_reserved() -> None:
    world = offered()
    decode = world.decodes[0]
    decode.step()
    assert decode.pool.free() < decode.pool.total
    alarm = decode.channel.alarm
    assert alarm is not None
    world.clock.now = alarm
    world._alarms()
    assert decode.pool.free() == decode.pool.total
    finish(world)


def test_a_write_whose_order_was_lost_is_not_begun_when_it_was_called_off() -> None:
    world = offered()
    decode = world.decodes[0]
    decode.worker.link.loses_next = True
    without_decode(world)
    assert not decode.reset(), "begun as far as is known: its blocks are kept"
    decode.step()
    assert not decode.worker.posted
    finish(world)
    assert not inserted(world)


def test_what_is_reserved_comes_back_when_blocks_become_few() -> None:
    world = offered()
    decode = world.decodes[0]
    taken = decode.pool.take(decode.pool.free() - 3)
    decode.step()
    assert decode.pool.free() == 3 + WRITTEN_BACK
    decode.pool.unpin(taken)
    finish(world)


def test_what_is_reserved_comes_back_after_a_while() -> None:
    world = offered()
    decode = world.decodes[0]
    world.clock.now += 1.0
    decode.step()
    assert decode.pool.free() == decode.pool.total
    without_decode(world)
    assert decode.worker.link.orders == 0
    finish(world)
    assert inserted(world) == WRITTEN_BACK, "as without a link"


def test_nothing_is_reserved_where_blocks_are_few() -> None:
    world = World(total=24)
    world.turn(PROMPT, world.decodes[0], TOKENS)
    world.run()
    assert world.decodes[0].worker.link.orders == 0
    finish(world)
    assert inserted(world) == WRITTEN_BACK


def test_a_failed_write_is_left_to_the_engine_thread() -> None:
    world = offered()
    seen = without_decode(world, fail=True)
    assert "Commit" not in seen
    decode = finish(world)
    assert not inserted(world)
    assert world.prefill.counts["disagg_kv_writeback_aborted"] == {"writer": 1}
    assert "disagg_kv_push_blocks" not in decode.counts


def test_a_step_may_tell_the_end_of_a_write_of_which_decode_has_not_heard() -> None:
    """The grant is in the inbox while the workers' report is read."""
    world = offered()
    without_decode(world)
    decode = world.decodes[0]
    report, decode.worker.report = decode.worker.report, WorkerReport()
    decode.scheduler.reported(report, set(), set())
    assert decode.pool.free() == decode.pool.total
    finish(world)
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}
    assert inserted(world) == WRITTEN_BACK


def test_what_was_evicted_before_it_is_offered_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn's end waits for prefill's address, or for a batch of its stream; its blocks are anybody's then."""
    world = World()
    decode = world.decodes[0]
    ends: list[TurnEnd] = []
    with monkeypatch.context() as patch:
        patch.setattr(OfferSide, "close", lambda self, end: ends.append(end))
        world.turn(PROMPT, decode, TOKENS)
        world.run()
    decode.add(FakeRequest("other", [9] * (decode.pool.total * BLOCK - 2), 1))
    decode.step()
    decode.scheduler.offers.close(ends[0])
    without_decode(world)
    assert decode.worker.link.orders == 0
    finish(world)
    assert decode.counts["disagg_kv_writeback_offers"] == {"evicted": 1}


def test_a_reset_of_decode_gets_back_what_is_reserved() -> None:
    world = offered()
    assert world.decodes[0].reset()
    without_decode(world)
    assert world.decodes[0].worker.link.orders == 0
    finish(world)
    assert not inserted(world)


def test_a_reset_of_decode_fails_during_a_write_which_is_not_taken_up() -> None:
    world = offered()
    world.network.deliver_all()
    world.prefill.step()
    world.network.deliver_all()
    assert world.decodes[0].worker.posted
    assert not world.decodes[0].reset()
    assert "Commit" not in without_decode(world)
    finish(world)
    assert not inserted(world)
    assert world.decodes[0].reset()


def test_an_order_that_is_lost_with_the_link_is_repeated_with_a_step() -> None:
    world = offered()
    decode = world.decodes[0]
    decode.worker.link.loses_next = True
    without_decode(world)
    assert not decode.worker.ordered
    finish(world)
    assert inserted(world) == WRITTEN_BACK
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}


def test_an_end_that_is_lost_with_the_link_is_told_with_a_step() -> None:
    world = offered()
    decode = world.decodes[0]
    world.network.deliver_all()
    world.prefill.step()
    world.network.deliver_all()
    assert decode.worker.posted
    decode.worker.link.is_lost = True
    assert "Commit" not in without_decode(world)
    finish(world)
    assert inserted(world) == WRITTEN_BACK


def test_a_cancellation_waits_for_a_write_that_decodes_engine_thread_has_not_heard_of() -> None:
    world = offered()
    decode = world.decodes[0]
    world.network.deliver_all()
    world.prefill.step()
    grant = next(message for message in world.network.messages if message.text == "Grant")
    world.network.messages.remove(grant)
    world.prefill.reset()
    world.prefill.step()
    world.network.deliver_all()  # the cancellation is in decode's inbox
    grant.deliver()
    assert decode.worker.posted
    decode.step()
    decode.step()
    assert not pending(world, "Released")
    world.land(decode.worker.posted[0])
    assert not pending(world, "Commit"), "nobody wants it any more"
    decode.step()
    assert pending(world, "Released")
    finish(world)
    assert not inserted(world)
