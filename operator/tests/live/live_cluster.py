"""A real control plane for the operator's tests: API server and controllers, no nodes; a kubelet of our own plays them.

Controllers create pods, nobody runs them: `Kubelet` writes the status that a node would, by the image's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from e2e.apiserver import ApiServer, api_server
from e2e.cluster import binaries
from e2e.cluster.progress import Progress
from e2e.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
_CONTROLLERS = (
    "garbagecollector,statefulset,deployment,replicaset,disruption,endpointslice,serviceaccount,resourcequota"
)
CONTROLLERS_LOG = "kube-controller-manager.log"
_STOP_SECONDS = 60
_KINDS = (
    "statefulsets,deployments,services,serviceaccounts,configmaps,roles,rolebindings,poddisruptionbudgets"
)


def until(condition: Callable[[], Any], what: str, *, limit: float = 240.0) -> Any:
    """Waits for a truthy value and returns it; fails with `what` and the last value."""
    deadline = time.monotonic() + limit
    value = None
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"waited {limit:.0f} s for {what}; last: {value!r}")


@dataclass
class Cluster:
    """The control plane and ways to look at it."""

    server: ApiServer
    folder: Path
    controllers: subprocess.Popen[bytes]
    core: client.CoreV1Api = field(init=False)
    apps: client.AppsV1Api = field(init=False)
    custom: client.CustomObjectsApi = field(init=False)

    def __post_init__(self) -> None:
        api = config.new_client_from_config(str(self.server.kubeconfig))
        self.core, self.apps = client.CoreV1Api(api), client.AppsV1Api(api)
        self.custom = client.CustomObjectsApi(api)

    def require_controllers(self) -> None:
        """Fail if they have ended: without them every test would wait in vain as long as it may."""
        said = self.folder / CONTROLLERS_LOG
        assert self.controllers.poll() is None, f"the controllers ended:\n{said.read_text()[-3000:]}"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        answer = self.server.kubectl(*arguments, stdin=stdin)
        assert answer.ok, f"kubectl {' '.join(arguments)}: {answer.stderr}"
        return answer.stdout

    def get(self, kind: str, namespace: str, *names: str) -> Any:
        return json.loads(self.kubectl("get", kind, "-n", namespace, "-o", "json", *names))

    def apply(self, namespace: str, name: str, spec: dict[str, Any], **metadata: Any) -> None:
        body = {
            "apiVersion": "inference.disagg.dev/v1alpha1",
            "kind": "DisaggInference",
            "metadata": {"name": name, "namespace": namespace, **metadata},
            "spec": spec,
        }
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(body))

    def patch(self, namespace: str, name: str, spec: dict[str, Any]) -> None:
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", "di", name, "-n", namespace, "--type=merge", "-p", patch)

    def condition(self, namespace: str, name: str, type_: str) -> dict[str, Any]:
        """The condition, with the whole status if it is absent or about an older spec; never stale."""
        found = self.get("di", namespace, name)
        status = found.get("status", {})
        if status.get("observedGeneration") == found["metadata"]["generation"]:
            for condition in status.get("conditions", []):
                if condition["type"] == type_:
                    return dict(condition)
        return {"status": "absent", "reason": "", "message": ""}

    def wait_for(
        self, namespace: str, name: str, type_: str, status: str, *, reason: str = "", limit: float = 240
    ) -> Any:
        def holds() -> Any:
            condition = self.condition(namespace, name, type_)
            return condition if condition["status"] == status and reason in condition["reason"] else None

        try:
            return until(holds, f"{type_}={status} {reason}", limit=limit)
        except AssertionError:
            status_now = json.dumps(self.get("di", namespace, name).get("status"), indent=1)
            raise AssertionError(f"{type_} is not {status} {reason} after {limit} s: {status_now}") from None


class Kubelet:
    """Gives every pod the status that a node would: ready, unless its image says otherwise.

    `broken` in the name of the main container's image: it cannot be pulled. A nodeSelector: nobody fits. An image's tag
    `at-ADDRESS` gives the pod that address.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._core = cluster.core
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Kubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            try:
                pods = self._core.list_pod_for_all_namespaces().items
            except Exception:
                continue
            for pod in pods:
                if (pod.status.conditions or []) or pod.metadata.deletion_timestamp:
                    continue
                # What fails, on a busy server or because the pod is gone, is tried again with the next list.
                with suppress(Exception):
                    self._core.patch_namespaced_pod_status(
                        pod.metadata.name, pod.metadata.namespace, {"status": _status(pod)}
                    )


def _status(pod: Any) -> dict[str, Any]:
    if pod.spec.node_selector:
        message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        return {"phase": "Pending", "conditions": [scheduled]}
    main = next(container for container in pod.spec.containers if container.name == "main")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if "broken" in main.image:
        waiting = {
            "reason": "ImagePullBackOff",
            "message": f'Back-off pulling image "{main.image}": ErrImagePull: {main.image}: not found',
        }
        state = {"name": "main", "image": main.image, "imageID": "", "ready": False, "restartCount": 0}
        return {
            "phase": "Pending",
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}],
            "containerStatuses": [{**state, "state": {"waiting": waiting}}],
        }
    return {
        "phase": "Running",
        "podIP": main.image.partition(":at-")[2] or "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
    }


@contextmanager
def control_plane(folder: Path) -> Iterator[Cluster]:
    """API server, controllers, our CRDs."""
    with api_server(folder) as server:
        program = binaries.ensure(("kube-controller-manager",), Progress())["kube-controller-manager"]
        command = [
            str(program),
            f"--kubeconfig={server.kubeconfig}",
            f"--service-account-private-key-file={folder / 'service-accounts.key'}",
            f"--controllers={_CONTROLLERS}",
            "--leader-elect=false",
            "--secure-port=0",
        ]
        with _process(command, folder / CONTROLLERS_LOG, dict(os.environ)) as controllers:
            cluster = Cluster(server, folder, controllers)
            server.install_crds()
            yield cluster


@dataclass
class OperatorProcess:
    """`python -m disagg_operator`, as it runs in its pod."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def passes(self) -> float:
        """How many passes over any object have ended."""
        return self.metric("disagg_operator_reconcile_seconds_count")

    def wait_for_rest(self, quiet_seconds: float = 10) -> None:
        """Until no pass has happened for longer than anything that is known to come late, as minReadySeconds."""

        def quiet() -> bool:
            before = self.passes()
            time.sleep(quiet_seconds)
            return self.passes() == before

        until(quiet, "the operator to be at rest", limit=300)

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the operator ended:\n{self.log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=60) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def running_operator(cluster: Cluster, *, wait: bool = True, **environment: str) -> Iterator[OperatorProcess]:
    """The operator as a process, ready unless told not to wait; ended by SIGTERM."""
    port = free_port()
    log = cluster.folder / f"operator-{port}.log"
    variables = {
        "KUBECONFIG": str(cluster.server.kubeconfig),
        "ROUTER_IMAGE": "router:1",
        "CONNECTOR_IMAGE": "connector:1",
        "HTTP_PORT": str(port),
        **environment,
    }
    with _process([sys.executable, "-m", "disagg_operator"], log, {**os.environ, **variables}) as process:
        operator = OperatorProcess(process, port, log)
        if wait:
            until(operator.is_ready, "the operator's /readyz")
        yield operator


@contextmanager
def _process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"uri": "hf://org/model"},
        "engine": {"image": "vllm:1", "device": "CPU"},
        "prefill": {"replicas": 2},
        "decode": {"replicas": 2},
        **changes,
    }


def children(cluster: Cluster, namespace: str, name: str = "demo") -> list[dict[str, Any]]:
    found = cluster.get(_KINDS, namespace, "-l", f"inference.disagg.dev/name={name}")
    return list(found["items"])


def pods(cluster: Cluster, namespace: str, role: str | None = None) -> dict[str, str]:
    """Name to uid."""
    selector = "inference.disagg.dev/role" + (f"={role}" if role else "")
    items = cluster.get("pods", namespace, "-l", selector)["items"]
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}


def charts_rules() -> list[dict[str, Any]]:
    """What the chart grants the operator: its template of rules is YAML but for its first and last line."""
    text = (REPOSITORY / "charts/disagg-operator/templates/_helpers.tpl").read_text()
    _, _, rest = text.partition('{{- define "disagg-operator.rules" -}}')
    return list(yaml.safe_load(rest.partition("{{- end -}}")[0]))


def with_the_charts_rights(cluster: Cluster, account: str, folder: Path) -> Path:
    """The kubeconfig of a new service account that may do what the chart grants, and nothing else."""
    for kind, body in (
        ("ClusterRole", {"rules": charts_rules()}),
        (
            "ClusterRoleBinding",
            {
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": account,
                },
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "default"}],
            },
        ),
    ):
        manifest = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": account},
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest | body))
    cluster.kubectl("create", "serviceaccount", account, "-n", "default")
    asked = (
        "auth",
        "can-i",
        "update",
        "disagginferences.inference.disagg.dev",
        "--subresource=finalizers",
        "-A",
        f"--as=system:serviceaccount:default:{account}",
    )
    until(lambda: cluster.server.kubectl(*asked).ok, "the API server to know the rights")
    token = cluster.kubectl("create", "token", account, "-n", "default").strip()
    access = yaml.safe_load(Path(cluster.server.kubeconfig).read_text())
    access["users"] = [{"name": user["name"], "user": {"token": token}} for user in access["users"]]
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(access))
    return kubeconfig
