"""Nothing that was begun under an older epoch of either engine is published or loaded."""

from __future__ import annotations

from connector.tests.unit.sim_contents import BLOCK
from connector.tests.unit.sim_engine import FakeRequest
from connector.tests.unit.simulation import World
from connector.tests.unit.test_scheduler_hazards import PROMPT, step_until_posted
from connector.tests.unit.test_scheduler_turns import answer_of, reference
from disagg_connector.protocol import Address, Load, Offer


def step_until_sent(world: World, text: str, rounds: int = 300) -> None:
    """Let the engines go on until a message of a kind is on its way; it is left there."""
    for _ in range(rounds):
        for engine in world.engines:
            if engine.wants_steps:
                engine.step()
            for write in list(engine.worker.posted):
                world.land(write)
            if any(message.text == text for message in world.network.messages):
                return
        world.network.deliver_all(1)
        world.clock.now += 0.01
    raise AssertionError(f"no {text} was ever sent")


def settled(world: World) -> None:
    world.settle()
    world.check()
    world.check_nothing_leaks()


def test_a_load_for_an_older_epoch_is_refused_and_sent_again_in_the_same_turn() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()
    assert world.prefill.reset()
    key = world.turn([*PROMPT, 1], decode)
    world.run()
    assert answer_of(decode, key) == reference([*PROMPT, 1], 6)
    assert world.prefill.counts["disagg_kv_refused_messages"] == {"epoch": 1}
    assert "disagg_kv_recomputed_requests" not in decode.counts
    settled(world)


def test_an_offer_for_an_older_epoch_is_refused_and_made_anew() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    step_until_sent(world, "Offer")
    world.prefill.scheduler.lifecycle.resetting()
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"epoch": 1, "granted": 1}
    world.turn([*PROMPT, 1], decode)
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"epoch": 1, "granted": 2}
    settled(world)


def test_a_question_for_an_older_epoch_is_refused_and_asked_again() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    world.run()
    decode.scheduler.lifecycle.resetting()
    world.prefill.pool.reset()
    prompt = PROMPT + answer_of(decode, key) + [7, 8, 9]
    second = world.turn(prompt, decode)
    world.run()
    assert decode.counts["disagg_kv_refused_messages"] == {"epoch": 1}
    assert world.prefill.counts["disagg_kv_ondemand_requests"]["served"] == 1
    assert answer_of(decode, second) == reference(prompt, 6)
    settled(world)


def test_what_arrives_on_decode_across_its_reset_is_not_used() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    write = step_until_posted(world, "p")
    decode.scheduler.lifecycle.resetting()
    # It lands before the worker has heard that it is called off.
    world.land(write)
    world.run()
    assert decode.recomputed == [f"{key}-{2:08x}"]
    assert decode.counts["disagg_kv_recomputed_requests"] == {"epoch": 1}
    assert answer_of(decode, key) == reference(PROMPT, 6)
    settled(world)


def test_a_prompt_computed_before_a_reset_is_not_pushed_after_it() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, decode_leg=False)
    world.run()
    assert world.prefill.reset(), "what only waits for decode does not make a reset fail"
    params = {
        "do_remote_prefill": True,
        "disagg": {"version": 1, "prefill": {"host": "p", "control_port": 5700}},
    }
    decode.add(FakeRequest(f"{key}-{2:08x}", PROMPT, 6, params))
    world.run(rounds=300)
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"gone": 1}
    assert "disagg_kv_push_tokens" not in world.prefill.counts
    settled(world)


def test_a_load_that_waited_for_its_prompt_across_a_reset_is_not_served() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, prefill_leg=False)
    step_until_sent(world, "Accepted")
    world.prefill.scheduler.lifecycle.resetting()
    world.prefill.add(
        FakeRequest(f"{key}-{1:08x}", PROMPT, 1, {"do_remote_decode": True, "disagg": {"version": 1}})
    )
    world.run(rounds=300)
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert "disagg_kv_push_tokens" not in world.prefill.counts
    settled(world)


def test_a_prompt_that_was_computed_across_a_reset_is_not_pushed() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, prefill_leg=False)
    params = {"do_remote_decode": True, "disagg": {"version": 1}}
    request = world.prefill.add(FakeRequest(f"{key}-{1:08x}", PROMPT, 1, params))
    world.prefill._admit(request)
    assert request.state == "running"
    world.prefill.scheduler.lifecycle.resetting()
    world.run(rounds=300)
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"aborted": 1}
    settled(world)


def test_a_turn_that_lived_through_a_reset_is_not_written_back() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    while not decode.requests[f"{key}-{2:08x}"].generated:
        world.run(rounds=1)
    decode.scheduler.lifecycle.resetting()
    world.run()
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert "disagg_kv_writeback_offers" not in decode.counts
    settled(world)


def test_a_turn_that_was_reset_between_its_load_and_its_first_step_is_not_written_back() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    request = decode.requests[f"{key}-{2:08x}"]
    while request.state != "loaded":
        world.run(rounds=1)
    assert not decode.reset(), "its blocks are in use"
    world.run()
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert "disagg_kv_writeback_offers" not in decode.counts
    settled(world)


def test_an_offer_for_an_older_epoch_waits_for_the_new_one_under_whatever_name_prefill_goes() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, decode_leg=False)
    world.network.channels[Address("alias", 5700)] = world.prefill.channel
    prefill = {"host": "alias", "control_port": 5700}
    params = {"do_remote_prefill": True, "disagg": {"version": 1, "prefill": prefill}}
    decode.add(FakeRequest(f"{key}-{2:08x}", PROMPT, 6, params))
    step_until_sent(world, "Offer")
    world.prefill.scheduler.lifecycle.resetting()
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"epoch": 1, "granted": 1}
    settled(world)


def test_an_open_offer_does_not_make_a_reset_fail() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    step_until_sent(world, "Offer")
    assert decode.reset()
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"epoch": 1}
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    world.check_nothing_leaks()


def test_blocks_come_back_across_the_epochs_of_both_ends() -> None:
    world = World(kv_lease_duration=600)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "d0")
    for engine in world.engines:
        engine.scheduler.lifecycle.resetting()
    world.run_without_landing()
    assert world.prefill.pool.refs[write.job.remote[0]] == 1, "decode may still write"
    world.land(write)
    world.run(rounds=50, seconds=0.1)  # a cancellation goes from epoch to epoch, and is answered
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    world.check_nothing_leaks()


def test_every_message_that_moves_kv_names_the_epoch_of_its_receiver() -> None:
    world = World()
    decode = world.decodes[0]
    for engine in world.engines:
        for _ in range(engine is world.prefill, 3):
            engine.scheduler.lifecycle.resetting()
    seen = []
    channel_of = {engine.engine_id: engine for engine in world.engines}
    for engine in world.engines:
        fast = engine.channel.fast

        def listen(message: object, fast: object = fast) -> object:
            if isinstance(message, Load | Offer):
                seen.append((message.epoch, channel_of[message.to].scheduler.context.epochs.epoch))
                assert (
                    message.sender.epoch
                    == channel_of[message.sender.engine_id].scheduler.context.epochs.epoch
                )
            return fast(message)  # type: ignore[operator]

        engine.channel.fast = listen  # type: ignore[assignment]
    world.turn(PROMPT, decode)
    world.run()
    assert seen == [(2, 2), (2, 2)]
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"] == {"": BLOCK}
