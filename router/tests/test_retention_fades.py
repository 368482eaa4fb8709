"""What a router takes decode to have dropped, and for how long."""

from __future__ import annotations

import pytest

from disagg_router.retention import FADES_SECONDS, MOST_IN_A_ROW, Retention


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_keeps_everything_until_something_was_gone() -> None:
    assert Retention(Clock()).keeps("decode-0", 1e9)


def test_what_has_rested_as_long_is_gone_too_on_that_engine() -> None:
    retention = Retention(Clock())
    retention.was_gone("decode-0", 8.0)
    assert not retention.keeps("decode-0", 8.0)
    assert not retention.keeps("decode-0", 60.0)
    assert retention.keeps("decode-0", 3.0)
    assert retention.keeps("decode-1", 60.0)


def test_the_belief_fades_and_a_new_finding_renews_it() -> None:
    clock = Clock()
    retention = Retention(clock)
    retention.was_gone("decode-0", 8.0)
    clock.now = FADES_SECONDS + 1
    assert retention.keeps("decode-0", 8.0)
    assert not retention.keeps("decode-0", 16.5)
    retention.was_gone("decode-0", 16.5)
    assert not retention.keeps("decode-0", 10.0)


@pytest.mark.parametrize("later", [1e4, 1e6, 1e9])
def test_after_a_long_time_nothing_is_left_of_it(later: float) -> None:
    clock = Clock()
    retention = Retention(clock)
    retention.was_gone("decode-0", 8.0)
    clock.now = later
    assert retention.keeps("decode-0", 3600.0)


def test_nothing_is_kept_of_pods_that_are_long_gone() -> None:
    clock = Clock()
    retention = Retention(clock)
    for n in range(1000):
        clock.now = n * 60.0
        retention.was_gone(f"decode-{n}", 8.0)
    assert len(retention) <= 60


def test_an_engine_that_never_has_what_it_should_have_is_rather_slow() -> None:
    retention = Retention(Clock())
    assert [retention.was_gone("decode-0", 8.0) for _ in range(MOST_IN_A_ROW + 2)] == [
        True
    ] * MOST_IN_A_ROW + [False] * 2
    retention.was_there("decode-0")
    assert retention.was_gone("decode-0", 8.0)


@pytest.mark.parametrize("rested", [0.0, 1e-6, 0.1])
def test_what_had_hardly_rested_does_not_tell_of_all_others_for_long(rested: float) -> None:
    """As when two turns of one conversation overlap, or many conversations share one name."""
    clock = Clock()
    retention = Retention(clock)
    retention.was_gone("decode-0", rested)
    assert retention.keeps("decode-0", 0.4)
    assert not retention.keeps("decode-0", 1.0)
    clock.now = 5 * FADES_SECONDS
    assert retention.keeps("decode-0", 15.0)
