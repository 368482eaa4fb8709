"""Raw sockets for tests of the HTTP core: a client that sends any bytes, and an engine that answers any bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from disagg_router.certfile import CertFile
from disagg_router.errors import error_response
from disagg_router.http1 import Connections, Exchange, HttpLimits, RequestHead, Response, ServerConnection

SECONDS = 60.0


class Client:
    """One connection. `answer` reads one whole response, `rest` everything until the peer closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        async with asyncio.timeout(SECONDS):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[int, bytes, bytes]:
        """(status, head, body) of the next response, which must have a Content-Length."""
        head = await self.head()
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        async with asyncio.timeout(SECONDS):
            body = await self.reader.readexactly(length)
        return int(head.split()[1]), head, body

    async def rest(self) -> bytes:
        async with asyncio.timeout(SECONDS):
            return await self.reader.read(-1)

    async def closed(self) -> bool:
        """Whether the peer closes without sending anything more."""
        try:
            return await self.rest() == b""
        except ConnectionError:
            return True

    def half_close(self) -> None:
        self.writer.write_eof()

    def reset(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def connect(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


async def echo(exchange: Exchange) -> None:
    """Answer with what was understood: method, path and body."""
    head = exchange.request.head
    exchange.respond(
        Response(200, f"{head.method} {head.path} ".encode() + exchange.request.body, "text/plain")
    )


@dataclass
class CoreServer:
    """The HTTP core with a handler of the test's own."""

    handler: Handler = echo
    limits: HttpLimits = field(default_factory=HttpLimits)
    admit: Callable[[RequestHead], Response | None] = lambda head: None
    certificate: CertFile | None = None
    handled: list[str] = field(default_factory=list)
    cancelled: int = 0
    connections: Connections = field(default_factory=Connections)
    port: int = 0

    async def _handle(self, exchange: Exchange) -> None:
        self.handled.append(exchange.request.head.path)
        try:
            await self.handler(exchange)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@asynccontextmanager
async def core_server(**settings: Any) -> AsyncIterator[CoreServer]:
    core = CoreServer(**settings)
    server = await asyncio.get_running_loop().create_server(
        lambda: ServerConnection(
            core._handle,
            core.admit,
            lambda status, message, headers: error_response(status, message),
            core.limits,
            core.connections,
        ),
        "127.0.0.1",
        0,
        **(core.certificate.listening(core.limits) if core.certificate else {}),
    )
    core.port = server.sockets[0].getsockname()[1]
    try:
        yield core
    finally:
        server.close()
        core.connections.kill()


class RawEngine:
    """Accepts connections and lets the test's script write whatever it wants as an answer."""

    def __init__(
        self, script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
    ) -> None:
        self._script = script
        self.accepted = 0
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            await self._script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def raw_engine(
    script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[RawEngine]:
    engine = RawEngine(script)
    server = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """The body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    return await reader.readexactly(length)
