"""Turns between two simulated engines: what moves, and what becomes of it."""

from __future__ import annotations

from connector.tests.unit.sim_contents import BLOCK
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.simulation import World

PROMPT = list(range(100, 118))  # four full blocks and a half


def answer_of(engine: SimEngine, key: str) -> list[int]:
    return engine.done[f"{key}-{2:08x}"].generated


def reference(prompt: list[int], tokens: int) -> list[int]:
    world = World()
    request = world.prefill.add(FakeRequest("plain", prompt, tokens))
    world.run()
    return request.generated


def test_a_turn_is_loaded_from_prefill_and_written_back() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    world.run()
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert world.prefill.counts["disagg_kv_push_tokens"] == {"prefill_to_decode": len(PROMPT)}
    # 18 + 6 tokens, the last one never computed: five full blocks, of which prefill had four.
    assert decode.counts["disagg_kv_push_tokens"] == {"decode_to_prefill": BLOCK}
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"] == {"": BLOCK}
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}
    world.check()
    world.settle()
    world.check_nothing_leaks()


def test_the_next_turn_is_a_local_hit_on_prefill() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    world.run()
    prompt = PROMPT + answer_of(decode, key) + [7, 8, 9]
    second = world.turn(prompt, decode)
    hits = sum(world.prefill.pool.find(h) is not None for h in FakeRequest("x", prompt, 1).hashes)
    assert hits == (len(PROMPT) + 6 - 1) // BLOCK
    world.run()
    assert answer_of(decode, second) == reference(prompt, 6)


def test_a_cold_prefill_asks_decode_for_the_conversation() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    world.run()
    prompt = PROMPT + answer_of(decode, key) + [7, 8, 9]
    world.prefill.pool.reset()
    second = world.turn(prompt, decode)
    world.run()
    assert world.prefill.counts["disagg_kv_ondemand_requests"]["served"] == 1
    assert world.prefill.counts["disagg_kv_writeback_inserted_tokens"][""] > BLOCK
    assert answer_of(decode, second) == reference(prompt, 6)
    world.settle()
    world.check_nothing_leaks()


def test_without_a_prefill_leg_decode_computes_after_a_while() -> None:
    world = World(load_timeout_seconds=4)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, prefill_leg=False)
    world.run(rounds=60, seconds=0.1)
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"unknown": 1}
    world.settle()
    world.check_nothing_leaks()


def test_without_a_decode_leg_prefill_lets_go_after_its_lease() -> None:
    world = World(kv_lease_duration=30)
    world.turn(PROMPT, world.decodes[0], decode_leg=False)
    world.run()
    assert world.prefill.pool.free() < world.prefill.pool.total
    world.settle(60)
    world.check_nothing_leaks()


def test_a_decode_that_gives_up_early_frees_prefill_at_once() -> None:
    world = World(kv_lease_duration=30)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    decode.abort(f"{key}-{2:08x}")
    world.run()
    world.check_nothing_leaks()


def test_different_prompts_on_the_two_legs_are_never_mixed() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, prefill_leg=False)
    other = [*PROMPT[:-1], 1]
    world.prefill.add(
        FakeRequest(f"{key}-{1:08x}", other, 1, {"do_remote_decode": True, "disagg": {"version": 1}})
    )
    world.run(rounds=400)
    assert answer_of(decode, key) == reference(PROMPT, 6)
    assert sum(decode.counts["disagg_kv_recomputed_requests"].values()) == 1


def test_engines_of_different_models_exchange_nothing() -> None:
    world = World()
    stranger = SimEngine("d9", "decode", world.network, 64, model="another")
    world.decodes.append(stranger)
    key = world.turn(PROMPT, stranger)
    world.run(rounds=400)
    assert answer_of(stranger, key) == reference(PROMPT, 6)
    assert stranger.counts["disagg_kv_recomputed_requests"] == {"fingerprint": 1}
    assert "disagg_kv_push_tokens" not in world.prefill.counts


def test_an_offer_that_would_leave_prefill_short_is_denied() -> None:
    world = World(writeback_min_free_percent=100)
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"no_blocks": 1}
    assert "disagg_kv_writeback_inserted_tokens" not in world.prefill.counts


def test_a_reserve_takes_write_backs_when_blocks_are_short() -> None:
    world = World(writeback_min_free_percent=50, writeback_reserve_blocks=8, total=24)
    decode = world.decodes[0]
    world.prefill.step()
    reserved = world.prefill.pool.total - world.prefill.pool.free()
    assert reserved == 8
    world.turn(PROMPT, decode)
    world.run()
    assert decode.counts["disagg_kv_writeback_offers"] == {"granted": 1}


def test_a_commit_from_before_a_cache_reset_is_refused() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    for _ in range(200):
        world.run(rounds=1)
        if decode.worker.posted:
            break
        # Stop before the write-back's write lands: run() lands it only in its own round.
        if any(m.text == "Grant" for m in world.network.messages):
            break
    world.prefill.scheduler.lifecycle.resetting()
    world.run()
    world.check()


def test_nothing_is_written_back_when_switched_off() -> None:
    world = World(writeback_mode="off")
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()
    assert "disagg_kv_writeback_offers" not in decode.counts


def test_malformed_params_are_counted_and_the_request_goes_on() -> None:
    world = World()
    decode = world.decodes[0]
    broken = {"do_remote_prefill": True, "disagg": {"version": 1, "prefill": {"host": 5}}}
    request = decode.add(FakeRequest("cmpl-x-0-00000001", PROMPT, 3, broken))
    world.run()
    assert request.generated == reference(PROMPT, 3)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"params": 1}


def test_every_sample_of_a_request_is_loaded() -> None:
    """`n: 2` makes two requests on decode and, from the router, one on prefill."""
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode, decode_leg=False)
    params = {
        "do_remote_prefill": True,
        "disagg": {"version": 1, "prefill": {"host": "p", "control_port": 5700}},
    }
    samples = [decode.add(FakeRequest(f"{n}_{key}-{5:08x}", PROMPT, 3, dict(params))) for n in range(2)]
    world.run()
    for sample in samples:
        assert sample.generated == reference(PROMPT, 3)
    assert "disagg_kv_recomputed_requests" not in decode.counts
    assert world.prefill.counts["disagg_kv_push_tokens"] == {"prefill_to_decode": 2 * len(PROMPT)}
    world.settle()
    world.check_nothing_leaks()


def test_a_restarted_prefill_is_noticed_by_its_answer() -> None:
    world = World()
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run()
    world.kill(world.prefill)
    world.prefill = SimEngine("p", "prefill", world.network, 64, boot=1)
    key = world.turn([*PROMPT, 1], decode)
    world.run()
    assert answer_of(decode, key) == reference([*PROMPT, 1], 6)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"lost": 1}
    key = world.turn([*PROMPT, 2], decode)
    world.run()
    assert answer_of(decode, key) == reference([*PROMPT, 2], 6)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"lost": 1}, "the next turn knows the new boot"


def test_a_turn_that_did_not_wait_for_its_prefill_lets_it_go_when_it_answers() -> None:
    world = World(kv_lease_duration=600)
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    while f"{key}-{2:08x}" not in decode.done:  # the greeting is slow: nothing is delivered meanwhile
        world.prefill.step()
        decode.step()
        world.clock.now += 0.2
    assert decode.counts["disagg_kv_recomputed_requests"] == {"peer": 1}
    assert world.prefill.pool.free() < world.prefill.pool.total
    world.run()
    world.check_nothing_leaks()


def test_a_request_id_that_no_message_can_name_is_as_if_it_had_no_params() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    other = decode.requests[f"{key}-{2:08x}"]
    long = decode.add(FakeRequest(f"cmpl-{'x' * 300}-{2:08x}", [*PROMPT, 1], 6, other.params))
    world.run()
    assert long.generated == reference([*PROMPT, 1], 6)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"params": 1}
    assert answer_of(decode, key) == reference(PROMPT, 6)


def test_engines_shake_hands_once_a_boot_and_before_the_first_write() -> None:
    world = World(decodes=2)
    decode, other = world.decodes
    world.turn(PROMPT, decode)
    while not world.prefill.worker.posted:
        world.run_without_landing()
    assert decode.worker.connected == ["p-boot0"], "though its write-back comes only at the turn's end"
    assert world.prefill.worker.connected == ["d0-boot0"]
    world.run()
    for number in range(3):
        world.turn([*PROMPT, number], decode)
        world.turn([*PROMPT, number], other)
        world.run()
    assert decode.worker.connected == ["p-boot0"]
    assert sorted(world.prefill.worker.connected) == ["d0-boot0", "d1-boot0"]


def test_prefill_is_introduced_to_the_conversations_decode_when_the_prompt_arrives() -> None:
    world = World()
    world.turn(PROMPT, world.decodes[0], decode_leg=False)
    world.run(rounds=3)
    assert world.prefill.worker.connected == ["d0-boot0"]
