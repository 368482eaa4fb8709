"""Whole passes over autoscaled objects: what becomes of the pools as the load, the clocks, the cluster and the users change."""

from itertools import pairwise

import pytest
from operator_world import World, resource
from scaling_world import STEP, WINDOW, Load, Scene, autoscaling, no_number_is_none, scaled_spec

from disagg_operator.naming import LABEL_ROLE, SCALER_KIND

OLD_AND_NEW = 2 * WINDOW + 120
"""By then high reuse is what a whole window was like, and a whole window's wishes were made of it."""


async def test_reuse_that_rises_makes_prefill_smaller_and_its_loss_brings_it_back() -> None:
    scene = Scene.of(prefill=2, tokens=1350)
    await scene.run(120)
    assert (scene.scaling()["desiredReplicas"], scene.scaler()) == (2, 2)
    scene.loads["demo"].brought = 0.8

    waited = await scene.until(lambda: scene.scaler() == 1)
    assert WINDOW <= waited <= OLD_AND_NEW
    assert scene.status()["reuse"]["ratioPercent"] == 80
    assert len(scene.events("ScaledDown")) == 1
    await scene.pass_()
    assert scene.leaving() == "1", "it takes no new turns"
    assert len(scene.pods()) == 2
    gone = await scene.until(lambda: len(scene.pods()) == 1)
    assert gone >= 60, "and goes when it has handed over"
    await scene.run(60)
    assert scene.leaving() is None

    scene.loads["demo"].brought = 0.0
    assert await scene.until(lambda: scene.scaler() == 2) <= 75, "a window of looks"
    assert await scene.until(lambda: len(scene.pods()) == 2) <= 30
    assert len(scene.events("ScaledUp")) == 1
    assert [spec["replicas"] for _, spec in scene.writes()] == [1, 2]
    assert not scene.failures


async def test_reuse_that_is_lost_while_pods_leave_calls_them_back() -> None:
    scene = Scene.of(prefill=2, tokens=1350, brought=0.8)
    await scene.until(lambda: scene.scaler() == 1)
    pods = scene.pods()
    scene.loads["demo"].brought = 0.0
    await scene.until(lambda: scene.scaler() == 2)
    await scene.run(120)
    assert scene.pods() == pods
    assert scene.leaving() is None


async def test_one_pool_is_made_smaller_at_a_time_and_one_pod_within_a_window() -> None:
    scene = Scene.of(prefill=4, decode=4, tokens=100)
    changes: list[tuple[float, int, int]] = [(0.0, 4, 4)]
    for step in range(240):
        await scene.step()
        sizes = scene.scaler(), scene.scaler("decode")
        if sizes != changes[-1][1:]:
            changes.append((step * STEP, *sizes))
    assert changes[-1][1:] == (1, 1)
    for (_, p, d), (_, p_then, d_then) in pairwise(changes):
        assert (p - p_then) + (d - d_then) == 1
    for earlier, later in zip(changes, changes[2:], strict=False):
        assert later[0] - earlier[0] >= WINDOW


async def test_a_burst_of_load_is_followed_at_once() -> None:
    scene = Scene.of(prefill=1, tokens=100)
    await scene.run(120)
    scene.loads["demo"].tokens = 3600
    assert await scene.until(lambda: scene.scaler() == 5) <= 90
    await scene.run(60)
    assert len(scene.pods()) == 5


# Modes


async def test_advisory_changes_nothing_and_says_what_it_would_do() -> None:
    scene = Scene.of(scaled_spec("Advisory"), prefill=1, tokens=2900)
    await scene.run(300)
    assert scene.scaler() == 1
    assert len(scene.pods()) == 1
    assert not scene.writes()
    assert scene.scaling()["desiredReplicas"] == 4
    assert len(scene.events("ScalingAdvised")) == 1
    assert "prefill 1 -> 4" in scene.events("ScalingAdvised")[0]
    assert not scene.events("ScaledUp", "ScaledDown")
    assert (
        'disagg_scaling_recommended_replicas{name="demo",namespace="default",role="prefill"} 4.0'
        in scene.exposed()
    )
    assert scene.active()["status"] == "True"


@pytest.mark.parametrize(("number", "aim"), [(0, 4), (3, 4), (1000, 8)])
async def test_external_never_writes_the_number_of_whoever_scales(number: int, aim: int) -> None:
    scene = Scene.of(scaled_spec("External"), prefill=1, tokens=2900)
    scene.write_scaler(number)
    await scene.run(300)
    assert scene.scaler() == number
    assert len(scene.pods()) == min(max(number, 1), 8)
    assert not scene.writes()
    assert not scene.events("ScaledUp", "ScaledDown", "ScalingAdvised")
    assert scene.scaling()["desiredReplicas"] == aim, "what Auto would do, from the pods that there were"
    scene.worlds["demo"].live[SCALER_KIND, "demo-prefill"]["metadata"]["labels"].pop(LABEL_ROLE)
    await scene.pass_()
    scaler = scene.worlds["demo"].live[SCALER_KIND, "demo-prefill"]
    assert scaler["metadata"]["labels"][LABEL_ROLE] == "prefill"
    assert scaler["spec"] == {"replicas": number}, "marking it as ours leaves the number as it is"


async def test_marking_a_scaler_as_ours_does_not_undo_a_number_that_was_written_just_now() -> None:
    scene = Scene.of(scaled_spec("External"))
    live = scene.worlds["demo"].live[SCALER_KIND, "demo-decode"]
    live["metadata"] |= {"resourceVersion": "42"}
    live["metadata"]["labels"].pop(LABEL_ROLE)
    await scene.pass_()
    ((_, _, written),) = [found for found in scene.server.applied if found[0] == SCALER_KIND]
    assert written["metadata"]["resourceVersion"] == "42", (
        "the API server refuses it if it is another one now"
    )


async def test_what_external_recommends_goes_on_from_what_it_recommended() -> None:
    scene = Scene.of(scaled_spec("External"), prefill=6, tokens=2900)
    await scene.run(WINDOW + 150)
    assert scene.scaling()["desiredReplicas"] == 5, "of six one is taken, though nobody has followed yet"
    await scene.run(WINDOW)
    assert scene.scaler() == 6
    assert scene.scaling()["desiredReplicas"] == 5, "with the tolerance to spare, four would be too few"


async def test_disabled_takes_scalers_status_condition_and_series_away() -> None:
    scene = Scene.of(prefill=2, tokens=1350)
    await scene.run(60)
    scene.worlds["demo"].edit(autoscaling={"mode": "Disabled"})
    await scene.run(300)
    assert not [key for key in scene.worlds["demo"].live if key[0] == SCALER_KIND]
    assert scene.worlds["demo"].condition("ScalingActive") is None
    assert not {"scaling", "reuse"} & scene.status().keys()
    assert 'name="demo"' not in scene.exposed()
    assert len(scene.pods()) == 1


async def test_from_advisory_to_auto_the_decision_begins_from_the_pods_that_there_are() -> None:
    scene = Scene.of(scaled_spec("Advisory"), prefill=1, tokens=2900)
    await scene.run(120)
    assert scene.scaling()["desiredReplicas"] == 4
    scene.worlds["demo"].edit(autoscaling=autoscaling("Auto"))
    await scene.run(120)
    assert scene.scaler() == 4
    assert len(scene.pods()) == 4


async def test_a_deleted_object_leaves_nothing_behind() -> None:
    scene = Scene.of(tokens=100)
    await scene.run(60)
    scene.worlds["demo"].resource["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await scene.pass_()
    assert scene.courses["demo"] is None
    assert 'name="demo"' not in scene.exposed()


# Hands


async def test_a_size_set_by_hand_in_auto_is_followed_and_then_decided_on() -> None:
    scene = Scene.of(prefill=2, tokens=1350)
    await scene.run(WINDOW + 120)
    scene.write_scaler(5)
    await scene.step()
    assert scene.scaler() == 4, "a whole window has shown that five are too many"
    assert await scene.until(lambda: scene.scaler() < 4) >= WINDOW - STEP, "one pod within a window, as ever"


async def test_a_size_set_by_hand_while_pages_are_read_is_not_overwritten() -> None:
    scene = Scene.of(prefill=1, tokens=3600)
    router = scene.pods("router")[0]
    written = []

    def by_hand(page: str) -> str:
        if "demo" in scene.courses and not written:
            scene.write_scaler(3)
            written.append(3)
        return page

    scene.broken[router] = by_hand
    await scene.until(lambda: bool(written))
    assert scene.scaler() == 3
    assert scene.writes() == []
    assert "demo-prefill was changed by somebody else meanwhile" in scene.active()["message"]
    await scene.step()
    assert scene.scaler() == 5, "it is decided on from there"
    assert not scene.failures
    assert scene.active()["reason"] == "Scaling"


async def test_a_scaler_that_is_deleted_while_pages_are_read_is_not_made_by_a_decision() -> None:
    scene = Scene.of(prefill=1, tokens=3600)
    await scene.step()
    world = scene.worlds["demo"]
    scene.broken[scene.pods("router")[0]] = lambda page: (
        world.live.pop((SCALER_KIND, "demo-prefill"), None),
        page,
    )[1]
    await scene.step()
    assert scene.writes() == []
    assert not scene.failures


async def test_a_size_set_too_low_by_hand_costs_no_pod() -> None:
    scene = Scene.of(prefill=4, tokens=2900)
    await scene.run(120)
    pods = scene.pods()
    scene.write_scaler(1)
    await scene.run(30)
    assert scene.scaler() == 4
    await scene.run(120)
    assert scene.pods() == pods


@pytest.mark.parametrize(("written", "kept"), [(1000, 8), (0, 1)])
async def test_a_number_out_of_bounds_is_put_within_them(written: int, kept: int) -> None:
    scene = Scene.of(prefill=1, tokens=100)
    scene.write_scaler(written)
    await scene.run(60)
    assert scene.scaler() == kept


async def test_a_deleted_scaler_comes_back_with_the_size_and_nothing_is_decided_without_it() -> None:
    scene = Scene.of(prefill=2, tokens=1350)
    await scene.run(120)
    pods = scene.pods()
    scene.loads["demo"].tokens = 3600
    await scene.run(45)
    scene.worlds["demo"].live[SCALER_KIND, "demo-prefill"]["spec"]["replicas"] = 2
    scene.worlds["demo"].delete((SCALER_KIND, "demo-prefill"))
    await scene.step()
    assert scene.scaler() >= 2
    assert "demo-prefill is not there yet" in scene.active()["message"]
    await scene.run(120)
    assert scene.scaler() == 5
    assert set(pods) <= set(scene.pods())


# Suspending, rollouts, neighbours


async def test_a_suspended_object_keeps_its_sizes_and_what_was_learned() -> None:
    spec = scaled_spec(autoscaling=autoscaling(prefillTokensPerSecond=None))
    scene = Scene.of(spec, prefill=3, tokens=1350)
    await scene.until(lambda: "learned" in scene.status()["scaling"])
    learned = scene.status()["scaling"]["learned"]
    scene.worlds["demo"].edit(suspend=True)
    await scene.run(WINDOW)
    assert (scene.pods(), scene.scaler()) == ([], 3)
    assert scene.worlds["demo"].condition("ScalingActive") is None
    assert scene.status()["scaling"]["learned"] == learned
    scene.worlds["demo"].edit(suspend=False)
    await scene.run(45)
    assert len(scene.pods()) == 3
    await scene.run(60)
    assert scene.status()["scaling"]["learned"] == learned
    assert scene.scaler() == 3


async def test_a_refused_spec_holds_the_sizes_and_says_so() -> None:
    scene = Scene.of(prefill=4, tokens=100)
    await scene.run(WINDOW - 30)
    scene.worlds["demo"].edit(rollout={"paused": True})
    await scene.run(WINDOW)
    assert scene.scaler() == 4
    assert scene.active()["reason"] == "NotImplemented"
    assert scene.status()["scaling"]["prefill"]["desiredReplicas"] == 4
    scene.worlds["demo"].edit(rollout={})
    assert await scene.until(lambda: scene.scaler() < 4) >= WINDOW


async def test_a_rollout_holds_the_sizes() -> None:
    scene = Scene.of(prefill=3, decode=2, tokens=100)
    await scene.run(WINDOW - 30)
    world = scene.worlds["demo"]
    world.can_start = lambda template: "vllm:2" not in str(template)
    world.edit(engine={"image": "vllm:2"})
    await scene.run(2 * WINDOW)
    assert scene.active()["reason"] == "ScalingHeld"
    assert scene.active()["message"] == "sizes are held: a rollout is in progress"
    assert (scene.scaler(), scene.scaler("decode")) == (3, 2)
    assert len(scene.pods()) == 6, "both revisions'"
    world.can_start = lambda template: True
    assert await scene.until(lambda: scene.scaler() < 3) >= WINDOW, "the new engines' load is seen anew"
    assert scene.active()["reason"] == "Scaling"


async def test_a_pool_that_grows_is_no_rollout() -> None:
    scene = Scene.of(prefill=1, tokens=3600)
    scene.worlds["demo"].can_start = lambda template: False
    await scene.until(lambda: scene.scaler() == 5)
    for _ in range(10):
        await scene.step()
        assert scene.active()["reason"] == "Scaling"


async def test_objects_do_not_mix() -> None:
    worlds = {}
    for name, uid in (("demo", "uid-1"), ("other", "uid-2")):
        worlds[name] = World(resource(scaled_spec(), name=name, uid=uid))
        worlds[name].settle()
        for role in ("prefill", "decode"):
            worlds[name].live[SCALER_KIND, f"{name}-{role}"]["spec"]["replicas"] = 2
        worlds[name].settle()
    now = max(world.now for world in worlds.values())
    scene = Scene(worlds, {"demo": Load(tokens=3600), "other": Load(tokens=1350, decode=1.3)}, now=now)
    for pod in scene.pods("decode", "other"):
        scene.broken[pod] = lambda text: ""
    await scene.run(WINDOW + 60)
    assert (scene.scaler(), scene.scaler("decode")) == (5, 1)
    assert scene.active()["status"] == "True"
    assert (scene.scaler(name="other"), scene.scaler("decode", "other")) == (2, 2)
    assert "other-decode" in scene.active("other")["message"]
    del scene.worlds["other"]
    await scene.pass_("other")
    assert scene.courses["other"] is None
    assert 'name="other"' not in scene.exposed()
    assert 'name="demo"' in scene.exposed()
    no_number_is_none(scene.exposed().splitlines())
