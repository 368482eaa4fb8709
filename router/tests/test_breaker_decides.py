"""The circuit breaker of a pod: its states, and what changes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router.backends import Backend
from disagg_router.breaker import Blame, Breaker, State
from disagg_router.http1 import Address
from disagg_router.load import LoadTable

POD = Backend("decode-0", "decode", "r1", Address("10.0.0.1", 8000), 5700)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(now: float = 0.0) -> Breaker:
    return Breaker().fail(Blame.FULL, now, probe=False)


def test_one_broken_connection_opens_it() -> None:
    breaker = opened()
    assert breaker.state(4.9) is State.OPEN
    assert breaker.avoided(4.9)
    assert breaker.state(5.0) is State.HALF_OPEN
    assert not breaker.avoided(5.0)


def test_engine_errors_open_it_only_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker = breaker.fail(Blame.SOME, 0, probe=False)
    assert breaker.state(0) is State.CLOSED
    assert breaker.succeed().fail(Blame.SOME, 0, probe=False).state(0) is State.CLOSED
    assert breaker.fail(Blame.SOME, 0, probe=False).state(0) is State.OPEN


def test_what_says_nothing_changes_nothing() -> None:
    for breaker in (Breaker(), Breaker(4), opened(), opened().begin(6.0)[0]):
        assert breaker.fail(Blame.NONE, 6.0, probe=True) == breaker


def test_one_turn_at_a_time_probes() -> None:
    breaker, probe = opened().begin(6.0)
    assert probe
    assert breaker.avoided(6.0)
    assert breaker.begin(6.0) == (breaker, False)
    again, probe = breaker.end_probe().begin(6.0)  # without a verdict: the client left
    assert (again, probe) == (breaker, True)


def test_a_probe_that_is_long_in_coming_keeps_others_away_for_a_minute() -> None:
    breaker, probe = opened().begin(6.0)
    assert breaker.avoided(65.9)
    assert not breaker.begin(65.9)[1]
    assert not breaker.avoided(66.0)
    breaker, probe = breaker.begin(66.0)
    assert probe
    assert breaker.avoided(66.0)
    assert breaker.succeed() == Breaker()


def test_a_probe_that_succeeds_closes_it_and_forgets_how_often_it_failed() -> None:
    assert opened().begin(6.0)[0].succeed() == Breaker()


def test_probes_that_fail_come_less_and_less_often_up_to_a_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(50):
        pauses.append(breaker.until - now)
        now = breaker.until
        breaker, probe = breaker.begin(now)
        assert probe
        breaker = breaker.fail(Blame.SOME, now, probe=True)
    assert pauses[:6] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert pauses[-1] == 60.0


def test_turns_that_had_begun_before_it_opened_do_not_prolong_it() -> None:
    breaker = opened()
    for now in (0.1, 4.0, 7.0):
        assert breaker.fail(Blame.FULL, now, probe=False) == breaker


@given(
    st.lists(
        st.tuples(st.sampled_from(["fail", "some", "none", "probe", "end", "succeed"]), st.floats(0, 100)),
        max_size=60,
    )
)
def test_whatever_happens_it_is_never_shut_for_longer_than_a_minute(events: list[tuple[str, float]]) -> None:
    breaker, now, probe, since = Breaker(), 0.0, False, 0.0
    for event, seconds in events:
        now += seconds
        if event == "probe":
            breaker, began = breaker.begin(now)
            assert not (began and probe and now < since + 60.0), "two probes at a time"
            probe, since = probe or began, now if began else since
        elif event == "end" and probe:
            breaker, probe = breaker.end_probe(), False
        elif event == "succeed":
            breaker, probe = breaker.succeed(), False
        elif event in ("fail", "some", "none"):
            blame = {"fail": Blame.FULL, "some": Blame.SOME, "none": Blame.NONE}[event]
            breaker = breaker.fail(blame, now, probe=probe)
            probe = probe and blame is Blame.NONE
        assert breaker.until - now <= 60.0
        assert breaker.avoided(now) <= (breaker.state(now) is not State.CLOSED)


# -- the table of all pods -------------------------------------------------------------------------------------


def broken(clock: Clock) -> LoadTable:
    loads = LoadTable(clock)
    with loads.hold(POD) as hold:
        hold.failed(Blame.FULL, "decode_broke")
    assert loads.snapshot([POD]).suspects == {"decode-0"}
    return loads


def test_a_probe_keeps_others_away_until_it_is_given_back() -> None:
    clock = Clock()
    loads = broken(clock)
    clock.now += 5.0
    assert not loads.snapshot([POD]).suspects
    with loads.hold(POD):
        assert loads.state(POD) is State.HALF_OPEN
        assert loads.snapshot([POD]).suspects == {"decode-0"}
    assert not loads.snapshot([POD]).suspects
    with loads.hold(POD) as hold:
        hold.succeeded()
        assert not loads.snapshot([POD]).suspects
    assert loads.state(POD) is State.CLOSED
    assert loads.opened == {("decode", "decode_broke"): 1}


def test_a_probe_that_failed_and_is_then_given_back_stays_failed() -> None:
    clock = Clock()
    loads = broken(clock)
    clock.now += 5.0
    with loads.hold(POD) as hold:
        hold.failed(Blame.SOME, "decode_error")
        hold.failed(Blame.SOME, "decode_error")
        assert loads.state(POD) is State.OPEN
    clock.now += 9.9
    assert loads.state(POD) is State.OPEN
    clock.now += 0.1
    assert loads.state(POD) is State.HALF_OPEN


def test_a_replaced_pod_does_not_inherit_failures() -> None:
    loads = broken(Clock())
    successor = Backend("decode-0", "decode", "r1", Address("10.0.0.2", 8000), 5700)
    late = loads.hold(POD)
    assert not loads.snapshot([successor]).suspects
    late.failed(Blame.FULL, "decode_broke")  # of the old pod, whose turn ends only now
    late.give_back()
    assert not loads.snapshot([successor]).suspects
    assert loads.state(successor) is State.CLOSED
    assert loads.inflight == {}


@pytest.mark.parametrize("gone", [{"ready": False}, {"terminating": True}])
def test_a_pod_that_takes_no_turns_is_forgotten(gone: dict[str, bool]) -> None:
    loads = broken(Clock())
    loads.snapshot([Backend("decode-0", "decode", "r1", POD.address, 5700, **gone)])  # type: ignore[arg-type]
    assert loads.state(POD) is State.CLOSED


def test_a_pod_that_is_leaving_is_still_avoided() -> None:
    loads = broken(Clock())
    leaving = Backend("decode-0", "decode", "r1", POD.address, 5700, leaving=True)
    assert loads.snapshot([leaving]).suspects == {"decode-0"}


def test_giving_back_twice_is_giving_back_once() -> None:
    loads = LoadTable(Clock())
    first, second = loads.hold(POD), loads.hold(POD)
    first.give_back()
    first.give_back()
    first.failed(Blame.FULL, "decode_broke")
    assert loads.inflight == {"decode-0": 1}
    assert loads.state(POD) is State.CLOSED
    second.give_back()
    assert loads.inflight == {}


def test_a_probe_that_was_answered_is_a_turn_like_others() -> None:
    clock = Clock()
    loads = broken(clock)
    clock.now += 5
    first = loads.hold(POD)
    first.succeeded()
    with loads.hold(POD) as second:
        second.failed(Blame.FULL, "decode_broke")
    first.failed(
        Blame.FULL, "broken_answer"
    )  # its answer breaks off with the other's: one loss of the engine
    clock.now += 5
    assert loads.state(POD) is State.HALF_OPEN
    probe = loads.hold(POD)
    first.give_back()
    assert loads.snapshot([POD]).suspects, "the probe is still under way"
    probe.give_back()
