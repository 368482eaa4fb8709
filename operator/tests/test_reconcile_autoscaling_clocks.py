"""Whole passes over autoscaled objects while clocks jump and operators are restarted."""

from datetime import timedelta

import pytest
from scaling_world import STEP, WINDOW, Scene, autoscaling, scaled_spec


@pytest.mark.parametrize("jump", [3600.0, 100.0, -200.0, -5000.0])
async def test_an_even_clock_that_jumps_never_shrinks_a_pool_early(jump: float) -> None:
    scene = Scene.of(prefill=4, tokens=100)
    await scene.run(WINDOW)
    assert scene.scaler() == 4
    scene.even += jump
    assert await scene.until(lambda: scene.scaler() < 4) >= WINDOW
    assert scene.scaler() == 3


async def test_an_even_clock_that_never_rests_shrinks_nothing_and_stops_nothing() -> None:
    scene = Scene.of(prefill=2, tokens=100)
    for jump in [400.0, -500.0, 1e6, -1e6, 150.0, -150.0] * 8:
        await scene.step()
        scene.even += jump
    assert scene.scaler() == 2
    assert not scene.failures
    scene.loads["demo"].tokens = 3600
    await scene.run(120)
    assert scene.scaler() == 5


@pytest.mark.parametrize("days", [1, -1, 400])
async def test_a_wall_clock_that_jumps_changes_no_decision_and_the_status_goes_on(days: int) -> None:
    scene = Scene.of(prefill=4, tokens=100)
    await scene.run(WINDOW / 2)
    scene.now += timedelta(days=days)
    left = await scene.until(lambda: scene.scaler() < 4)
    assert WINDOW / 2 - STEP <= left <= WINDOW / 2 + 90
    told = scene.status()["scaling"]["decidedTime"]
    await scene.run(90)
    assert scene.status()["scaling"]["decidedTime"] != told, "told again within a minute"
    scene.now -= timedelta(days=days)
    await scene.run(30)
    now = f"{scene.now - timedelta(seconds=60):%Y-%m-%dT%H:%M:%SZ}"
    assert now <= scene.status()["scaling"]["decidedTime"] <= f"{scene.now:%Y-%m-%dT%H:%M:%SZ}"


async def test_a_new_operator_waits_for_a_whole_window_of_its_own() -> None:
    scene = Scene.of(prefill=4, tokens=100)
    await scene.run(WINDOW - 30)
    scene.restart()
    assert await scene.until(lambda: scene.scaler() < 4) >= WINDOW


async def test_operators_that_restart_all_the_time_shrink_nothing_and_grow_what_lacks() -> None:
    scene = Scene.of(prefill=4, tokens=100)
    for _ in range(12):
        await scene.run(90)
        scene.restart()
    assert scene.scaler() == 4
    scene.loads["demo"].tokens = 3600
    await scene.run(120)
    assert scene.scaler() == 5


async def test_a_new_operator_ends_the_handover_that_the_old_one_began() -> None:
    scene = Scene.of(prefill=2, tokens=100)
    await scene.until(lambda: scene.scaler() == 1)
    await scene.run(30)
    assert scene.leaving() == "1"
    scene.restart()
    gone = await scene.until(lambda: len(scene.pods()) == 1)
    assert 30 <= gone <= 60
    assert scene.scaler() == 1


async def test_a_new_operator_goes_on_from_the_speed_that_was_learned() -> None:
    spec = scaled_spec(autoscaling=autoscaling(prefillTokensPerSecond=None))
    scene = Scene.of(spec, prefill=2, tokens=1350)
    await scene.until(lambda: "learned" in scene.status()["scaling"])
    learned = scene.status()["scaling"]["learned"]
    scene.restart()
    await scene.run(30)
    assert scene.status()["scaling"]["learned"] == learned
    assert scene.status()["scaling"]["inputs"]["tokensPerSecondPerPod"] == learned["prefillTokensPerSecond"]


async def test_what_was_learned_of_one_revision_is_not_said_of_another() -> None:
    spec = scaled_spec(autoscaling=autoscaling(prefillTokensPerSecond=None))
    scene = Scene.of(spec, prefill=2, tokens=1350)
    await scene.until(lambda: "learned" in scene.status()["scaling"])
    old = scene.status()["revision"]
    scene.worlds["demo"].edit(engine={"image": "vllm:2"})
    await scene.until(lambda: scene.status()["revision"] not in (None, old))
    assert "learned" not in scene.status()["scaling"]
    scene.restart()
    await scene.run(30)
    assert "learned" not in scene.status()["scaling"]


async def test_looks_come_by_their_own_time_whatever_else_is_a_reason_for_a_pass() -> None:
    scene = Scene.of(tokens=100)
    await scene.run(30)
    looks = len(scene.asked)
    await scene.step(5)
    assert len(scene.asked) == looks, "it is not time yet"
    assert scene.again["demo"] == 10.0
    await scene.step(10)
    assert len(scene.asked) == looks + 1


async def test_a_handover_that_ends_within_a_pass_is_not_forgotten() -> None:
    """Between the plan and the report time goes by; what was still to come in the one is over in the other."""
    scene = Scene.of(scaled_spec("External"), decode=2)
    scene.write_scaler(1, "decode")
    await scene.pass_()
    ends = scene.now + timedelta(seconds=60)
    scene.now, scene.slow = ends - timedelta(seconds=0.5), 0.25
    await scene.pass_()
    assert scene.now > ends
    again = scene.again["demo"]
    assert again is not None
    assert again < 20
