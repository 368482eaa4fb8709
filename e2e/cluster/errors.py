"""What can go wrong with a cluster. Every message says what happened, where, and what to do.

ClusterError
├── PreflightError     the machine lacks something; nothing has been changed
├── CommandError       a program that we ran failed
├── DaemonDied         a component of the cluster ended by itself
├── WaitTimeoutError   something did not become true in time
└── NoCluster          there is no cluster to talk to
"""


class ClusterError(Exception):
    """Base of everything this package raises on purpose."""


class PreflightError(ClusterError):
    """The machine lacks something; nothing has been changed yet."""


class CommandError(ClusterError):
    """A program that we ran ended with an error; carries what it printed."""

    def __init__(self, doing: str, argv: list[str], code: int, output: str) -> None:
        tail = "\n".join(output.strip().splitlines()[-20:]) or "(it printed nothing)"
        super().__init__(f"{doing}: `{' '.join(argv)}` ended with status {code}:\n{tail}")
        self.code = code
        self.output = output


class DaemonDied(ClusterError):  # noqa: N818 - reads as the fact it reports
    """A component of the cluster ended by itself."""


class WaitTimeoutError(ClusterError):
    """Something did not become true within its limit."""


class NoCluster(ClusterError):  # noqa: N818 - reads as the fact it reports
    """There is no cluster to talk to."""
