"""Whole lives of a DisaggInference, pass by pass, on the cluster in memory."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, minimal_spec, resource

from disagg_operator.naming import LABEL_REVISION
from disagg_operator.plan import SETTLE


def image_of(template: dict[str, Any]) -> str:
    main: str = template["spec"]["containers"][0]["image"]
    return main


def starts_unless(bad: str) -> Any:
    return lambda template: image_of(template) != bad


def revision_of(world: World) -> str:
    revision: str = world.resource["status"]["revision"]
    return revision


def test_a_new_object_becomes_ready_and_then_nothing_is_written() -> None:
    world = World()
    first = world.reconcile()
    assert first.status.observed_generation == 1
    assert world.condition("Reconciling"), "the first status after a change says that it is worked on"
    world.settle()
    ready = world.condition("Ready")
    assert ready is not None
    assert ready["status"] == "True"
    assert world.condition("Reconciling") is None
    assert [(role["name"], role["ready"]) for role in world.resource["status"]["roles"]] == [
        ("prefill", "2/2"),
        ("decode", "2/2"),
        ("router", "2/2"),
    ]
    plan = world.plan()
    assert (plan.apply, plan.prune) == ((), ())
    assert world.reconcile().notices == ()


def test_a_new_revision_comes_up_in_full_before_the_old_one_goes() -> None:
    world = World()
    world.settle()
    old = revision_of(world)
    world.edit(engine={"image": "vllm:2"})
    seen_both = False
    for _ in range(20):
        world.reconcile()
        world.tick()
        new = [pod for pod in world.pods.values() if pod.labels.get(LABEL_REVISION, old) != old]
        complete = len(new) == 4 and all(pod.ready_at for pod in new)
        seen_both |= complete and world.ready("decode", old) == 2
        if not complete:
            assert (world.ready("prefill", old), world.ready("decode", old)) == (2, 2)
    world.settle()
    assert seen_both
    assert revision_of(world) != old
    assert {key[0] for key in world.live if old in key[1]} == set(), "nothing of the old revision is left"
    assert world.ready("decode") == 2


def test_the_old_revision_stays_until_routers_can_know_the_new_one() -> None:
    world = World()
    world.settle()
    old = revision_of(world)
    world.edit(engine={"image": "vllm:2"})
    world.reconcile()
    world.tick()  # pods are made
    world.tick()  # and become ready
    world.reconcile()
    assert world.ready("decode", old) == 2
    told = world.condition("Reconciling")
    assert told is not None
    assert "is ready and takes over" in told["message"]
    world.now += SETTLE
    world.reconcile()
    assert world.ready("decode", old) == 0
    assert world.ready("decode") == 2


def test_a_dead_revision_leaves_the_old_one_serving_and_goes_when_fixed() -> None:
    """A tag that does not exist, then a good one."""
    world = World(can_start=starts_unless("vllm:broken"))
    world.settle()
    old, pods = revision_of(world), sorted(world.pods)
    world.edit(engine={"image": "vllm:broken"})
    world.settle()
    assert (world.ready("prefill", old), world.ready("decode", old)) == (2, 2)
    reconciling = world.condition("Reconciling")
    assert reconciling is not None
    assert f"revision {old} serves meanwhile" in reconciling["message"]
    for role in ("PrefillReady", "DecodeReady"):
        condition = world.condition(role)
        assert condition is not None
        assert condition["status"] == "True", "the roles' conditions are about who serves"
    assert set(pods) <= set(world.pods), "the old pods are the same ones"

    world.edit(engine={"image": "vllm:3"})
    world.reconcile()
    revisions = {pod.labels[LABEL_REVISION] for pod in world.pods.values() if LABEL_REVISION in pod.labels}
    assert revisions == {old}, "the dead revision goes at once, its devices are needed"
    world.settle()
    ready = world.condition("Ready")
    assert ready is not None
    assert ready["status"] == "True"
    assert len(world.pods) == 6


def test_going_back_to_the_old_revision_keeps_its_pods() -> None:
    world = World(can_start=starts_unless("vllm:broken"))
    world.settle()
    original = {name: id(pod) for name, pod in world.pods.items()}
    world.edit(engine={"image": "vllm:broken"})
    world.settle()
    world.edit(engine={"image": "vllm:1"})
    world.settle()
    assert {name: id(pod) for name, pod in world.pods.items()} == original
    assert world.condition("Reconciling") is None


def test_a_change_without_part_in_compatibility_is_made_in_place() -> None:
    world = World(can_start=lambda template: "nodeSelector" not in template["spec"])
    world.settle()
    revision = revision_of(world)
    world.edit(prefill={"replicas": 2, "template": {"spec": {"nodeSelector": {"no": "such"}}}})
    world.settle()
    assert revision_of(world) == revision
    assert world.ready("prefill") == 1, "one pod waits, the other serves on"
    world.edit(prefill={"replicas": 2})
    world.settle()
    assert world.ready("prefill") == 2
    assert {pod.labels.get(LABEL_REVISION) for pod in world.pods.values()} == {revision, None}


def test_a_change_of_size_scales_in_place() -> None:
    world = World()
    world.settle()
    revision, before = revision_of(world), set(world.pods)
    world.edit(decode={"replicas": 4})
    world.settle()
    assert revision_of(world) == revision
    assert world.ready("decode", revision) == 4
    assert before <= set(world.pods)
    world.edit(decode={"replicas": 1})
    world.settle()
    assert world.ready("decode", revision) == 1


def test_a_size_edited_during_a_rollout_is_the_new_revisions() -> None:
    world = World()
    world.settle()
    world.edit(engine={"image": "vllm:2"})
    world.reconcile()
    world.edit(engine={"image": "vllm:2"}, decode={"replicas": 3})
    world.settle()
    assert world.ready("decode") == 3


def test_suspending_stops_all_pods_and_resuming_starts_them() -> None:
    world = World()
    world.settle()
    world.edit(suspend=True)
    world.settle()
    assert world.pods == {}
    ready = world.condition("Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "Suspended")
    assert world.condition("Reconciling") is None
    world.edit(suspend=False)
    world.settle()
    assert len(world.pods) == 6


def test_a_deleted_child_is_made_again() -> None:
    world = World()
    world.settle()
    for key in list(world.live):
        del world.live[key]
        plan = world.plan()
        written = (*plan.apply, *((plan.secret.manifest,) if plan.secret else ()))
        assert [(m["kind"], m["metadata"]["name"]) for m in written] == [key]
        world.settle()


def test_no_progress_becomes_stalled_and_ends_with_progress() -> None:
    world = World(
        resource(minimal_spec(rollout={"progressDeadlineSeconds": 60})), can_start=starts_unless("vllm:1")
    )
    world.settle()
    assert world.condition("Reconciling")
    world.tick(61)
    said = world.reconcile()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert stalled["reason"] == "DeadlineExceeded"
    assert world.condition("Reconciling") is None, "kstatus: not both"
    assert [(notice.type, notice.reason) for notice in said.notices] == [("Warning", "DeadlineExceeded")]
    world.tick(1000)
    assert world.reconcile().notices == (), "it is said once"
    world.can_start = lambda template: True
    world.settle()
    assert world.condition("Stalled") is None
    ready = world.condition("Ready")
    assert ready is not None
    assert ready["status"] == "True"


def test_an_edit_ends_stalled_at_once() -> None:
    world = World(
        resource(minimal_spec(rollout={"progressDeadlineSeconds": 60})), can_start=starts_unless("vllm:1")
    )
    world.settle()
    world.tick(61)
    world.reconcile()
    world.edit(engine={"image": "vllm:2"})
    world.reconcile()
    assert world.condition("Stalled") is None
    assert world.condition("Reconciling")


edits = st.one_of(
    st.sampled_from(["vllm:1", "vllm:2", "vllm:broken"]).map(lambda image: {"engine": {"image": image}}),
    st.integers(1, 3).map(lambda n: {"decode": {"replicas": n}}),
    st.integers(1, 3).map(lambda n: {"prefill": {"replicas": n}}),
    st.booleans().map(lambda suspend: {"suspend": suspend}),
    st.integers(1, 2).map(lambda n: {"router": {"replicas": n}}),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(edits, st.integers(0, 6)), max_size=6))
def test_any_history_of_edits_ends_where_its_last_spec_says(
    history: list[tuple[dict[str, Any], int]],
) -> None:
    world = World(can_start=starts_unless("vllm:broken"))
    for edit, steps in history:
        world.edit(**edit)
        for _ in range(steps):
            world.reconcile()
            world.tick()
    world.settle(80)
    spec = world.resource["spec"]
    if spec["engine"]["image"] == "vllm:broken" and not spec.get("suspend"):
        return  # what is left depends on whether anything served before; other tests say what
    sizes = {role: 0 if spec.get("suspend") else spec[role]["replicas"] for role in ("prefill", "decode")}
    assert {role: world.ready(role) for role in sizes} == sizes
    assert len({key[1] for key in world.live if key[0] == "StatefulSet"}) == 2, "one revision is left"


def lose_decode(world: World, revision: str) -> None:
    """Every decode pod of the revision stops being ready, as when its node reboots."""
    for pod in world.pods.values():
        if pod.labels.get(LABEL_REVISION) == revision and "-decode-" in pod.name:
            pod.ready_at = None


def test_a_lost_decode_pod_does_not_cost_the_revision_that_served() -> None:
    world = World(can_start=starts_unless("vllm:bad"))
    world.settle()
    old = revision_of(world)
    world.edit(engine={"image": "vllm:bad"})
    world.settle()

    lose_decode(world, old)
    world.reconcile()
    assert any(old in name for _, name in world.live), "its engines are still there"
    world.tick()  # the pods come back
    world.reconcile()
    assert world.ready("decode", old) == 2
    assert revision_of(world) == old


def test_engines_that_stay_away_give_their_devices_to_the_new_revision() -> None:
    world = World()
    world.settle()
    old = revision_of(world)
    world.can_start = lambda template: False
    lose_decode(world, old)
    world.reconcile()
    world.edit(engine={"image": "vllm:fix"})
    world.reconcile()
    assert any(old in name for _, name in world.live)
    for _ in range(61):
        world.tick()
        world.reconcile()
    assert not any(old in name for _, name in world.live)
