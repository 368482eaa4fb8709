"""`kubectl disagg explain` as a command, against an API server that is a fake: it answers what a test tells it to.

The real one is in tests/live.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import minimal_spec, resource
from typer.testing import CliRunner

from disagg_operator.cli import app

GROUP = "/apis/inference.disagg.dev/v1alpha1"
Answers = dict[str, tuple[int, Any]]


class FakeApiServer:
    """By the path: a status code and a body. Anything else is a 404."""

    def __init__(self, answers: Answers) -> None:
        self.asked: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append(self.path)
                code, body = answers.get(self.path, (404, {"message": "not found"}))
                sent = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @contextmanager
    def running(self) -> Iterator["FakeApiServer"]:
        thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()


def path(namespace: str, name: str = "demo") -> str:
    return f"{GROUP}/namespaces/{namespace}/disagginferences/{name}"


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(file))
    return file


def write(file: Path, url: str) -> None:
    """Two contexts: the current one without a namespace, and `team` with one."""
    cluster = {"name": "c", "cluster": {"server": url}}
    context = {"cluster": "c", "user": "u"}
    file.write_text(
        yaml.safe_dump(
            {
                "current-context": "here",
                "clusters": [cluster],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [
                    {"name": "here", "context": context},
                    {"name": "team", "context": {**context, "namespace": "team-a"}},
                ],
            }
        )
    )


def ran(file: Path, answers: Answers, *arguments: str) -> tuple[int, str, str, list[str]]:
    with FakeApiServer(answers).running() as server:
        write(file, server.url)
        result = CliRunner().invoke(app, ["explain", *arguments])
    return result.exit_code, result.stdout, result.stderr, server.asked


def refused(file: Path, answers: Answers, *arguments: str) -> str:
    code, out, err, _ = ran(file, answers, *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    return err


@pytest.mark.parametrize(
    ("arguments", "namespace"),
    [
        ((), "default"),
        (("--context", "team"), "team-a"),
        (("--context", "team", "-n", "team-b"), "team-b"),
    ],
)
def test_the_namespace_is_found_as_kubectl_finds_it(
    kubeconfig: Path, arguments: tuple[str, ...], namespace: str
) -> None:
    found = resource(minimal_spec(), namespace=namespace)
    code, out, err, asked = ran(kubeconfig, {path(namespace): (200, found)}, "demo", *arguments)
    assert (code, err, asked) == (0, "", [path(namespace)])
    assert out.startswith(f"{namespace}/demo\n")


def test_json_is_json(kubeconfig: Path) -> None:
    code, out, _, _ = ran(kubeconfig, {path("default"): (200, resource())}, "demo", "-o", "json")
    assert code == 0
    assert json.loads(out)["mode"] == "Disabled"


def test_an_object_that_is_not_there_is_one_clear_line(kubeconfig: Path) -> None:
    kinds = {"resources": [{"name": "disagginferences"}]}
    said = refused(kubeconfig, {GROUP: (200, kinds)}, "demo")
    assert said == "Error: read DisaggInference default/demo: there is none\n"


def test_a_cluster_without_our_kind_is_told_apart(kubeconfig: Path) -> None:
    assert "are the CRDs installed?" in refused(kubeconfig, {}, "demo")


def test_a_missing_right_is_told_in_the_servers_words(kubeconfig: Path) -> None:
    why = 'disagginferences.inference.disagg.dev "demo" is forbidden: User "u" cannot get it'
    assert why in refused(kubeconfig, {path("default"): (403, {"message": why})}, "demo")


def test_no_cluster_is_told(kubeconfig: Path) -> None:
    write(kubeconfig, "http://127.0.0.1:1")
    result = CliRunner().invoke(app, ["explain", "demo"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "read DisaggInference default/demo: " in result.stderr


def test_a_context_that_does_not_exist_is_told(kubeconfig: Path) -> None:
    assert "nowhere" in refused(kubeconfig, {}, "demo", "--context", "nowhere")


@pytest.mark.parametrize("content", [None, "", "a: [", "contexts: 7\ncurrent-context: x\n", "\0"])
def test_a_kubeconfig_that_cannot_be_used_is_told(kubeconfig: Path, content: str | None) -> None:
    if content is not None:
        kubeconfig.write_text(content)
    result = CliRunner().invoke(app, ["explain", "demo"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"use the kubeconfig {kubeconfig}: " in result.stderr
