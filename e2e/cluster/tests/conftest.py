"""Pods for the tests of the cluster itself, in a namespace of their own."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.cluster import Cluster
from e2e.cluster.shell import wait_until

NAMESPACE = "cluster-tests"
PYTHON = "localhost/disagg/python:dev"
SERVE = """
import http.server, os
os.chdir("/tmp")
open("name", "w").write(os.uname().nodename)
http.server.test(http.server.SimpleHTTPRequestHandler, port=8000)
"""
SETTLED = ("Succeeded", "Failed")
"""Phases in which a pod stays."""


@dataclass(frozen=True)
class Pods:
    """Makes pods in the tests' namespace."""

    cluster: Cluster

    def start(
        self, name: str, code: str, node: str | None = None, image: str = PYTHON, **spec: Any
    ) -> dict[str, Any]:
        """Start a pod that runs Python code and wait until it is ready; returns it."""
        self.apply(name, code, node, image, **spec)
        self.cluster.wait_ready(f"pod/{name}", NAMESPACE)
        pod = self.cluster.get("pod", name, NAMESPACE)
        assert pod is not None
        return pod

    def output(self, name: str, code: str, image: str = PYTHON, **spec: Any) -> str:
        """Run Python code in a pod to its end and return what it printed; fails unless it ended well."""
        self.apply(name, code, None, image, **spec)
        phase = wait_until(lambda: self._settled(name), f"pod {name} to end", limit=300, every=0.3)
        printed = self.kubectl("logs", name)
        assert phase == "Succeeded", f"pod {name} failed; it printed:\n{printed}"
        return printed

    def run_in(self, name: str, code: str) -> str:
        """Run Python code in a running pod and return what it printed."""
        return self.kubectl("exec", name, "--", "python", "-c", code)

    def fetch(self, name: str, url: str) -> str:
        """The body that a pod gets from a URL."""
        return self.run_in(
            name, f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=60).read().decode())"
        )

    def _settled(self, name: str) -> str | None:
        pod = self.cluster.get("pod", name, NAMESPACE)
        phase = (pod or {}).get("status", {}).get("phase", "")
        return phase if phase in SETTLED else None

    def kubectl(self, *words: str) -> str:
        """kubectl in the tests' namespace."""
        return self.cluster.kubectl(f"--namespace={NAMESPACE}", *words)

    def apply(self, name: str, code: str, node: str | None, image: str = PYTHON, **spec: Any) -> None:
        """Create a pod; `spec` is laid over its specification, `container` in it over its container's."""
        over = dict(spec.pop("container", {}))
        container = {"name": "main", "image": image, "command": ["python", "-c", code], **over}
        base: dict[str, Any] = {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
        }
        if node is not None:
            base["nodeName"] = node
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
        self.cluster.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**base, **spec}}
        )


@pytest.fixture(scope="session")
def pods(cluster: Cluster) -> Iterator[Pods]:
    """The tests' namespace, with a ServiceAccount so that pods can be created in it."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.kubectl(
        "wait", "--for=create", "serviceaccount/default", f"--namespace={NAMESPACE}", "--timeout=180s"
    )
    yield Pods(cluster)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="session")
def servers(pods: Pods, cluster: Cluster) -> Sequence[dict[str, Any]]:
    """One web server on each of the first two nodes, behind the Service `web`."""
    nodes = sorted(cluster.real_nodes())[:2]
    started = [
        pods.start(
            f"web-{index}",
            SERVE,
            node,
            container={"ports": [{"containerPort": 8000}], "readinessProbe": _probe()},
            hostname=f"web-{index}",
            subdomain="web-headless",
        )
        for index, node in enumerate(nodes)
    ]
    for pod in started:
        pods.kubectl("label", "pod", pod["metadata"]["name"], "role=web")
    for name, address in (("web", {}), ("web-headless", {"clusterIP": "None"})):
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {"selector": {"role": "web"}, "ports": [{"port": 80, "targetPort": 8000}], **address},
            }
        )
    return started


@pytest.fixture
def address_of(cluster: Cluster) -> Callable[[str], str]:
    """The cluster IP of a Service."""

    def find(name: str) -> str:
        service = cluster.get("service", name, NAMESPACE)
        assert service is not None, (
            f"There is no Service {name}: {json.dumps(cluster.list('services', NAMESPACE))}"
        )
        return str(service["spec"]["clusterIP"])

    return find


def _probe() -> dict[str, Any]:
    return {"httpGet": {"path": "/name", "port": 8000}, "periodSeconds": 1}
