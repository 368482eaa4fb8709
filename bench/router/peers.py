"""The two ends of the router's benchmark, as light as can be: engines that stream, and an open-loop client.

The engine is a fake: it answers a prefill leg at once and plays a recorded stream otherwise. Both parse no more HTTP than
this benchmark needs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import uvloop

_RECORDED = Path(__file__).with_name("recorded.json")
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token%d"},"finish_reason":null}]}\n\n'
)
_LAST_CHUNK = b"0\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n" + _LAST_CHUNK
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PREFILLED = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "e",
            "remote_request_id": "r",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
    }
).encode()
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_BODY = b'{"model":"m","stream":true,"max_tokens":64,"messages":[{"role":"user","content":"%s %d"}]}'


@dataclass(frozen=True)
class Play:
    """A stream that every answer is: `chunks` of them with the recorded gaps, `pace` times as fast."""

    chunks: int
    pace: float

    def gaps(self) -> list[float]:
        """Seconds before each chunk but the first."""
        recorded = json.loads(_RECORDED.read_text())["gaps_ms"]
        return [recorded[i % len(recorded)] / 1e3 / self.pace for i in range(self.chunks - 1)]

    @property
    def seconds(self) -> float:
        return sum(self.gaps())


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class _Engine(asyncio.Protocol):
    def __init__(self, chunks: Sequence[bytes], gaps: Sequence[float]) -> None:
        self._chunks = chunks
        self._gaps = gaps
        self._loop = asyncio.get_running_loop()
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pending += data
        head, found, rest = self._pending.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET "):
            self._pending = rest
            self._transport.write(_whole(_MODELS))
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(rest) < length:
            return
        body, self._pending = rest[:length], rest[length:]
        if b'"stream":true' not in body:
            self._transport.write(_whole(_PREFILLED))
        else:
            self._transport.write(_STREAM_HEAD + self._chunks[0])
            self._next(1, self._loop.time())

    def _next(self, done: int, due: float) -> None:
        if done == len(self._chunks):
            self._transport.write(_END)
            return
        # Against the time at which it is due, or a late timer would slow the whole stream down.
        due += self._gaps[done - 1]
        self._loop.call_at(due, self._go_on, done, due)

    def _go_on(self, done: int, due: float) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._chunks[done])
            self._next(done + 1, due)


def serve(play: Play, ready: Connection) -> None:
    """Run an engine; its port goes to `ready`."""
    chunks, gaps = [_framed(CHUNK % number) for number in range(play.chunks)], play.gaps()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Engine(chunks, gaps), "127.0.0.1", 0, backlog=4096)
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
        self._sent: float | None = None
        self._waiting = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, number: int) -> None:
        body = _BODY % (b"hello world " * 200, number)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        self._waiting, self._tail, self._sent = True, b"", time.perf_counter()
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        found = data.count(b"data: {")
        self._tally.chunks += found
        if found and self._waiting and self._sent is not None:
            self._waiting = False
            self._tally.first_chunk.append(time.perf_counter() - self._sent)
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self._tail == _LAST_CHUNK:
            self._sent = None
            if self._waiting:  # an answer without a chunk: an error
                self._tally.lost += 1
            else:
                self._tally.finished += 1
            self._idle.append(self)
            self._settled.release()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sent is not None:
            self._tally.lost += 1
            self._settled.release()
        elif self in self._idle:
            self._idle.remove(self)

    def close(self) -> None:
        self._sent = None
        self._transport.close()


class Load:
    """Requests at a rate, whether those before are answered or not."""

    def __init__(self, port: int) -> None:
        self.tally = Tally()
        self._port = port
        self._settled = asyncio.Semaphore(0)
        self._idle: list[_Client] = []
        self._all: list[_Client] = []
        self._asked = 0

    async def ask(self, requests: int, rate: float) -> None:
        """Send `requests` at `rate` a second."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in range(requests):
            wait = start + number / rate - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            client = self._idle.pop() if self._idle else await self._connect()
            client.ask(self._asked)
            self._asked += 1

    async def drain(self, seconds: float) -> None:
        """Wait for the end of all answers, at most for `seconds`; those that are missing show as such."""
        try:
            async with asyncio.timeout(seconds):
                for _ in range(self._asked):
                    await self._settled.acquire()
        except TimeoutError:
            pass

    def close(self) -> None:
        for client in self._all:
            client.close()

    async def _connect(self) -> _Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(
            lambda: _Client(self.tally, self._idle, self._settled), "127.0.0.1", self._port
        )
        self._all.append(client)
        return client
