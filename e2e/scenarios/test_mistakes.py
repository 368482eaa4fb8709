"""What users get wrong: a condition says which pod and why, and putting it right is enough."""

import copy
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, Provider
from e2e.cluster.shell import wait_until
from e2e.demo.conditions import Shown
from e2e.demo.stack import Stack
from e2e.images.engine import ensure_model
from e2e.inference import Inference
from e2e.scenarios.talk import client_of, cpu_manifest

pytestmark = pytest.mark.cluster


@pytest.fixture
def typo(operator: Stack) -> Iterator[Inference]:
    inference = Inference(operator.cluster, "typo")
    yield inference
    inference.delete()


def wait_told(inference: Inference, *texts: str) -> None:
    told = inference.wait_condition(
        "Reconciling", lambda c: all(text in c.message for text in texts), f"about {texts}"
    )
    assert f"{inference.name}-" in told.message, told
    ready = inference.condition("Ready")
    assert ready is not None
    assert ready.status == "False", ready


def test_a_model_folder_that_does_not_exist_is_named_and_found_once_it_is_there(
    typo: Inference, provider: Provider
) -> None:
    manifest = cpu_manifest(typo.name, model="late-model", served_name="late-model")
    typo.cluster.apply(manifest)
    wait_told(typo, "/var/lib/disagg-local/models/late-model")

    provider.expose("models/late-model", Path(ensure_model("tiny-qwen3")))
    typo.wait_ready()

    with typo.router() as url, client_of(url) as client:
        typo.wait_served(url)
        answered = client.completions.create(model="late-model", prompt="hello", max_tokens=4)
    assert answered.usage is not None
    assert answered.usage.completion_tokens == 4


def test_a_selector_that_no_node_has_is_named_and_taken_back(typo: Inference) -> None:
    manifest = cpu_manifest(typo.name, model="tiny-qwen3", served_name="tiny")
    manifest["spec"]["placement"] = {"nodeSelector": {"disk": "no-node-has-this"}}
    typo.cluster.apply(manifest)
    wait_told(typo, "didn't match")

    typo.patch({"placement": None})
    wait_until(lambda: all_scheduled(typo), "all pods to have a node", limit=300, every=0.5)


def all_scheduled(inference: Inference) -> bool:
    pods = [*inference.pods("prefill"), *inference.pods("decode")]
    return len(pods) == 2 and all(pod["spec"].get("nodeName") for pod in pods)


def test_a_field_of_a_later_version_is_refused_by_name(typo: Inference, cluster: Cluster) -> None:
    manifest = cpu_manifest(typo.name, model="tiny-qwen3", served_name="tiny")
    manifest["spec"]["kvTransfer"] = {"loadFailurePolicy": "Fail"}
    cluster.apply(manifest)

    told = typo.wait_condition("Stalled", lambda c: c.reason == "NotImplemented", "not implemented")
    assert "kvTransfer.loadFailurePolicy" in told.message, told
    assert not typo.children()


def test_a_hash_seed_of_prefill_alone_is_told_when_engines_meet(typo: Inference) -> None:
    """No flag shows it: the engines find out, compute every turn anew, and count."""
    manifest = cpu_manifest(typo.name, model="tiny-qwen3", served_name="tiny")
    template = copy.deepcopy(manifest["spec"]["prefill"]["template"])
    template["spec"]["containers"][0]["env"] = [{"name": "PYTHONHASHSEED", "value": "7"}]
    manifest["spec"]["prefill"]["template"] = template
    typo.cluster.apply(manifest)
    typo.wait_ready()
    told = typo.condition("RevisionsCompatible")
    assert told is not None
    assert told.status == "True", "nobody has met yet"
    numbers = itertools.count()

    with typo.router() as url, client_of(url) as client:
        typo.wait_served(url)

        def mismatch() -> Shown | None:
            prompt = f"Turn {next(numbers)}: " + "count to a hundred and back again. " * 10
            answered = client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
            assert answered.usage is not None
            assert answered.usage.completion_tokens == 4, "turns are answered all the same"
            have_it_looked_at(typo)
            condition = typo.condition("RevisionsCompatible")
            return condition if condition is not None and condition.status == "False" else None

        told = wait_until(mismatch, "engines that refuse each other to be told of", limit=600, every=2)
    assert told.reason == "FingerprintMismatch"
    assert f"{typo.name}-decode-" in told.message, told
    typo.wait_ready()


def have_it_looked_at(inference: Inference) -> None:
    """A change of a child is a reason for a pass; without one it would be five minutes until the next."""
    where = f"--namespace={inference.namespace}"
    inference.cluster.kubectl(
        "annotate",
        "configmap",
        f"{inference.name}-router",
        where,
        f"looked-at={time.time_ns()}",
        "--overwrite",
    )
