"""What autoscaling says of a decision: in the status, in the condition ScalingActive, in our metrics."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_course import Watch, decided, observed, pod, told
from scaling_pages import Line
from scaling_pages import decode as decode_page
from scaling_pages import prefill as prefill_page
from scaling_pages import router as router_page
from scaling_world import as_the_crd_asks, autoscaling, no_number_is_none

from disagg_operator import autoscale
from disagg_operator.api.conditions import MAX_MESSAGE, Reason
from disagg_operator.api.status import ConditionStatus, ScalingStatus
from disagg_operator.autoscale import TELL_EVERY, Course
from disagg_operator.metrics import Metrics
from disagg_operator.naming import KIND, Component
from disagg_operator.pages import Answer, NoPage
from disagg_operator.scaling.inputs import Inputs, Sizes
from disagg_operator.scaling.policy import Decision, Outcome

# The status


def test_a_status_is_written_when_the_decision_changes_or_is_a_minute_old() -> None:
    watch = Watch()
    first = told(watch.work(4))
    assert told(watch.work(1), first) is first
    assert told(watch.work(2), first) is first
    later = told(watch.work(1), first)
    assert later.decided_time - first.decided_time == TELL_EVERY
    assert told(watch.work(1, hold="a rollout is in progress"), later).reason == "Held"
    grown = told(watch.work(1, tokens=2000), later)
    assert grown.prefill is not None
    assert grown.prefill.desired_replicas > grown.prefill.current_replicas


@pytest.mark.parametrize("ahead", [timedelta(seconds=1), timedelta(days=3)])
def test_a_status_from_the_future_is_written_again(ahead: timedelta) -> None:
    course = Watch().work(4)
    now = told(course)
    before = now.model_copy(update={"decided_time": now.decided_time + ahead})
    assert told(course, before) == now


def test_before_the_first_look_the_status_stays() -> None:
    previous = told(Watch().work(2))
    assert autoscale.told(Course(), previous) is previous
    assert autoscale.told(Course(), None) is None


def test_the_status_has_the_numbers_and_the_sentence_too() -> None:
    status = told(Watch().work(6)).to_wire()
    assert status["message"].startswith("prefill 2 (need 1.87")
    assert status["prefill"]["needMilli"] == 1867
    assert status["inputs"]["offeredTokensPerSecond"] == 1400
    assert status["inputs"]["kvUsageMilli"] == 500
    assert status["inputs"]["decodePods"] == 2
    assert "ttftMilliseconds" not in status["inputs"], "what nobody measured is not there"


def test_reuse_is_told_with_the_decision_of_the_same_look() -> None:
    course = Watch().work(5)
    scaling = told(course)
    reuse = autoscale.reuse(course, None, scaling)
    assert reuse is not None
    assert (reuse.observed_time, reuse.window_seconds, reuse.ratio_percent) == (scaling.decided_time, 60, 0)
    assert reuse.computed_tokens == reuse.prompt_tokens > 0
    as_the_crd_asks(KIND, {"reuse": reuse.to_wire()})
    older = scaling.model_copy(update={"decided_time": scaling.decided_time - timedelta(seconds=30)})
    assert autoscale.reuse(course, reuse, older) is reuse
    assert autoscale.reuse(course, reuse, None) is reuse
    assert autoscale.reuse(Course(), reuse, scaling) is reuse


def test_without_prompts_nobody_knows_the_reuse() -> None:
    watch = Watch()
    watch.work(3)
    before = autoscale.reuse(watch.course, None, told(watch.course))
    watch.work(20, tokens=0)  # the counters stand far below what they were: the engines began anew
    assert autoscale.reuse(watch.course, before, told(watch.course)) is before
    metrics = Metrics()
    metrics.show_course("default", "demo", watch.course)
    assert "disagg_reuse_ratio{" not in metrics.render().decode()


# The condition


def test_each_outcome_has_its_claim() -> None:
    sizes = Sizes(2, 2)
    claims = {}
    for outcome in Outcome:
        course = Course(decision=Decision(outcome, sizes, sizes, detail="because"))
        claims[outcome] = autoscale.claim(course)
    assert {outcome: claim.reason for outcome, claim in claims.items()} == {
        Outcome.GROWN: Reason.SCALING,
        Outcome.SHRUNK: Reason.SCALING,
        Outcome.STEADY: Reason.SCALING,
        Outcome.HELD: Reason.SCALING_HELD,
        Outcome.BLIND: Reason.METRICS_UNAVAILABLE,
        Outcome.CONFLICT: Reason.RATIO_CONFLICT,
    }
    for claim in claims.values():
        assert (claim.status is ConditionStatus.TRUE) is (claim.reason is Reason.SCALING)
    assert autoscale.claim(Course()).reason is Reason.METRICS_UNAVAILABLE
    assert "nobody has looked yet" in autoscale.claim(Course()).message


def test_missing_pods_are_named_up_to_a_number() -> None:
    missing = tuple(f"pod-{n}: status 503" for n in range(64))
    sizes = Sizes(2, 2)
    blind = Course(inputs=Inputs(None, None, missing), decision=Decision(Outcome.BLIND, sizes, sizes))
    message = autoscale.claim(blind).message
    assert "pod-4: status 503 and 59 more" in message
    assert "pod-5" not in message
    steady = replace(blind, decision=Decision(Outcome.STEADY, sizes, sizes))
    assert "no pool shrinks, metrics are missing: pod-0" in autoscale.claim(steady).message


# Numbers of every kind

FIGURES = st.one_of(
    st.sampled_from([0.0, 1.0, 5e-324, 1e-30, 1e17, 1e18, 1e19, 1e308, float("inf"), float("nan"), -1.0]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1),
    st.integers(0, 10**19).map(float),
)


@st.composite
def strange_pages(draw: st.DrawFn) -> Mapping[Component, Answer]:
    more: list[Line] = [
        ("vllm:nixl_xfer_time_seconds_sum", {"engine": "0"}, draw(FIGURES)),
        ("disagg_kv_push_tokens_total", {"engine": "0", "direction": "decode_to_prefill"}, draw(FIGURES)),
        ("disagg_kv_write_seconds_sum", {"engine": "0", "direction": "decode_to_prefill"}, draw(FIGURES)),
    ]
    numbers = {
        name: draw(FIGURES) for name in ("computed", "cached", "prompts", "seconds", "waiting", "hits")
    }
    return {
        Component.PREFILL: prefill_page(**numbers, more=more[:1]),
        Component.DECODE: decode_page(
            usage=draw(st.floats(0, 1)), running=draw(FIGURES), waiting=draw(FIGURES), more=more[1:]
        ),
        Component.ROUTER: router_page(
            turns=draw(FIGURES),
            waiting=draw(FIGURES),
            more=[("disagg_router_retained_kv_blocks", {}, draw(FIGURES))],
        ),
    }


@settings(max_examples=150, deadline=None)
@given(st.lists(strange_pages(), min_size=2, max_size=8), st.sampled_from([15.0, 1.0, 61.0, 200.0]))
def test_whatever_pods_count_the_status_and_our_metrics_hold_numbers_that_are_accepted(
    looks: list[Mapping[Component, Answer]], after: float
) -> None:
    targets = autoscaling(prefillTokensPerSecond=None, remoteTokenCostMilli=None)
    watch, metrics = Watch(autoscaling=targets), Metrics()
    scaling: ScalingStatus | None = None
    for pages in looks:
        course = watch.look(pages, after)
        scaling = told(course, None)
        reuse = autoscale.reuse(course, None, scaling)
        if reuse is not None:
            as_the_crd_asks(KIND, {"reuse": reuse.to_wire()})
        metrics.show_course("default", "demo", course)
        no_number_is_none(metrics.render().decode().splitlines())
        decision = decided(course)
        for role in (Component.PREFILL, Component.DECODE):
            assert 1 <= decision.desired.of(role) <= 8
        watch.sizes = {role: decision.desired.of(role) for role in watch.sizes}


def test_very_many_missing_pods_do_not_fill_the_status() -> None:
    watch = Watch()
    watch.seen = observed(*(pod(Component.PREFILL, n) for n in range(1000)))
    course = watch.look({Component.PREFILL: NoPage("no answer within 2 s")})
    told = autoscale.told(course, None)
    assert told is not None
    assert len(told.message) <= MAX_MESSAGE
