"""What autoscaling remembers between looks, and what it asks of a decision."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from operator_world import parsed_spec
from scaling_course import NOTHING, NOW, REVISION, Watch, decided, observed, pod, spec, told, workload
from scaling_world import autoscaling

from disagg_operator import autoscale
from disagg_operator.api.conditions import Reason
from disagg_operator.api.status import ConditionStatus, DisaggInferenceStatus
from disagg_operator.autoscale import Course
from disagg_operator.naming import Component
from disagg_operator.pages import NoPage
from disagg_operator.pools import Pool
from disagg_operator.scaling.history import History, Resize
from disagg_operator.scaling.inputs import Sizes
from disagg_operator.scaling.policy import Because, Decision, Outcome
from disagg_operator.trouble import Trouble

# What a decision is bound by


def test_limits_are_what_the_spec_says_in_seconds_shares_and_pods() -> None:
    asked = spec(
        prefill={"scaling": {"minReplicas": 2, "maxReplicas": 6}, "parallelism": {"tensor": 4}},
        decode={
            "scaling": {"minReplicas": 1, "maxReplicas": 9},
            "parallelism": {"tensor": 2, "data": 2},
            "extraArgs": ["--max-num-seqs", "64"],
        },
        autoscaling={
            "mode": "Auto",
            "ratio": {"minPercent": 25, "maxPercent": 300},
            "maxDevices": 40,
            "targets": {
                "prefillUtilizationPercent": 60,
                "prefillTokensPerSecond": 9000,
                "remoteTokenCostMilli": 170,
                "backlogDrainSeconds": 20,
                "decodeKVUsagePercent": 70,
                "decodeRunningPercent": 90,
                "timeToFirstTokenMilliseconds": 1500,
                "interTokenLatencyMilliseconds": 40,
            },
            "behavior": {
                "tolerancePercent": 5,
                "scaleUp": {"stabilizationWindowSeconds": 30, "maxPods": 3},
                "scaleDown": {"stabilizationWindowSeconds": 900, "maxPods": 2},
            },
        },
    )
    limits = autoscale.limits(asked, observed(pod(Component.DECODE, 0), pod(Component.PREFILL, 0)))
    assert (limits.prefill.least, limits.prefill.most, limits.prefill.devices) == (2, 6, 4)
    assert (limits.decode.least, limits.decode.most, limits.decode.devices, limits.decode.engines) == (
        1,
        9,
        4,
        2,
    )
    assert (limits.utilization, limits.tokens_per_second, limits.remote_cost) == (0.6, 9000, 0.17)
    assert (limits.drain_seconds, limits.kv_usage, limits.running, limits.sequences) == (20, 0.7, 0.9, 64)
    assert (limits.ttft_target, limits.itl_target) == (1.5, 0.04)
    assert (limits.ratio_least, limits.ratio_most, limits.max_devices) == (0.25, 3.0, 40)
    assert (limits.tolerance, limits.up_window, limits.up_pods) == (0.05, 30, 3)
    assert (limits.down_window, limits.down_pods, limits.pod_start_seconds) == (900, 2, 40)
    assert not limits.decode_holds_reuse


def test_without_a_word_in_the_spec_speed_and_cost_are_left_to_be_learned() -> None:
    limits = autoscale.limits(spec(autoscaling={"mode": "Auto"}), observed())
    assert (limits.tokens_per_second, limits.remote_cost, limits.sequences) == (None, None, None)
    assert (limits.ttft_target, limits.itl_target, limits.max_devices) == (None, None, None)
    assert limits.pod_start_seconds == 0


@pytest.mark.parametrize(
    ("engine", "decode", "sequences"),
    [
        (["--max-num-seqs=128"], [], 128),
        (["--max-num-seqs", "128"], ["--max_num_seqs", "32"], 32),
        (["--max-num-seqs", "auto"], [], None),
        (["--max-num-seqs", "0"], [], None),
        (["--max-num-seqs", "-4"], [], None),
        (["--max-num-seqs"], [], None),
    ],
)
def test_places_in_decodes_batch_are_what_the_flag_says(
    engine: list[str], decode: list[str], sequences: int | None
) -> None:
    asked = spec(
        engine={"image": "vllm:1", "extraArgs": engine},
        decode={"scaling": {"maxReplicas": 8}, "extraArgs": decode},
    )
    assert autoscale.limits(asked, observed()).sequences == sequences


def test_in_mode_bidirectional_pull_decode_holds_the_reuse() -> None:
    pull = spec(kvTransfer={"mode": "BidirectionalPull"})
    assert autoscale.limits(pull, observed()).decode_holds_reuse


def test_a_pod_that_took_days_says_nothing_of_how_long_pods_take() -> None:
    took = [30, 50, 40, 3 * 86_400, -10]
    pods = [pod(Component.PREFILL, n, created=NOW - timedelta(seconds=s)) for n, s in enumerate(took)]
    unknown = pod(Component.DECODE, 0, created=None)
    assert autoscale.limits(spec(), observed(*pods, unknown)).pod_start_seconds == 40


# Why sizes are held


def test_nothing_holds_what_is_at_rest() -> None:
    assert autoscale.why_held("demo", spec(), observed(workloads=(workload(),)), rolling_out=False) == ""
    assert autoscale.why_full(observed(pod(Component.DECODE, 0), workloads=(workload(),)), NOW) == ""


def test_rollouts_and_a_scaler_that_is_not_there_hold_both_pools() -> None:
    assert "rollout" in autoscale.why_held("demo", spec(), observed(), rolling_out=True)
    paused = parsed_spec(rollout={"paused": True})
    assert "paused" in autoscale.why_held("demo", paused, observed(), rolling_out=False)
    one = {("DisaggInferenceScaler", "demo-prefill"): {}}
    why = autoscale.why_held("demo", spec(), observed(live=one), rolling_out=False)
    assert why == "DisaggInferenceScaler demo-decode is not there yet"


UNSCHEDULABLE = Trouble(Reason.UNSCHEDULABLE, "0/3 nodes are available")


@pytest.mark.parametrize(
    ("changes", "is_full"),
    [
        ({}, True),
        ({"created": NOW - timedelta(minutes=4)}, False),
        ({"created": None}, False),
        ({"created": NOW + timedelta(days=1)}, False),
        ({"leaving": True}, False),
        ({"component": Component.ROUTER}, False),
        ({"trouble": None}, False),
        ({"trouble": Trouble(Reason.IMAGE_PULL_FAILED, "no such image")}, False),
    ],
)
def test_a_pod_that_has_long_found_no_node_keeps_pools_from_growing(
    changes: Mapping[str, Any], is_full: bool
) -> None:
    waiting = pod(Component.DECODE, 3, ready=False, created=NOW - timedelta(minutes=6), trouble=UNSCHEDULABLE)
    why = autoscale.why_full(observed(replace(waiting, **changes)), NOW)
    assert bool(why) is is_full
    assert "decode-0123abcd-3 has found no node for 5 minutes" in why or not is_full


def test_a_quota_that_has_long_refused_pods_does_too() -> None:
    quota = Trouble(Reason.QUOTA_EXCEEDED, "exceeded quota: gpus")
    refused = workload(refusal=quota, applied=NOW - timedelta(minutes=6))
    assert "exceeded quota: gpus" in autoscale.why_full(observed(workloads=(refused,)), NOW)
    assert not autoscale.why_full(observed(workloads=(replace(refused, applied=NOW),)), NOW)


def test_without_room_a_pool_does_not_grow_and_still_shrinks() -> None:
    watch = Watch()
    watch.sizes = {Component.PREFILL: 2, Component.DECODE: 6}
    course = watch.work(4, tokens=1400, full="pod x has found no node for 5 minutes")
    assert decided(course).desired == Sizes(2, 6)
    assert decided(course).prefill_because is Because.FULL
    assert "no pool grows: pod x has found no node" in autoscale.claim(course).message
    assert not course.history.changes
    course = watch.work(24, tokens=1400, full="pod x has found no node for 5 minutes")
    assert [change.by for change in course.history.changes] == [-1]
    assert watch.work(1, tokens=1400).history.changes[-1].by == 2, "as soon as there is room"


# Looks


def test_a_look_is_due_at_first_after_a_while_and_when_the_clock_went_back() -> None:
    course = Course()
    assert autoscale.is_due(course, 0.0)
    assert autoscale.rest(course, 0.0) == 0
    course = replace(course, looked_at=100.0)
    for now, rest in ((100.0, 15.0), (105.0, 10.0), (112.9, pytest.approx(2.1))):
        assert not autoscale.is_due(course, now)
        assert autoscale.rest(course, now) == rest
    for now in (113.5, 115.0, 9000.0, 99.0):
        assert autoscale.is_due(course, now)
        assert autoscale.rest(course, now) == 0


def test_ready_pods_of_the_revision_and_all_routers_are_asked() -> None:
    seen = observed(
        pod(Component.PREFILL, 0),
        pod(Component.PREFILL, 1, revision="ffff0000"),
        pod(Component.DECODE, 0, ready=False),
        pod(Component.DECODE, 1, leaving=True),
        pod(Component.DECODE, 2, address=None),
        pod(Component.DECODE, 3),
        pod(Component.ROUTER, 0),
    )
    asked = autoscale.targets(seen, "team-a", REVISION)
    assert list(asked) == ["demo-prefill-0123abcd-0", "demo-decode-0123abcd-3", "demo-router-0"]
    assert {target.namespace for target in asked.values()} == {"team-a"}
    assert "vllm:kv_cache_usage_perc" in asked["demo-decode-0123abcd-3"].names
    assert asked["demo-router-0"].port != 8000


def test_a_ready_pod_without_an_address_is_missing() -> None:
    watch = Watch()
    lost = pod(Component.DECODE, 1, address=None)
    watch.seen = observed(*(p for p in watch.seen.pods if p.name != lost.name), lost)
    pages = {p.name: NoPage("status 503") for p in watch.seen.pods if p.address}
    sizes = {component: Pool(2, 2) for component in watch.sizes}
    course = autoscale.look(watch.course, watch.spec, watch.seen, sizes, pages, "", "", 1.0, NOW)
    assert f"{lost.name}: not asked" in course.inputs.missing


@pytest.mark.parametrize("mode", ["Advisory", "External"])
def test_whoever_does_not_carry_decisions_out_is_told_the_next_one_all_the_same(mode: str) -> None:
    watch = Watch(mode=mode)
    watch.work(4, tokens=1700)
    assert decided(watch.course).desired.prefill == 5
    assert decided(watch.work(1, tokens=1700)).current.prefill == 5
    watch.sizes[Component.PREFILL] = 3
    assert decided(watch.work(1, tokens=1700)).current.prefill == 5, "a size on the way there changes nothing"


@pytest.mark.parametrize("mode", ["Advisory", "External"])
def test_late_tokens_in_pools_that_nobody_enlarged_raise_no_advice(mode: str) -> None:
    watch = Watch(autoscaling=autoscaling(mode, interTokenLatencyMilliseconds=50))
    slow = [watch.work(1, tokens=100, gap=0.4) for _ in range(40)]
    assert {decided(course).desired.decode for course in slow} == {2, 3}
    watch.sizes[Component.DECODE] = 3
    more = [watch.work(1, tokens=100, gap=0.4) for _ in range(12)]
    assert decided(more[-1]).desired.decode == 4, "it was done, and did not suffice"


def test_auto_begins_each_decision_from_the_pods_that_there_are() -> None:
    watch = Watch()
    watch.work(4, tokens=1700)
    watch.sizes[Component.PREFILL] = 3
    assert decided(watch.work(1, tokens=1700)).current.prefill == 3


def test_a_decision_that_was_not_carried_out_counts_for_nothing() -> None:
    watch = Watch()
    course = watch.work(2, tokens=1700)
    assert decided(course).desired.prefill == 5
    undone = autoscale.undone(course, Component.PREFILL, "the server is away")
    assert decided(undone).desired.prefill == 2
    assert not [change for change in undone.history.changes if change.role is Component.PREFILL]
    assert undone.history.ticks == course.history.ticks
    claim = autoscale.claim(undone)
    assert (claim.status, claim.reason) == (ConditionStatus.FALSE, Reason.SCALING_HELD)
    assert claim.message == "sizes are held: the server is away"
    assert autoscale.undone(Course(), Component.PREFILL, "away") == Course()


def test_only_the_latest_change_of_that_role_is_undone() -> None:
    earlier = Resize(10.0, Component.DECODE, 1)
    other, latest = Resize(20.0, Component.PREFILL, 1), Resize(20.0, Component.DECODE, -1)
    course = Course(
        history=History(changes=(earlier, other, latest)),
        looked_at=20.0,
        decision=Decision(Outcome.GROWN, Sizes(1, 3), Sizes(2, 2)),
    )
    undone = autoscale.undone(course, Component.DECODE, "away")
    assert undone.history.changes == (earlier, other)
    assert decided(undone).desired == Sizes(2, 3)


# What was learned


def learned(**figures: Any) -> DisaggInferenceStatus:
    scaling = {"decidedTime": "2026-01-01T00:00:00Z", "reason": "Steady", "learned": figures}
    return DisaggInferenceStatus.model_validate({"revision": REVISION, "scaling": scaling})


def test_a_new_operator_goes_on_from_what_was_learned_of_the_same_revision() -> None:
    status = learned(prefillTokensPerSecond=9000, remoteTokenCostMilli=170)
    course = autoscale.begin("uid-1", status, REVISION)
    assert course.sight.lessons.learned.tokens_per_second == 9000
    assert course.sight.lessons.learned.remote_cost == 0.17
    assert not course.history.ticks
    assert autoscale.is_due(course, 0.0)
    assert told(Watch(course).look(NOTHING), status.scaling).learned == status.scaling.learned  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "status",
    [
        DisaggInferenceStatus(),
        learned(prefillTokensPerSecond=9000).model_copy(update={"revision": "ffff0000"}),
        learned(prefillTokensPerSecond=9000).model_copy(update={"revision": None}),
    ],
)
def test_nothing_is_resumed_of_another_revision(status: DisaggInferenceStatus) -> None:
    assert autoscale.begin("uid-1", status, REVISION) == Course("uid-1", REVISION)


def test_what_another_revision_taught_goes_from_the_status_at_once() -> None:
    """Or an operator that starts anew would take it for this one's."""
    old = learned(prefillTokensPerSecond=9000).scaling
    assert old is not None
    old = old.model_copy(update={"reason": "MetricsUnavailable", "decided_time": NOW})
    course = Watch().look(NOTHING)
    assert told(course, old).learned is None


@pytest.mark.parametrize("figures", [{}, {"remoteTokenCostMilli": 40}, {"prefillTokensPerSecond": 0}])
def test_figures_that_are_not_all_there_are_resumed_as_they_are(figures: Mapping[str, int]) -> None:
    course = autoscale.begin("uid-1", learned(**figures), REVISION)
    assert decided(Watch(course).work(3)).arithmetic is not None
