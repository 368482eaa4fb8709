"""The hazards that random faults reach too seldom, one by one."""

from __future__ import annotations

from connector.tests.unit.sim_contents import BLOCK
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.sim_network import Message
from connector.tests.unit.sim_worker import Write
from connector.tests.unit.simulation import World
from disagg_connector.landing import HOLD_LIMIT

PROMPT = list(range(100, 118))


def step_until_posted(world: World, source: str, rounds: int = 300) -> Write:
    """Let the engines go on, landing nothing, until an engine has posted a write."""
    for _ in range(rounds):
        for engine in world.engines:
            if engine.wants_steps:
                engine.step()
        world.network.deliver_all()
        for engine in world.engines:
            if engine.name == source and engine.worker.posted:
                return engine.worker.posted[0]
            if engine.name != source:
                for write in list(engine.worker.posted):
                    world.land(write)
        world.clock.now += 0.01
    raise AssertionError(f"{source} never posted a write")


def pull(world: World, text: str) -> Message:
    """Take the first message of a kind off the network."""
    message = next(m for m in world.network.messages if m.text == text)
    world.network.messages.remove(message)
    return message


def test_a_grant_whose_writer_is_slow_is_held_beyond_its_lease() -> None:
    world = World(kv_lease_duration=20)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "d0")
    for _ in range(60):
        world.run_without_landing(seconds=1.0)
    # Prefill has called the write-back off, decode has not said that its write is over: the block is kept.
    assert world.prefill.counts["disagg_kv_blocks_quarantined"] == {"": 1}
    assert world.prefill.pool.refs[write.job.remote[0]] == 1
    world.land(write)
    world.settle(120)
    assert world.prefill.counts["disagg_kv_blocks_quarantined"] == {"": 0}
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    world.check_nothing_leaks()


def test_what_a_peer_that_is_cut_off_for_ever_may_write_into_comes_back_in_the_end() -> None:
    world = World(kv_lease_duration=20)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "d0")
    granted_until = world.clock() + 20
    # Nothing is heard of it again, and nobody refuses a connection: its process may live, and still write.
    world.kill(decode)
    decode.worker.posted.clear()
    while world.clock() < granted_until + HOLD_LIMIT - 30:
        world.run(rounds=1, seconds=5)
    assert all(world.prefill.pool.refs[block] == 1 for block in write.job.remote)
    world.settle(120)
    world.check_nothing_leaks()


def test_a_prefill_in_a_long_step_is_not_taken_for_dead() -> None:
    world = World(load_timeout_seconds=120)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    for _ in range(60):
        # Of prefill only the control thread gets on.
        decode.step()
        world.network.deliver_all()
        world.clock.now += 1.0
    assert any(request.state == "loading" for request in decode.requests.values())
    world.run(200)
    assert not decode.recomputed
    assert not decode.requests
    world.settle()
    world.check_nothing_leaks()


def test_a_grant_that_comes_after_its_lease_is_not_written() -> None:
    world = World(kv_lease_duration=20, link=False)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    while not any(m.text == "Grant" for m in world.network.messages):
        for engine in world.engines:
            engine.step()
            for write in list(engine.worker.posted):
                world.land(write)
        if not any(m.text == "Grant" for m in world.network.messages):
            world.network.deliver_all(1)
        world.clock.now += 0.01
    grant = pull(world, "Grant")
    world.clock.now += 14.9
    grant.deliver()
    world.clock.now += 5.0
    decode.step()
    assert not decode.worker.posted
    world.settle()
    world.check_nothing_leaks()


def test_a_load_that_arrives_after_its_cancellation_starts_nothing() -> None:
    world = World(load_timeout_seconds=4)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.prefill.step()
    for _ in range(3):
        decode.step()
        while any(m.text != "Load" for m in world.network.messages):
            next(m for m in world.network.messages if m.text != "Load").deliver_once(world.network)
    load = pull(world, "Load")
    world.run(rounds=60, seconds=0.1)  # decode gives up, cancels and gets its answer
    load.deliver()
    world.prefill.step()
    assert not world.prefill.worker.posted
    world.settle()
    world.check_nothing_leaks()


def test_what_is_found_in_a_cache_is_read_only_after_the_step_that_computes_it() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()  # the engines know each other
    prompt = [9] * 14
    world.prefill.add(
        FakeRequest(
            f"cmpl-{7:032x}-0-{1:08x}", prompt, 1,
            {"do_remote_decode": True, "disagg": {"version": 1, "decode": {"host": "d0", "control_port": 5700}}},
        )
    )  # fmt: skip
    decode.add(FakeRequest("local", prompt, 2))
    world.prefill.step()
    # The request for KV reaches decode's engine thread inside the very step whose forward pass computes it:
    # the hashes are published already, as vLLM does it.
    publish = decode._publish

    def publish_and_hear(request: FakeRequest, num_tokens: int) -> None:
        publish(request, num_tokens)
        world.network.deliver_all()

    decode._publish = publish_and_hear  # type: ignore[method-assign]
    decode.step()
    assert not decode.worker.posted, "a write may not start in the step that computes its source"
    decode._publish = publish  # type: ignore[method-assign]
    world.run()
    assert world.prefill.counts["disagg_kv_ondemand_requests"]["served"] == 1
    world.check()


def test_a_commit_of_an_older_epoch_is_refused() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "d0")
    world.prefill.scheduler.lifecycle.resetting()
    world.land(write)
    world.run()
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}
    assert "disagg_kv_push_tokens" not in decode.counts, "what is not taken up is not counted as pushed"
    world.settle()
    world.check_nothing_leaks()


def test_decode_takes_back_its_offers_when_its_own_cache_is_reset() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    for _ in range(100):
        for engine in world.engines:
            engine.step()
            for write in list(engine.worker.posted):
                world.land(write)
        if any(m.text == "Offer" for m in world.network.messages):
            break
        world.network.deliver_all()
        world.clock.now += 0.01
    decode.scheduler.lifecycle.resetting()
    world.run()
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    world.settle()
    world.check_nothing_leaks()


def test_nothing_is_published_that_nixl_has_not_announced() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "d0")
    decode.worker.posted.remove(write)
    decode.worker.through(write, failed=False)
    for _ in range(20):
        world.run_without_landing()
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    for block, content in zip(write.job.remote, write.contents, strict=True):
        world.prefill.pool.content[block] = content
    world.prefill.worker.announce(write.job.xid)
    world.run()
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"] == {"": BLOCK}


def test_a_request_recomputed_after_a_lost_prefill_uses_other_blocks() -> None:
    world = World(load_timeout_seconds=60)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    write = step_until_posted(world, "p")
    targets = set(write.job.remote)
    world.kill(world.prefill)
    for _ in range(200):
        if decode.wants_steps:
            decode.step()
        world.network.deliver_all()
        world.clock.now += 0.1
    assert decode.recomputed == [f"{key}-{2:08x}"]
    assert decode.counts["disagg_kv_recomputed_requests"] == {"lost": 1}
    assert not targets & set(decode.done[f"{key}-{2:08x}"].blocks)
    assert decode.counts["disagg_kv_blocks_quarantined"] == {"": len(targets)}


def see_prefill_refuse_connections(world: World, decode: SimEngine) -> None:
    """Prefill dies for good; half a minute passes on decode."""
    world.kill(world.prefill)
    world.network.refusing.add(world.prefill.address)
    for _ in range(300):
        if decode.wants_steps:
            decode.step()
        world.network.deliver_all()
        world.clock.now += 0.1
        world._alarms()


def test_a_refused_connection_proves_a_dead_writer() -> None:
    world = World(load_timeout_seconds=60)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    step_until_posted(world, "p")
    see_prefill_refuse_connections(world, decode)
    assert decode.counts["disagg_kv_blocks_quarantined"] == {"": 0}
    assert decode.pool.free() == decode.pool.total


def test_one_refused_connection_gives_back_all_that_the_dead_writer_was_to_write() -> None:
    world = World(load_timeout_seconds=60)
    decode = world.decodes[0]
    for number in range(8):
        world.turn([number] * 6, decode)
    while len(world.prefill.worker.posted) < 8:
        world.run_without_landing()
    see_prefill_refuse_connections(world, decode)
    assert decode.counts["disagg_kv_blocks_quarantined"] == {"": 0}
    assert decode.pool.free() == decode.pool.total


def test_a_prompt_that_waits_longer_than_allowed_goes_on_without() -> None:
    world = World(max_wait_milliseconds=500)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()
    decode.pool.reset()
    world.prefill.pool.reset()
    request = FakeRequest(
        "cmpl-late-0-00000001", PROMPT, 1,
        {"do_remote_decode": True, "disagg": {"version": 1, "decode": {"host": "d0", "control_port": 5700}}},
    )  # fmt: skip
    world.prefill.add(request)
    lost = world.network.messages
    started = world.clock.now
    while not request.generated:
        world.prefill.step()
        lost.clear()
        world.clock.now += 0.05
        assert world.clock.now - started < 2
    assert world.prefill.counts["disagg_kv_ondemand_requests"]["timeout"] == 1


def test_a_decode_that_has_vanished_is_not_waited_for_again_and_again() -> None:
    world = World(max_wait_milliseconds=500)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()
    world.kill(decode)
    waited = []
    for number in range(4):
        key = world.turn([number] * 20, decode, decode_leg=False)
        began = world.clock.now
        while f"{key}-{1:08x}" not in world.prefill.done:
            world.run(rounds=1)
        waited.append(world.clock.now - began)
        world.run(rounds=30, seconds=0.1)
    assert waited[0] > 0.4, "nobody knows yet"
    assert waited[3] < 0.1, "it has not even said who it is"


def test_a_next_turn_during_the_write_back_waits_for_it_and_no_longer() -> None:
    world = World(max_wait_milliseconds=5000)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    write = step_until_posted(world, "d0")
    answer = next(iter(decode.done.values())).generated
    key = world.turn([*PROMPT, *answer, *range(10)], decode)
    for _ in range(20):
        world.run_without_landing()
    request = world.prefill.requests[f"{key}-{1:08x}"]
    assert request.state == "waiting", "the block it lacks is on its way"
    started = world.clock.now
    world.land(write)
    world.run(rounds=30)
    assert f"{key}-{1:08x}" in world.prefill.done
    assert world.clock.now - started < 1, "it does not wait for more than is coming"
    world.check()


def test_a_dead_prefill_is_noticed_by_the_refused_connection() -> None:
    world = World(load_timeout_seconds=60)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    step_until_posted(world, "p")
    world.kill(world.prefill)
    world.network.refusing.add(world.prefill.address)
    died = world.clock.now
    while f"{key}-{2:08x}" not in decode.done:
        decode.step()
        world.network.deliver_all()
        world.clock.now += 0.1
    assert world.clock.now - died < 6, "one unanswered question and a look are enough"
    assert decode.counts["disagg_kv_recomputed_requests"] == {"lost": 1}


def test_two_prefill_legs_of_one_turn_hold_its_prompt_once() -> None:
    """Several samples of a request share the id that the legs are joined by."""
    world = World()
    decode = {"version": 1, "decode": {"host": "d0", "control_port": 5700}}
    for sample in range(2):
        params = {"do_remote_decode": True, "do_remote_prefill": False, "disagg": decode}
        world.prefill.add(FakeRequest(f"{sample}_cmpl-{7:032x}-{sample:08x}", list(range(18)), 1, params))
    world.run()
    assert world.prefill.pool.free() < world.prefill.pool.total
    world.settle()
    world.check_nothing_leaks()


def run_with_busy_prefill(world: World, rounds: int) -> list[Message]:
    """Let everything go on but that prefill's engine comes to no offer; returns the offers."""
    offers: list[Message] = []
    for _ in range(rounds):
        for engine in world.engines:
            if engine.wants_steps:
                engine.step()
        offers += [m for m in world.network.messages if m.text == "Offer"]
        world.network.messages[:] = [m for m in world.network.messages if m.text != "Offer"]
        world.network.deliver_all()
        for write in list(world.prefill.worker.posted):
            world.land(write)
        world.clock.now += 0.01
    return offers


def test_an_offer_pins_nothing_until_it_is_granted() -> None:
    world = World(link=False)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    (offer,) = run_with_busy_prefill(world, 60)
    assert decode.pool.free() == decode.pool.total
    offer.deliver()
    world.run()
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"] == {"": BLOCK}


def test_unanswered_offers_never_stand_in_the_way_of_a_request() -> None:
    """Decode is full of what it offers to a prefill that is busy with a long step."""
    world = World(total=48)
    decode = world.decodes[0]
    for number in range(6):
        world.turn([number, *PROMPT], decode)
    assert len(run_with_busy_prefill(world, 100)) == 6
    request = decode.add(FakeRequest("big", [9] * (48 * BLOCK - 2), 1))
    decode.step()
    assert request.id in decode.done, "it takes what is offered, and waits for nobody"
    world.run(rounds=400, seconds=0.1)
    assert decode.counts["disagg_kv_writeback_offers"] == {"timeout": 6}
    world.check()
    world.check_nothing_leaks()


def test_what_was_evicted_before_prefill_granted_it_is_not_written() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    for _ in range(300):
        for engine in world.engines:
            if engine.wants_steps:
                engine.step()
            for write in list(world.prefill.worker.posted):
                world.land(write)
        if any(m.text == "Grant" for m in world.network.messages):
            break
        world.network.deliver_all()
        world.clock.now += 0.01
    grant = pull(world, "Grant")
    # Every block of decode is used by another request, which then holds the same ids under other hashes.
    decode.add(FakeRequest("other", [9] * (decode.pool.total * BLOCK - 2), 1))
    decode.step()
    grant.deliver()
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"evicted": 1}
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    assert world.prefill.pool.free() == world.prefill.pool.total, "prefill has its blocks back at once"


def test_a_turn_that_ends_before_prefill_has_introduced_itself_is_written_back() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    slow: list[Message] = []
    for _ in range(400):
        # The greeting takes longer than decode waits for it, and than the whole turn.
        slow += [m for m in world.network.messages if m.text == "Hello" and m.source == decode.engine_id]
        world.network.messages[:] = [m for m in world.network.messages if m not in slow]
        world.run(rounds=1, seconds=0.02)
        if decode.done:
            break
    assert f"{key}-{2:08x}" in decode.done
    assert "disagg_kv_writeback_offers" not in decode.counts
    for message in slow:
        message.deliver()
    world.run(rounds=100)
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}
    tokens = PROMPT + decode.done[f"{key}-{2:08x}"].generated
    hashes = FakeRequest("x", tokens, 1).hashes
    assert sum(world.prefill.pool.find(h) is not None for h in hashes) == (len(tokens) - 1) // BLOCK


def test_a_turns_end_waits_for_an_address_that_never_answers_no_longer_than_allowed() -> None:
    world = World()
    decode = world.decodes[0]
    world.kill(world.prefill)
    params = {
        "do_remote_prefill": True,
        "disagg": {"version": 1, "prefill": {"host": "p", "control_port": 5700}},
    }
    decode.add(FakeRequest(f"cmpl-{1:032x}-0-{2:08x}", PROMPT, 4, params))
    for _ in range(400):
        if decode.wants_steps:
            decode.step()
        world.clock.now += 0.05
        world._alarms()
    assert decode.counts["disagg_kv_writeback_offers"] == {"peer": 1}
    assert decode.channel.alarm is None, "an idle engine is not woken for it any more"
