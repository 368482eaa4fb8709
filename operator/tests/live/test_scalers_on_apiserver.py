"""Scaled pools on a real API server: their scalers as HPA, KEDA and people use them, by an operator that has the chart's rights and
no others. Pods are fakes, with pages of metrics on loopback addresses."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from live_cluster import Cluster, OperatorProcess, pods, running_operator, spec, until, with_the_charts_rights

from disagg_operator.naming import ADMIN_PORT, HTTP_PORT

pytestmark = pytest.mark.cluster
ENGINES, ROUTER = "127.0.0.21", "127.0.0.22"
SCALERS = ("inference.disagg.dev", "v1alpha1")
PLURAL = "disagginferencescalers"
PAGE = """\
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {tokens}
vllm:request_prefill_time_seconds_count{{engine="0"}} {turns}
vllm:request_prefill_time_seconds_sum{{engine="0"}} {turns}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:num_requests_running{{engine="0"}} 1.0
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
disagg_router_waiting_turns 0.0
disagg_router_prefill_decisions_total{{placement="prefill",reason="disabled"}} {turns}
"""


class Load:
    """Pages of pods that answer two turns of a thousand tokens every second."""

    def __init__(self) -> None:
        self.usage, self._began = "0.1", time.monotonic()

    def page(self) -> bytes:
        turns = 2 * (time.monotonic() - self._began)
        return PAGE.format(tokens=1000 * turns, turns=turns, usage=self.usage).encode()


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    made = Load()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = made.page()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ExitStack() as stack:
        for address in ((ENGINES, HTTP_PORT), (ROUTER, ADMIN_PORT)):
            server = stack.enter_context(ThreadingHTTPServer(address, Handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield made


@pytest.fixture(scope="module")
def operator(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    kubeconfig = with_the_charts_rights(cluster, "scalers-test", tmp_path_factory.mktemp("scalers"))
    router = f"router:at-{ROUTER}"
    with running_operator(
        cluster, KUBECONFIG=str(kubeconfig), RESYNC_SECONDS="2", ROUTER_IMAGE=router
    ) as running:
        yield running
    assert "forbidden" not in running.log.read_text()


def scaled(mode: str, **changes: Any) -> dict[str, Any]:
    role = {"scaling": {"minReplicas": 1, "maxReplicas": 3}, "drain": {"handoverSeconds": 0}}
    engine = {"image": f"vllm:at-{ENGINES}", "device": "CPU"}
    autoscaling = {"mode": mode, "targets": {"prefillTokensPerSecond": 1000}}
    return spec(engine=engine, prefill=role, decode=role, autoscaling=autoscaling) | changes


def ready(cluster: Cluster, namespace: str, mode: str) -> None:
    cluster.apply(namespace, "demo", scaled(mode))
    cluster.wait_for(namespace, "demo", "Ready", "True")


def scaler(cluster: Cluster, namespace: str, role: str = "decode") -> dict[str, Any]:
    return dict(cluster.get("discaler", namespace, f"demo-{role}"))


def scale(cluster: Cluster, namespace: str, replicas: int, role: str = "decode") -> None:
    """As a HorizontalPodAutoscaler does it: GET and PUT of the subresource, again if the scaler has changed in between.

    The operator may be writing the scaler's status.
    """
    name = f"demo-{role}"

    def is_written() -> bool:
        found = cluster.custom.get_namespaced_custom_object_scale(*SCALERS, namespace, PLURAL, name)
        found["spec"]["replicas"] = replicas
        try:
            cluster.custom.replace_namespaced_custom_object_scale(*SCALERS, namespace, PLURAL, name, found)
        except ApiException as refusal:
            if refusal.status != 409:
                raise
            return False
        return True

    until(is_written, f"{replicas} replicas to be written")


def said(cluster: Cluster, namespace: str, reason: str) -> list[str]:
    """What the events of that reason say, in no order. The operator posts them after it has written the status."""
    return [e["message"] for e in cluster.get("events", namespace)["items"] if e["reason"] == reason]


def test_the_scale_subresource_is_what_an_autoscaler_needs(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    ready(cluster, namespace, "External")

    def seen() -> dict[str, Any]:
        return dict(
            cluster.custom.get_namespaced_custom_object_scale(*SCALERS, namespace, PLURAL, "demo-decode")
        )

    until(lambda: seen().get("status", {}).get("replicas") == 1, "the scaler's status")
    assert seen()["kind"] == "Scale"
    assert seen()["spec"] == {"replicas": 1}
    selected = cluster.get("pods", namespace, "-l", seen()["status"]["selector"])["items"]
    assert {pod["metadata"]["name"] for pod in selected} == pods(cluster, namespace, "decode").keys()

    scale(cluster, namespace, 3)
    until(lambda: len(pods(cluster, namespace, "decode")) == 3, "three decode pods")
    until(lambda: seen()["status"]["replicas"] == 3, "the scaler to say so")
    until(
        lambda: (
            scaler(cluster, namespace)["status"]["observedGeneration"]
            == scaler(cluster, namespace)["metadata"]["generation"]
        ),
        "the scaler's status to be about its present spec",
    )
    cluster.kubectl("scale", "discaler/demo-decode", "-n", namespace, "--replicas=2")
    until(lambda: len(pods(cluster, namespace, "decode")) == 2, "two decode pods")
    assert len(pods(cluster, namespace, "prefill")) == 1


@pytest.mark.parametrize("number", [3, 1000, 0])
def test_in_external_nobody_but_the_autoscaler_writes_the_number(
    cluster: Cluster, operator: OperatorProcess, namespace: str, number: int
) -> None:
    ready(cluster, namespace, "External")
    scale(cluster, namespace, number)
    size = min(max(number, 1), 3)
    until(lambda: len(pods(cluster, namespace, "decode")) == size, "the pods within the bounds")
    cluster.kubectl("label", "discaler/demo-decode", "-n", namespace, "inference.disagg.dev/role-")
    until(
        lambda: "inference.disagg.dev/role" in scaler(cluster, namespace)["metadata"]["labels"],
        "the label to be put back",
    )
    until(lambda: cluster.condition(namespace, "demo", "ScalingActive")["status"] != "absent", "a decision")
    passes = operator.passes()
    until(lambda: operator.passes() > passes + 3, "more passes")
    assert scaler(cluster, namespace)["spec"] == {"replicas": number}
    assert not said(cluster, namespace, "ScaledUp") + said(cluster, namespace, "ScaledDown")


def test_a_deleted_scaler_is_made_again_with_the_size_that_there_is(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    ready(cluster, namespace, "External")
    scale(cluster, namespace, 2)
    until(lambda: len(pods(cluster, namespace, "decode")) == 2, "two decode pods")
    uid = scaler(cluster, namespace)["metadata"]["uid"]
    cluster.kubectl("delete", "discaler/demo-decode", "-n", namespace)

    def again() -> bool:
        found = cluster.get("discaler", namespace)["items"]
        return any(s["metadata"]["name"] == "demo-decode" and s["metadata"]["uid"] != uid for s in found)

    until(again, "the scaler to be made again")
    assert scaler(cluster, namespace)["spec"] == {"replicas": 2}
    assert len(pods(cluster, namespace, "decode")) == 2
    cluster.patch(namespace, "demo", {"autoscaling": {"mode": "Disabled"}})
    until(lambda: not cluster.get("discaler", namespace)["items"], "the scalers to be gone")


def test_auto_grows_by_real_pages_and_holds_without_them(
    cluster: Cluster, operator: OperatorProcess, namespace: str, load: Load
) -> None:
    load.usage = "0.1"
    ready(cluster, namespace, "Auto")
    until(lambda: scaler(cluster, namespace, "prefill")["spec"] == {"replicas": 3}, "prefill to grow")
    until(lambda: len(pods(cluster, namespace, "prefill")) == 3, "three prefill pods")
    cluster.wait_for(namespace, "demo", "ScalingActive", "True")

    def seen() -> Any:
        """A status with inputs. There are none after a look that missed a page, as it does when the machine stands still."""
        found = cluster.get("di", namespace, "demo")["status"]
        return found if "inputs" in found["scaling"] else None

    status = until(seen, "what the decision rests on")
    assert status["scaling"]["inputs"]["tokensPerSecondPerPod"] == 1000
    assert status["scaling"]["prefill"]["limitedBy"] in ("MaxReplicas", "Stabilization")
    assert status["reuse"]["ratioPercent"] == 0
    until(
        lambda: any("prefill 1 -> " in message for message in said(cluster, namespace, "ScaledUp")),
        "an event that prefill grows",
    )
    recommended = f'disagg_scaling_recommended_replicas{{name="demo",namespace="{namespace}",role="prefill"}}'
    until(lambda: operator.metric(recommended) == 3, "the operator's metrics to say so")

    load.usage = "NaN"
    held = cluster.wait_for(namespace, "demo", "ScalingActive", "False", reason="MetricsUnavailable")
    (decode,) = pods(cluster, namespace, "decode")
    assert decode in held["message"]
    cluster.kubectl("scale", "discaler/demo-decode", "-n", namespace, "--replicas=1000")
    until(lambda: scaler(cluster, namespace)["spec"] == {"replicas": 3}, "the number to be within bounds")
    assert scaler(cluster, namespace, "prefill")["spec"] == {"replicas": 3}
    load.usage = "0.1"
    cluster.wait_for(namespace, "demo", "ScalingActive", "True")


def test_advisory_writes_what_it_would_do_and_nothing_else(
    cluster: Cluster, operator: OperatorProcess, namespace: str, load: Load
) -> None:
    load.usage = "0.1"
    ready(cluster, namespace, "Advisory")
    until(
        lambda: (
            cluster.get("di", namespace, "demo")["status"]
            .get("scaling", {})
            .get("prefill", {})
            .get("desiredReplicas")
            == 3
        ),
        "advice",
    )
    assert scaler(cluster, namespace, "prefill")["spec"] == {"replicas": 1}
    assert len(pods(cluster, namespace, "prefill")) == 1
    until(lambda: said(cluster, namespace, "ScalingAdvised"), "an event with the advice")
    assert not said(cluster, namespace, "ScaledUp")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"prefill": {"scaling": {"minReplicas": 4, "maxReplicas": 3}}},
            "must not be greater than scaling.max",
        ),
        (
            {"prefill": {"replicas": 2}},
            "needs scaling (bounds) instead of replicas in both prefill and decode",
        ),
        ({"decode": {"replicas": 2, "scaling": {"maxReplicas": 3}}}, "replicas"),
        (
            {"autoscaling": {"mode": "Auto", "ratio": {"minPercent": 300, "maxPercent": 200}}},
            "ratio.minPercent",
        ),
        ({"autoscaling": {"mode": "Sometimes"}}, "autoscaling.mode"),
    ],
)
def test_bounds_that_cannot_be_are_refused(
    cluster: Cluster, namespace: str, changes: dict[str, Any], why: str
) -> None:
    body = {
        "apiVersion": "inference.disagg.dev/v1alpha1",
        "kind": "DisaggInference",
        "metadata": {"name": "demo", "namespace": namespace},
        "spec": scaled("Auto") | changes,
    }
    answer = cluster.server.apply(body)
    assert not answer.ok
    assert why in answer.stderr


@pytest.mark.parametrize("replicas", [-1, 1001])
def test_a_size_that_cannot_be_is_refused(cluster: Cluster, namespace: str, replicas: int) -> None:
    body = {
        "apiVersion": "inference.disagg.dev/v1alpha1",
        "kind": "DisaggInferenceScaler",
        "metadata": {"name": "demo-decode", "namespace": namespace},
        "spec": {"replicas": replicas},
    }
    answer = cluster.server.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    assert not answer.ok
    assert "spec.replicas" in answer.stderr
