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

    @property
    def engine_id(self) -> str:
        """What vLLM's front end calls the request in the engine, less its random suffix."""
        if self.path == "/v1/responses":
            return f"{self.body['request_id']}_0"
        return f"chatcmpl-{self.request_id}" if "chat" in self.path else f"cmpl-{self.request_id}-0"


Script = Callable[["FakeEngine", web.Request, Seen], Awaitable[web.StreamResponse]]


def sse(text: str) -> bytes:
    chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def speak(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Answer with `engine.words`, streamed if the request says so."""
    if seen.path == "/v1/responses":
        return await respond(engine, request, seen)
    if seen.path in ("/tokenize", "/detokenize"):
        return web.json_response({"count": 2, "tokens": [1, 2]})
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


def response_object(engine: FakeEngine, seen: Seen, status: str) -> dict[str, Any]:
    """The answer of /v1/responses, as far as OpenAI's client needs it."""
    text = {"type": "output_text", "text": " ".join(engine.words), "annotations": []}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        "id": seen.body["request_id"],
        "object": "response",
        "created_at": 1,
        "model": seen.body.get("model", ""),
        "status": status,
        "output": [message] if status == "completed" else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 7,
            "output_tokens": len(engine.words),
            "total_tokens": 9,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def write_event(stream: web.StreamResponse, name: str, **fields: Any) -> None:
    text = json.dumps({"type": name, **fields})
    await stream.write(f"event: {name}\ndata: {text}\n\n".encode())


async def begin_response(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Start a stream of /v1/responses as vLLM does: with two events that come before the engine is asked."""
    response = await start_stream(request)
    for number, name in enumerate(("response.created", "response.in_progress")):
        begun = response_object(engine, seen, "in_progress")
        await write_event(response, name, sequence_number=number, response=begun)
    return response


async def respond(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
    if not seen.body.get("stream"):
        return web.json_response(response_object(engine, seen, "completed"))
    response = await begin_response(engine, request, seen)
    for number, word in enumerate(engine.words):
        where = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
        await write_event(
            response, "response.output_text.delta", sequence_number=number + 2, delta=word, **where
        )
    completed = response_object(engine, seen, "completed")
    await write_event(response, "response.completed", sequence_number=9, response=completed)
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
        app.router.add_post("/v1/responses", self._handle)
        app.router.add_post("/tokenize", self._handle)
        app.router.add_post("/detokenize", self._handle)
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
