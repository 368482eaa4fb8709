"""A FAKE engine: speaks vLLM's HTTP surface as far as the router sees it, without any model.

It records every request, answers as its `decode` and `prefill` scripts say, and notices when its client leaves.
Real engines are used by the `engine` tests; this one exists to fail in ways that real ones do only rarely.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Seen:
    """One request as it reached the engine."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def is_prefill(self) -> bool:
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]


Script = Callable[["FakeEngine", web.Request, Seen], Awaitable[web.StreamResponse]]


def sse(text: str) -> bytes:
    chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def speak(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Answer with `engine.words`, streamed if the request says so."""
    if not seen.body.get("stream"):
        text = " ".join(engine.words)
        message = {"role": "assistant", "content": text}
        return web.json_response(
            {
                "id": f"chatcmpl-{seen.request_id}",
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "text": text, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 7, "completion_tokens": len(engine.words), "total_tokens": 9},
            }
        )
    response = await start_stream(request)
    for word in engine.words:
        await response.write(sse(word))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


async def never(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Accept and never answer, until the client leaves."""
    await asyncio.Event().wait()
    raise AssertionError


def refuse(status: int, message: str, type_: str = "BadRequestError") -> Script:
    """Answer an error in vLLM's shape."""

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        error = {"message": message, "type": type_, "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    return script


async def hang_up(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    await asyncio.Event().wait()
    raise AssertionError


def hang_up_after(words: int) -> Script:
    """Stream some words, then close the connection in mid-stream."""

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        for word in engine.words[:words]:
            await response.write(sse(word))
        assert request.transport is not None
        request.transport.close()
        await asyncio.Event().wait()
        raise AssertionError

    return script


@dataclass
class FakeEngine:
    """`decode` and `prefill` are the scripts for the two kinds of leg, `render` that for questions about a prompt's tokens."""

    words: list[str] = field(default_factory=lambda: ["one", "two", "three"])
    decode: Script = speak
    prefill: Script = speak
    render: Script = field(default_factory=lambda: refuse(403, "Scale-out endpoints are disabled."))
    seen: list[Seen] = field(default_factory=list)
    active: int = 0
    abandoned: int = 0
    port: int = 0
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> FakeEngine:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/v1/completions", self._handle)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/v1/completions/render", self._render)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _render(self, request: web.Request) -> web.StreamResponse:
        return await self.render(self, request, await _read(request))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = await _read(request)
        self.seen.append(seen)
        self.active += 1
        try:
            return await (self.prefill if seen.is_prefill else self.decode)(self, request, seen)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.active -= 1


async def _read(request: web.Request) -> Seen:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return Seen(request.path, headers, json.loads((await request.read()).decode(errors="replace")))
