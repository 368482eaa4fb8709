"""A DisaggInference in a cluster, as a user deals with it: apply, wait for a condition, talk to it, look at its pods."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.cluster import Cluster, CommandError
from e2e.cluster.handle import program
from e2e.cluster.shell import wait_until
from e2e.demo.conditions import Shown, conditions_of
from e2e.demo.counters import Counters, read_counters

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
KIND = "disagginferences.inference.disagg.dev"
_HTTP_PORT = 8000
_DELETE_SECONDS = 600.0


@dataclass(frozen=True)
class Inference:
    """The DisaggInference `name` and what belongs to it. Nothing is cached: every call asks the cluster."""

    cluster: Cluster
    name: str
    namespace: str = "default"

    @property
    def selector(self) -> str:
        """The label selector of its children and pods."""
        return f"inference.disagg.dev/name={self.name}"

    def resource(self) -> dict[str, Any]:
        """The object itself.

        Raises:
            LookupError: it does not exist.
        """
        found = self.cluster.get(KIND, self.name, self.namespace)
        if found is None:
            raise LookupError(f"There is no DisaggInference {self.namespace}/{self.name}.")
        return found

    def patch(self, spec: dict[str, Any]) -> None:
        """Merge `spec` into the object's spec, as `kubectl patch` does."""
        self.cluster.kubectl(
            *("patch", KIND, self.name, f"--namespace={self.namespace}", "--type=merge"),
            *("--patch", json.dumps({"spec": spec})),
        )

    def delete(self) -> None:
        """Delete the object and wait until it and its children are gone."""
        self.cluster.kubectl(
            *("delete", KIND, self.name, f"--namespace={self.namespace}", "--ignore-not-found"),
            *("--cascade=foreground", f"--timeout={_DELETE_SECONDS:.0f}s"),
            timeout=_DELETE_SECONDS + 10,
        )

    def condition(self, type_: str) -> Shown | None:
        """The condition of that type for the object's present generation, or None."""
        return next((c for c in conditions_of(self.resource()) if c.type == type_), None)

    def wait_condition(
        self, type_: str, matches: Callable[[Shown], bool], what: str, limit: float = 300.0
    ) -> Shown:
        """The condition, once it is there and `matches`.

        Raises:
            WaitTimeoutError: it is not in time; the text has all conditions.
        """

        def found() -> Shown | None:
            condition = self.condition(type_)
            return condition if condition is not None and matches(condition) else None

        try:
            return wait_until(found, f"{type_} of {self.name} to be {what}", limit=limit, every=0.5)
        except Exception as error:
            error.add_note(self.told())
            raise

    def wait_ready(self, limit: float = 600.0) -> None:
        """Wait until `Ready` is true for the object's present generation."""
        self.wait_condition("Ready", lambda c: c.status == "True", "true", limit)

    def wait_served(self, url: str, limit: float = 300.0) -> None:
        """Wait until the router at `url` has engines to send a turn to: it hears of ready pods a moment later than we do.

        Raises:
            WaitTimeoutError: it has none in time.
        """
        wait_until(
            lambda: _answers(f"{url}/health"), f"the router of {self.name} to have engines", limit=limit
        )

    def told(self) -> str:
        """All its conditions, a line each."""
        return "\n".join(
            f"{c.type}={c.status} {c.reason}: {c.message}" for c in conditions_of(self.resource())
        )

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        """Its pods, of one role or all, without those that are being deleted."""
        selector = self.selector + (f",inference.disagg.dev/role={role}" if role else "")
        found = self.cluster.list("pods", self.namespace, selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def children(self) -> list[str]:
        """kind/name of everything in the namespace that carries its label, pods and endpoint slices included."""
        kinds = (
            "statefulsets,deployments,replicasets,pods,services,endpointslices,configmaps,serviceaccounts,"
            "roles,rolebindings,poddisruptionbudgets"
        )
        printed = self.cluster.kubectl(
            "get", kinds, f"--namespace={self.namespace}", f"--selector={self.selector}", "-o=name"
        )
        return sorted(printed.split())

    def counters(self) -> Counters:
        """What the engines have counted so far, read from their pods through the API server."""
        return read_counters(self._metrics("prefill"), self._metrics("decode"))

    def _metrics(self, role: str) -> list[str]:
        root = f"/api/v1/namespaces/{self.namespace}/pods"
        paths = [f"{root}/{pod['metadata']['name']}:{_HTTP_PORT}/proxy/metrics" for pod in self.pods(role)]
        return [self.cluster.kubectl("get", "--raw", path) for path in paths]

    @contextmanager
    def router(self) -> Iterator[str]:
        """The router's base URL as seen from this machine."""
        service = self.cluster.get("service", f"{self.name}-router", self.namespace)
        if service is None:
            raise LookupError(f"There is no Service {self.name}-router.")
        port = service["spec"]["ports"][0]["port"]
        if self.cluster.provider == "local":
            yield f"http://{service['spec']['clusterIP']}:{port}"
        else:
            with self._forwarded(port) as url:
                yield url

    def forward_command(self, ports: str) -> list[str]:
        """The command that makes the router reachable where this machine is not in the cluster's network."""
        kubectl, config = str(program("kubectl")), f"--kubeconfig={self.cluster.kubeconfig}"
        service = f"service/{self.name}-router"
        return [kubectl, config, "port-forward", f"--namespace={self.namespace}", service, ports]

    @contextmanager
    def _forwarded(self, port: int) -> Iterator[str]:
        command = self.forward_command(f":{port}")
        forwarding = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            line = forwarding.stdout.readline() if forwarding.stdout else ""
            found = re.search(r"127\.0\.0\.1:\d+", line)
            if not found:
                raise CommandError("Forwarding a port to the router", command, 1, line)
            yield f"http://{found[0]}"
        finally:
            forwarding.terminate()
            forwarding.wait()


def _answers(url: str) -> bool:
    """Whether a GET, past any proxy, is answered with 200."""
    try:
        with _DIRECT.open(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:  # urllib's errors are of this kind
        return False
