"""Requests, responses and their heads: what both sides of the proxy share. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

# Fields that belong to one connection, not to the message (RFC 9110 section 7.6.1), and fields whose value the
# proxy decides itself. Neither is copied from an engine's answer to the client's.
_NOT_PASSED_ON = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
        b"date",
        b"server",
        b"x-request-id",
        b"x-disagg-decision",
    }
)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_BREAKS_A_LINE = re.compile(r"[\r\n\0]")


class Headers:
    """Header fields in order, names in lower case. Values are the bytes of the wire, without outer blanks."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.items: list[tuple[bytes, bytes]] = [(name.lower(), value) for name, value in items]

    def add(self, name: bytes, value: bytes) -> None:
        self.items.append((name.lower(), value.strip(b" \t")))

    def get(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower case), or None."""
        for key, value in self.items:
            if key == name:
                return value
        return None

    def count(self, name: bytes) -> int:
        return sum(key == name for key, _ in self.items)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client connection may make the router hold or wait for. Sizes in bytes, times in seconds."""

    head_bytes: int = 65536
    body_bytes: int = 32 * 1024 * 1024
    header_fields: int = 200
    # From a request's first byte to its last: a client that drips its request holds a socket no longer.
    request_seconds: float = 120.0
    # How long a kept-alive connection may stay silent between two requests; longer than clients and balancers keep
    # theirs (60 to 90 s), so that it is they who close it and never a request that meets our close.
    keep_alive_seconds: float = 120.0
    # How long a client may refuse to read before its turn is given up.
    stall_seconds: float = 120.0
    # After a request is refused in mid-body: time for the client to read the refusal before the socket closes.
    linger_seconds: float = 2.0
    # Over TLS: from a client's connection to the end of its handshake.
    handshake_seconds: float = 10.0
    # Over TLS: how long a client that has read everything may take to answer our goodbye (close_notify).
    goodbye_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's start line and header fields. `path` is without the query and not percent-decoded."""

    method: str
    path: str
    headers: Headers
    http10: bool
    keep_alive: bool


@dataclass(frozen=True, slots=True)
class Request:
    head: RequestHead
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer that the router makes itself."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"


def response_head(response: Response, keep_alive: bool) -> bytes:
    """The head of a router-made answer, with its Content-Length."""
    lines = [f"HTTP/1.1 {response.status} {_reason(response.status)}"]
    if response.body:
        lines.append(f"content-type: {response.content_type}")
    lines.append(f"content-length: {len(response.body)}")
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def relayed_head(
    status: int, headers: Headers, extra: dict[str, str], *, keep_alive: bool, decoded: bool
) -> bytes:
    """The head that announces an engine's answer to the client.

    The framing fields (Content-Length, Transfer-Encoding) are the engine's own, because its body bytes are passed
    on as they are; with `decoded` they are left out and the body ends with the connection (HTTP/1.0 clients).
    """
    parts = [f"HTTP/1.1 {status} {_reason(status)}\r\n".encode("latin-1")]
    for name, value in headers.items:
        if name in _NOT_PASSED_ON or (decoded and name in (b"transfer-encoding", b"content-length")):
            continue
        parts.append(name + b": " + value + b"\r\n")
    parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in extra.items()]
    if decoded or not keep_alive:
        parts.append(b"connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def request_head(method: str, path: str, host: str, fields: dict[str, str], body_length: int) -> bytes:
    """The head of a request to an engine. Raises ValueError for a field that would break out of its line."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    for name, value in fields.items():
        if _BREAKS_A_LINE.search(name + value):
            raise ValueError(f"control character in header field {name!r}")
        lines.append(f"{name}: {value}")
    lines.append(f"content-length: {body_length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
