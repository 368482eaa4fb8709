"""Fake P5en nodes take pods by GPU and EFA like real ones, and no others."""

from typing import Any

import pytest

from e2e.cluster import Cluster, Progress, Provider
from e2e.cluster.shell import wait_until
from e2e.cluster.tests.conftest import NAMESPACE, Pods

pytestmark = pytest.mark.cluster

NODES = 2


@pytest.fixture(scope="module", autouse=True)
def fake_nodes(cluster: Cluster, provider: Provider) -> None:
    provider.add_fake_nodes(NODES, Progress())


def whole_node(pods: Pods, name: str) -> None:
    wanted = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16"}
    pods.apply(
        name,
        "",
        None,
        container={"resources": {"limits": wanted, "requests": wanted}},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
        nodeSelector={"node.kubernetes.io/instance-type": "p5en.48xlarge"},
    )


def scheduled(cluster: Cluster, name: str) -> dict[str, Any] | None:
    pod = cluster.get("pod", name, NAMESPACE)
    conditions = (pod or {}).get("status", {}).get("conditions", [])
    return next((dict(found) for found in conditions if found["type"] == "PodScheduled"), None)


def test_a_node_holds_sixteen_efa_devices_and_one_pod_too_many_stays_pending(
    cluster: Cluster, pods: Pods
) -> None:
    capacity = [
        node
        for node in cluster.list("nodes", None, "type=kwok")
        if node["status"]["allocatable"]["vpc.amazonaws.com/efa"] == "16"
    ]
    names = [f"whole-{index}" for index in range(len(capacity) + 1)]
    assert len(capacity) >= NODES
    for name in names[:-1]:
        whole_node(pods, name)
    for name in names[:-1]:
        cluster.wait_ready(f"pod/{name}", NAMESPACE)
    placed = [cluster.get("pod", name, NAMESPACE) for name in names[:-1]]
    assert len({pod["spec"]["nodeName"] for pod in placed if pod}) == len(capacity)

    whole_node(pods, names[-1])
    refused = wait_until(lambda: scheduled(cluster, names[-1]), f"a verdict on {names[-1]}", limit=180)
    assert refused["status"] == "False"
    assert "Insufficient vpc.amazonaws.com/efa" in refused["message"]
    pods.kubectl("delete", "pod", *names, "--wait=true", "--timeout=180s")


def test_an_ordinary_pod_never_lands_on_a_fake_node(cluster: Cluster, pods: Pods) -> None:
    pod = pods.start("ordinary", "import time; time.sleep(600)")
    assert pod["spec"]["nodeName"] in cluster.real_nodes()


def test_fake_nodes_keep_their_leases_so_that_their_pods_stay_ready(cluster: Cluster) -> None:
    def renewals() -> dict[str, str]:
        leases = cluster.list("leases", "kube-node-lease")
        fake = {node["metadata"]["name"] for node in cluster.list("nodes", None, "type=kwok")}
        found = {lease["metadata"]["name"]: str(lease["spec"]["renewTime"]) for lease in leases}
        return {name: found[name] for name in fake if name in found} if fake <= set(found) else {}

    first = wait_until(renewals, "every fake node to have a lease", limit=60)
    wait_until(
        lambda: all(renewals().get(name, then) != then for name, then in first.items()),
        "every fake node's lease to be renewed",
        limit=120,
        every=1,
    )
