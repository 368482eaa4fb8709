"""New weights, pauses and sleep: engines of different weights exchange nothing, and old KV never outlives them."""

from __future__ import annotations

import pytest

from connector.tests.unit.simulation import World
from connector.tests.unit.test_scheduler_hazards import PROMPT, step_until_posted
from connector.tests.unit.test_scheduler_turns import answer_of, reference
from disagg_connector.protocol import Cancel, Commit, Load, Offer, Refused, Status, Want


def turn(world: World, prompt: list[int]) -> None:
    """One whole turn, whose answer must be right whatever becomes of its KV."""
    decode = world.decodes[0]
    key = world.turn(prompt, decode)
    world.run(rounds=300)
    assert answer_of(decode, key) == reference(prompt, 6)
    world.check()


def exchanged(world: World) -> int:
    """Tokens pushed to decode so far."""
    return world.prefill.counts.get("disagg_kv_push_tokens", {}).get("prefill_to_decode", 0)


def renew(world: World, *engines: int) -> None:
    """New weights as they should be brought: paused, with the cache cleared."""
    chosen = [world.engines[index] for index in engines]
    for engine in chosen:
        engine.pause()
    world.run(rounds=100, seconds=0.1)
    for engine in chosen:
        assert engine.reset(), "nothing is left in the way of a reset after a while"
        engine.change_weights()
        engine.resume()


def test_engines_with_weights_changed_differently_exchange_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    turn(world, PROMPT)
    before = exchanged(world)
    renew(world, 1)
    turn(world, [*PROMPT, 1])
    turn(world, [*PROMPT, 2])
    assert exchanged(world) == before
    assert world.decodes[0].counts["disagg_kv_recomputed_requests"] == {"fingerprint": 2}
    explained = [r.getMessage() for r in caplog.records if "not compatible" in r.getMessage()]
    assert any("generation: 'boot+1' here, 'boot+0' there" in text for text in explained)
    assert len(explained) <= 2, "once on either engine"


def test_engines_with_weights_changed_alike_exchange_again() -> None:
    world = World()
    turn(world, PROMPT)
    renew(world, 0, 1)
    before = exchanged(world)
    turn(world, [*PROMPT, 1])
    turn(world, [*PROMPT, 2])
    assert exchanged(world) > before


def test_a_version_speaks_for_the_weights_however_they_came_about() -> None:
    world = World()
    renew(world, 0)
    renew(world, 0, 1)
    for engine in world.engines:
        engine.weights = 7
        engine.scheduler.lifecycle.named_weights("step-7")
    turn(world, PROMPT)
    assert exchanged(world) > 0
    world.prefill.scheduler.lifecycle.named_weights("step-8")
    before = exchanged(world)
    turn(world, [*PROMPT, 2])
    assert exchanged(world) == before


def test_weights_that_change_under_a_used_cache_close_the_engine_until_a_reset_succeeds() -> None:
    world = World()
    turn(world, PROMPT)
    before = exchanged(world)
    for engine in world.engines:
        engine.change_weights()
    turn(world, [*PROMPT, 1])
    assert exchanged(world) == before
    assert world.decodes[0].counts["disagg_kv_recomputed_requests"] == {"closed": 1}
    for engine in world.engines:
        assert engine.reset()
    turn(world, [*PROMPT, 2])
    assert exchanged(world) > before


def test_a_plain_reset_leaves_the_generation_as_it_is() -> None:
    world = World()
    turn(world, PROMPT)
    fingerprints = [engine.scheduler.context.me().fingerprint for engine in world.engines]
    epochs = [engine.scheduler.context.me().epoch for engine in world.engines]
    for engine in world.engines:
        engine.reset()
    assert [engine.scheduler.context.me().fingerprint for engine in world.engines] == fingerprints
    assert all(
        engine.scheduler.context.me().epoch > old for engine, old in zip(world.engines, epochs, strict=True)
    )


def test_weights_that_were_left_half_changed_keep_the_engine_closed() -> None:
    world = World()
    lifecycle = world.prefill.scheduler.lifecycle
    lifecycle.changing_weights()
    turn(world, PROMPT)
    assert exchanged(world) == 0
    lifecycle.changing_weights()
    lifecycle.changed_weights()
    assert world.prefill.scheduler.context.epochs.now.generation == "boot+2"


def test_a_pause_goes_on_stepping_until_peers_have_let_go() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "p")
    decode.pause()
    assert not decode.reset(), "prefill may still write"
    world.run_without_landing()
    assert decode.scheduler.needs_steps
    world.land(write)
    began = world.clock.now
    while decode.scheduler.needs_steps:
        world.run(rounds=1, seconds=0.1)
        assert world.clock.now - began < 10
    assert decode.reset()


def test_a_pause_does_not_wait_for_a_lost_peer_for_ever() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    step_until_posted(world, "p")
    world.kill(world.prefill)
    decode.pause()
    for _ in range(200):
        decode.step()
        world.network.deliver_all()
        world.clock.now += 0.1
    assert not decode.scheduler.needs_steps
    assert not decode.reset(), "a late write may still come: vLLM has to refuse"


def test_a_pause_does_not_wait_for_a_write_that_never_ends() -> None:
    world = World()
    world.turn(PROMPT, world.decodes[0])
    write = step_until_posted(world, "p")
    world.prefill.pause()
    began = world.clock.now
    while world.prefill.scheduler.needs_steps:
        world.run_without_landing(seconds=1.0)
        assert world.clock.now - began < 120
    assert not world.prefill.reset(), "its source blocks are still read"
    world.land(write)
    world.settle()
    assert world.prefill.reset()


def test_a_paused_engine_refuses_peers_without_its_engine_thread() -> None:
    world = World()
    prefill, decode = world.prefill, world.decodes[0]
    me, sender = prefill.engine_id, decode.scheduler.context.me()
    prefill.pause()
    load = Load(me, 1, "x", "r", sender, bytes(32), 4, 0, [1])
    assert prefill.channel.fast(load) == Refused("closed", me)
    assert isinstance(prefill.channel.fast(Offer(me, 1, "y", sender, [bytes(32)], 0, "")), Refused)
    want = Want(decode.engine_id, 0, "z", prefill.scheduler.context.me(), [bytes(32)], 0)
    decode.pause()
    assert isinstance(decode.channel.fast(want), Refused)
    for way_out in (Cancel(me, "x", "r"), Commit(me, 1, "y", True, True), Status(me, [])):
        assert not isinstance(prefill.channel.fast(way_out), Refused), "blocks come back whatever happens"
    prefill.step()
    assert prefill.counts["disagg_kv_refused_messages"] == {"closed": 2}


def test_after_a_pause_turns_go_on_in_a_new_epoch() -> None:
    world = World()
    turn(world, PROMPT)
    before = exchanged(world)
    for engine in world.engines:
        engine.pause()
    world.run(rounds=100, seconds=0.1)
    for engine in world.engines:
        assert engine.reset()
        engine.resume()
    turn(world, [*PROMPT, 1])
    assert exchanged(world) > before
