"""Two engines under random faults: wrong KV is never used, nothing hangs, nothing leaks.

Messages are lost and overtake each other, writes are late, fail, land after their writer has reported
them, or land unannounced; clients leave; engines die with writes on their way and come back as another boot;
caches are reset. `simulation` raises as soon as a write hits a block that is not its own, or an engine goes on
from KV that is not its request's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.tests.unit.sim_contents import ViolationError
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.sim_worker import Write
from connector.tests.unit.simulation import World

# How long data may still be on its way after its writer has reported it, or has died.
REPORTED_LATE = 1.0
DEAD_LATE = 5.0


class Trouble:
    """Draws one event after another."""

    def __init__(self, draw: random.Random, total: int, tokens: int = 5, **config: Any) -> None:
        self.draw = draw
        self.tokens = tokens
        self.world = World(decodes=2, total=total, kv_lease_duration=20, load_timeout_seconds=8, **config)
        self.histories: list[list[int]] = [[i + 1] * 9 for i in range(3)]
        self.asked: list[tuple[str, SimEngine, list[int]]] = []
        self.late: list[tuple[float, Write]] = []
        self.boots = 0

    def run(self, events: int) -> None:
        kinds: list[tuple[int, Callable[[], None]]] = [
            (6, self.turn), (60, self.step), (60, self.deliver), (4, self.lose), (20, self.land),
            (3, self.land_late), (2, self.break_write), (1, self.land_silently), (12, self.wait),
            (1, self.wait_long), (2, self.leave), (1, self.die), (1, self.reset),
        ]  # fmt: skip
        weights = [weight for weight, _ in kinds]
        for _ in range(events):
            (_, event), *_ = self.draw.choices(kinds, weights)
            event()
            self.land_what_is_late()
        self.calm_down()

    def turn(self) -> None:
        history = self.draw.choice(self.histories)
        prompt = history + [self.draw.randrange(50) for _ in range(self.draw.randrange(1, 7))]
        decode = self.draw.choice(self.world.decodes)
        legs = self.draw.choice([(True, True)] * 6 + [(True, False), (False, True)])
        key = self.world.turn(prompt, decode, self.tokens, prefill_leg=legs[0], decode_leg=legs[1])
        if legs[1]:
            self.asked.append((key, decode, prompt))
        if len(prompt) < 60:
            self.histories[self.draw.randrange(3)] = prompt + expected(prompt, self.tokens)

    def step(self) -> None:
        self.draw.choice(self.world.engines).step()

    def deliver(self) -> None:
        if messages := self.world.network.messages:
            messages.pop(self.draw.randrange(min(4, len(messages)))).deliver()

    def lose(self) -> None:
        if messages := self.world.network.messages:
            messages.pop(self.draw.randrange(len(messages)))

    def land(self) -> None:
        if write := self.some_write():
            self.world.land(write)

    def break_write(self) -> None:
        if write := self.some_write():
            self.world.land(write, fail=True)

    def land_silently(self) -> None:
        if write := self.some_write():
            self.world.land(write, announce=False)

    def land_late(self) -> None:
        """The writer sees its write through before the data is there, as over some fabrics."""
        if write := self.some_write():
            write.source.posted.remove(write)
            write.source.through(write, failed=self.draw.random() < 0.5)
            self.late.append((self.world.clock() + self.draw.random() * REPORTED_LATE, write))

    def wait(self) -> None:
        self.pass_time(self.draw.random() * 0.3)

    def wait_long(self) -> None:
        for _ in range(self.draw.randrange(60)):
            self.pass_time(0.25)

    def pass_time(self, seconds: float) -> None:
        self.world.clock.now += seconds
        # What is on its way arrives when it is due, whatever the engines do then.
        self.land_what_is_late()
        self.world._alarms()

    def leave(self) -> None:
        engine = self.draw.choice(self.world.engines)
        if engine.requests:
            engine.abort(self.draw.choice(list(engine.requests)))

    def die(self) -> None:
        engine = self.draw.choice(self.world.engines)
        self.world.kill(engine)
        dead = self.world.clock() + DEAD_LATE
        for write in engine.worker.posted:
            if self.draw.random() < 0.7:
                self.late.append((self.world.clock() + self.draw.random() * DEAD_LATE, write))
        engine.worker.posted.clear()
        self.late = [(min(at, dead) if w.source is engine.worker else at, w) for at, w in self.late]
        self.boots += 1
        again = SimEngine(
            engine.name, engine.role, self.world.network, engine.pool.total, self.boots, **self.world.config
        )
        if engine.role == "prefill":
            self.world.prefill = again
        else:
            self.world.decodes.append(again)

    def reset(self) -> None:
        self.draw.choice(self.world.engines).reset()

    def some_write(self) -> Write | None:
        writes = [write for engine in self.world.engines for write in engine.worker.posted]
        return self.draw.choice(writes) if writes else None

    def land_what_is_late(self) -> None:
        for item in [item for item in self.late if self.world.clock() >= item[0]]:
            self.late.remove(item)
            self.world.put(item[1])

    def calm_down(self) -> None:
        """No more faults: everything must come to its end."""
        for _ in range(400):
            self.land_what_is_late()
            self.world.run(rounds=1, seconds=0.3)
        self.world.settle()
        self.world.check()
        self.world.check_nothing_leaks()
        for engine in self.world.engines:
            if engine.requests:
                raise ViolationError(f"{engine.name} never ended {list(engine.requests)}")
        for key, decode, prompt in self.asked:
            request = decode.done.get(f"{key}-{2:08x}")
            if request is not None and len(request.generated) == self.tokens:
                assert request.generated == expected(prompt, self.tokens)


def expected(prompt: list[int], tokens: int) -> list[int]:
    request = FakeRequest("x", prompt, tokens)
    for _ in range(tokens):
        request.generated.append((sum(request.tokens) * 31 + len(request.tokens)) % 50)
    return request.generated


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0, max_value=10**9), st.sampled_from([40, 80, 200]))
def test_no_fault_gives_wrong_kv_or_leaks_blocks(seed: int, total: int) -> None:
    Trouble(random.Random(seed), total).run(events=400)


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0, max_value=10**9), st.sampled_from([40, 80, 200]), st.integers(1, 3))
def test_no_fault_in_the_middle_of_a_stream_gives_wrong_kv_or_leaks_blocks(
    seed: int, total: int, batch: int
) -> None:
    config = {"writeback_mode": "streaming", "writeback_batch_blocks": batch}
    Trouble(random.Random(seed), total, tokens=25, **config).run(events=500)


def test_the_simulation_notices_a_block_that_is_reused_too_early() -> None:
    """Without this the property above could hold because nothing is looked at."""
    world = World()
    decode = world.decodes[0]
    world.turn(list(range(1, 15)), decode)
    for _ in range(200):
        world.run(rounds=1, seconds=0)
        world.network.deliver_all()
        world.prefill.step()
        if world.prefill.worker.posted:
            break
    write = world.prefill.worker.posted[0]
    request = next(iter(decode.requests.values()))
    decode.pool.unpin(request.blocks)
    request.blocks = []
    with pytest.raises(ViolationError, match="which is free"):
        world.land(write)
