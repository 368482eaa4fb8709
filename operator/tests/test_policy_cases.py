"""Every outcome and every reason of a decision, each reached by what would bring it about."""

from dataclasses import dataclass, field, replace

import pytest

from disagg_operator.naming import Component
from disagg_operator.scaling.history import EMPTY, History, Resize
from disagg_operator.scaling.inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from disagg_operator.scaling.policy import Because, Decision, Outcome, decide

TICK = 15.0
LIMITS = Limits(
    RoleLimits(1, 8),
    RoleLimits(1, 8),
    tokens_per_second=1000.0,
    remote_cost=0.1,
    sequences=100,
    utilization=0.5,
)
"""So a prefill pod is planned for 500 computed tokens per second."""


def seen(
    work: float = 900.0,
    *,
    reuse: float = 0.5,
    backlog: float = 0.0,
    usage: float = 0.7,
    pods: int = 2,
    running: float = 50.0,
    waiting: float = 0.0,
    retained: float | None = None,
    **others: float | tuple[str, ...],
) -> Inputs:
    """A load with so many tokens per second to compute, and decode pods so full."""
    offered = work / (1 - reuse)
    prefill = PrefillLoad(offered=offered, tokens=60 * offered, reuse=Reuse(local=reuse), backlog=backlog)
    decode = DecodeLoad(
        pods=pods, kv_usage=usage, fullest=usage, running=running, waiting=waiting, retained=retained
    )
    return replace(Inputs(prefill, decode), **others)


FITS, IDLE = seen(), seen(100.0, usage=0.1, running=5.0)
IDLE_PREFILL, IDLE_DECODE = seen(100.0), seen(usage=0.1, running=5.0)
WINDOW = 21
"""Ticks that come to the window of shrinking, with the first that may shrink."""


@dataclass
class Case:
    """What is seen tick by tick, and what the last decision is."""

    ticks: list[Inputs]
    outcome: Outcome
    sizes: Sizes
    prefill: Because | None = None
    decode: Because | None = None
    limits: Limits = LIMITS
    first: Sizes = field(default_factory=lambda: Sizes(2, 2))
    hold: str = ""
    full: str = ""
    before: History = EMPTY


def run(case: Case) -> Decision:
    history, sizes = case.before, case.first
    decision: Decision | None = None
    for number, inputs in enumerate(case.ticks):
        decision, history = decide(inputs, case.limits, sizes, history, number * TICK, case.hold, case.full)
        if number < len(case.ticks) - 1:
            sizes = decision.desired
    assert decision is not None
    return decision


def with_limits(**limits: object) -> Limits:
    return replace(LIMITS, **limits)


LATE, SLOW = seen(ttft_p95=3.0, backlog=1.0), seen(itl_p95=0.2)
BLIND = Inputs(None, None, missing=("p-0: timed out",))
CASES = {
    "a load that fits": Case([FITS], Outcome.STEADY, Sizes(2, 2)),
    "more to compute": Case([seen(1600.0)], Outcome.GROWN, Sizes(4, 2)),
    "fuller decode": Case([seen(usage=0.95)], Outcome.GROWN, Sizes(2, 3)),
    "idle prefill": Case([IDLE_PREFILL] * WINDOW, Outcome.SHRUNK, Sizes(1, 2), first=Sizes(3, 2)),
    "idle decode": Case([IDLE_DECODE] * WINDOW, Outcome.SHRUNK, Sizes(2, 1)),
    "nothing can be read": Case([FITS, BLIND], Outcome.BLIND, Sizes(2, 2), Because.MISSING, Because.MISSING),
    "a rollout": Case(
        [seen(5000.0)], Outcome.HELD, Sizes(2, 2), Because.HELD, Because.HELD, hold="a rollout"
    ),
    "more than may be": Case(
        [seen(9000.0)], Outcome.GROWN, Sizes(8, 2), Because.MOST, limits=with_limits(up_pods=100)
    ),
    "fewer than must be": Case(
        [FITS], Outcome.GROWN, Sizes(3, 2), Because.LEAST, limits=with_limits(prefill=RoleLimits(3, 8))
    ),
    "idle at the least": Case(
        [IDLE],
        Outcome.STEADY,
        Sizes(2, 2),
        Because.LEAST,
        Because.LEAST,
        with_limits(prefill=RoleLimits(2, 8), decode=RoleLimits(2, 8)),
    ),
    "idle, but not for long": Case(
        [IDLE], Outcome.STEADY, Sizes(2, 2), Because.STABILIZATION, Because.STABILIZATION
    ),
    "a wish that is too new": Case(
        [FITS, seen(1600.0)],
        Outcome.STEADY,
        Sizes(2, 2),
        Because.STABILIZATION,
        limits=with_limits(up_window=60.0),
    ),
    "faster than may be": Case([seen(9000.0)], Outcome.GROWN, Sizes(6, 2), Because.UP_RATE),
    "slower than could be": Case(
        [IDLE_PREFILL] * WINDOW,
        Outcome.SHRUNK,
        Sizes(7, 2),
        Because.DOWN_RATE,
        limits=with_limits(down_pods=1),
        first=Sizes(8, 2),
    ),
    "too little prefill for decode": Case(
        [seen(usage=0.7, pods=8)],
        Outcome.GROWN,
        Sizes(4, 8),
        Because.RATIO,
        limits=with_limits(ratio_least=0.5),
        first=Sizes(2, 8),
    ),
    "a ratio that cannot be": Case(
        [seen(usage=0.7, pods=8)],
        Outcome.CONFLICT,
        Sizes(2, 8),
        Because.RATIO,
        Because.RATIO,
        with_limits(ratio_least=0.5, prefill=RoleLimits(1, 3)),
        Sizes(2, 8),
    ),
    "no more GPUs": Case(
        [seen(1600.0)], Outcome.GROWN, Sizes(3, 2), Because.BUDGET, limits=with_limits(max_devices=5)
    ),
    "both idle": Case(
        [IDLE] * WINDOW,
        Outcome.SHRUNK,
        Sizes(2, 4),
        Because.DOWN_RATE,
        Because.OTHER_POOL,
        with_limits(),
        Sizes(4, 4),
    ),
    "KV that is kept for prefill": Case(
        [seen(usage=0.95, retained=0.6)], Outcome.STEADY, Sizes(2, 2), decode=Because.RETAINED
    ),
    "reuse that would go": Case(
        [seen(600.0, reuse=0.9)] * WINDOW,
        Outcome.STEADY,
        Sizes(3, 2),
        Because.REUSE_AT_RISK,
        first=Sizes(3, 2),
    ),
    "transfers that fail": Case(
        [replace(IDLE_PREFILL, failed_share=0.1)] * WINDOW,
        Outcome.STEADY,
        Sizes(2, 2),
        Because.TRANSFERS_FAIL,
    ),
    "a page that is missing": Case(
        [replace(IDLE_PREFILL, missing=("p-1: 503",))] * WINDOW, Outcome.STEADY, Sizes(2, 2), Because.MISSING
    ),
    "speed that nobody knows": Case(
        [seen(1600.0)],
        Outcome.STEADY,
        Sizes(2, 2),
        Because.UNKNOWN_SPEED,
        limits=with_limits(tokens_per_second=None),
    ),
    "late first tokens that wait for prefill": Case(
        [LATE] * 3, Outcome.GROWN, Sizes(3, 2), Because.LATE_FIRST_TOKENS, limits=with_limits(ttft_target=2.0)
    ),
    "late first tokens that wait for decode": Case(
        [seen(ttft_p95=3.0, waiting=1.0)] * 3,
        Outcome.GROWN,
        Sizes(2, 3),
        decode=Because.LATE_FIRST_TOKENS,
        limits=with_limits(ttft_target=2.0),
    ),
    "slow tokens": Case(
        [SLOW] * 3, Outcome.GROWN, Sizes(2, 3), decode=Because.SLOW_TOKENS, limits=with_limits(itl_target=0.1)
    ),
    "no room for more": Case([seen(1600.0)], Outcome.STEADY, Sizes(2, 2), Because.FULL, full="no node"),
    "no room for more of one pool, and the other has too much": Case(
        [seen(1600.0, usage=0.1, running=5.0)] * WINDOW,
        Outcome.SHRUNK,
        Sizes(2, 1),
        Because.FULL,
        full="no node",
    ),
    "too many turns": Case(
        [IDLE_PREFILL] * WINDOW,
        Outcome.STEADY,
        Sizes(3, 2),
        Because.FLAPPING,
        first=Sizes(3, 2),
        before=History(changes=tuple(Resize(-1000.0 + n, Component.PREFILL, (-1) ** n) for n in range(5))),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_decision_says_what_it_comes_to_and_why(case: Case) -> None:
    decision = run(case)
    assert (decision.outcome, decision.desired) == (case.outcome, case.sizes)
    assert (decision.prefill_because, decision.decode_because) == (case.prefill, case.decode)


def test_every_outcome_and_every_reason_has_a_case() -> None:
    assert {case.outcome for case in CASES.values()} == set(Outcome)
    reasons = {because for case in CASES.values() for because in (case.prefill, case.decode)}
    assert reasons == {None, *Because}


def walk(ticks: list[Inputs], limits: Limits, first: Sizes) -> list[Sizes]:
    """The sizes after each tick."""
    history, sizes, found = EMPTY, first, []
    for number, inputs in enumerate(ticks):
        decision, history = decide(inputs, limits, sizes, history, number * TICK)
        sizes = decision.desired
        found.append(sizes)
    return found


def test_clients_that_waited_and_come_again_are_no_trend() -> None:
    """What they send falls while they wait, and the window forgets that only slowly."""
    waits = [seen(work, backlog=4000.0) for work in (700.0, 500.0, 300.0, 300.0)]
    come_again = [seen(work) for work in (450.0, 600.0, 750.0, 900.0, 900.0)]
    limits = with_limits(pod_start_seconds=90.0)
    sizes = walk([*[FITS] * 20, *waits, *come_again], limits, Sizes(2, 8))
    assert {s.prefill for s in sizes} == {2}


def test_a_load_that_grows_beyond_what_it_was_before_the_wait_is_a_trend() -> None:
    grows = [seen(900.0 + 100.0 * n, backlog=4000.0) for n in range(5)]
    assert walk([*[FITS] * 20, *grows], with_limits(pod_start_seconds=90.0), Sizes(2, 8))[-1].prefill == 4


def fallen(backlog: float = 4000.0, tokens: float = 20_000.0) -> Inputs:
    """Nothing is reused any more, which the window shows only in part so far."""
    inputs = seen(reuse=0.5, backlog=backlog)
    assert inputs.prefill is not None
    return replace(inputs, prefill=replace(inputs.prefill, latest_tokens=tokens, latest_reuse=0.0))


def test_prefill_grows_by_the_reuse_of_the_latest_look_while_prompts_wait() -> None:
    assert walk([FITS, fallen()], LIMITS, Sizes(2, 8))[-1].prefill == 4, "1800 of 1800 tokens/s to compute"
    assert walk([FITS, fallen(backlog=0.0)], LIMITS, Sizes(2, 8))[-1].prefill == 2, "the pods can do it"
    assert walk([FITS, fallen(tokens=100.0)], LIMITS, Sizes(2, 8))[-1].prefill == 2, "it may be chance"


def test_a_pool_that_has_just_grown_waits_for_the_window_to_show_the_fall() -> None:
    limits = with_limits(pod_start_seconds=30.0)
    grown = walk([seen(1400.0), *[fallen()] * 7], limits, Sizes(2, 8))
    assert [sizes.prefill for sizes in grown] == [3, 3, 3, 3, 3, 3, 6, 6]


def test_the_rate_of_shrinking_holds_in_a_window_of_more_than_an_hour() -> None:
    ticks = int(7200 / TICK)
    sizes = walk([IDLE_PREFILL] * (2 * ticks), with_limits(down_window=7200.0, down_pods=1), Sizes(8, 2))
    assert sizes[-1] == Sizes(7, 2)


def test_a_pool_that_grew_does_not_shrink_in_a_window_of_more_than_an_hour() -> None:
    ticks = int(7200 / TICK)
    limits = with_limits(down_window=7200.0, ttft_target=2.0, prefill=RoleLimits(2, 8))
    late = seen(100.0, ttft_p95=3.0, backlog=1.0)
    sizes = walk(
        [*[IDLE_PREFILL] * 300, late, late, late, *[IDLE_PREFILL] * (ticks - 1)], limits, Sizes(2, 2)
    )
    assert {s.prefill for s in sizes[302:]} == {3}


def test_a_pool_that_is_too_large_for_the_ratio_can_still_shrink() -> None:
    limits = with_limits(ratio_most=1.0, decode=RoleLimits(1, 2))
    assert walk([IDLE_PREFILL] * 100, limits, Sizes(8, 2))[-1] == Sizes(1, 2)


def test_a_pool_grows_as_far_as_the_ratio_lets_it() -> None:
    limits = with_limits(prefill=RoleLimits(1, 2), decode=RoleLimits(1, 20), ratio_least=0.2)
    full = seen(100.0, usage=0.95, pods=8, running=5.0, waiting=5.0)
    assert walk([full], limits, Sizes(1, 4)) == [Sizes(2, 8)]
    decision, _ = decide(seen(100.0, usage=0.95, pods=8, waiting=50.0), limits, Sizes(2, 9), EMPTY, 0.0)
    assert (decision.outcome, decision.desired) == (Outcome.CONFLICT, Sizes(2, 10))


def test_out_of_the_ratio_a_pool_does_not_grow() -> None:
    limits = with_limits(ratio_least=0.5, prefill=RoleLimits(1, 3))
    decision, _ = decide(seen(usage=0.95, pods=8), limits, Sizes(2, 8), EMPTY, 0.0)
    assert (decision.outcome, decision.desired) == (Outcome.CONFLICT, Sizes(2, 8))
