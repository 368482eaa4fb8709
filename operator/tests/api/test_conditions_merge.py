"""Conditions keep their times, and abnormal ones exist only while they hold."""

from datetime import UTC, datetime, timedelta

from disagg_operator.api.conditions import (
    MAX_MESSAGE,
    ConditionType,
    Reason,
    fails,
    find,
    holds,
    merge,
    unknown,
)
from disagg_operator.api.reference import member_docs
from disagg_operator.api.types import DisaggInferenceStatus

T0 = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
T1 = T0 + timedelta(minutes=5)


def test_the_transition_time_moves_only_when_the_status_changes() -> None:
    first = merge((), [fails(ConditionType.READY, Reason.PODS_STARTING, "0/1")], generation=1, now=T0)
    same = merge(first, [fails(ConditionType.READY, Reason.IMAGE_PULL_FAILED, "x")], generation=2, now=T1)
    assert same[0].last_transition_time == T0.replace(microsecond=0)
    assert (same[0].reason, same[0].observed_generation) == (Reason.IMAGE_PULL_FAILED, 2)
    turned = merge(same, [holds(ConditionType.READY, Reason.READY)], generation=2, now=T1)
    assert turned[0].last_transition_time == T1.replace(microsecond=0)


def test_merging_the_same_claims_again_changes_nothing() -> None:
    claims = [
        holds(ConditionType.READY, Reason.READY),
        unknown(ConditionType.KV_TRANSFER_READY, Reason.NOT_PROVEN, "y"),
    ]
    once = merge((), claims, generation=3, now=T0)
    assert merge(once, claims, generation=3, now=T1) == once


def test_reconciling_and_stalled_are_absent_unless_true() -> None:
    claims = [
        fails(ConditionType.STALLED, Reason.READY, "no"),
        holds(ConditionType.RECONCILING, Reason.PROGRESSING),
    ]
    merged = merge((), claims, generation=1, now=T0)
    assert [c.type for c in merged] == [ConditionType.RECONCILING]
    assert merge(merged, [], generation=1, now=T1) == ()


def test_the_first_of_two_claims_about_one_type_counts() -> None:
    claims = [fails(ConditionType.READY, Reason.UNSCHEDULABLE, "a"), holds(ConditionType.READY, Reason.READY)]
    ready = find(merge((), claims, generation=1, now=T0), ConditionType.READY)
    assert ready is not None
    assert ready.reason == Reason.UNSCHEDULABLE


def test_long_messages_are_cut() -> None:
    merged = merge((), [fails(ConditionType.READY, Reason.API_ERROR, "x" * 9000)], generation=1, now=T0)
    assert len(merged[0].message) == MAX_MESSAGE


def test_times_are_written_with_seconds_in_utc_and_read_back() -> None:
    status = DisaggInferenceStatus(
        conditions=merge((), [holds(ConditionType.READY, Reason.READY)], generation=1, now=T0)
    )
    assert status.to_wire()["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    assert DisaggInferenceStatus.model_validate(status.to_wire()) == status


def test_every_condition_and_reason_is_explained() -> None:
    for enum in (ConditionType, Reason):
        docs = member_docs(enum)
        assert set(docs) == {member.value for member in enum}
        assert all(text.endswith(".") for text in docs.values()), enum
