"""kubectl, for the cluster's own use while it starts."""

from pathlib import Path

from e2e.cluster.shell import Word, in_netns, run


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
        return run([*self._argv, *words], doing, stdin=stdin, env=self._env, timeout=timeout)

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
