"""The operator's process: killed, doubled, at rest, without a CRD. No other operator runs meanwhile."""

import contextlib
import signal
import time
from pathlib import Path

import pytest
from live_cluster import Cluster, OperatorProcess, children, running_operator, spec, until

pytestmark = pytest.mark.cluster


def test_killed_in_the_middle_it_converges_when_it_is_back(cluster: Cluster, namespace: str) -> None:
    with running_operator(cluster, WATCH_NAMESPACES=namespace) as first:
        cluster.apply(namespace, "demo", spec())
        until(lambda: children(cluster, namespace), "the first child")
        first.process.kill()
        first.process.wait()
    assert 0 < len(children(cluster, namespace)) <= 13
    with running_operator(cluster, WATCH_NAMESPACES=namespace):
        cluster.wait_for(namespace, "demo", "Ready", "True")
        assert len(children(cluster, namespace)) == 13


def test_a_change_made_while_it_was_away_is_seen_when_it_is_back(cluster: Cluster, namespace: str) -> None:
    with running_operator(cluster, WATCH_NAMESPACES=namespace):
        cluster.apply(namespace, "demo", spec())
        cluster.wait_for(namespace, "demo", "Ready", "True")
    cluster.patch(namespace, "demo", {"decode": {"replicas": 3}})
    cluster.kubectl("delete", "service", "demo-router", "-n", namespace)
    with running_operator(cluster, WATCH_NAMESPACES=namespace):
        cluster.wait_for(namespace, "demo", "Ready", "True")
        assert cluster.get("di", namespace, "demo")["status"]["roles"][1]["ready"] == "3/3"
        until(lambda: len(children(cluster, namespace)) == 13, "the Service to be made again")


def test_a_second_one_waits_for_the_lease_and_takes_over(cluster: Cluster, namespace: str) -> None:
    lease = {"WATCH_NAMESPACES": namespace, "LEASE_NAME": "disagg", "POD_NAMESPACE": namespace}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_operator(cluster, POD_NAME="first", **lease))
        second = stack.enter_context(running_operator(cluster, wait=False, POD_NAME="second", **lease))
        until(
            lambda: "waiting for the lease that first holds" in second.log.read_text(), "the second to wait"
        )
        assert not second.is_ready()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(120) == 0
        holder = cluster.get("lease", namespace, "disagg")["spec"].get("holderIdentity")
        assert holder != "first", "it was released and need not run out"
        until(second.is_ready, "the second to take over")
        cluster.apply(namespace, "demo", spec())
        cluster.wait_for(namespace, "demo", "Ready", "True")


def test_one_that_loses_the_lease_ends(cluster: Cluster, namespace: str) -> None:
    lease = {
        "WATCH_NAMESPACES": namespace,
        "LEASE_NAME": "disagg",
        "POD_NAMESPACE": namespace,
        "POD_NAME": "a",
    }
    with running_operator(cluster, **lease) as operator:
        stolen = '{"spec":{"holderIdentity":"b"}}'
        cluster.kubectl("patch", "lease", "disagg", "-n", namespace, "--type=merge", "-p", stolen)
        assert operator.process.wait(120) != 0
        assert "no longer ours" in operator.log.read_text()


def test_at_rest_it_is_small_and_quiet(cluster: Cluster, namespace: str) -> None:
    with running_operator(cluster, WATCH_NAMESPACES=namespace) as operator:
        for name in ("a", "b", "c", "d", "e"):
            cluster.apply(namespace, name, spec())
        for name in ("a", "b", "c", "d", "e"):
            cluster.wait_for(namespace, name, "Ready", "True")
        for _ in range(3):  # a look at an object that is due all the same comes once
            operator.wait_for_rest()
            passes, began = operator.passes(), time.monotonic()
            cpu = operator.metric("process_cpu_seconds_total")
            time.sleep(10)
            share = (operator.metric("process_cpu_seconds_total") - cpu) / (time.monotonic() - began)
            if operator.passes() == passes:
                break
        else:
            pytest.fail("there was a pass in each of three times of rest")
        assert operator.metric("process_resident_memory_bytes") <= 120 * 2**20
        assert share < 0.05, "an idle process does not spin"
        print(f"at rest: {share:.2%} CPU, {memory_mib(operator):.0f} MiB")


def memory_mib(operator: OperatorProcess) -> float:
    return operator.metric("process_resident_memory_bytes") / 2**20


def test_what_the_api_server_writes_in_other_words_is_not_written_again(
    cluster: Cluster, namespace: str
) -> None:
    resources = {
        "requests": {"cpu": "0.5", "memory": "1024Mi"},
        "limits": {"cpu": "1500m", "memory": "2000000Ki"},
    }
    empty = {
        "priorityClassName": "",
        "tolerations": [],
        "containers": [{"name": "main", "env": [{"name": "E"}]}],
    }
    odd = spec(
        engine={"image": "vllm:1"},
        prefill={"replicas": 1, "resources": resources, "template": {"spec": empty}},
        placement={"tolerations": [{"key": "a", "operator": "Exists"}]},
        fabric={"type": "EFA", "efa": {"hugepages2Mi": "10Gi"}},
    )
    with running_operator(cluster, WATCH_NAMESPACES=namespace, RESYNC_SECONDS="1") as operator:
        cluster.apply(namespace, "demo", odd)
        cluster.wait_for(namespace, "demo", "Ready", "True")
        passes = operator.passes()
        until(lambda: operator.passes() > passes + 5, "some passes more")
        applied = [
            line.split(" applied ")[1]
            for line in operator.log.read_text().splitlines()
            if " applied " in line
        ]
    assert len(applied) == 13
    assert len(set(applied)) == 13, "each child was written once"


def test_settings_that_are_missing_end_it_with_their_name(cluster: Cluster, tmp_path: Path) -> None:
    with running_operator(cluster, wait=False, ROUTER_IMAGE="") as operator:
        assert operator.process.wait(120) == 1
        assert "set ROUTER_IMAGE to the router's image" in operator.log.read_text()
