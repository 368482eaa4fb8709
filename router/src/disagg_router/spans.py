"""What a turn tells its trace. Without tracing there is nobody to tell: `Untraced` passes the client's trace on to the engines.

`otel` has the other implementation; nothing else knows OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.http1 import RequestHead
from disagg_router.relay import passed_on

CANCELLED = "cancelled"
"""How a leg ends that nobody needs any more."""


class Leg(Protocol):
    """One request to an engine."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What the engine is told of the trace."""

    def answered(self, status: int) -> None:
        """The engine's answer has begun."""

    def end(self, error: str | None) -> None:
        """The leg is over. `error`: what went wrong with it, a word of few; CANCELLED if nothing did."""


class Trace(Protocol):
    """One turn."""

    def leg(self, backend: Backend, path: str, request_id: str) -> Leg:
        """A request goes out to `backend`."""

    def event(self, name: str) -> None:
        """Something happened just now."""

    def end(self, facts: Mapping[str, Any]) -> None:
        """The turn is over. `facts` are the fields of its log line; those that are None do not count."""


class Tracer(Protocol):
    def turn(self, endpoint: legs.Endpoint, head: RequestHead) -> Trace:
        """A client's request is about to be served."""


class Untraced:
    """Of a router that makes no traces."""

    def turn(self, endpoint: legs.Endpoint, head: RequestHead) -> Trace:
        return _Untraced(passed_on(head.headers))


class _Untraced:
    """Trace and leg; `headers` are the client's."""

    __slots__ = ("headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def leg(self, backend: Backend, path: str, request_id: str) -> Leg:
        return self

    def event(self, name: str) -> None:
        pass

    def answered(self, status: int) -> None:
        pass

    def end(self, outcome: object) -> None:
        pass
