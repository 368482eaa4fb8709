"""The operator as a process against a real API server and real controllers."""

import json
import time
from collections.abc import Iterator

import pytest
from live_cluster import Cluster, OperatorProcess, children, pods, running_operator, spec, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    with running_operator(cluster) as running:
        yield running


def test_children_are_ours_and_the_object_stays_as_the_user_wrote_it(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    labels = {
        "app.kubernetes.io/instance": "team-a",
        "argocd.argoproj.io/instance": "team-a",
        "cost-center": "42",
    }
    cluster.apply(
        namespace, "demo", spec(), labels=labels, annotations={"argocd.argoproj.io/tracking-id": "x"}
    )
    cluster.wait_for(namespace, "demo", "Ready", "True")
    resource = cluster.get("di", namespace, "demo")
    assert "finalizers" not in resource["metadata"]
    assert resource["metadata"]["annotations"] == {"argocd.argoproj.io/tracking-id": "x"}
    found = children(cluster, namespace)
    assert len(found) == 13
    for child in found:
        name = f"{child['kind']} {child['metadata']['name']}"
        owner = child["metadata"]["ownerReferences"]
        assert [(o["uid"], o["controller"]) for o in owner] == [(resource["metadata"]["uid"], True)], name
        text = json.dumps([child["metadata"].get("labels"), child["metadata"].get("annotations")])
        assert "team-a" not in text, name
        assert "cost-center" not in text, name
        assert "argocd" not in text, name
    managers = cluster.kubectl("get", "sts", "-n", namespace, "--show-managed-fields", "-o", "json")
    for item in json.loads(managers)["items"]:
        written = {(m["manager"], m["operation"]) for m in item["metadata"]["managedFields"]}
        assert ("disagg-operator", "Apply") in written
        assert not {m for m in written if m[0] == "disagg-operator" and m[1] == "Update"}


def test_a_label_of_the_object_changes_nothing_below_it_and_is_no_reason_to_look(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")

    def seen() -> tuple[float, dict[str, str]]:
        found = children(cluster, namespace)
        return operator.passes(), {c["metadata"]["uid"]: c["metadata"]["resourceVersion"] for c in found}

    for number in range(3):  # what else happens to a child meanwhile is a reason, and happens once
        operator.wait_for_rest()
        before = seen()
        cluster.kubectl("label", "di", "demo", "-n", namespace, f"cost-center={number}", "--overwrite")
        cluster.kubectl("annotate", "di", "demo", "-n", namespace, f"team={number}", "--overwrite")
        operator.wait_for_rest()
        if seen() == before:
            return
    pytest.fail(f"passes and children before and after: {before}, {seen()}")


def test_deleting_the_object_takes_everything(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    cluster.kubectl("delete", "di", "demo", "-n", namespace)
    until(
        lambda: not children(cluster, namespace) and not pods(cluster, namespace), "all children to be gone"
    )


def test_a_bad_revision_leaves_the_old_one_serving_and_going_back_keeps_its_pods(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    original = pods(cluster, namespace)

    cluster.patch(namespace, "demo", {"engine": {"image": "vllm:broken"}})
    told = cluster.wait_for(namespace, "demo", "Reconciling", "True", reason="ImagePullFailed")
    assert "vllm:broken: not found" in told["message"]
    assert "serves meanwhile (2 prefill, 2 decode ready)" in told["message"]
    assert cluster.condition(namespace, "demo", "DecodeReady")["status"] == "True"

    cluster.patch(namespace, "demo", {"engine": {"image": "vllm:1"}})
    cluster.wait_for(namespace, "demo", "Ready", "True")
    until(lambda: pods(cluster, namespace) == original, "the original pods and no others")

    cluster.patch(namespace, "demo", {"engine": {"image": "vllm:broken"}})
    cluster.wait_for(namespace, "demo", "Reconciling", "True", reason="ImagePullFailed")
    cluster.patch(namespace, "demo", {"engine": {"image": "vllm:2"}})
    cluster.wait_for(namespace, "demo", "Ready", "True")
    until(lambda: len(pods(cluster, namespace)) == 6, "one revision's pods and the routers")
    until(
        lambda: len([c for c in children(cluster, namespace) if c["kind"] == "StatefulSet"]) == 2,
        "one revision's StatefulSets",
    )


def test_a_bad_template_is_reported_and_its_pods_replaced_when_it_is_put_right(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    decode = pods(cluster, namespace, "decode")
    selector = {"spec": {"nodeSelector": {"no": "such"}}}
    cluster.patch(namespace, "demo", {"prefill": {"template": selector}})
    told = cluster.wait_for(namespace, "demo", "PrefillReady", "False", reason="Unschedulable")
    assert told["message"].startswith("1 of 2 pods ready; pod demo-prefill-")
    assert "didn't match Pod's node affinity/selector" in told["message"]
    cluster.patch(namespace, "demo", {"prefill": {"template": None}})
    cluster.wait_for(namespace, "demo", "Ready", "True")
    assert pods(cluster, namespace, "decode") == decode


def test_a_refused_child_is_reported_as_the_users_template(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    nonsense = {"spec": {"containers": [{"name": "main", "imagePullPolicy": "Sometimes"}]}}
    cluster.apply(namespace, "demo", spec(prefill={"replicas": 1, "template": nonsense}))
    told = cluster.wait_for(namespace, "demo", "Stalled", "True", reason="InvalidTemplate")
    assert "imagePullPolicy" in told["message"]
    cluster.patch(namespace, "demo", {"prefill": {"template": None}})
    cluster.wait_for(namespace, "demo", "Ready", "True")


def test_a_quota_is_quoted_and_waited_for(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.kubectl("create", "quota", "pods", "-n", namespace, "--hard=pods=6")
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    original = pods(cluster, namespace)
    cluster.patch(namespace, "demo", {"engine": {"extraArgs": ["--block-size", "32"]}})
    told = cluster.wait_for(namespace, "demo", "Reconciling", "True", reason="QuotaExceeded")
    assert "exceeded quota: pods" in told["message"]
    assert original.items() <= pods(cluster, namespace).items(), "the old pair keeps all its pods"

    def is_left_alone() -> bool:
        writes = cluster.get("di", namespace, "demo")["metadata"]["resourceVersion"]
        time.sleep(4)
        return bool(cluster.get("di", namespace, "demo")["metadata"]["resourceVersion"] == writes)

    until(is_left_alone, "the status to be at rest: there is no tight loop")
    cluster.kubectl("patch", "quota", "pods", "-n", namespace, "-p", '{"spec":{"hard":{"pods":"10"}}}')
    # The StatefulSet controller's own back-off decides when it tries again.
    cluster.wait_for(namespace, "demo", "Ready", "True", limit=600)
    until(lambda: len(pods(cluster, namespace)) == 6, "the old revision's pods to be gone")


def test_somebody_elses_object_is_left_alone_and_reported(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.kubectl("create", "configmap", "demo-router", "-n", namespace, "--from-literal=mine=1")
    before = cluster.get("configmap", namespace, "demo-router")
    cluster.apply(namespace, "demo", spec())
    told = cluster.wait_for(namespace, "demo", "Stalled", "True", reason="NotOwned")
    assert "ConfigMap demo-router exists and is not controlled by this DisaggInference" in told["message"]
    assert cluster.get("configmap", namespace, "demo-router") == before
    cluster.kubectl("delete", "configmap", "demo-router", "-n", namespace)
    cluster.wait_for(namespace, "demo", "Ready", "True")


def test_a_deletion_followed_by_the_same_name_waits_for_the_collector(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    cluster.kubectl("delete", "di", "demo", "-n", namespace)
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    uid = cluster.get("di", namespace, "demo")["metadata"]["uid"]
    found = children(cluster, namespace)
    assert {c["metadata"]["ownerReferences"][0]["uid"] for c in found} == {uid}
    assert len(found) == 13


def test_what_others_change_or_delete_is_put_back(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    decode = next(c for c in children(cluster, namespace) if c["metadata"]["name"].startswith("demo-decode-"))
    full_name = decode["metadata"]["name"]
    cluster.kubectl("scale", "sts", full_name, "-n", namespace, "--replicas=5")
    until(
        lambda: cluster.get("sts", namespace, full_name)["spec"]["replicas"] == 2, "the size to be put back"
    )
    for kind in ("service", "configmap", "role", "pdb"):
        uid = cluster.get(kind, namespace, "demo-router")["metadata"]["uid"]
        cluster.kubectl("delete", kind, "demo-router", "-n", namespace)
        until(
            lambda kind=kind, uid=uid: any(
                item["metadata"]["name"] == "demo-router" and item["metadata"]["uid"] != uid
                for item in cluster.get(kind, namespace)["items"]
            ),
            f"the {kind} to be made again",
        )


def test_what_is_not_implemented_is_said_and_leaves_everything_as_it_is(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    cluster.apply(namespace, "demo", spec())
    cluster.wait_for(namespace, "demo", "Ready", "True")
    before = {
        c["metadata"]["uid"]: c["metadata"]["generation"]
        for c in children(cluster, namespace)
        if "generation" in c["metadata"]
    }
    cluster.patch(namespace, "demo", {"kvTransfer": {"loadFailurePolicy": "Fail"}, "decode": {"replicas": 3}})
    told = cluster.wait_for(namespace, "demo", "Stalled", "True", reason="NotImplemented")
    assert "spec.kvTransfer.loadFailurePolicy" in told["message"]
    assert "use Recompute" in told["message"]
    after = {
        c["metadata"]["uid"]: c["metadata"]["generation"]
        for c in children(cluster, namespace)
        if "generation" in c["metadata"]
    }
    assert before == after
    assert cluster.condition(namespace, "demo", "DecodeReady")["status"] == "True"


def test_roles_with_different_kv_never_become_ready(
    cluster: Cluster, operator: OperatorProcess, namespace: str
) -> None:
    different = {"replicas": 1, "extraArgs": ["--block-size=16"]}
    cluster.apply(
        namespace,
        "demo",
        spec(prefill={"replicas": 1, "extraArgs": ["--block-size", "32"]}, decode=different),
    )
    told = cluster.wait_for(namespace, "demo", "RevisionsCompatible", "False", reason="ArgumentsDiffer")
    assert "--block-size is 32 for prefill and 16 for decode" in told["message"]
    assert cluster.condition(namespace, "demo", "Ready")["status"] == "False"
    cluster.patch(namespace, "demo", {"decode": {"extraArgs": ["--block-size=32", "--max-model-len=512"]}})
    cluster.wait_for(namespace, "demo", "Ready", "True")
