"""Whole passes over autoscaled objects while writes and reads fail."""

import pytest
from scaling_world import WINDOW, Scene

from disagg_operator.errors import classify
from disagg_operator.naming import KIND, SCALER_KIND


async def test_a_scaler_that_cannot_be_written_is_told_and_tried_again_in_full() -> None:
    scene = Scene.of(prefill=1, tokens=3600)
    away = classify("apply DisaggInferenceScaler default/demo-prefill", 503, "away")
    scene.server.refuse = lambda verb, kind, name: (
        away if (verb, name) == ("apply", "demo-prefill") and kind == SCALER_KIND else None
    )
    await scene.run(150)
    assert scene.scaler() == 1
    assert scene.active()["reason"] == "ScalingHeld"
    assert "apply DisaggInferenceScaler default/demo-prefill: away" in scene.active()["message"]
    assert scene.scaling()["desiredReplicas"] == 1
    assert not scene.events("ScaledUp")
    assert scene.failures
    scene.server.refuse = lambda verb, kind, name: None
    await scene.step()
    assert scene.scaler() == 5, "four pods a minute, and none of the failed ones counts"
    assert scene.active()["reason"] == "Scaling"
    assert len(scene.events("ScaledUp")) == 1


async def test_a_pool_that_could_not_be_made_smaller_is_as_soon_as_it_can() -> None:
    scene = Scene.of(prefill=4, tokens=100)
    away = classify("apply", 503, "away")
    scene.server.refuse = lambda verb, kind, name: away if (verb, kind) == ("apply", SCALER_KIND) else None
    await scene.run(2 * WINDOW)
    assert scene.scaler() == 4
    scene.server.refuse = lambda verb, kind, name: None
    await scene.step()
    assert scene.scaler() == 3


async def test_a_cluster_that_cannot_be_read_leaves_sizes_and_what_was_said() -> None:
    scene = Scene.of(prefill=4, tokens=100)
    await scene.run(WINDOW - 30)
    before = scene.status()
    away = classify("list", 503, "away")
    scene.server.refuse = lambda verb, kind, name: away if verb == "list" else None
    await scene.run(WINDOW)
    assert scene.status() == before
    scene.server.refuse = lambda verb, kind, name: None
    assert await scene.until(lambda: scene.scaler() < 4) >= WINDOW, "nobody has seen the load meanwhile"


async def test_a_fault_of_our_own_is_told_and_keeps_sizes_and_what_was_decided() -> None:
    scene = Scene.of(prefill=2, tokens=1350)
    await scene.run(120)
    decided = scene.status()["scaling"]
    scene.even = "noon"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        await scene.pass_()
    ready = scene.worlds["demo"].condition("Ready")
    assert ready is not None
    assert ready["reason"] == "InternalError"
    assert scene.status()["scaling"] == decided
    assert scene.courses["demo"] is None
    scene.even = 5000.0
    await scene.run(60)
    assert scene.active()["reason"] == "Scaling"
    assert scene.scaler() == 2


async def test_a_status_that_cannot_be_written_costs_no_event() -> None:
    scene = Scene.of(prefill=1, tokens=3600)
    away = classify("status", 503, "away")
    scene.server.refuse = lambda verb, kind, name: away if (verb, kind) == ("status", KIND) else None
    await scene.run(60)
    assert scene.scaler() == 5
    scene.server.refuse = lambda verb, kind, name: None
    await scene.run(30)
    assert scene.scaling()["desiredReplicas"] == 5
