"""Fake p5en.48xlarge nodes: the real scheduler places pods on them, kwok says that they run.

Placement, status and scale can be tested on the shape of P5en without one. Nothing answers in such a pod.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.kubectl import Kubectl

MANAGED = "kwok.x-k8s.io/node"
LEASE_SECONDS = 40
"""As a kubelet's. Without leases the node controller takes the nodes for dead within a minute, and marks their pods as
not ready, which nobody takes back: kwok sets a pod's readiness once."""
_PER_ZONE = 3


def p5en_node(index: int) -> dict[str, Any]:
    """Node `index` (from 0): 8 GPUs, 16 EFA devices, the huge pages that the EFA driver reserves (5128 of 2 MiB).

    The first three of every four are in one zone, the fourth is in another, since EFA does not cross zones.
    """
    capacity = {
        "cpu": "192",
        "memory": "2000Gi",
        "ephemeral-storage": "1000Gi",
        "pods": "110",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "16",
        "hugepages-2Mi": "10256Mi",
    }
    zone = "us-west-2a" if index % 4 < _PER_ZONE else "us-west-2b"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"p5en-{index}",
            "annotations": {MANAGED: "fake"},
            "labels": {
                "type": "kwok",
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/hostname": f"p5en-{index}",
                "kubernetes.io/os": "linux",
                "node.kubernetes.io/instance-type": "p5en.48xlarge",
                "topology.kubernetes.io/region": "us-west-2",
                "topology.kubernetes.io/zone": zone,
            },
        },
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {"allocatable": capacity, "capacity": capacity},
    }


def kwok_command(programs: Mapping[str, Path], kubeconfig: Path, pods: str) -> list[str]:
    """The command that runs kwok for nodes with our annotation alone; `pods` is the range of their pods' addresses."""
    kwok = programs["kwok"]
    stages = [f"--config={path}" for path in sorted(kwok.parent.glob("*.yaml"))]
    return [
        str(kwok),
        f"--kubeconfig={kubeconfig}",
        f"--manage-nodes-with-annotation-selector={MANAGED}=fake",
        "--manage-all-nodes=false",
        f"--node-lease-duration-seconds={LEASE_SECONDS}",
        f"--cidr={pods}",
        *stages,
    ]


def add(kubectl: Kubectl, count: int) -> None:
    """Add nodes 0 to count-1 and wait until they are Ready."""
    kubectl.apply(yaml.safe_dump_all([p5en_node(index) for index in range(count)]), "Adding fake p5en nodes")
    names = [f"node/p5en-{index}" for index in range(count)]
    kubectl("wait", "--for=condition=Ready", "--timeout=300s", *names, doing="Waiting for kwok", timeout=310)
