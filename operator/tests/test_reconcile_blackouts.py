"""Whole passes over an object some of whose metrics are not what they should be. Its pools have four pods a role and work for
two, so that a wrong reading shows."""

import re

import pytest
from scaling_world import Mangle, Scene, autoscaling, no_number_is_none, scaled_spec

from disagg_operator.pages import NoPage

WINDOW = 120
"""Seconds of low load before a pool shrinks."""


def put(name: str, value: str) -> Mangle:
    """The page with that value in the first line of that name."""

    def mangled(text: str) -> str:
        new, count = re.subn(
            rf"^({re.escape(name)}(?:{{.*}})?) .*$", rf"\g<1> {value}", text, count=1, flags=re.M
        )
        assert count == 1
        return new

    return mangled


TOKENS, WAITING, USAGE = (
    "vllm:prompt_tokens_by_source_total",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
ANY: dict[str, Mangle] = {
    "infinite waiting": put(WAITING, "+Inf"),
    "minus infinity": put(WAITING, "-Inf"),
    "an empty page": lambda text: "",
    "a page of HTML": lambda text: "<!DOCTYPE html><html><body>Sign in</body></html>\n",
    "a page cut in a line": lambda text: text[: text.rindex("}") - 3],
    "status 503": lambda text: NoPage("status 503"),
    "no answer": lambda text: NoPage("no answer within 2 s"),
    "half a page": lambda text: "".join(
        line + "\n" for line in text.splitlines()[: len(text.splitlines()) // 3]
    ),
}
BROKEN: list[tuple[str, str, Mangle]] = [
    ("prefill", "a counter that is NaN", put(TOKENS, "NaN")),
    ("prefill", "a counter beyond all numbers", put(TOKENS, "1e400")),
    ("prefill", "a counter beyond all that counts", put(TOKENS, "1e300")),
    ("decode", "usage that is NaN", put(USAGE, "NaN")),
    ("decode", "usage in percent", put(USAGE, "36.0")),
    *((role, name, mangle) for role in ("prefill", "decode") for name, mangle in ANY.items()),
]


async def at_work() -> Scene:
    scene = _scene()
    await scene.run(90)
    assert scene.active()["status"] == "True"
    assert all(1500 < scene.scaling(role)["needMilli"] < 2600 for role in ("prefill", "decode"))
    return scene


def _scene() -> Scene:
    scene = Scene.of(
        scaled_spec(autoscaling=autoscaling(down_window=WINDOW)), prefill=4, decode=4, tokens=1350
    )
    scene.loads["demo"].decode = 1.44
    return scene


async def held_throughout(scene: Scene, seconds: float, *named: str) -> None:
    """Runs on; fails unless all sizes are held the whole time, for want of the metrics of the pods that are named."""
    for _ in range(round(seconds / 15)):
        await scene.step()
        assert scene.active()["status"] == "False"
        assert scene.active()["reason"] == "MetricsUnavailable"
        for pod in named:
            assert pod in scene.active()["message"]
        for role in ("prefill", "decode"):
            assert scene.scaling(role)["desiredReplicas"] == 4
            assert scene.scaler(role) == 4
            assert len(scene.pods(role)) == 4
            assert (
                f'recommended_replicas{{name="demo",namespace="default",role="{role}"}} 4.0'
                in scene.exposed()
            )
        no_number_is_none(scene.exposed().splitlines())
    assert not scene.failures


@pytest.mark.parametrize("all_of_them", [False, True], ids=["one pod", "all pods"])
@pytest.mark.parametrize(
    ("role", "mangle"), [pytest.param(role, m, id=f"{role} {name}") for role, name, m in BROKEN]
)
async def test_while_metrics_are_missing_sizes_are_held(role: str, mangle: Mangle, all_of_them: bool) -> None:
    scene = await at_work()
    pods = scene.pods(role) if all_of_them else scene.pods(role)[-1:]
    scene.broken = dict.fromkeys(pods, mangle)
    await held_throughout(scene, WINDOW + 60, *pods)
    scene.broken = {}
    await scene.step()
    assert scene.active()["status"] == "True", "the look after the pages are clean decides again"
    assert "inputs" in scene.status()["scaling"]
    assert (scene.scaler(), scene.scaler("decode")) == (4, 4)


async def test_nothing_at_all_can_be_read() -> None:
    scene = await at_work()
    pods = [pod for role in ("prefill", "decode", "router") for pod in scene.pods(role)]
    scene.broken = dict.fromkeys(pods, lambda text: NoPage("no connection"))
    await held_throughout(scene, WINDOW + 150)
    assert "and 5 more" in scene.active()["message"]
    scene.broken = {}
    await scene.step()
    assert scene.active()["status"] == "True"
    assert await scene.until(lambda: scene.scaler() + scene.scaler("decode") < 8) >= WINDOW - 15
    assert scene.scaler() + scene.scaler("decode") == 7


async def test_a_short_blackout_is_told_and_costs_no_window() -> None:
    scene = await at_work()
    scene.broken = {scene.pods()[0]: lambda text: ""}
    await held_throughout(scene, 30, *scene.broken)
    scene.broken = {}
    assert await scene.until(lambda: scene.scaler() + scene.scaler("decode") < 8) <= WINDOW - 90 + 15


async def test_one_router_of_two_is_enough_to_grow_and_not_to_shrink() -> None:
    scene = await at_work()
    scene.broken = {scene.pods("router")[0]: lambda text: NoPage("status 503")}
    await scene.run(2 * WINDOW)
    assert scene.active()["status"] == "True"
    assert f"no pool shrinks, metrics are missing: {scene.pods('router')[0]}" in scene.active()["message"]
    assert (scene.scaler(), scene.scaler("decode")) == (4, 4)
    scene.loads["demo"].tokens = 4300
    await scene.run(150)
    assert scene.scaler() > 4


async def test_a_blackout_is_one_warning_and_its_end_none() -> None:
    scene = await at_work()
    scene.broken = {scene.pods()[1]: lambda text: ""}
    await held_throughout(scene, 120)
    scene.broken = {}
    await scene.run(60)
    told = [event for event in scene.server.told if event["reason"] == "MetricsUnavailable"]
    assert [event["type"] for event in told] == ["Warning"]


async def test_statuses_are_written_when_a_decision_changes_and_once_a_minute() -> None:
    scene = Scene.of(prefill=2, tokens=1350)
    await scene.run(120)
    before = scene.server.statuses.count(("DisaggInference", "demo"))
    await scene.run(240)
    assert scene.server.statuses.count(("DisaggInference", "demo")) - before == 4


# Pods with several engines


def engines(shares: tuple[float, float], *, reverse: bool, models: bool) -> Mangle:
    """The page of a pod with two engines whose counters have these shares, the same sums in every order and division."""
    gauges = {USAGE: (0.9, 0.1), WAITING: (9.0, 0.0), "vllm:num_requests_running": (4.0, 0.0)}

    def mangled(text: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            series, _, number = line.rpartition(" ")
            name = series.partition("{")[0]
            values = gauges.get(name) or tuple(float(number) * share for share in shares)
            for engine, value in enumerate(values):
                of = series.replace('engine="0"', f'engine="{engine}"')
                if models and name not in gauges:
                    other = of.replace('model_name="m"', 'model_name="lora"')
                    lines += [f"{of} {value / 2}", f"{other} {value / 2}"]
                else:
                    lines.append(f"{of} {value}")
        return "".join(f"{line}\n" for line in (reversed(lines) if reverse else lines))

    return mangled


@pytest.mark.parametrize("models", [False, True], ids=["", "by model"])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reversed"])
async def test_engines_of_a_pod_add_up_in_any_order_and_division(reverse: bool, models: bool) -> None:
    scene = _scene()
    for role in ("prefill", "decode"):
        for pod in scene.pods(role):
            scene.broken[pod] = engines((0.25, 0.75), reverse=reverse, models=models)
    await scene.until(lambda: "inputs" in scene.status()["scaling"])
    inputs = scene.status()["scaling"]["inputs"]
    assert (inputs["waitingRequests"], inputs["runningRequests"]) == (36, 16)
    assert (inputs["kvUsageMilli"], inputs["fullestKVUsageMilli"]) == (900, 900), (
        "a full engine is not hidden"
    )
    assert inputs["offeredTokensPerSecond"] == 1350
    assert inputs["backlogTokens"] == 36_000
    assert scene.scaling("decode")["desiredReplicas"] == 8
    assert scene.scaling()["desiredReplicas"] == 4
