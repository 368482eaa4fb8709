"""The P5en examples on simulated p5en.48xlarge nodes: the real scheduler places them, the operator reports what does not fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import Cluster, Progress, Provider
from e2e.cluster.shell import wait_until
from e2e.demo.stack import OPERATOR_NAMESPACE, OPERATOR_SELECTOR, Stack
from e2e.inference import Inference

pytestmark = pytest.mark.cluster

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "p5en").glob("*.yaml"))
NODES = 8
"""Six in one zone, two in another: the pod that is placed first decides the zone, and either zone must hold a pair."""


@pytest.fixture(scope="module")
def p5en(operator: Stack, provider: Provider) -> Cluster:
    provider.add_fake_nodes(NODES, Progress())
    return operator.cluster


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest, p5en: Cluster) -> Iterator[tuple[Inference, dict[str, Any]]]:
    manifest: dict[str, Any] = next(yaml.safe_load_all(request.param.read_text()))
    inference = Inference(p5en, manifest["metadata"]["name"], "p5en")
    p5en.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "p5en"}})
    manifest["metadata"]["namespace"] = "p5en"
    yield inference, manifest
    inference.delete()


def engines(inference: Inference) -> list[dict[str, Any]]:
    return [*inference.pods("prefill"), *inference.pods("decode")]


def nodes_of(inference: Inference) -> list[str]:
    return [pod["spec"]["nodeName"] for pod in engines(inference) if pod["spec"].get("nodeName")]


def efa_of(pod: dict[str, Any]) -> int:
    (main,) = (c for c in pod["spec"]["containers"] if c["name"] == "main")
    return int(main["resources"]["limits"]["vpc.amazonaws.com/efa"])


def zone_of(cluster: Cluster, node: str) -> str:
    found = cluster.get("node", node)
    assert found is not None
    return str(found["metadata"]["labels"]["topology.kubernetes.io/zone"])


def test_both_pools_land_in_one_zone_and_what_does_not_fit_is_reported(
    example: tuple[Inference, dict[str, Any]],
) -> None:
    inference, manifest = example
    cluster = inference.cluster
    cluster.apply(manifest)
    wait_until(lambda: len(nodes_of(inference)) == 2, "both engines to be placed", limit=300, every=0.5)

    assert [efa_of(pod) for pod in engines(inference)] == [16, 16]
    assert len(set(nodes_of(inference))) == 2
    assert len({zone_of(cluster, node) for node in nodes_of(inference)}) == 1

    inference.patch({"decode": {"replicas": NODES}})
    told = inference.wait_condition(
        "Reconciling", lambda c: "vpc.amazonaws.com/efa" in c.message, "about the missing EFA interfaces"
    )
    assert f"{inference.name}-decode-" in told.message, told

    inference.patch({"decode": {"replicas": 1}})
    wait_until(
        lambda: len(engines(inference)) == 2, "the pods that do not fit to be gone", limit=300, every=0.5
    )


def test_an_operator_killed_while_it_creates_is_no_matter(example: tuple[Inference, dict[str, Any]]) -> None:
    inference, manifest = example
    cluster = inference.cluster
    cluster.apply(manifest)
    (operator,) = cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR_SELECTOR)
    wait_until(lambda: inference.children(), "the first child to be created", limit=180, every=0.05)
    cluster.kubectl(
        *("delete", "pod", operator["metadata"]["name"], f"--namespace={OPERATOR_NAMESPACE}"),
        *("--grace-period=0", "--force"),
    )

    inference.wait_ready()
    assert len(nodes_of(inference)) == 2
    assert inference.resource()["metadata"].get("finalizers") is None
    assert "annotations" not in inference.resource()["metadata"] or not any(
        "kopf" in key for key in inference.resource()["metadata"]["annotations"]
    )
