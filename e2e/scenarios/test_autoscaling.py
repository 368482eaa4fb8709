"""Prefill's pool follows the reuse of KV on real engines: a pod leaves and no turn notices, one comes back, blindness changes nothing.

The tests are one story: each begins where the one before it has ended.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.cluster.shell import run, wait_until
from e2e.demo.stack import MODEL, OPERATOR_NAMESPACE, OPERATOR_SELECTOR, Stack
from e2e.engines import EngineSpec, running
from e2e.images.engine import ensure_model
from e2e.inference import Inference
from e2e.scenarios.load import Load, Prompt, grown, strangers
from e2e.scenarios.talk import client_of, cpu_manifest

pytestmark = pytest.mark.cluster

RATE = 100.0
"""Prompt tokens a second in every load: less than one engine on a busy processor computes."""
SPEED = 70
"""What one prefill pod is said to compute: the load takes two pods without reuse, and one with most of it."""
WINDOW, DOWN_WINDOW = 20, 30
HANDOVER = 60
"""Within it everything has to be seen that is there only while a pod leaves."""
TALKERS = 4
ENGINE_PORT, ROUTER_PORT, OPERATOR_PORT = 8000, 8001, 8080
KEEP = "inference.disagg.dev/keep"

Samples = Sequence[tuple[str, Mapping[str, str], float]]


@pytest.fixture(scope="module")
def conversations(operator: Stack) -> Sequence[Sequence[Prompt]]:
    """What the people who come back ask, and what a plain engine answers."""
    spec = EngineSpec(model=ensure_model("smollm2-135m"), served_name=MODEL)
    with running(spec, "plain") as engine, client_of(engine.url) as client:
        return [grown(client, 1000 * (talker + 1), turns=4, items=3) for talker in range(TALKERS)]


@pytest.fixture(scope="module")
def pools(operator: Stack, conversations: object) -> Iterator[Inference]:
    """A DisaggInference that scales itself, with two prefill engines and one decode engine, ready.

    It may not shrink at first, or it would while nobody asks anything yet.
    """
    inference = Inference(operator.cluster, "pools")
    operator.cluster.apply(scaled_manifest(inference.name))
    try:
        inference.wait_ready()
        yield inference
    finally:
        inference.delete()


def scaled_manifest(name: str) -> dict[str, Any]:
    manifest = cpu_manifest(name)
    spec = manifest["spec"]
    for role, pods in (("prefill", 2), ("decode", 1)):
        del spec[role]["replicas"]
        spec[role]["scaling"] = {"minReplicas": pods, "maxReplicas": pods}
        spec[role]["drain"]["handoverSeconds"] = HANDOVER
    spec["autoscaling"] = {
        "mode": "Auto",
        "windowSeconds": WINDOW,
        "targets": {"prefillTokensPerSecond": SPEED},
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": DOWN_WINDOW}},
    }
    return manifest


@pytest.fixture
def url(pools: Inference) -> Iterator[str]:
    with pools.router() as url:
        pools.wait_served(url)
        yield url


# What there is to see


def wait(
    pools: Inference, check: Callable[[], object], what: str, *, limit: float, every: float = 1.0
) -> None:
    """Until `check` holds; if it does not in time, the error has what the object says of itself."""
    try:
        wait_until(check, what, limit=limit, every=every)
    except Exception as error:
        error.add_note(f"{pools.told()}\n{pools.resource()['status'].get('scaling')}")
        raise


def size(pools: Inference) -> int:
    """What the scaler of prefill says."""
    scaler = pools.cluster.get("disagginferencescaler", f"{pools.name}-prefill")
    assert scaler is not None
    return int(scaler["spec"]["replicas"])


def keep_label(pools: Inference) -> str | None:
    """How many prefill pods the routers are told to keep; None while all stay."""
    selector = f"{pools.selector},inference.disagg.dev/role=prefill"
    (service,) = pools.cluster.list("services", pools.namespace, selector)
    found: str | None = service["metadata"]["labels"].get(KEEP)
    return found


def events(pools: Inference, reason: str) -> list[str]:
    """What events of that reason say."""
    found = pools.cluster.list("events", pools.namespace)
    return [e["message"] for e in found if (e["involvedObject"]["name"], e["reason"]) == (pools.name, reason)]


def page(pools: Inference, pod: str, port: int, namespace: str | None = None) -> Samples:
    """A pod's metrics."""
    path = f"/api/v1/namespaces/{namespace or pools.namespace}/pods/{pod}:{port}/proxy/metrics"
    families = text_string_to_metric_families(pools.cluster.kubectl("get", "--raw", path))
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def total(samples: Samples, sample: str, **labels: str) -> float:
    """The sum of the samples with this name and these labels."""
    return sum(value for name, has, value in samples if name == sample and labels.items() <= has.items())


def operator_pod(pools: Inference) -> dict[str, Any]:
    (operator,) = pools.cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR_SELECTOR)
    return dict(operator)


def says_operator(pools: Inference, sample: str) -> float:
    """What the operator's own metrics say of prefill."""
    samples = page(pools, operator_pod(pools)["metadata"]["name"], OPERATOR_PORT, OPERATOR_NAMESPACE)
    return total(samples, sample, namespace=pools.namespace, name=pools.name, role="prefill")


def is_left_alone(pools: Inference, pod: str) -> bool:
    """Whether the router knows that a prefill pod leaves, and has no turn there."""
    (router,) = pools.pods("router")
    samples = page(pools, router["metadata"]["name"], ROUTER_PORT)
    leaving = total(samples, "disagg_router_engines", role="prefill", state="leaving")
    return leaving == 1 and total(samples, "disagg_router_inflight_legs", pod=pod) == 0


def wait_told_of_leaving(pools: Inference) -> dict[str, Any]:
    """The status that tells of a prefill pod that leaves: routers hear of it first, since a pass ends with the status."""

    def found() -> dict[str, Any] | None:
        status: dict[str, Any] = pools.resource()["status"]
        leaving = {role["name"]: role["leavingReplicas"] for role in status["roles"]}
        # There are no inputs after a look that missed a pod's metrics; the next one is 15 s later.
        return status if leaving["prefill"] == 1 and "inputs" in status["scaling"] else None

    return wait_until(found, "the status to tell of the pod that leaves", limit=HANDOVER, every=0.5)


def wait_recorded(pools: Inference, reason: str, change: str, *, size: int) -> None:
    """Until an event and the operator's metrics tell of a change. The scaler shows it first: they follow at the pass's end."""
    wait(
        pools,
        lambda: any(change in message for message in events(pools, reason)),
        f"an event that tells of {change}",
        limit=60,
    )
    wait(
        pools,
        lambda: says_operator(pools, "disagg_scaling_recommended_replicas") == size,
        f"the operator's metrics to say {size}",
        limit=60,
    )


def prompts(pools: Inference, pod: str) -> float:
    """How many prompts a prefill pod has finished."""
    return total(page(pools, pod, ENGINE_PORT), "vllm:request_prefill_time_seconds_count")


def newest(pools: Inference) -> dict[str, Any]:
    """The prefill pod with the highest ordinal."""
    return max(pools.pods("prefill"), key=lambda pod: str(pod["metadata"]["name"]))


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def unknown_people(first: int) -> list[Iterator[Prompt]]:
    """As many as talk at once, none of whom anybody has met."""
    return [strangers(first + 1000 * talker, items=12) for talker in range(TALKERS)]


# The story


@pytest.mark.timeout(1500)  # with what it starts it is the longest of all tests by far
def test_reuse_makes_prefill_smaller_and_no_turn_notices(
    pools: Inference, url: str, conversations: Sequence[Sequence[Prompt]]
) -> None:
    with Load(url, RATE, unknown_people(100_000)) as load:
        wait(
            pools,
            lambda: load.check() and says_operator(pools, "disagg_scaling_needed_replicas") > 1,
            "the operator to find that prompts without reuse need more than one prefill pod",
            limit=600,
            every=2,
        )
        pools.patch({"prefill": {"scaling": {"minReplicas": 1}}})
    leaver = newest(pools)["metadata"]["name"]
    before = prompts(pools, leaver)
    assert size(pools) == 2

    with Load(url, RATE, [itertools.cycle(turns) for turns in conversations]) as load:
        wait(
            pools,
            lambda: load.check() and size(pools) == 1,
            "reuse to make prefill smaller",
            limit=600,
            every=1,
        )
        wait(pools, lambda: keep_label(pools) == "1", "the Service to say who stays", limit=120, every=0.2)
        wait(
            pools,
            lambda: is_left_alone(pools, leaver),
            "the router to leave the pod alone",
            limit=HANDOVER,
            every=0.5,
        )
        told = wait_told_of_leaving(pools)
        asked = [prompts(pools, leaver)]

        def has_left() -> bool:
            load.check()
            if len(pools.pods("prefill")) == 1:
                return True
            asked.append(prompts(pools, leaver))
            return False

        wait(pools, has_left, "the pod to be stopped after the handover", limit=300, every=0.5)
        answered = load.check()
        wait(
            pools, lambda: load.check() >= answered + 2 * TALKERS, "turns to go on without the pod", limit=300
        )
        wait(
            pools, lambda: keep_label(pools) is None, "the Service to say nothing more", limit=300, every=0.5
        )

    assert asked[0] > before
    assert set(asked) == {asked[0]}, asked
    assert told["scaling"]["reason"]
    assert told["scaling"]["prefill"]["desiredReplicas"] == 1
    assert told["scaling"]["inputs"]["shrinkingReuseMilli"] > 500
    assert told["reuse"]["ratioPercent"] > 50
    wait_recorded(pools, "ScaledDown", "prefill 2 -> 1", size=1)


def test_lost_reuse_brings_the_pod_back(pools: Inference, url: str) -> None:
    assert size(pools) == 1
    with Load(url, RATE, unknown_people(200_000)) as load:
        wait(
            pools,
            lambda: load.check() and size(pools) == 2,
            "lost reuse to make prefill larger",
            limit=600,
            every=1,
        )
    wait_recorded(pools, "ScaledUp", "prefill 1 -> 2", size=2)


def test_blindness_changes_no_size(pools: Inference) -> None:
    """Nobody asks anything: seen or not, that makes the difference between two pods and one."""
    if pools.cluster.provider != "local":
        pytest.skip("only the local cluster's network can be cut from here")
    assert size(pools) == 2
    unseen = min(pools.pods("prefill"), key=lambda pod: str(pod["metadata"]["name"]))
    with unreachable_for_operator(pools, unseen):
        pools.wait_condition(
            "ScalingActive",
            lambda c: c.reason == "MetricsUnavailable" and unseen["metadata"]["name"] in c.message,
            "about the pod that cannot be seen",
            limit=300,
        )
        since = time.monotonic()
        wait(
            pools,
            lambda: is_ready(newest(pools)) and time.monotonic() - since > WINDOW + DOWN_WINDOW,
            "the other pod to be ready, and the time to pass after which idle pods go",
            limit=600,
            every=1,
        )
        assert size(pools) == 2
        told = pools.condition("ScalingActive")
        assert told is not None
        assert told.reason == "MetricsUnavailable"
    pools.wait_condition("ScalingActive", lambda c: c.status == "True", "true again", limit=300)
    wait(pools, lambda: size(pools) == 1, "idle prefill to get smaller once it is seen", limit=600, every=1)


@contextmanager
def unreachable_for_operator(pools: Inference, pod: dict[str, Any]) -> Iterator[None]:
    """Nothing that the operator sends reaches the pod, which serves everybody else."""
    process = a_process_of(operator_pod(pools))
    route = ("unreachable", pod["status"]["podIP"])

    def change(how: str) -> None:
        argv = ["nsenter", f"--net=/proc/{process}/ns/net", "--", "ip", "route", how, *route]
        run(argv, "Changing the operator's routes")

    change("add")
    try:
        yield
    finally:
        change("del")


def a_process_of(pod: dict[str, Any]) -> int:
    """The nodes of the local cluster share this machine's processes."""
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):
            if pod["metadata"]["uid"] in path.read_text():
                return int(path.parent.name)
    raise LookupError(f"No process belongs to pod {pod['metadata']['name']}.")
