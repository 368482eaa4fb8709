from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg_connector.landing import Admission, Room, admit
from disagg_connector.protocol import Address, Offer, Peer

PEER = Peer("e", Address("h", 1), "h", 1, 1, "fp")
CHAIN = [bytes([i]) * 32 for i in range(8)]
PLENTY = Room(free=100, total=100, min_free_percent=10, reserved=0)


def offer(first: int = 0, skip: int = 0) -> Offer:
    return Offer("to", 0, "xid", PEER, CHAIN[skip:], first, "", skip=skip)


def decide(
    held: int, offered: Offer | None = None, room: Room = PLENTY, in_flight: int | None = None
) -> Admission:
    return admit(
        offered or offer(),
        lambda h: CHAIN.index(h) < held,
        lambda h: in_flight is not None and CHAIN.index(h) == in_flight,
        room,
    )


def test_what_is_missing_is_granted_from_the_first_missing_block_on() -> None:
    assert decide(held=3) == Admission("", 3, 5)


def test_a_chain_may_be_offered_without_its_beginning() -> None:
    assert decide(held=4, offered=offer(first=4, skip=3)) == Admission("", 4, 4)
    assert decide(held=6, offered=offer(first=4, skip=3)) == Admission("", 6, 2)
    assert decide(held=8, offered=offer(first=4, skip=3)).reason == "have"
    assert decide(held=3, offered=offer(first=4, skip=3)).reason == "gap", "what it continues is not there"
    assert decide(held=4, offered=offer(first=4, skip=3), in_flight=4).reason == "dup"


def test_the_first_objection_decides() -> None:
    assert decide(held=8).reason == "have"
    assert decide(held=2, offered=offer(first=3)).reason == "gap"
    assert decide(held=2, in_flight=2).reason == "dup"
    assert decide(held=2, room=Room(10, 100, 10, 0)).reason == "no_blocks"


def test_a_part_is_granted_when_there_is_no_room_for_all() -> None:
    assert decide(held=2, room=Room(12, 100, 10, 0)) == Admission("", 2, 2)


@given(st.integers(0, 200), st.integers(1, 200), st.integers(0, 100), st.integers(0, 50))
def test_a_grant_never_eats_into_the_floor(free: int, total: int, percent: int, reserved: int) -> None:
    grantable = Room(min(free, total), total, percent, reserved).grantable
    from_pool = grantable - reserved
    assert from_pool >= 0
    assert from_pool == 0 or (min(free, total) - from_pool) * 100 >= total * percent
