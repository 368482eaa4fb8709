"""The engines' Secret against a real API server, by an operator that has the chart's rights on Secrets and no others."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_cluster import Cluster, OperatorProcess, pods, running_operator, spec, until, with_the_charts_rights

pytestmark = pytest.mark.cluster
NAMES = ("previous", "current", "next")
ANNOTATION = "inference.disagg.dev/keys-rotated-at"


@pytest.fixture(scope="module")
def operator(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """As a service account, since the administrator may do anything."""
    kubeconfig = with_the_charts_rights(cluster, "keys-test", tmp_path_factory.mktemp("keys"))
    with running_operator(cluster, KUBECONFIG=str(kubeconfig), RESYNC_SECONDS="1") as running:
        yield running


def keys(cluster: Cluster, namespace: str) -> dict[str, bytes]:
    data = cluster.get("secret", namespace, "demo-control")["data"]
    return {name: base64.b64decode(data[name]) for name in NAMES}


def ready(cluster: Cluster, namespace: str) -> dict[str, bytes]:
    cluster.apply(namespace, "demo", spec(prefill={"replicas": 1}, decode={"replicas": 1}))
    cluster.wait_for(namespace, "demo", "Ready", "True")
    return keys(cluster, namespace)


def told(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Reason of each event about the object, and its type."""
    items = cluster.get("events", namespace)["items"]
    return {e["reason"]: e["type"] for e in items if e["involvedObject"]["kind"] == "DisaggInference"}


def test_keys_are_made_rotated_and_kept_without_a_restart(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    first = ready(cluster, namespace)
    assert {len(key) for key in first.values()} == {32}
    assert len(set(first.values())) == 3
    running, templates = pods(cluster, namespace), _templates(cluster, namespace)
    owner = cluster.get("secret", namespace, "demo-control")["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster.get("di", namespace, "demo")["metadata"]["uid"]

    cluster.patch(namespace, "demo", {"decode": {"replicas": 2}})
    cluster.wait_for(namespace, "demo", "Ready", "True")
    assert keys(cluster, namespace) == first, "a pass is no reason for new keys"

    _annotate(cluster, namespace, "2020-01-01T00:00:00Z")
    until(lambda: keys(cluster, namespace) != first, "the keys to be rotated")
    second = keys(cluster, namespace)
    assert (second["previous"], second["current"]) == (first["current"], first["next"])
    operator_passes = operator.passes()
    until(lambda: operator.passes() > operator_passes + 3, "more passes")
    assert keys(cluster, namespace) == second
    assert running.items() <= pods(cluster, namespace).items()
    assert _templates(cluster, namespace) == templates
    until(lambda: told(cluster, namespace).get("ControlKeysRotated") == "Normal", "an event")

    everything = operator.log.read_text() + cluster.kubectl(
        "get", "events,di,sts", "-n", namespace, "-o", "yaml"
    )
    for key in (*first.values(), *second.values()):
        for text in (base64.b64encode(key).decode(), key.hex(), repr(key)[2:-1]):
            assert text not in everything


def test_a_damaged_secret_is_repaired_and_a_deleted_one_made_again(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    first = ready(cluster, namespace)
    patch = json.dumps({"data": {"current": base64.b64encode(b"short").decode()}})
    cluster.kubectl("patch", "secret", "demo-control", "-n", namespace, "--type=merge", "-p", patch)
    until(lambda: len(keys(cluster, namespace)["current"]) == 32, "the key to be repaired")
    second = keys(cluster, namespace)
    assert (second["previous"], second["current"]) == (first["previous"], first["next"])
    until(lambda: told(cluster, namespace).get("ControlKeysRepaired") == "Warning", "a warning")
    uid = cluster.get("secret", namespace, "demo-control")["metadata"]["uid"]
    cluster.kubectl("delete", "secret", "demo-control", "-n", namespace)
    until(lambda: _uid(cluster, namespace) not in (None, uid), "the Secret to be made again")
    assert not set(keys(cluster, namespace).values()) & {*first.values(), *second.values()}


def test_it_goes_with_its_object(cluster: Cluster, operator: OperatorProcess, namespace: str) -> None:
    ready(cluster, namespace)
    cluster.kubectl("delete", "di", "demo", "-n", namespace)
    until(lambda: _uid(cluster, namespace) is None, "the Secret to be collected")


@pytest.mark.parametrize("verb", ["list", "watch", "patch", "delete"])
def test_the_operator_cannot_look_for_secrets(cluster: Cluster, operator: OperatorProcess, verb: str) -> None:
    asked = ("auth", "can-i", verb, "secrets", "-A", "--as=system:serviceaccount:default:keys-test")
    assert cluster.server.kubectl(*asked).stdout.strip() == "no"


def _annotate(cluster: Cluster, namespace: str, moment: str) -> None:
    cluster.kubectl(
        "annotate", "secret", "demo-control", "-n", namespace, "--overwrite", f"{ANNOTATION}={moment}"
    )


def _uid(cluster: Cluster, namespace: str) -> str | None:
    items = cluster.get("secret", namespace)["items"]
    return next((str(i["metadata"]["uid"]) for i in items if i["metadata"]["name"] == "demo-control"), None)


def _templates(cluster: Cluster, namespace: str) -> list[Any]:
    return [item["spec"]["template"] for item in cluster.get("sts", namespace)["items"]]
