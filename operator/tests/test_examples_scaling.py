"""The examples of autoscaling by others fit what there is: scalers, bounds, and series that the operator really shows."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import SETTINGS
from prometheus_client.parser import text_string_to_metric_families

from disagg_operator.autoscale import Course
from disagg_operator.metrics import Metrics
from disagg_operator.plan import rendered
from disagg_operator.scaling.inputs import Sizes
from disagg_operator.scaling.policy import Decision, Outcome
from disagg_operator.wanted import read

Manifest = dict[str, Any]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "autoscaling"
METRIC = "disagg_scaling_recommended_replicas"


def documents(file: str) -> list[Manifest]:
    return list(yaml.safe_load_all((EXAMPLES / file).read_text()))


def inference(file: str) -> Manifest:
    (found,) = (item for item in documents(file) if item["kind"] == "DisaggInference")
    return {**found, "metadata": {"namespace": "default", "uid": "u", "generation": 1} | found["metadata"]}


def of_kind(file: str, kind: str) -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item for item in documents(file) if item["kind"] == kind}


def series(file: str) -> list[dict[str, str]]:
    """The labels that the operator shows the recommendation for this example with."""
    meta = inference(file)["metadata"]
    metrics = Metrics()
    decision = Decision(Outcome.STEADY, Sizes(1, 2), Sizes(1, 2))
    metrics.show_course(meta["namespace"], meta["name"], Course(decision=decision))
    families = text_string_to_metric_families(metrics.render().decode())
    return [sample.labels for family in families for sample in family.samples if sample.name == METRIC]


def scalers(file: str) -> set[str]:
    children = rendered(read(inference(file), SETTINGS))
    return {item["metadata"]["name"] for item in children if item["kind"] == "DisaggInferenceScaler"}


@pytest.mark.parametrize(
    ("file", "kind", "least", "most"),
    [
        ("external-hpa.yaml", "HorizontalPodAutoscaler", "minReplicas", "maxReplicas"),
        ("external-keda.yaml", "ScaledObject", "minReplicaCount", "maxReplicaCount"),
    ],
)
def test_each_role_has_one_that_scales_it_within_its_bounds(
    file: str, kind: str, least: str, most: str
) -> None:
    spec = inference(file)["spec"]
    assert spec["autoscaling"]["mode"] == "External"
    found = of_kind(file, kind)
    assert {item["spec"]["scaleTargetRef"]["name"] for item in found.values()} == scalers(file)
    for item in found.values():
        target = item["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (
            "inference.disagg.dev/v1alpha1",
            "DisaggInferenceScaler",
        )
        bounds = spec[target["name"].rpartition("-")[2]]["scaling"]
        assert (item["spec"][least], item["spec"][most]) == (bounds["minReplicas"], bounds["maxReplicas"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_hpa_goes_by_the_recommendation_of_its_role(role: str) -> None:
    (metric,) = of_kind("external-hpa.yaml", "HorizontalPodAutoscaler")[f"chat-{role}"]["spec"]["metrics"]
    external = metric["external"]
    assert external["metric"]["name"] == METRIC
    wanted = external["metric"]["selector"]["matchLabels"]
    (shown,) = (labels for labels in series("external-hpa.yaml") if wanted.items() <= labels.items())
    assert shown["role"] == role
    assert external["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_the_adapters_rule_serves_that_metric_by_its_labels() -> None:
    (values,) = documents("prometheus-adapter-values.yaml")
    (rule,) = values["rules"]["external"]
    assert rule["name"]["as"] == METRIC
    assert rule["seriesQuery"].partition("{")[0] == METRIC
    labels = {*re.findall(r'(\w+)!=""', rule["seriesQuery"]), *rule["resources"]["overrides"]}
    assert labels == set(series("external-hpa.yaml")[0])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_keda_asks_for_the_recommendation_of_its_role_and_takes_none_for_none(role: str) -> None:
    (trigger,) = of_kind("external-keda.yaml", "ScaledObject")[f"chat-{role}"]["spec"]["triggers"]
    asked = trigger["metadata"]
    found = re.fullmatch(rf"max\({METRIC}\{{(.*)\}}\)", asked["query"])
    assert found is not None
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    assert wanted["role"] == role
    assert wanted in series("external-keda.yaml")
    assert (trigger["metricType"], asked["threshold"]) == ("AverageValue", "1")
    assert asked["ignoreNullValues"] == "false", "KEDA would take a missing recommendation for 0"
    assert all(isinstance(value, str) for value in asked.values())


def test_in_mode_auto_nobody_else_scales() -> None:
    assert [item["kind"] for item in documents("auto.yaml")] == ["DisaggInference"]
    assert inference("auto.yaml")["spec"]["autoscaling"]["mode"] == "Auto"
    assert scalers("auto.yaml") == {"qwen3-32b-prefill", "qwen3-32b-decode"}
