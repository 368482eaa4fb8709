"""What can go wrong when the operator talks to the API server, classified once, by who can do something about it.

KubeError               what we were doing, what the server said
├── UnavailableError         nobody: try again later (no answer, 429, 5xx, conflict with a change just made)
├── RefusedError             the user or an administrator (invalid object, quota, admission, missing permission)
└── GoneError                nobody: the object no longer exists
"""


class KubeError(Exception):
    """A request that failed. `doing` reads as in "apply StatefulSet default/x"; `answer` is the server's own text."""

    def __init__(self, doing: str, answer: str, status: int | None = None) -> None:
        super().__init__(f"{doing}: {answer}")
        self.doing = doing
        self.answer = answer
        self.status = status


class UnavailableError(KubeError):
    """The server could not answer, or somebody else changed the object in between: the next pass may succeed."""


class RefusedError(KubeError):
    """The server said no and will say no again until somebody changes something."""

    @property
    def by_quota(self) -> bool:
        """Whether a ResourceQuota is what refused."""
        return self.status == 403 and "exceeded quota" in self.answer


class GoneError(KubeError):
    """The object does not exist."""


def classify(doing: str, status: int | None, answer: str) -> KubeError:
    """The error for an HTTP status; None is a request that got no answer."""
    if status == 404:
        return GoneError(doing, answer, status)
    if status is None or status in (408, 409, 410, 429) or status >= 500:
        return UnavailableError(doing, answer, status)
    return RefusedError(doing, answer, status)
