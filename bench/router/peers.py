"""The two ends of the router's benchmark, as light as can be: engines that stream, and an open-loop client.

The engine is a fake: it answers a prefill leg at once and streams a fixed text otherwise. Both parse no more HTTP than
this benchmark needs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

import uvloop

CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token%d"},"finish_reason":null}]}\n\n'
)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PREFILL = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 29\r\n\r\n{"usage":{"prompt_tokens":5}}'
_BODY = b'{"model":"m","stream":true,"max_tokens":64,"messages":[{"role":"user","content":"%s %d"}]}'


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class _Engine(asyncio.Protocol):
    def __init__(self, chunks: int, interval: float) -> None:
        self._chunks = chunks
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pending += data
        head, found, rest = self._pending.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(rest) < length:
            return
        self._pending = rest[length:]
        if b'"do_remote_decode":true' in rest[:length]:
            self._transport.write(_PREFILL)
        else:
            self._transport.write(_STREAM_HEAD + _framed(CHUNK % 0))
            self._loop.call_later(self._interval, self._go_on, 1)

    def _go_on(self, done: int) -> None:
        if self._transport.is_closing():
            return
        if done == self._chunks:
            self._transport.write(_END)
            return
        self._transport.write(_framed(CHUNK % done))
        self._loop.call_later(self._interval, self._go_on, done + 1)


def serve(chunks: int, interval: float, ready: Connection) -> None:
    """Run an engine; its port goes to `ready`."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Engine(chunks, interval), "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


@dataclass
class Tally:
    """What the client saw. Times in seconds."""

    first_chunk: list[float] = field(default_factory=list)
    finished: int = 0
    chunks: int = 0
    lost: int = 0


class _Client(asyncio.Protocol):
    def __init__(self, tally: Tally, idle: list[_Client], settled: asyncio.Semaphore) -> None:
        self._tally = tally
        self._idle = idle
        self._settled = settled
        self._waiting = False
        self._sent: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, number: int) -> None:
        body = _BODY % (b"hello world " * 200, number)
        self._waiting = True
        self._sent = time.perf_counter()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        found = data.count(b"data: {")
        self._tally.chunks += found
        if found and self._waiting and self._sent is not None:
            self._waiting = False
            self._tally.first_chunk.append(time.perf_counter() - self._sent)
        if data.endswith(_END[-25:]):
            self._tally.finished += 1
            self._sent = None
            self._idle.append(self)
            self._settled.release()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sent is not None:
            self._tally.lost += 1
            self._settled.release()
        elif self in self._idle:
            self._idle.remove(self)


async def load(port: int, requests: int, rate: float, drain_seconds: float) -> Tally:
    """Send `requests` at `rate` a second whether answered or not; wait for the last for `drain_seconds` at most."""
    loop = asyncio.get_running_loop()
    tally, settled, start = Tally(), asyncio.Semaphore(0), loop.time()
    idle: list[_Client] = []
    for number in range(requests):
        wait = start + number / rate - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        if idle:
            client = idle.pop()
        else:
            _, client = await loop.create_connection(lambda: _Client(tally, idle, settled), "127.0.0.1", port)
        client.ask(number)
    try:
        async with asyncio.timeout(drain_seconds):
            for _ in range(requests):
                await settled.acquire()
    except TimeoutError:
        pass  # those that are missing show as lost
    return tally
