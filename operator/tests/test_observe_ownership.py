"""What a pass makes of the objects that it is given."""

from datetime import UTC, datetime
from typing import Any

import pytest

from disagg_operator.observe import MAX_QUESTIONS, observe, open_questions

OURS = {"kind": "DisaggInference", "controller": True, "uid": "us"}


def child(
    kind: str = "Service", name: str = "demo-router", *, owners: list[Any] | None = None, **rest: Any
) -> Any:
    metadata = {"name": name, "ownerReferences": [OURS] if owners is None else owners}
    return {"kind": kind, "metadata": metadata, **rest}


def stateful_set(*, replicas: int = 2, **status: Any) -> Any:
    item = child("StatefulSet", "demo-prefill-0123abcd", spec={"replicas": replicas}, status=status)
    item["metadata"] |= {
        "generation": 3,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"inference.disagg.dev/role": "prefill", "inference.disagg.dev/revision": "0123abcd"},
        "managedFields": [
            {"manager": "kube-controller-manager", "operation": "Update", "time": "2026-01-05T00:00:00Z"},
            {"manager": "disagg-operator", "operation": "Apply", "time": "2026-01-02T00:00:00Z"},
        ],
    }
    return item


@pytest.mark.parametrize(
    ("owners", "stranger", "predecessor"),
    [
        ([OURS], False, False),
        ([], True, False),
        ([{**OURS, "uid": "before us"}], True, True),
        ([{**OURS, "controller": False}], True, False),
        ([{"kind": "Deployment", "controller": True, "uid": "x"}], True, False),
        ([{"kind": "Deployment", "uid": "x"}, OURS], False, False),
    ],
)
def test_only_what_we_control_is_ours(owners: list[Any], stranger: bool, predecessor: bool) -> None:
    seen = observe("us", [], [child(owners=owners)])
    assert bool(seen.live) != stranger
    assert [s.predecessor for s in seen.strangers] == ([predecessor] if stranger else [])


@pytest.mark.parametrize(
    ("status", "settled"),
    [
        ({"observedGeneration": 3, "replicas": 2, "updatedReplicas": 2}, True),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2}, False),
        ({"observedGeneration": 3, "replicas": 2, "updatedReplicas": 1}, False),
        ({}, False),
    ],
)
def test_a_workload_is_settled_when_its_controller_has_seen_it_and_all_pods_are_new(
    status: dict[str, int], settled: bool
) -> None:
    workload = observe("us", [stateful_set(**status)]).workloads[0]
    assert workload.settled is settled
    assert workload.applied == datetime(2026, 1, 2, tzinfo=UTC), "others' changes are not our progress"


@pytest.mark.parametrize(
    ("seen", "exist", "updated", "replacing"),
    [
        (3, 4, 4, False),
        (2, 4, 4, True),
        (3, 4, 2, True),
        (3, 2, 2, False),
        (3, 6, 4, False),
        (3, 0, 0, False),
    ],
    ids=["at rest", "not seen yet", "old pods", "pods that a quota refuses", "pods that end", "no pod"],
)
def test_pods_are_being_replaced_only_while_some_are_of_an_older_template(
    seen: int, exist: int, updated: int, replacing: bool
) -> None:
    item = stateful_set(replicas=4, observedGeneration=seen, updatedReplicas=updated)
    item["status"]["replicas"] = exist
    (workload,) = observe("us", [item]).workloads
    assert workload.replacing is replacing


def test_a_pod_that_is_being_deleted_counts_for_nothing() -> None:
    pod = {
        "kind": "Pod",
        "metadata": {
            "name": "demo-prefill-0123abcd-0",
            "labels": {"inference.disagg.dev/role": "prefill", "inference.disagg.dev/revision": "0123abcd"},
        },
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        },
    }
    seen = observe("us", [pod])
    prefill = seen.pods[0].component
    assert prefill is not None
    assert seen.ready(prefill, "0123abcd") == 1
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # type: ignore[index]
    assert observe("us", [pod]).ready(prefill) == 0


def waiting_pod(number: int) -> Any:
    return {"kind": "Pod", "metadata": {"name": f"p-{number}"}, "status": {"phase": "Pending"}}


def test_events_are_asked_for_only_where_the_status_is_silent() -> None:
    told = waiting_pod(1)
    told["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "no node"}]
    running = {"kind": "Pod", "metadata": {"name": "p-2"}, "status": {"phase": "Running"}}
    leaving = waiting_pod(3)
    leaving["metadata"]["deletionTimestamp"] = "now"
    full, short = stateful_set(replicas=1), stateful_set(replicas=2, updatedReplicas=1)
    full["status"] = {"replicas": 1}
    assert open_questions([told, running, leaving, full]) == ()
    assert open_questions([waiting_pod(4), short]) == (
        ("StatefulSet", "demo-prefill-0123abcd"),
        ("Pod", "p-4"),
    )


def test_not_too_many_questions() -> None:
    assert len(open_questions([waiting_pod(n) for n in range(50)])) == MAX_QUESTIONS
