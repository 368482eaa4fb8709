"""kubectl: how it is run, and the one that the cluster itself uses while it starts."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.errors import CommandError
from e2e.cluster.shell import Word, in_netns, run

ATTEMPTS = 4
PAUSE_SECONDS = 1.0
_STALLED = (
    "TLS handshake timeout",
    "i/o timeout",
    "http2: client connection lost",
    "etcdserver: request timed out",
)


def has_stalled(words: str) -> bool:
    """Whether kubectl or helm ended with `words` because the machine stood still: it gives a TLS handshake 10 s, etcd a request 7 s.

    Nothing is wrong then, and to ask once more is right: the request was not made, or making it twice does no harm.
    """
    return any(mark in words for mark in _STALLED)


def run_patiently(
    argv: Sequence[Word],
    doing: str,
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
) -> str:
    """`run` for kubectl and helm: again if the machine stood still meanwhile."""
    for _ in range(ATTEMPTS - 1):
        try:
            return run(argv, doing, stdin=stdin, env=env, timeout=timeout)
        except CommandError as error:
            if not has_stalled(error.output):
                raise
        time.sleep(PAUSE_SECONDS)
    return run(argv, doing, stdin=stdin, env=env, timeout=timeout)


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
