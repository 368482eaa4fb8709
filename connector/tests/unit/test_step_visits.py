"""A step with nothing due costs the same with hundreds of turns under way as with one.

Counted in the connector's own lines of Python, not in seconds: a machine's noise cannot break it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import disagg_connector
from connector.tests.unit.sim_engine import SimEngine
from connector.tests.unit.simulation import World

HERE = disagg_connector.__path__[0]
MANY = 256


def lines(action: Callable[[], Any]) -> int:
    """How many lines of the connector run in `action`; a comprehension counts each of its rounds."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def hooks_of_a_step(engine: SimEngine) -> None:
    """What vLLM calls in every step, no request beginning or ending in it."""
    scheduler = engine.scheduler
    _ = scheduler.needs_steps
    scheduler.orders()
    scheduler.reported(None, set(), set())
    scheduler.step_is_over()


def cost(engine: SimEngine) -> int:
    hooks_of_a_step(engine)  # what is due now is done here
    return lines(lambda: hooks_of_a_step(engine))


def running_on_decode(turns: int) -> World:
    world = World(total=turns * 12 + 40, load_timeout_seconds=1000)
    for number in range(turns):
        world.turn([number, *range(20)], world.decodes[0], tokens=1000)
    world.run(rounds=12)
    running = [r for r in world.decodes[0].requests.values() if r.state == "running"]
    assert len(running) == turns
    return world


def loading_on_decode(turns: int) -> World:
    """Prefill's legs do not come: every load of decode's is open, and registered on prefill."""
    world = World(total=turns * 12 + 40, load_timeout_seconds=1000)
    for number in range(turns):
        world.turn([number, *range(20)], world.decodes[0], prefill_leg=False)
    world.run(rounds=6)
    loading = [r for r in world.decodes[0].requests.values() if r.state == "loading"]
    assert len(loading) == turns
    return world


def waiting_on_prefill(turns: int) -> World:
    """Decode's legs do not come: every prompt is pinned on prefill."""
    world = World(total=turns * 12 + 40, load_timeout_seconds=1000)
    for number in range(turns):
        world.turn([number, *range(20)], world.decodes[0], decode_leg=False)
    world.run(rounds=12)
    assert world.prefill.pool.total - world.prefill.pool.free() >= turns
    return world


def writing_back(turns: int) -> World:
    """Every turn has ended and been granted; no write gets on."""
    world = World(total=turns * 24 + 40, load_timeout_seconds=1000)
    for number in range(turns):
        world.turn([number, *range(20)], world.decodes[0], tokens=20)
    for _ in range(40):
        for write in list(world.prefill.worker.posted):
            world.land(write)
        world.run_without_landing()
    assert len(world.decodes[0].worker.posted) == turns
    return world


@pytest.mark.parametrize("state", [running_on_decode, loading_on_decode, waiting_on_prefill, writing_back])
def test_a_step_costs_the_same_with_one_turn_and_with_many(state: Callable[[int], World]) -> None:
    few, many = state(1), state(MANY)
    for one, other in zip(few.engines, many.engines, strict=True):
        assert cost(other) <= cost(one) + 10, f"{other.name} looks at every turn in every step"


def test_the_counting_sees_a_walk_over_all_turns() -> None:
    world = running_on_decode(MANY)
    scheduler = world.decodes[0].scheduler
    turns = scheduler.loads._turns

    def walks() -> None:
        hooks_of_a_step(world.decodes[0])
        for turn in turns.values():
            scheduler.loads._close(turn, "loaded")

    assert lines(walks) > MANY
