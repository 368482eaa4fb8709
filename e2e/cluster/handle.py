"""A cluster as tests and the demo see it, whoever provides it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import binaries
from e2e.cluster.kubectl import run_patiently
from e2e.cluster.progress import Progress
from e2e.cluster.shell import Word

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Cluster:
    """A running cluster and the programs that talk to it."""

    provider: str
    """local, kind or existing."""
    kubeconfig: Path

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 180.0) -> str:
        """Run kubectl and return what it printed.

        Raises:
            CommandError: it failed; the message has the command and its words.
        """
        argv: list[Word] = [program("kubectl"), f"--kubeconfig={self.kubeconfig}", *words]
        return run_patiently(
            argv, "Talking to the cluster", stdin=stdin, env=self._environment, timeout=timeout
        )

    def helm(self, *words: str, timeout: float = 600.0) -> str:
        """Run helm and return what it printed; builds it first where neither PATH nor the cache has it.

        Raises:
            CommandError: it failed; the message has the command and its words.
        """
        argv: list[Word] = [program("helm"), f"--kubeconfig={self.kubeconfig}", *words]
        return run_patiently(argv, "Running helm", env=self._environment, timeout=timeout)

    @property
    def _environment(self) -> dict[str, str]:
        """What kubectl and helm learn about the cluster is cached with it, so that it goes when the cluster goes."""
        if self.provider == "existing":
            return {}
        return {"KUBECACHEDIR": str(self.kubeconfig.parent / "kubectl-cache")}

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """One object, or None if it does not exist."""
        printed = self.kubectl("get", kind, name, f"--namespace={namespace}", "--ignore-not-found", "-o=json")
        return dict(json.loads(printed)) if printed.strip() else None

    def list(self, kind: str, namespace: str | None = "default", selector: str = "") -> list[dict[str, Any]]:
        """Objects of a kind in a namespace (None: in all), narrowed by a label selector."""
        where = f"--namespace={namespace}" if namespace else "--all-namespaces"
        return list(
            json.loads(self.kubectl("get", kind, where, f"--selector={selector}", "-o=json"))["items"]
        )

    def apply(self, manifests: str | Manifest | Sequence[Manifest], *flags: str) -> str:
        """Apply YAML or objects server-side; returns kubectl's words."""
        if isinstance(manifests, Mapping):
            manifests = [manifests]
        text = manifests if isinstance(manifests, str) else yaml.safe_dump_all(manifests)
        return self.kubectl("apply", "--server-side", "-f", "-", *flags, stdin=text)

    def delete(
        self, manifests: str | Manifest | Sequence[Manifest], *flags: str, timeout: float = 180.0
    ) -> None:
        """Delete what `apply` made and wait until it is gone; what is gone already is no error."""
        if isinstance(manifests, Mapping):
            manifests = [manifests]
        text = manifests if isinstance(manifests, str) else yaml.safe_dump_all(manifests)
        self.kubectl("delete", "--ignore-not-found", "-f", "-", *flags, stdin=text, timeout=timeout)

    def wait_ready(self, resource: str, namespace: str = "default", timeout: float = 300.0) -> None:
        """Wait until `resource` (pod/x, deployment/x, statefulset/x) exists and is ready.

        Raises:
            CommandError: it is not in time; the message has what kubectl saw.
        """
        where = f"--namespace={namespace}"
        limit = f"--timeout={int(timeout)}s"
        self.kubectl("wait", "--for=create", resource, where, limit, timeout=timeout + 10)
        if resource.split("/")[0] in ("pod", "node"):
            self.kubectl("wait", "--for=condition=Ready", resource, where, limit, timeout=timeout + 10)
        else:
            self.kubectl("rollout", "status", resource, where, limit, timeout=timeout + 10)

    def real_nodes(self) -> Sequence[str]:
        """Names of the nodes that run containers; fake ones are left out."""
        nodes = self.list("nodes", namespace=None)
        return [
            node["metadata"]["name"] for node in nodes if node["metadata"]["labels"].get("type") != "kwok"
        ]


def program(name: str) -> Path:
    """kubectl or helm: the one in our cache, else the user's own, else built now."""
    if not binaries.missing([name]):
        return binaries.path_of(name)
    if found := shutil.which(name):
        return Path(found)
    return binaries.ensure([name], Progress())[name]
