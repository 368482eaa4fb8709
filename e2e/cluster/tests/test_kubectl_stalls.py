"""A machine that stands still for some seconds fails no kubectl command. kubectl is a script here that ends as told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.apiserver import ApiServer
from e2e.cluster import Cluster, CommandError, handle, kubectl
from e2e.cluster.kubectl import ATTEMPTS, Kubectl

HANDSHAKE = "Unable to connect to the server: net/http: TLS handshake timeout"
ETCD = "Error from server: etcdserver: request timed out"
SCRIPT = """\
#!/bin/sh
cat >> {folder}/read
echo >> {folder}/runs
[ $(wc -l < {folder}/runs) -gt {failures} ] && echo done && exit 0
echo '{words}' >&2
exit 1
"""

Ask = Callable[..., str]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], Path]:
    monkeypatch.setattr(kubectl, "_PAUSE_SECONDS", 0.0)

    def write(failures: int, words: str) -> Path:
        """Fails so often with these words, then does what it is asked to."""
        path = tmp_path / "kubectl"
        path.write_text(SCRIPT.format(folder=tmp_path, failures=failures, words=words))
        path.chmod(0o755)
        monkeypatch.setattr(handle, "program", lambda name: path)
        return path

    return write


def of_a_test(program: Path) -> str:
    return Cluster("existing", program.with_name("kubeconfig")).kubectl("apply", stdin="a manifest\n")


def of_the_cluster(program: Path) -> str:
    return Kubectl(program, program.with_name("kubeconfig"))("apply", doing="Trying", stdin="a manifest\n")


def of_an_api_server(program: Path) -> str:
    answer = ApiServer(program.with_name("kubeconfig"), program).kubectl("apply", stdin="a manifest\n")
    if not answer.ok:
        raise CommandError("Trying", ["kubectl"], answer.code, answer.stderr)
    return answer.stdout


ALL = pytest.mark.parametrize("ask", [of_a_test, of_the_cluster, of_an_api_server])


def runs(program: Path) -> int:
    return len(program.with_name("runs").read_text().splitlines())


@ALL
@pytest.mark.parametrize("words", [HANDSHAKE, ETCD])
def test_it_is_asked_again_with_the_same_words(
    fake: Callable[[int, str], Path], ask: Ask, words: str
) -> None:
    program = fake(ATTEMPTS - 1, words)
    assert ask(program) == "done\n"
    assert program.with_name("read").read_text() == "a manifest\n" * ATTEMPTS


@ALL
def test_a_server_that_never_answers_is_told_of(fake: Callable[[int, str], Path], ask: Ask) -> None:
    program = fake(100, HANDSHAKE)
    with pytest.raises(CommandError, match="TLS handshake timeout"):
        ask(program)
    assert runs(program) == ATTEMPTS


@ALL
def test_a_refusal_is_final(fake: Callable[[int, str], Path], ask: Ask) -> None:
    program = fake(1, "Error from server (Forbidden): no")
    with pytest.raises(CommandError, match="Forbidden"):
        ask(program)
    assert runs(program) == 1
