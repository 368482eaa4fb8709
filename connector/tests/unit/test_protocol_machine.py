"""The protocol under everything that can go wrong, and the proof that a broken rule would be noticed.

The exploration is short in `make test-unit`; `HYPOTHESIS_PROFILE=thorough` makes it take a quarter of an hour.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from connector.tests.unit.protocol_machine import ProtocolMachine
from connector.tests.unit.sim_contents import BLOCK, ViolationError
from connector.tests.unit.sim_engine import FakeRequest
from disagg_connector import landing, offers, protocol
from disagg_connector.direct import Direct
from disagg_connector.epochs import Standing
from disagg_connector.landing import HeldBlocks
from disagg_connector.lifecycle import Lifecycle
from disagg_connector.remembered import Remembered
from disagg_connector.scheduler import Scheduler
from disagg_connector.sending import Sender
from disagg_connector.writeback import WriteBackSide

TestProtocol = ProtocolMachine.TestCase
if os.environ.get("HYPOTHESIS_PROFILE") is None:
    TestProtocol.settings = settings.get_profile("quick")


# --- Rules, each broken, and a way on which that shows ---------------------------------------------

Patch = pytest.MonkeyPatch
Machine = ProtocolMachine
FIRST = (0, 0, 3, 0)
SECOND = (0, 0, 4, 0)


def publish_before_it_has_landed(patch: Patch) -> None:
    whole = WriteBackSide._publish_if_complete

    def at_once(self: WriteBackSide, landing: Any) -> None:
        landing.ranks_landed = 1
        whole(self, landing)

    patch.setattr(WriteBackSide, "_publish_if_complete", at_once)


def a_write_back_that_lands_late(machine: Machine) -> None:
    machine.turn(SECOND)
    machine.run_up_to("write of d0")
    machine.let_land_late(machine.pick_write(0), 10, failed=False)
    machine.stall(2)


def unpin_the_source_before_it_is_written(patch: Patch) -> None:
    fill = Sender.fill

    def unpinned(self: Sender, orders: Any) -> None:
        fill(self, orders)
        for job in orders.writes:
            self._pool.unpin(job.local)

    patch.setattr(Sender, "fill", unpinned)


def a_write_that_takes_a_while(machine: Machine) -> None:
    machine.turn(FIRST)
    machine.run_up_to("write of p")
    machine.stall(2)


def skip_the_epoch_check(patch: Patch) -> None:
    objection = Scheduler._objection

    def lenient(self: Scheduler, message: Any) -> str:
        reason = objection(self, message)
        return "" if reason == protocol.EPOCH else reason

    patch.setattr(Scheduler, "_objection", lenient)


def a_turn_after_a_reset(machine: Machine) -> None:
    machine.turn(FIRST)
    machine.go_on(6, 0.3)
    machine.reset(0, preempting=False)
    machine.turn(SECOND)
    machine.go_on(6, 0.3)


def skip_the_quarantine(patch: Patch) -> None:
    def free(self: HeldBlocks, xid: str, blocks: Any, peer: Any, request: str = "") -> None:
        self._pool.unpin(blocks)

    patch.setattr(HeldBlocks, "hold", free)


def a_client_that_leaves_during_the_write(machine: Machine) -> None:
    machine.turn(FIRST)
    machine.run_up_to("write of p")
    machine.leave(1, 0)
    machine.step(1)
    machine.step(1)
    machine.land(0)


def let_nothing_settle(patch: Patch) -> None:
    patch.setattr(landing, "SETTLE", 0.0)


def a_late_write_after_a_client_has_left(machine: Machine) -> None:
    machine.turn(FIRST)
    machine.run_up_to("write of p")
    machine.leave(1, 0)
    machine.let_land_late(machine.pick_write(0), 10, failed=True)
    machine.go_on(6, 0.01)
    machine.wait(20)


def hear_everything_twice(patch: Patch) -> None:
    patch.setattr(Remembered, "add", lambda self, name: True)


def a_load_that_arrives_twice(machine: Machine) -> None:
    machine.turn(FIRST)
    machine.trouble_with_a_message("Load", "twice", FIRST)
    machine.go_on(6, 0.3)
    machine.go_on(6, 0.3)


def write_whatever_is_in_the_blocks(patch: Patch) -> None:
    patch.setattr(offers, "is_", lambda now, then: True)


def a_grant_after_the_blocks_are_used_again(machine: Machine) -> None:
    machine.turn(SECOND)
    machine.run_up_to("Grant")
    decode = machine.world.decodes[0]
    decode.add(FakeRequest("big", [9] * (decode.pool.total * BLOCK - 2), 1))
    decode.step()
    machine.go_on(6, 0.01)


def call_all_weights_the_same(patch: Patch) -> None:
    patch.setattr(Standing, "generation", "boot")


def new_weights_on_prefill_alone(machine: Machine) -> None:
    machine.change_weights({0}, patient=True)
    machine.turn(FIRST)
    machine.go_on(6, 0.3)


def exchange_what_older_weights_have_left(patch: Patch) -> None:
    patch.setattr(Lifecycle, "changed_weights", lambda self: self._context.epochs.open("updating"))


def new_weights_under_a_used_cache(machine: Machine) -> None:
    machine.turn(SECOND)
    machine.go_on(6, 0.3)
    machine.change_weights({0, 1, 2}, patient=False)
    machine.turn((0, 1, 4, 0))
    machine.go_on(6, 0.3)


def answer_cancellations_of_what_the_ranks_already_write(patch: Patch) -> None:
    def forget(self: Direct, xid: str) -> None:
        self._flights.pop(xid, None)

    patch.setattr(Direct, "settle", forget)


def a_cancellation_that_overtakes_a_grant(machine: Machine) -> None:
    world = machine.world
    machine.turn(SECOND)
    machine.run_up_to("Grant")
    grant = next(message for message in world.network.messages if message.text == "Grant")
    world.network.messages.remove(grant)
    machine.reset(0, preempting=False)
    machine.step(0)
    world.network.deliver_all()
    grant.deliver()
    assert world.decodes[0].worker.posted
    machine.stall(4)
    machine.land(0)


def commit_whatever_has_become_of_the_epoch(patch: Patch) -> None:
    patch.setattr(Direct, "_may_commit", lambda self, flight: True)


def a_reset_during_a_write_back(machine: Machine) -> None:
    machine.turn(SECOND)
    machine.run_up_to("write of d0")
    machine.reset(1, preempting=False)
    machine.land(0)


def pin_nothing_before_it_is_granted(patch: Patch) -> None:
    reserve = Sender.reserve

    def unpinned(self: Sender, reservation: Any, on_done: Any) -> bool:
        done = reserve(self, reservation, on_done)
        if done:
            self._pool.unpin(reservation.blocks)
        return done

    patch.setattr(Sender, "reserve", unpinned)


def a_turns_end(machine: Machine) -> None:
    machine.turn(SECOND)
    machine.run_up_to("Grant")


BROKEN: list[tuple[Callable[[Patch], None], Callable[[Machine], None]]] = [
    (publish_before_it_has_landed, a_write_back_that_lands_late),
    (unpin_the_source_before_it_is_written, a_write_that_takes_a_while),
    (skip_the_epoch_check, a_turn_after_a_reset),
    (skip_the_quarantine, a_client_that_leaves_during_the_write),
    (let_nothing_settle, a_late_write_after_a_client_has_left),
    (hear_everything_twice, a_load_that_arrives_twice),
    (write_whatever_is_in_the_blocks, a_grant_after_the_blocks_are_used_again),
    (call_all_weights_the_same, new_weights_on_prefill_alone),
    (exchange_what_older_weights_have_left, new_weights_under_a_used_cache),
    (answer_cancellations_of_what_the_ranks_already_write, a_cancellation_that_overtakes_a_grant),
    (commit_whatever_has_become_of_the_epoch, a_reset_during_a_write_back),
    (pin_nothing_before_it_is_granted, a_turns_end),
]


def follow(way: Callable[[Machine], None]) -> None:
    """One way through the machine, with its invariants at the end and after calming down."""
    machine = Machine()
    try:
        machine.begin(total=40, acquainted=True)
        way(machine)
        machine.everything_is_as_it_must_be()
    finally:
        machine.teardown()


@pytest.mark.parametrize(("broken", "way"), BROKEN, ids=lambda f: f.__name__)
def test_a_broken_rule_is_noticed(
    broken: Callable[[Patch], None], way: Callable[[Machine], None], monkeypatch: Patch
) -> None:
    follow(way)
    broken(monkeypatch)
    with pytest.raises(ViolationError):
        follow(way)
