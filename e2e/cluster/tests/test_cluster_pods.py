"""What a cluster must do for everything else to be tested on it."""

import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import Cluster, CommandError, Provider
from e2e.cluster.shell import wait_until
from e2e.cluster.tests.conftest import Pods

pytestmark = pytest.mark.cluster

Servers = Sequence[dict[str, Any]]


def direct(url: str) -> str:
    """The body that this machine gets from a URL, without any proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        return str(answer.read().decode()).strip()


def url_of(pod: dict[str, Any]) -> str:
    return f"http://{pod['status']['podIP']}:8000/name"


def test_two_nodes_are_ready_in_one_zone(cluster: Cluster) -> None:
    names = cluster.real_nodes()
    assert len(names) >= 2
    for name in names:
        cluster.wait_ready(f"node/{name}")
    nodes = [node for node in cluster.list("nodes", None) if node["metadata"]["name"] in names]
    assert len({node["metadata"]["labels"]["topology.kubernetes.io/zone"] for node in nodes}) == 1


def test_pods_reach_each_other_across_nodes(servers: Servers, pods: Pods) -> None:
    first, second = servers
    assert first["spec"]["nodeName"] != second["spec"]["nodeName"]
    assert pods.fetch("web-0", url_of(second)).strip() == "web-1"
    assert pods.fetch("web-1", url_of(first)).strip() == "web-0"


def test_a_service_spreads_over_nodes_and_reaches_the_caller_itself(servers: Servers, pods: Pods) -> None:
    url = "http://web/name"
    # Each new connection is given to an endpoint at random; a pod may get itself (hairpin).
    seen: set[str] = set()

    def both() -> bool:
        # DNS and the node's kube-proxy hear of a new Service a moment after it was made.
        with suppress(CommandError):
            seen.add(pods.fetch("web-0", url).strip())
        return seen == {"web-0", "web-1"}

    wait_until(both, "the Service to answer from both pods", limit=300)


def test_names_resolve_to_services_and_single_pods(servers: Servers, pods: Pods) -> None:
    look_up = "import socket; print(sorted({entry[4][0] for entry in socket.getaddrinfo('%s', 80)}))"
    addresses = sorted(server["status"]["podIP"] for server in servers)

    def resolved(name: str, expected: list[str]) -> Callable[[], bool]:
        def check() -> bool:
            try:
                return pods.run_in("web-0", look_up % name).strip() == str(expected)
            except CommandError:  # as long as there is no such name
                return False

        return check

    wait_until(resolved("web-headless", addresses), "web-headless to resolve to both pods", limit=180)
    one = f"web-1.web-headless.{servers[1]['metadata']['namespace']}.svc.cluster.local"
    wait_until(resolved(one, [servers[1]["status"]["podIP"]]), f"{one} to resolve", limit=180)


def test_this_machine_reaches_pods_and_services(
    servers: Servers, provider: Provider, address_of: Callable[[str], str]
) -> None:
    if provider.name != "local":
        pytest.skip(f"CLUSTER={provider.name}: its network need not be reachable from this machine")
    assert direct(url_of(servers[1])) == "web-1"

    def answered() -> str | None:
        # The control plane's kube-proxy, by which this machine goes, hears of a new Service when it does.
        try:
            return direct(f"http://{address_of('web')}/name")
        except OSError:
            return None

    assert wait_until(answered, "the Service to answer this machine", limit=180) in ("web-0", "web-1")


def test_a_pod_reaches_the_api_server(pods: Pods) -> None:
    code = (
        "import ssl, urllib.request; root = '/var/run/secrets/kubernetes.io/serviceaccount/'; "
        "trust = ssl.create_default_context(cafile=root + 'ca.crt'); "
        "print(urllib.request.urlopen('https://kubernetes.default.svc/version', context=trust, timeout=60).read().decode())"
    )
    assert '"gitVersion"' in pods.output("asks-api", code)


def test_logs_show_what_a_container_printed(pods: Pods) -> None:
    assert pods.output("prints", "print('one'); print('two')").splitlines() == ["one", "two"]


def test_an_exposed_folder_is_mounted_by_its_stable_name(
    pods: Pods, provider: Provider, tmp_path: Path
) -> None:
    if provider.name != "local":
        pytest.skip(f"CLUSTER={provider.name}: a temporary folder is not on its nodes")
    (tmp_path / "word").write_text("found")
    tmp_path.chmod(0o755)
    path = provider.expose("tests/shelf", tmp_path)
    printed = pods.output(
        "mounts",
        "print(open('/shelf/word').read())",
        container={"volumeMounts": [{"name": "shelf", "mountPath": "/shelf", "readOnly": True}]},
        volumes=[{"name": "shelf", "hostPath": {"path": str(path), "type": "Directory"}}],
    )
    assert printed.strip() == "found"
