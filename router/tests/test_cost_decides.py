"""Which way a prompt takes by its cost, and how that is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg_router.cost import (
    LEARNING_INTERVAL,
    MEASURE_INTERVAL,
    Cost,
    Costs,
    Decision,
    Reason,
    Situation,
    cheaper,
    threshold,
)

COSTS = Costs(prefill=Cost(0.05, 1e-4), hand_over=Cost(0.1, 1e-6), decode=Cost(0.1, 1e-4), measured=True)
AT = Situation(
    decode_tokens=200,
    prefill_tokens=200,
    decode_backlog=0,
    prefill_backlog=0,
    spare_seconds=0.1,
    since_decode=0,
    since_prefill=0,
)


def decide(costs: Costs = COSTS, max_tokens: int = 512, **changes: Any) -> Decision:
    return cheaper(replace(AT, **changes), costs, max_tokens)


def test_the_way_that_is_sooner_is_taken_and_both_times_are_told() -> None:
    decision = decide()
    assert (decision.placement, decision.reason) == ("decode", Reason.CHEAPER)
    assert decision.decode_seconds == pytest.approx(0.1 + 200e-4)
    assert decision.prefill_seconds == pytest.approx(0.05 + 200e-4 + 0.1 + 200e-6)


def test_what_waits_before_it_on_either_engine_counts() -> None:
    assert decide(decode_backlog=1000).placement == "prefill"
    assert decide(decode_backlog=1000, prefill_backlog=1000).placement == "decode"


def test_a_prompt_that_prefill_has_and_decode_has_not_goes_to_prefill() -> None:
    decision = decide(decode_tokens=900, prefill_tokens=10)
    assert (decision.placement, decision.reason) == ("prefill", Reason.CHEAPER)


def test_decode_does_not_make_others_wait_for_longer_than_it_may() -> None:
    assert decide(decode_tokens=1000, prefill_tokens=1000).placement == "decode"
    decision = decide(decode_tokens=1001, prefill_tokens=1001)
    assert (decision.placement, decision.reason) == ("prefill", Reason.GUARD)
    assert decide(spare_seconds=0.0).reason == Reason.GUARD
    assert decide(spare_seconds=0.0, prefill_backlog=1e6).placement == "prefill", "however long it takes"


def test_a_cost_by_the_token_that_is_told_too_low_does_not_fool_the_guard() -> None:
    lucky = replace(COSTS, decode=Cost(0.1, 1e-7))
    assert decide(lucky, decode_tokens=1000, prefill_tokens=1000).placement == "decode"
    assert decide(lucky, decode_tokens=1001, prefill_tokens=1001).reason == Reason.GUARD


def test_until_enough_is_measured_the_threshold_decides() -> None:
    unsure = replace(COSTS, measured=False, decode=Cost(9.0, 1e-4))
    assert decide(unsure, max_tokens=200).placement == "decode"
    assert decide(unsure, max_tokens=199).placement == "prefill"
    assert decide(unsure, max_tokens=199).reason == Reason.LEARNING
    assert decide(unsure, spare_seconds=0.01).placement == "prefill", "the guard holds all the same"


def test_a_way_that_was_not_taken_for_long_is_measured() -> None:
    assert decide(since_prefill=MEASURE_INTERVAL - 1).placement == "decode"
    decision = decide(since_prefill=MEASURE_INTERVAL)
    assert (decision.placement, decision.reason) == ("prefill", Reason.MEASURE)
    assert decide(replace(COSTS, measured=False), since_prefill=LEARNING_INTERVAL).placement == "prefill"
    slow = replace(COSTS, decode=Cost(9.0, 1e-4))
    assert decide(slow, since_decode=MEASURE_INTERVAL - 1).placement == "prefill"
    decision = decide(slow, since_decode=MEASURE_INTERVAL)
    assert (decision.placement, decision.reason) == ("decode", Reason.MEASURE)


@pytest.mark.parametrize("changes", [{"decode_tokens": 600}, {"spare_seconds": 0.0}])
def test_only_what_would_run_on_decode_by_the_threshold_is_measured_there(changes: dict[str, Any]) -> None:
    slow = replace(COSTS, decode=Cost(9.0, 1e-5))
    assert decide(slow, since_decode=10 * MEASURE_INTERVAL, **changes).placement == "prefill"


def test_the_threshold_is_what_it_says() -> None:
    assert threshold(512, 512) == Decision("decode", Reason.SMALL, 512)
    assert threshold(513, 512) == Decision("prefill", Reason.LARGE, 513)


def test_a_decision_reads_as_documented() -> None:
    told = str(replace(decide(), decode_seconds=0.0345, prefill_seconds=0.08))
    assert told == "placement=decode; reason=cheaper; new_tokens=200; decode_ms=35; prefill_ms=80"
    assert str(Decision("prefill", Reason.DISABLED)) == "placement=prefill; reason=disabled"
