"""The least that a relay in Python can do: read from one socket, write to another. What every router here is measured against.

It has no choice of engines, no limits, no back-pressure and no metrics, takes one engine that always answers in chunks, and
believes that an answer ends with the last bytes of its framing. Nobody should use it for anything else.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import uvloop

_END = b"0\r\n\r\n"


class _Engine(asyncio.Protocol):
    """A connection to the engine."""

    client: _Client | None = None

    def __init__(self, idle: list[_Engine]) -> None:
        self._idle = idle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.client is not None:
            self.client.transport.write(data)
            if data.endswith(_END):
                self.client = None
                self._idle.append(self)


class _Client(asyncio.Protocol):
    """A connection from the client."""

    def __init__(self, engine: tuple[str, int], idle: list[_Engine]) -> None:
        self._engine = engine
        self._idle = idle
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        head = b"POST %s HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        request, self._body = head % (self._path, len(self._body)) + self._body, b""
        if self._idle:
            self._send(self._idle.pop(), request)
        else:
            task = asyncio.create_task(self._connect(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(lambda: _Engine(self._idle), *self._engine)
        self._send(engine, request)

    def _send(self, engine: _Engine, request: bytes) -> None:
        engine.client = self
        engine.transport.write(request)


async def _serve(engine_port: int) -> None:
    idle: list[_Engine] = []
    engine = ("127.0.0.1", engine_port)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Client(engine, idle), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
