"""Streaming write-back between two simulated engines: what moves when, and what becomes of it in trouble."""

from __future__ import annotations

import itertools

import pytest

from connector.tests.unit.sim_contents import BLOCK
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.simulation import World
from disagg_connector.streams import STEPS_APART

PROMPT = list(range(100, 118))  # four full blocks and a half
TOKENS = 60
BATCH = 2


def streaming(**config: object) -> World:
    return World(writeback_mode="streaming", writeback_batch_blocks=BATCH, total=256, **config)


def answer_of(engine: SimEngine, key: str) -> list[int]:
    return engine.done[f"{key}-{2:08x}"].generated


def reference(prompt: list[int], tokens: int) -> list[int]:
    world = World()
    request = world.prefill.add(FakeRequest("plain", prompt, tokens))
    world.run(rounds=tokens + 20)
    return request.generated


def written_at_prefill(engine: SimEngine, tokens: list[int]) -> int:
    return sum(engine.pool.find(h) is not None for h in FakeRequest("x", tokens, 1).hashes)


def run_until_generated(world: World, key: str, tokens: int) -> FakeRequest:
    """Let a turn go on until decode has generated so much; it is still running then."""
    request = world.decodes[0].requests[f"{key}-{2:08x}"]
    for _ in range(2000):
        if len(request.generated) >= tokens:
            return request
        world.run(rounds=1)
    raise AssertionError(f"{request.state} after {len(request.generated)} tokens")


def hold_first_batch(world: World) -> None:
    """Let a turn go on until decode has posted a batch, and leave that on its way."""
    for _ in range(300):
        if world.decodes[0].worker.posted:
            return
        world.run_without_landing()
        for write in list(world.prefill.worker.posted):
            world.land(write)
    raise AssertionError("decode never posted a batch")


def inserted(world: World) -> int:
    """Blocks that have been written back."""
    return world.prefill.counts.get("disagg_kv_writeback_inserted_tokens", {}).get("", 0) // BLOCK


def test_blocks_reach_prefill_while_decode_generates() -> None:
    world = streaming()
    key = world.turn(PROMPT, world.decodes[0], TOKENS)
    before = 0
    for tokens in (20, 40, 56):
        request = run_until_generated(world, key, tokens)
        full = (request.num_tokens - 1) // BLOCK
        assert written_at_prefill(world.prefill, request.tokens) >= full - 2 * BATCH
        assert inserted(world) > before
        before = inserted(world)
    world.run()
    assert answer_of(world.decodes[0], key) == reference(PROMPT, TOKENS)
    whole = (len(PROMPT) + TOKENS - 1) // BLOCK
    assert written_at_prefill(world.prefill, PROMPT + answer_of(world.decodes[0], key)) == whole
    world.check()
    world.settle()
    world.check_nothing_leaks()


def test_the_turns_end_moves_less_than_two_batches() -> None:
    world = streaming()
    key = world.turn(PROMPT, world.decodes[0], TOKENS)
    run_until_generated(world, key, TOKENS - 1)
    streamed = inserted(world)
    world.run()
    assert 0 <= inserted(world) - streamed <= 2 * BATCH
    assert streamed >= TOKENS // BLOCK - 2 * BATCH


def test_only_what_is_new_is_named_until_the_end() -> None:
    world = streaming()
    decode = world.decodes[0]
    named: list[tuple[int, int]] = []
    offer = decode.scheduler.offers.offer

    def heard(peer, chain, *rest, **more):  # type: ignore[no-untyped-def]
        named.append((chain.skip, len(chain.hashes)))
        offer(peer, chain, *rest, **more)

    decode.scheduler.offers.offer = heard  # type: ignore[method-assign]
    world.turn(PROMPT, decode, TOKENS)
    world.run(rounds=120)
    *batches, last = named
    assert len(batches) >= 4
    assert all(skip >= 3 and count <= 2 * BATCH + 1 for skip, count in batches)
    assert last == (0, (len(PROMPT) + TOKENS - 1) // BLOCK), "the end names the whole chain"


def test_the_next_turn_hits_all_that_was_streamed() -> None:
    world = streaming()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, TOKENS)
    world.run(rounds=120)
    history = PROMPT + answer_of(decode, key)
    second = world.turn([*history, 7, 8, 9], decode, 4)
    assert written_at_prefill(world.prefill, history) == (len(history) - 1) // BLOCK
    world.run()
    assert answer_of(decode, second) == reference([*history, 7, 8, 9], 4)


def test_a_client_that_leaves_in_the_middle_leaves_what_was_computed_at_prefill() -> None:
    world = streaming()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, 200)
    request = run_until_generated(world, key, 41)
    decode.abort(request.id)
    world.run()
    assert written_at_prefill(world.prefill, request.tokens) == (request.num_tokens - 1) // BLOCK
    world.check()
    world.settle()
    world.check_nothing_leaks()


def test_a_batch_under_way_at_the_turns_end_is_waited_for() -> None:
    """Prefill would deny the rest as a second copy of it."""
    world = streaming()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, TOKENS)
    hold_first_batch(world)
    for _ in range(2 * TOKENS):
        world.run_without_landing()
    assert f"{key}-{2:08x}" in decode.done
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 2}
    history = PROMPT + answer_of(decode, key)
    assert written_at_prefill(world.prefill, history) == (len(history) - 1) // BLOCK
    world.settle()
    world.check_nothing_leaks()


def test_a_prefill_that_denies_is_asked_once_more_at_the_end() -> None:
    world = streaming(writeback_min_free_percent=100)
    decode = world.decodes[0]
    world.turn(PROMPT, decode, TOKENS)
    world.run(rounds=120)
    assert decode.counts["disagg_kv_writeback_offers"] == {"no_blocks": 2}


@pytest.mark.parametrize("reason", ["error", "epoch"])
def test_a_prefill_that_has_lost_the_prompt_is_given_the_whole_chain(reason: str) -> None:
    world = streaming()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, TOKENS)
    run_until_generated(world, key, 12)
    streamed = inserted(world)
    if reason == "epoch":
        assert world.prefill.reset()
    else:
        world.prefill.pool.reset()  # evicted: it has not been told to forget, it just has no room
    request = run_until_generated(world, key, 40)
    assert written_at_prefill(world.prefill, request.tokens) >= 8, "all of it, the prompt included"
    assert inserted(world) > streamed + 8
    assert decode.counts["disagg_kv_writeback_offers"][reason] == 1, "once, and no more"
    world.run()
    world.check()


def test_a_prefill_that_restarts_in_the_middle_gets_everything_at_the_end() -> None:
    world = streaming()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, TOKENS)
    run_until_generated(world, key, 20)
    world.kill(world.prefill)
    world.prefill = SimEngine("p", "prefill", world.network, 256, boot=1, **world.config)
    world.run(rounds=120)
    history = PROMPT + answer_of(decode, key)
    assert written_at_prefill(world.prefill, history) == (len(history) - 1) // BLOCK
    world.check()
    world.settle()
    world.check_nothing_leaks()


def test_a_turn_that_decode_computed_itself_is_streamed_from_its_first_block() -> None:
    world = streaming(load_timeout_seconds=1)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, TOKENS, prefill_leg=False)
    request = run_until_generated(world, key, 30)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"timeout": 1}
    assert written_at_prefill(world.prefill, request.tokens) >= (len(PROMPT) + 30) // BLOCK - 2 * BATCH
    world.run()


def test_a_preempted_turn_goes_on_being_streamed() -> None:
    world = streaming()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, TOKENS)
    request = run_until_generated(world, key, 20)
    decode._preempt(request)
    run_until_generated(world, key, 50)
    assert written_at_prefill(world.prefill, request.tokens) >= (len(PROMPT) + 50) // BLOCK - 2 * BATCH - 1
    world.run()
    world.check()
    world.settle()
    world.check_nothing_leaks()


def test_a_next_turn_in_the_middle_of_a_stream_waits_for_its_blocks_and_asks_for_the_rest() -> None:
    world = streaming(max_wait_milliseconds=5000)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, 200)
    request = run_until_generated(world, key, 30)
    for _ in range(300):
        if decode.worker.posted:
            break
        world.run_without_landing()
    assert decode.worker.posted
    prompt = [*request.tokens[: len(PROMPT) + 29], 7, 7, 7, 7, 7]
    second = world.turn(prompt, decode, 4)
    world.run_without_landing()
    world.run()
    assert answer_of(decode, second) == reference(prompt, 4)
    hits = (len(PROMPT) + 29) // BLOCK
    assert written_at_prefill(world.prefill, prompt) >= hits
    world.check()


@pytest.mark.parametrize("running", [1, 8])
def test_batches_are_offered_some_steps_apart(running: int) -> None:
    world = World(writeback_mode="streaming", writeback_batch_blocks=1, total=1024)
    decode = world.decodes[0]
    for number in range(running):
        world.turn([number, *PROMPT], decode, TOKENS)
    offered: list[int] = []
    for step in range(200):
        before, streams = len(world.network.messages), len(decode.requests)
        decode.step()
        # When a turn ends its rest is offered at once.
        if len(decode.requests) == streams:
            offered += [step for m in world.network.messages[before:] if m.text == "Offer"]
        world.prefill.step()
        world.network.deliver_all()
        for engine in world.engines:
            for write in list(engine.worker.posted):
                world.land(write)
        world.clock.now += 0.01
    assert len(offered) >= 5
    assert all(later - earlier >= STEPS_APART for earlier, later in itertools.pairwise(offered))
    assert inserted(world) >= running * (TOKENS // BLOCK - 1)


def test_turns_that_do_not_get_on_are_not_looked_at_in_every_step() -> None:
    world = World(writeback_mode="streaming", writeback_batch_blocks=4, total=2048)
    decode = world.decodes[0]
    keys = [world.turn([number, *PROMPT], decode, 500) for number in range(16)]
    run_until_generated(world, keys[-1], 14)
    streams = decode.scheduler.streams
    looked = 0
    look = streams._offer_batch

    def counting(stream):  # type: ignore[no-untyped-def]
        nonlocal looked
        looked += 1
        return look(stream)

    streams._offer_batch = counting  # type: ignore[method-assign]
    for request in decode.requests.values():
        request.state = "stalled"
    for _ in range(160):
        decode.step()
    assert looked <= 16 * (160 // (4 * BLOCK) + 2)
