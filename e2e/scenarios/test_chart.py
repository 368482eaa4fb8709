"""The chart, rendered by helm and installed on a real API server: what it creates, what the operator may do with it."""

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg_operator.config import Settings
from disagg_operator.kube import CHILD_KINDS, RESOURCES
from e2e.apiserver import ApiServer, api_server
from e2e.cluster import binaries
from e2e.cluster.kubectl import ask_patiently
from e2e.cluster.progress import Progress
from e2e.cluster.shell import Answer, wait_until

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "disagg-operator"
REGISTRY = "images.registry=registry.example.com/disagg"


@pytest.fixture(scope="module")
def helm_path() -> Path:
    return binaries.ensure(["helm"], Progress())["helm"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("apiserver")) as running:
        yield running


@pytest.fixture(scope="module")
def helm(server: ApiServer, helm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> "Helm":
    return Helm(helm_path, tmp_path_factory.mktemp("helm"), server.kubeconfig)


class Helm:
    """helm with a home of its own, with or without a cluster."""

    def __init__(self, path: Path, home: Path, kubeconfig: Path | None = None) -> None:
        self.path = path
        self.env = {**os.environ, "HOME": str(home), "KUBECONFIG": str(kubeconfig or home / "none")}

    def __call__(self, *arguments: str) -> Answer:
        return ask_patiently([self.path, *arguments], "Running helm", env=self.env, timeout=300)

    def template(
        self, *arguments: str, profile: tuple[str, ...] = ("--set", REGISTRY)
    ) -> list[dict[str, Any]]:
        answer = self("template", "disagg", str(CHART), "-n", "disagg-system", *profile, *arguments)
        assert answer.ok, answer.stderr
        return [manifest for manifest in yaml.safe_load_all(answer.stdout) if manifest]


@pytest.fixture(scope="module")
def offline(helm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(helm_path, tmp_path_factory.mktemp("helm-offline"))


def one(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def container_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    container: dict[str, Any] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return container


# ---------------------------------------------------------------------------------------------- rendering


def test_it_passes_lint_with_each_values_file(offline: Helm) -> None:
    for values in ((), ("-f", str(CHART / "values-local.yaml"))):
        answer = offline("lint", "--strict", str(CHART), *values)
        assert answer.ok, answer.stdout


def test_without_a_registry_it_says_what_to_set(offline: Helm) -> None:
    answer = offline("template", "disagg", str(CHART))
    assert not answer.ok
    assert "--set images.registry=" in answer.stderr


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("logLevel=verbose", "logLevel"),
        ("workers=0", "workers"),
        ("rotateDays=0", "rotateDays"),
        ("prometheusURL=prometheus:9090", "prometheusURL"),
        ("image.tag=v1", "image"),
        ("watchNamespaces={Team-A}", "watchNamespaces"),
        ("images.registry=example.com/disagg/", "registry"),
        ("images.operator.digest=latest", "digest"),
    ],
)
def test_a_mistaken_value_is_refused_with_its_name(offline: Helm, setting: str, complaint: str) -> None:
    answer = offline("template", "disagg", str(CHART), "--set", REGISTRY, "--set", setting)
    assert not answer.ok
    assert complaint in answer.stderr


def as_in_a_pod(variable: dict[str, Any]) -> str:
    """The value that a container sees, with fields of the pod as text."""
    if "value" in variable:
        return str(variable["value"])
    return f"the {variable['valueFrom']['fieldRef']['fieldPath']}"


def test_the_operator_understands_all_that_the_chart_sets(offline: Helm) -> None:
    container = container_of(
        offline.template(
            *("--set", "watchNamespaces={team-a,team-b}", "--set", "images.pullSecrets={one,two}"),
            *("--set", "logLevel=DEBUG", "--set", "workers=7", "--set", "images.router.tag=v9"),
            *("--set", "rotateDays=30", "--set", "prometheusURL=http://prometheus:9090"),
        )
    )
    settings = Settings.from_env({variable["name"]: as_in_a_pod(variable) for variable in container["env"]})
    assert settings == Settings(
        router_image="registry.example.com/disagg/router:v9",
        connector_image="registry.example.com/disagg/connector:0.1.0",
        image_pull_policy="IfNotPresent",
        image_pull_secrets=("one", "two"),
        watch_namespaces=("team-a", "team-b"),
        workers=7,
        resync_seconds=300,
        prometheus_url="http://prometheus:9090",
        rotate_days=30,
        http_port=8080,
        log_level="DEBUG",
        lease_name="disagg-disagg-operator",
        pod_namespace="the metadata.namespace",
        pod_name="the metadata.name",
    )
    assert [port["containerPort"] for port in container["ports"]] == [settings.http_port]


def test_the_operator_runs_once_and_without_privileges(offline: Helm) -> None:
    deployment = one(offline.template(), "Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["enableServiceLinks"]


def test_a_digest_wins_over_a_tag(offline: Helm) -> None:
    digest = "sha256:" + "0" * 64
    container = container_of(offline.template("--set", f"images.operator.digest={digest}"))
    assert container["image"] == f"registry.example.com/disagg/operator@{digest}"


def test_the_local_profile_takes_the_loaded_images(offline: Helm) -> None:
    manifests = offline.template(profile=("-f", str(CHART / "values-local.yaml")))
    container = container_of(manifests)
    assert container["image"] == "localhost/disagg/operator:dev"
    assert container["imagePullPolicy"] == "Never"


def test_crds_are_kept_on_uninstall_and_can_be_left_out(offline: Helm) -> None:
    crds = [m for m in offline.template() if m["kind"] == "CustomResourceDefinition"]
    assert len(crds) == 2
    assert all(crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for crd in crds)
    assert not [
        m for m in offline.template("--set", "crds.enabled=false") if m["kind"] == "CustomResourceDefinition"
    ]


def test_options_render_only_when_asked_for(offline: Helm) -> None:
    kinds = {manifest["kind"] for manifest in offline.template()}
    assert not kinds & {"ServiceMonitor", "ConfigMap"}
    asked = offline.template(
        "--set", "metrics.serviceMonitor.enabled=true", "--set", "argocd.healthConfigMap.enabled=true"
    )
    health = one(asked, "ConfigMap")["data"][
        "resource.customizations.health.inference.disagg.dev_DisaggInference"
    ]
    assert health.strip() == (CHART / "files" / "argocd-health.lua").read_text().strip()
    monitor = one(asked, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= one(asked, "Service")["metadata"]["labels"].items()
    assert [endpoint["honorLabels"] for endpoint in monitor["endpoints"]] == [True], (
        "the namespace of an object would be the operator's"
    )


def test_a_monitor_without_its_service_is_refused(offline: Helm) -> None:
    answer = offline(
        *("template", "disagg", str(CHART), "--set", REGISTRY),
        *("--set", "metrics.service.enabled=false,metrics.serviceMonitor.enabled=true"),
    )
    assert not answer.ok
    assert "metrics.service.enabled=true" in answer.stderr


# ---------------------------------------------------------------------------------------------- rights


def granted(rules: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """(group, resource) -> verbs."""
    rights: dict[tuple[str, str], set[str]] = {}
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                rights.setdefault((group, resource), set()).update(rule["verbs"])
    return rights


def needed() -> dict[tuple[str, str], set[str]]:
    """What the operator's own client does, plus what it must have in order to give it to routers."""
    changed = {"get", "list", "watch", "create", "patch", "delete"}
    rights = {
        ("inference.disagg.dev", "disagginferences"): {"get", "list", "watch"},
        ("inference.disagg.dev", "disagginferences/status"): {"get", "patch"},
        ("inference.disagg.dev", "disagginferences/finalizers"): {"update"},
        ("inference.disagg.dev", "disagginferencescalers/status"): {"get", "patch"},
        ("", "pods"): {"get", "list", "watch"},
        ("", "events"): {"list", "create"},
        ("discovery.k8s.io", "endpointslices"): {"get", "list", "watch"},
        # Only the engines' keys, by name: read, made, shifted.
        ("", "secrets"): {"get", "create", "update"},
    }
    for kind in CHILD_KINDS:
        if kind != "Pod":
            resource = RESOURCES[kind]
            group = resource.group_version.split("/")[0] if "/" in resource.group_version else ""
            rights[group, resource.plural] = changed
    return rights


def named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def test_the_operator_has_the_rights_that_it_uses_and_no_others(offline: Helm) -> None:
    role = named(offline.template(), "ClusterRole", "disagg-system:disagg-disagg-operator")
    assert granted(role["rules"]) == needed()


def test_with_watched_namespaces_it_has_the_same_rights_there_and_none_elsewhere(offline: Helm) -> None:
    manifests = offline.template("--set", "watchNamespaces={team-a,team-b}", "--set", "rbac.aggregate=false")
    roles = [m for m in manifests if m["kind"] == "Role" and m["metadata"]["namespace"] != "disagg-system"]
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    assert all(granted(role["rules"]) == needed() for role in roles)
    assert not [m for m in manifests if m["kind"] in ("ClusterRole", "ClusterRoleBinding")]


def test_it_may_hold_its_own_lease_and_no_other(offline: Helm) -> None:
    manifests = offline.template()
    variables = {variable["name"]: variable.get("value") for variable in container_of(manifests)["env"]}
    create, hold = named(manifests, "Role", "disagg-disagg-operator-lease")["rules"]
    assert (create["resources"], create["verbs"]) == (["leases"], ["create"])
    assert (hold["resourceNames"], hold["verbs"]) == ([variables["LEASE_NAME"]], ["get", "update"])


# ---------------------------------------------------------------------------------------------- installing


def inference(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "inference.disagg.dev/v1alpha1",
        "kind": "DisaggInference",
        "metadata": {"name": "qwen3", "namespace": namespace},
        "spec": {"model": {"uri": "hf://Qwen/Qwen3-32B"}, "engine": {"image": "vllm/vllm-openai:v1"}},
    }


def install(helm: Helm, namespace: str, *settings: str) -> Answer:
    sets = [
        word
        for setting in (REGISTRY, f"watchNamespaces={{{namespace}}}", *settings)
        for word in ("--set", setting)
    ]
    return helm("install", "disagg", str(CHART), "-n", namespace, "--create-namespace", *sets)


@pytest.fixture(scope="module")
def two_teams(server: ApiServer, helm: Helm) -> ApiServer:
    """The same release name in two namespaces, each serving its own."""
    first = install(helm, "team-a")
    assert first.ok, first.stderr
    assert "--set crds.enabled=false" in first.stdout  # NOTES name the flag that the next team needs
    refused = install(helm, "team-b")
    assert not refused.ok
    assert "belongs to release disagg in namespace team-a" in refused.stderr
    assert "--set crds.enabled=false" in refused.stderr
    second = install(helm, "team-b", "crds.enabled=false")
    assert second.ok, second.stderr
    established = server.kubectl("wait", "--for=condition=Established", "--timeout=180s", "crd", "--all")
    assert established.ok, established.stderr
    # The API server learns of new rights a moment after it has stored them.
    for namespace in ("team-a", "team-b"):
        account = OPERATOR_A.replace("team-a", namespace)
        may = partial(can, server, account, "patch", "statefulsets.apps", namespace)
        wait_until(may, f"the operator's rights in {namespace}", limit=120)
    return server


def can(server: ApiServer, account: str, verb: str, resource: str, namespace: str) -> bool:
    """Whether the account may; `resource` is PLURAL.GROUP or PLURAL.GROUP/SUBRESOURCE."""
    plural, _, subresource = resource.partition("/")
    asked = (
        "auth",
        "can-i",
        verb,
        plural,
        f"--subresource={subresource}",
        "-n",
        namespace,
        f"--as={account}",
    )
    return server.kubectl(*asked).stdout.strip() == "yes"


OPERATOR_A = "system:serviceaccount:team-a:disagg-disagg-operator"


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("patch", "statefulsets.apps", True),
        ("patch", "disagginferences.inference.disagg.dev/status", True),
        ("patch", "disagginferences.inference.disagg.dev", False),
        ("delete", "disagginferences.inference.disagg.dev", False),
        ("get", "secrets", True),
        ("list", "secrets", False),
        ("watch", "secrets", False),
        ("patch", "secrets", False),
        ("delete", "secrets", False),
        ("delete", "pods", False),
        ("create", "pods/exec", False),
    ],
)
def test_an_operator_acts_in_its_namespace_only(
    two_teams: ApiServer, verb: str, resource: str, allowed: bool
) -> None:
    assert can(two_teams, OPERATOR_A, verb, resource, "team-a") is allowed
    assert not can(two_teams, OPERATOR_A, verb, resource, "team-b")


def role_for_a_router(*verbs: str) -> dict[str, Any]:
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": list(verbs)}
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "qwen3-router", "namespace": "team-a"},
        "rules": [rule],
    }


def test_the_operator_can_give_a_router_its_rights_and_no_more(two_teams: ApiServer) -> None:
    as_operator = ("--server-side", "--dry-run=server", f"--as={OPERATOR_A}")
    given = two_teams.apply(role_for_a_router("get", "list", "watch"), *as_operator)
    assert given.ok, given.stderr
    refused = two_teams.apply(role_for_a_router("delete"), *as_operator)
    assert "attempting to grant RBAC permissions not currently held" in refused.stderr


def test_editors_of_a_namespace_may_edit_models_and_viewers_see_them(two_teams: ApiServer) -> None:
    # The aggregation itself is done by a controller, which does not run here: ask the roles that it collects.
    roles = json.loads(
        two_teams.kubectl(
            "get", "clusterroles", "-l", "app.kubernetes.io/instance=disagg", "-o", "json"
        ).stdout
    )
    by_target: dict[str, dict[tuple[str, str], set[str]]] = {}
    for role in roles["items"]:
        for label in role["metadata"]["labels"]:
            if label.startswith("rbac.authorization.k8s.io/aggregate-to-"):
                target = by_target.setdefault(label.rpartition("-")[2], {})
                for resource, verbs in granted(role["rules"]).items():
                    target.setdefault(resource, set()).update(verbs)
    models = ("inference.disagg.dev", "disagginferences")
    assert by_target["view"][models] == {"get", "list", "watch"}
    assert by_target["edit"][models] >= {"get", "create", "patch", "delete"}
    assert by_target["admin"] == by_target["edit"]
    assert "patch" not in by_target["edit"]["inference.disagg.dev", "disagginferences/status"]


def owned_cluster_wide(server: ApiServer, namespace: str) -> set[str]:
    """Cluster-scoped objects that carry the mark of the release in that namespace."""
    kinds = "clusterroles,clusterrolebindings,crds"
    items: list[Mapping[str, Any]] = json.loads(server.kubectl("get", kinds, "-o", "json").stdout)["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}"
        for item in items
        if item["metadata"].get("annotations", {}).get("meta.helm.sh/release-namespace") == namespace
    }


def test_uninstalling_one_of_two_equal_releases_leaves_the_other_and_all_models(
    two_teams: ApiServer, helm: Helm
) -> None:
    for namespace in ("team-a", "team-b"):
        applied = two_teams.apply(inference(namespace))
        assert applied.ok, applied.stderr
    before = owned_cluster_wide(two_teams, "team-b")
    assert before
    gone = helm("uninstall", "disagg", "-n", "team-a")
    assert gone.ok, gone.stderr
    assert owned_cluster_wide(two_teams, "team-a") == {
        "CustomResourceDefinition/disagginferences.inference.disagg.dev",
        "CustomResourceDefinition/disagginferencescalers.inference.disagg.dev",
    }
    assert owned_cluster_wide(two_teams, "team-b") == before
    for namespace in ("team-a", "team-b"):
        assert two_teams.kubectl("get", "di/qwen3", "-n", namespace).ok
    operator_b = OPERATOR_A.replace("team-a", "team-b")
    assert can(two_teams, operator_b, "patch", "statefulsets.apps", "team-b")
    wait_until(
        lambda: not can(two_teams, OPERATOR_A, "patch", "statefulsets.apps", "team-a"),
        "the rights of what was uninstalled to be gone",
        limit=120,
    )
    again = install(helm, "team-a")
    assert again.ok, again.stderr
