"""kubectl: how it is run, and the one that the cluster itself uses while it starts."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.shell import Answer, Word, answer_of, in_netns, output

ATTEMPTS = 4
_PAUSE_SECONDS = 1.0
_STALLED = (
    "TLS handshake timeout",
    "i/o timeout",
    "http2: client connection lost",
    "etcdserver: request timed out",
)


def ask_patiently(
    argv: Sequence[Word],
    doing: str,
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
) -> Answer:
    """`answer_of` for kubectl and helm: again if the machine stood still meanwhile. kubectl gives a TLS handshake 10 s, etcd a request 7 s.

    Nothing is wrong then, and to ask once more is right: the request was not made, or making it twice does no harm.
    """
    for attempt in range(1, ATTEMPTS + 1):
        answer = answer_of(argv, doing, stdin=stdin, env=env, timeout=timeout)
        if answer.ok or attempt == ATTEMPTS or not any(mark in answer.stderr for mark in _STALLED):
            break
        time.sleep(_PAUSE_SECONDS)
    return answer


def run_patiently(
    argv: Sequence[Word],
    doing: str,
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
) -> str:
    """`run`, as patiently."""
    return output(ask_patiently(argv, doing, stdin=stdin, env=env, timeout=timeout), argv, doing)


class Kubectl:
    """kubectl with one kubeconfig; what it caches goes with the cluster.

    In the network namespace `netns`, if given: so that `down` finds a kubectl that a killed run left waiting.
    """

    def __init__(self, program: Path, kubeconfig: Path, netns: str | None = None) -> None:
        argv: list[Word] = [program, f"--kubeconfig={kubeconfig}"]
        self._argv = in_netns(netns, argv) if netns else [str(word) for word in argv]
        self._env = {"KUBECACHEDIR": str(kubeconfig.parent / "kubectl-cache")}

    def __call__(self, *words: str, doing: str, stdin: str | None = None, timeout: float = 180.0) -> str:
        """Run kubectl and return what it printed.

        Raises:
            CommandError: it failed or ran out of time; `doing` starts the message.
        """
        return run_patiently([*self._argv, *words], doing, stdin=stdin, env=self._env, timeout=timeout)

    def apply(self, manifests: str, doing: str) -> None:
        """Server-side apply as field manager `disagg-cluster`."""
        self(
            "apply",
            "--server-side",
            "--field-manager=disagg-cluster",
            "-f",
            "-",
            doing=doing,
            stdin=manifests,
        )
