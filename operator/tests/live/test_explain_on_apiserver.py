"""`kubectl disagg explain` against a real API server: who may read, what is found, and that the status is one that the CRD knows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from disagg_operator.cli import app
from e2e.apiserver import ApiServer, api_server

pytestmark = pytest.mark.cluster
SCALED = {"scaling": {"maxReplicas": 4}}
OBJECT: dict[str, Any] = {
    "apiVersion": "inference.disagg.dev/v1alpha1",
    "kind": "DisaggInference",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"uri": "hf://org/model"},
        "engine": {"image": "vllm:1"},
        "prefill": SCALED,
        "decode": SCALED,
        "autoscaling": {"mode": "Auto"},
    },
}
STATUS = {
    "observedGeneration": 1,
    "scaling": {
        "decidedTime": "2026-01-01T12:00:00Z",
        "reason": "Steady",
        "prefill": {"currentReplicas": 1, "desiredReplicas": 1, "needMilli": 160, "limitedBy": "MinReplicas"},
        "decode": {"currentReplicas": 1, "desiredReplicas": 1, "needMilli": 191},
        "inputs": {
            "offeredTokensPerSecond": 5200,
            "backlogTokens": 1200,
            "reuseMilli": 810,
            "growingReuseMilli": 810,
            "growingRemoteReuseMilli": 600,
            "shrinkingReuseMilli": 700,
            "shrinkingRemoteReuseMilli": 500,
            "tokensPerSecondPerPod": 15928,
            "remoteTokenCostMilli": 170,
            "decodePods": 1,
            "kvUsageMilli": 153,
            "fullestKVUsageMilli": 153,
            "runningRequests": 12,
            "waitingRequests": 0,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("apiserver")) as running:
        running.install_crds()
        done(running, "create", "namespace", "team-a")
        done(running, "apply", "-n", "team-a", "-f", "-", stdin=json.dumps(OBJECT))
        patch = json.dumps({"status": STATUS})
        done(running, "patch", "di/demo", "-n", "team-a", "--subresource=status", "--type=merge", "-p", patch)
        yield running


def done(server: ApiServer, *arguments: str, stdin: str | None = None) -> str:
    answer = server.kubectl(*arguments, stdin=stdin)
    assert answer.ok, answer.stderr
    return answer.stdout


def explain(kubeconfig: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", "demo", *arguments], env={"KUBECONFIG": str(kubeconfig)})


def test_an_object_is_explained(server: ApiServer) -> None:
    result = explain(server.kubeconfig, "-n", "team-a")
    assert result.exit_code == 0, result.output
    assert "(988 + 530.4 + 7.6) / 9556.8" in result.stdout
    assert "= 0.160 pods" in result.stdout
    assert "The operator came to" not in result.stdout


def test_an_object_that_is_not_there_is_told(server: ApiServer) -> None:
    result = explain(server.kubeconfig)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: read DisaggInference default/demo: there is none\n"


def test_who_may_not_read_it_is_told_by_the_server(server: ApiServer, tmp_path: Path) -> None:
    done(server, "create", "serviceaccount", "stranger", "-n", "team-a")
    token = done(server, "create", "token", "stranger", "-n", "team-a").strip()
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(yaml.safe_dump(config))
    result = explain(kubeconfig, "-n", "team-a")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "team-a:stranger" in result.stderr
    assert "cannot get resource" in result.stderr
