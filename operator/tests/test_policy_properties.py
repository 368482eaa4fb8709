"""What no decision ever does, whatever it is shown."""

from dataclasses import replace
from math import isfinite

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_operator.naming import ENGINES
from disagg_operator.scaling.history import EMPTY, History
from disagg_operator.scaling.inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from disagg_operator.scaling.policy import Because, Decision, Outcome, decide

shares = st.floats(0, 1)
amounts = st.floats(0, 1e9)
rates = st.one_of(st.just(0.0), st.floats(1, 1e6))


@st.composite
def prefill_loads(draw: st.DrawFn) -> PrefillLoad:
    local = draw(shares)
    return PrefillLoad(draw(rates), draw(amounts), Reuse(local, draw(st.floats(0, 1 - local))), draw(amounts))


@st.composite
def decode_loads(draw: st.DrawFn) -> DecodeLoad:
    usage, waiting = draw(shares), draw(st.one_of(st.just(0.0), st.floats(0, 1e4)))
    retained = draw(st.one_of(st.none(), shares))
    return DecodeLoad(
        draw(st.integers(1, 12)), usage, usage, draw(st.floats(0, 1e4)), waiting, None, retained
    )


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    return Inputs(
        draw(st.one_of(st.none(), prefill_loads())),
        draw(st.one_of(st.none(), decode_loads())),
        missing=draw(st.sampled_from([(), (), ("p-0: 503",)])),
        failed_share=draw(st.sampled_from([0.0, 0.0, 0.5])),
        ttft_p95=draw(st.one_of(st.none(), st.floats(0, 100))),
        itl_p95=draw(st.one_of(st.none(), st.floats(0, 1))),
    )


@st.composite
def role_limits(draw: st.DrawFn) -> RoleLimits:
    least = draw(st.integers(1, 6))
    return RoleLimits(least, draw(st.integers(least, 12)), devices=draw(st.integers(1, 8)))


limits = st.builds(
    Limits,
    prefill=role_limits(),
    decode=role_limits(),
    sequences=st.one_of(st.none(), st.integers(1, 256)),
    tokens_per_second=st.one_of(st.none(), st.floats(1, 1e5)),
    ttft_target=st.one_of(st.none(), st.just(2.0)),
    itl_target=st.one_of(st.none(), st.just(0.1)),
    ratio_least=st.sampled_from([0.1, 0.5, 1.0]),
    ratio_most=st.sampled_from([1.0, 2.0, 4.0]),
    up_window=st.sampled_from([0.0, 60.0]),
    up_pods=st.integers(1, 8),
    down_window=st.sampled_from([0.0, 45.0, 300.0]),
    down_pods=st.integers(1, 4),
    max_devices=st.one_of(st.none(), st.integers(1, 60)),
    pod_start_seconds=st.sampled_from([0.0, 90.0]),
)
gaps = st.sampled_from([15.0, 15.0, 15.0, 15.0, 60.0, 120.0, 0.0, -30.0, -1e6, 1e6])
holds = st.sampled_from(["", "", "", "a rollout"])
steps = st.lists(st.tuples(inputs(), gaps, holds), min_size=1, max_size=12)
sizes = st.builds(Sizes, st.integers(1, 14), st.integers(1, 14))


def walk(
    bounds: Limits, first: Sizes, ticks: list[tuple[Inputs, float, str]]
) -> list[tuple[Inputs, str, History, float, Decision]]:
    history, now, size, found = EMPTY, 1e7, first, []
    for shown, gap, hold in ticks:
        now += gap
        decision, after = decide(shown, bounds, size, history, now, hold)
        found.append((shown, hold, history, now, decision))
        history, size = after, decision.desired
    return found


@settings(max_examples=60, deadline=None)
@given(limits, sizes, steps)
def test_no_decision_breaks_what_it_is_bound_by(
    bounds: Limits, first: Sizes, ticks: list[tuple[Inputs, float, str]]
) -> None:
    for shown, hold, history, now, decision in walk(bounds, first, ticks):
        current, desired = decision.current, decision.desired
        if decision.outcome in (Outcome.BLIND, Outcome.HELD):
            assert desired == current
            continue
        assert not hold
        assert None not in (shown.prefill, shown.decode)
        grown = {r: max(0, desired.of(r) - current.of(r)) for r in ENGINES}
        devices = {r: b.devices for r, b in zip(ENGINES, (bounds.prefill, bounds.decode), strict=True)}
        if any(grown.values()) and bounds.max_devices is not None:
            assert sum(desired.of(r) * devices[r] for r in ENGINES) <= bounds.max_devices
        for role, b in zip(ENGINES, (bounds.prefill, bounds.decode), strict=True):
            short = decision.because(role) is Because.BUDGET
            assert desired.of(role) <= b.most
            assert desired.of(role) >= (min(b.least, current.of(role)) if short else b.least)
        most = {r: b.most for r, b in zip(ENGINES, (bounds.prefill, bounds.decode), strict=True)}
        by_load = [r for r in ENGINES if desired.of(r) < min(current.of(r), most[r])]
        assert len(by_load) <= 1, "never both"
        if shown.missing or shown.failed_share > 0.01:
            assert not by_load
        if by_load:
            seen = history.seen_until(now)
            assert bounds.down_window == 0 or seen.covers(now, bounds.down_window)


@settings(max_examples=60, deadline=None)
@given(limits, sizes, steps)
def test_the_ratio_holds_or_the_decision_says_that_it_cannot(
    bounds: Limits, first: Sizes, ticks: list[tuple[Inputs, float, str]]
) -> None:
    bounds = replace(bounds, max_devices=None)
    for *_, decision in walk(bounds, first, ticks):
        if decision.outcome in (Outcome.GROWN, Outcome.SHRUNK, Outcome.STEADY):
            ratio = decision.desired.prefill / decision.desired.decode
            assert bounds.ratio_least - 1e-6 <= ratio <= bounds.ratio_most + 1e-6


@settings(max_examples=60, deadline=None)
@given(limits, sizes, steps)
def test_no_number_of_a_decision_is_other_than_finite(
    bounds: Limits, first: Sizes, ticks: list[tuple[Inputs, float, str]]
) -> None:
    for *_, decision in walk(bounds, first, ticks):
        terms = decision.arithmetic
        if terms is None:
            continue
        found = [terms.offered, terms.decode.pods, terms.decode_pods, terms.growing_reuse.total]
        if terms.prefill is not None:
            found.append(terms.prefill.pods)
        assert all(isfinite(number) and number >= 0 for number in found)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([-1e6, -20.0, 120.0, 1e6]), st.integers(1, 30))
def test_a_clock_that_jumps_never_shrinks(jump: float, calm: int) -> None:
    bounds = Limits(RoleLimits(1, 8), RoleLimits(1, 8), tokens_per_second=1000.0)
    idle = Inputs(PrefillLoad(10.0, 1e5, Reuse(0.5), 0.0), DecodeLoad(4, 0.1, 0.1, 2.0, 0.0))
    busy = replace(
        idle, prefill=PrefillLoad(4000.0, 1e6, Reuse(), 0.0), decode=DecodeLoad(4, 0.7, 0.7, 50.0, 0.0)
    )
    history, now = EMPTY, 1e7
    for _ in range(calm):
        _, history = decide(busy, bounds, Sizes(7, 4), history, now)
        now += 15
    decision, _ = decide(idle, bounds, Sizes(7, 4), history, now + jump)
    assert decision.desired == Sizes(7, 4)
