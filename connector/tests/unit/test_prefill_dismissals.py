"""The router tells prefill that decode will not come: prefill lets go at once, and never of what is being fetched."""

from __future__ import annotations

import pytest

from connector.tests.unit.sim_contents import BLOCK
from connector.tests.unit.sim_engine import FakeRequest
from connector.tests.unit.simulation import World
from disagg_connector.protocol import turn_of

PROMPT = [(i * 7) % 50 for i in range(3 * BLOCK + 3)]


def dismiss(world: World, key: str) -> None:
    """As the router does: a small request that carries nothing but the dismissal."""
    params = {"disagg": {"version": 1, "dismiss": turn_of(key)}}
    world.prefill.add(FakeRequest(f"cmpl-{'f' * 32}-0-{9:08x}", [0], 1, params))


def in_use(world: World) -> int:
    return world.prefill.pool.total - world.prefill.pool.free()


def test_a_computed_prompt_is_let_go_at_once() -> None:
    world = World(kv_lease_duration=30)
    key = world.turn(PROMPT, world.decodes[0], decode_leg=False)
    world.run()
    assert in_use(world) > 0
    dismiss(world, key)
    world.run(rounds=5)
    assert in_use(world) == 0


@pytest.mark.parametrize("before", [True, False])
def test_a_prompt_not_computed_yet_is_not_kept(before: bool) -> None:
    """Also if its leg arrives after the dismissal, out of the front end's queue."""
    world = World(kv_lease_duration=30)
    if before:
        dismiss(world, f"cmpl-{1:032x}-0")
    key = world.turn(PROMPT, world.decodes[0], decode_leg=False)
    if not before:
        dismiss(world, key)
    world.run(rounds=20)
    assert in_use(world) == 0


def test_what_decode_is_fetching_goes_on() -> None:
    world = World()
    decode = world.decodes[0]
    key = world.turn(PROMPT, decode)
    while not world.prefill.worker.posted:
        world.run_without_landing()
    dismiss(world, key)
    world.run()
    assert "disagg_kv_recomputed_requests" not in decode.counts
    world.settle()
    world.check_nothing_leaks()


def test_a_decode_that_comes_all_the_same_computes() -> None:
    world = World()
    dismiss(world, f"cmpl-{1:032x}-0")
    decode = world.decodes[0]
    world.turn(PROMPT, decode)
    world.run(rounds=400)
    assert decode.counts["disagg_kv_recomputed_requests"] == {"gone": 1}
    world.settle()
    world.check_nothing_leaks()


def test_other_turns_are_kept() -> None:
    world = World(kv_lease_duration=30)
    world.turn(PROMPT, world.decodes[0], decode_leg=False)
    world.run()
    held = in_use(world)
    dismiss(world, f"cmpl-{77:032x}-0")
    world.run(rounds=5)
    assert in_use(world) == held


def test_the_routers_id_is_found_in_what_the_front_end_makes_of_it() -> None:
    turn = "0123456789abcdef0123456789abcdef"
    assert turn_of(f"chatcmpl-{turn}") == turn
    assert {turn_of(f"cmpl-{turn}-{prompt}") for prompt in (0, 12)} == {turn}
    assert turn_of(f"resp_{turn}_0") == turn
    assert turn_of("cmpl-somebody-elses-0") == "cmpl-somebody-elses-0"
