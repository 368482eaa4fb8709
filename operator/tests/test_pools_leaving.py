"""How large pools are, where the size comes from, and how pods leave one that gets smaller."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import Manifest, SimulatedPod, World, resource

from disagg_operator.naming import ANNOTATION_LEAVING, LABEL_KEEP, LABEL_ROLE

BOUNDS = {"minReplicas": 1, "maxReplicas": 8}


def scaled(mode: str = "Auto", **changes: Any) -> World:
    spec = {
        "model": {"uri": "hf://org/model"},
        "engine": {"image": "vllm:1"},
        "prefill": {"scaling": BOUNDS},
        "decode": {"scaling": BOUNDS},
        "autoscaling": {"mode": mode},
        **changes,
    }
    world = World(resource(spec))
    world.settle()
    return world


def scaler(world: World, role: str) -> Manifest:
    return world.live["DisaggInferenceScaler", f"demo-{role}"]


def scale(world: World, role: str, replicas: int) -> None:
    """Somebody writes the scaler."""
    item = scaler(world, role)
    item["spec"] = {"replicas": replicas}
    item["metadata"]["generation"] += 1


def service_label(world: World, role: str) -> str | None:
    found = [
        item["metadata"]["labels"].get(LABEL_KEEP)
        for (kind, _), item in world.live.items()
        if kind == "Service" and item["metadata"]["labels"].get(LABEL_ROLE) == role
    ]
    assert len(found) == 1
    return found[0]


def role_status(world: World, role: str) -> Manifest:
    return next(r for r in world.resource["status"]["roles"] if r["name"] == role)


def test_a_scaled_role_has_a_scaler_that_decides_its_size() -> None:
    world = scaled()
    assert scaler(world, "prefill")["spec"] == {"replicas": 1}
    scale(world, "decode", 3)
    world.settle()
    assert (world.ready("prefill"), world.ready("decode")) == (1, 3)
    assert scaler(world, "decode")["spec"] == {"replicas": 3}, "the number is whoever's who scales"


@pytest.mark.parametrize(("written", "kept"), [(0, 1), (1, 1), (8, 8), (1000, 8)])
def test_the_bounds_hold_whatever_stands_in_the_scaler(written: int, kept: int) -> None:
    world = scaled()
    scale(world, "decode", written)
    world.settle()
    assert world.ready("decode") == kept


@pytest.mark.parametrize("mode", ["Auto", "External"])
def test_a_scaler_that_is_made_while_suspended_is_not_of_0_pods(mode: str) -> None:
    """An HPA leaves a scaler of 0 alone, also when the object goes on."""
    world = scaled(mode, suspend=True, decode={"scaling": {"minReplicas": 2, "maxReplicas": 8}})
    assert (world.ready("prefill"), world.ready("decode")) == (0, 0)
    assert [scaler(world, role)["spec"]["replicas"] for role in ("prefill", "decode")] == [1, 2]
    world.edit(suspend=False)
    world.settle()
    assert (world.ready("prefill"), world.ready("decode")) == (1, 2)


def test_a_deleted_scaler_comes_back_with_the_size_that_there_is() -> None:
    world = scaled()
    scale(world, "decode", 4)
    world.settle()
    world.delete(("DisaggInferenceScaler", "demo-decode"))
    world.settle()
    assert scaler(world, "decode")["spec"] == {"replicas": 4}
    assert world.ready("decode") == 4


def test_labels_taken_from_a_scaler_come_back_and_its_number_stays() -> None:
    world = scaled()
    scale(world, "decode", 3)
    scaler(world, "decode")["metadata"]["labels"].pop(LABEL_ROLE)
    world.settle()
    assert scaler(world, "decode")["metadata"]["labels"][LABEL_ROLE] == "decode"
    assert scaler(world, "decode")["spec"] == {"replicas": 3}


def test_turning_scaling_off_removes_the_scalers_and_goes_to_the_least() -> None:
    world = scaled()
    scale(world, "decode", 3)
    world.settle()
    world.edit(autoscaling={"mode": "Disabled"})
    world.settle()
    assert not [key for key in world.live if key[0] == "DisaggInferenceScaler"]
    assert world.ready("decode") == 1


def test_a_new_revision_comes_up_in_the_size_of_the_scaler() -> None:
    world = scaled()
    scale(world, "decode", 3)
    world.settle()
    world.edit(engine={"image": "vllm:2"})
    world.settle()
    assert world.ready("decode") == 3


def test_resuming_brings_back_the_size_from_before() -> None:
    world = scaled()
    scale(world, "decode", 3)
    world.settle()
    world.edit(suspend=True)
    world.settle()
    assert world.ready("decode") == 0
    world.edit(suspend=False)
    world.settle()
    assert world.ready("decode") == 3


def test_pods_take_no_new_turns_before_they_go() -> None:
    world = scaled(decode={"scaling": BOUNDS, "drain": {"handoverSeconds": 45}})
    scale(world, "decode", 4)
    world.settle()
    scale(world, "decode", 2)
    world.reconcile()
    began = world.now
    assert service_label(world, "decode") == "2"
    assert service_label(world, "prefill") is None
    while world.live["StatefulSet", statefulset(world, "decode")]["spec"]["replicas"] == 4:
        status = role_status(world, "decode")
        assert (status["leavingReplicas"], status["desiredReplicas"]) == (2, 2)
        assert datetime.fromisoformat(status["leavingUntil"]) == began + timedelta(seconds=45)
        world.tick()
        world.reconcile()
        assert (world.now - began).total_seconds() < 120
    assert (world.now - began).total_seconds() >= 45
    world.settle()
    assert world.ready("decode") == 2
    assert service_label(world, "decode") is None
    assert role_status(world, "decode")["leavingReplicas"] == 0


def test_the_routers_are_told_until_the_last_leaving_pod_has_ended() -> None:
    world = scaled(decode={"scaling": BOUNDS, "drain": {"handoverSeconds": 0}})
    scale(world, "decode", 2)
    world.settle()
    scale(world, "decode", 1)
    world.reconcile()
    assert service_label(world, "decode") == "1"
    assert world.live["StatefulSet", statefulset(world, "decode")]["spec"]["replicas"] == 1
    world.tick()
    world.reconcile()
    assert service_label(world, "decode") is None


def statefulset(world: World, role: str) -> str:
    return next(name for kind, name in world.live if kind == "StatefulSet" and f"-{role}-" in name)


def test_growing_again_calls_the_leaving_pods_back() -> None:
    world = scaled()
    scale(world, "decode", 3)
    world.settle()
    pods = {p for p in world.pods if "-decode-" in p}
    scale(world, "decode", 2)
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert service_label(world, "decode") == "2"
    scale(world, "decode", 3)
    world.settle()
    assert service_label(world, "decode") is None
    assert {p for p in world.pods if "-decode-" in p} == pods


def test_a_still_smaller_size_begins_the_handover_anew() -> None:
    world = scaled()
    scale(world, "decode", 4)
    world.settle()
    scale(world, "decode", 3)
    for _ in range(5):
        world.reconcile()
        world.tick()
    scale(world, "decode", 2)
    world.reconcile()
    first = role_status(world, "decode")
    assert first["leavingReplicas"] == 2
    assert service_label(world, "decode") == "2"
    for _ in range(5):
        world.tick()
        world.reconcile()
    assert world.ready("decode") == 4, "pod 2 has been leaving for less than a minute"


def test_a_scaler_does_not_count_pods_that_are_leaving() -> None:
    world = scaled()
    scale(world, "decode", 4)
    world.settle()
    scale(world, "decode", 3)
    world.reconcile()
    world.tick()
    (status,) = [s["status"] for s in world.plan().statuses if s["metadata"]["name"] == "demo-decode"]
    assert world.ready("decode") == 4
    assert status["replicas"] == 3


def test_pods_that_never_came_up_leave_at_once() -> None:
    world = scaled()
    world.can_start = lambda template: False
    scale(world, "decode", 3)
    for _ in range(3):
        world.reconcile()
        world.tick()
    scale(world, "decode", 1)
    world.reconcile()
    world.tick()
    assert len([p for p in world.pods if "-decode-" in p]) == 1


def leaving_pod(world: World) -> SimulatedPod:
    """Of decode, which has two pods and is to have one."""
    scale(world, "decode", 2)
    world.settle()
    scale(world, "decode", 1)
    world.reconcile()
    return next(pod for pod in world.pods.values() if pod.name.endswith("-1") and "-decode-" in pod.name)


def test_a_leaving_pod_that_misses_a_probe_hands_over_all_the_same() -> None:
    world = scaled()
    pod, began = leaving_pod(world), world.now
    pod.answers = False
    while pod.name in world.pods:
        world.tick()
        world.reconcile()
        assert (world.now - began).total_seconds() < 120
    assert (world.now - began).total_seconds() >= 60


def test_a_leaving_pod_that_restarts_has_nothing_to_hand_over() -> None:
    world = scaled()
    pod = leaving_pod(world)
    world.can_start = lambda template: False
    pod.ready_at = None
    world.reconcile()
    world.tick()
    assert pod.name not in world.pods


def test_suspending_waits_for_no_handover() -> None:
    world = scaled()
    scale(world, "decode", 3)
    world.settle()
    world.edit(suspend=True)
    world.reconcile()
    world.tick()
    assert not [p for p in world.pods if "-decode-" in p]


def test_a_rollout_calls_leaving_pods_back() -> None:
    """The old revision serves for as long as the new one takes, which may be for ever, and its sizes do not change meanwhile."""
    world = scaled()
    world.can_start = lambda template: "vllm:broken" not in str(template)
    scale(world, "decode", 4)
    world.settle()
    scale(world, "decode", 2)
    world.reconcile()
    assert service_label(world, "decode") == "2"
    world.edit(engine={"image": "vllm:broken"})
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.ready("decode") == 4
    services = [item["metadata"] for (kind, _), item in world.live.items() if kind == "Service"]
    assert not [meta for meta in services if LABEL_KEEP in meta["labels"]]
    assert not [meta for meta in services if ANNOTATION_LEAVING in meta["annotations"]]
    world.edit(engine={"image": "vllm:1"})
    world.reconcile()
    assert service_label(world, "decode") == "2", "and so it goes on from there"
    world.settle()
    assert world.ready("decode") == 2


@pytest.mark.parametrize(
    "refused",
    [
        {"rollout": {"paused": True}},
        {"engine": {"image": "vllm:2", "extraArgs": ["--kv-transfer-conf={}"]}},
        {"engine": {"image": 2}},
    ],
    ids=["not implemented", "of another revision", "unreadable"],
)
def test_a_spec_that_is_refused_calls_leaving_pods_back(refused: Manifest) -> None:
    """It may stay so for days. Nothing is carried out meanwhile, and pods that wait for nothing would only hold their devices."""
    world = scaled()
    scale(world, "decode", 4)
    world.settle()
    good = world.resource["spec"]
    scale(world, "decode", 2)
    world.reconcile()
    assert service_label(world, "decode") == "2"
    world.edit(**refused)
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.condition("Stalled")
    assert service_label(world, "decode") is None
    assert world.ready("decode") == 4
    status = role_status(world, "decode")
    assert (status["leavingReplicas"], status.get("leavingUntil")) == (0, None)
    assert world.plan().apply == ()
    world.edit(**{"rollout": {}, **good})
    began = world.now
    world.reconcile()
    assert service_label(world, "decode") == "2", "and so it goes on from there"
    world.settle()
    assert world.ready("decode") == 2
    assert (world.now - began).total_seconds() >= 60, "with all the time to hand over"


def test_a_spec_that_is_refused_calls_no_pod_back_that_is_being_stopped() -> None:
    world = scaled(decode={"scaling": BOUNDS, "drain": {"handoverSeconds": 0}})
    scale(world, "decode", 2)
    world.settle()
    scale(world, "decode", 1)
    world.reconcile()
    assert world.live["StatefulSet", statefulset(world, "decode")]["spec"]["replicas"] == 1
    world.edit(rollout={"paused": True})
    world.reconcile()
    assert service_label(world, "decode") == "1", "it is still there"


def test_decode_keeps_what_it_promised_to_prefill() -> None:
    world = scaled(
        kvTransfer={"mode": "BidirectionalPull", "decodeRetentionSeconds": 300},
    )
    for role in ("prefill", "decode"):
        scale(world, role, 2)
    world.settle()
    began = world.now
    for role in ("prefill", "decode"):
        scale(world, role, 1)
    gone = {}
    while len(gone) < 2:
        world.reconcile()
        world.tick()
        for role in ("prefill", "decode"):
            if world.ready(role) == 1:
                gone.setdefault(role, (world.now - began).total_seconds())
        assert (world.now - began).total_seconds() < 400
    assert gone["prefill"] < 100
    assert gone["decode"] >= 300


@pytest.mark.parametrize(
    "written", ["yesterday", "", "2999-01-01T00:00:00+00:00", "0001-01-01T00:00:00+14:00"]
)
def test_a_time_that_cannot_be_ends_no_handover_early_and_holds_none_for_ever(written: str) -> None:
    world = scaled()
    scale(world, "decode", 2)
    world.settle()
    scale(world, "decode", 1)
    world.reconcile()
    service = next(
        item for (kind, name), item in world.live.items() if kind == "Service" and "-decode-" in name
    )
    service["metadata"]["annotations"]["inference.disagg.dev/leaving-since"] = written
    world.reconcile()
    assert world.ready("decode") == 2
    world.settle()
    assert world.ready("decode") == 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("prefill", "decode")), st.integers(0, 10), st.integers(0, 9)), max_size=6
    )
)
def test_any_history_of_sizes_ends_at_the_last_one(history: list[tuple[str, int, int]]) -> None:
    world = scaled()
    last = {"prefill": 1, "decode": 1}
    for role, replicas, steps in history:
        scale(world, role, replicas)
        last[role] = min(max(replicas, 1), 8)
        for _ in range(steps):
            world.reconcile()
            world.tick()
    world.settle(100)
    assert {role: world.ready(role) for role in last} == last
    assert service_label(world, "prefill") is None
    assert service_label(world, "decode") is None
