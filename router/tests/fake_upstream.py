"""FAKE engines that keep KV as vLLM's own connectors do, for the router's other modes.

A world has one memory for all its engines. A token is a letter's number, so that what a block of KV was made of can be
compared with the prompt that it is used for: `wrong` lists every use that real engines would have answered with wrong text,
and `dead` every message that would have ended a real engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from router.tests.conftest import Stack
from router.tests.fake_engine import FakeEngine, Seen, speak, sse, start_stream

_BEGIN, _END = 1, 2
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


def tokens_of(body: dict[str, Any]) -> list[int]:
    """The prompt's tokens."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if prompt is not None:
        return [ord(c) for c in prompt]
    tokens = []
    for message in body["messages"]:
        tokens += [_BEGIN, *(ord(c) for c in message["role"] + message["content"]), _END]
    return [*tokens, _BEGIN, *(ord(c) for c in "assistant")]


@dataclass
class World:
    """`transfer` is how prefill's KV gets to decode; `back` whether decode keeps its own for prefill."""

    transfer: Literal["pull", "push"] = "pull"
    back: bool = False
    thinks: str = ""
    """What decode generates before its words and leaves out of its answer."""
    boot: int = 1
    blocks: int = 2
    """Of what decode keeps, as it names it."""
    kv: dict[str, list[int]] = field(default_factory=dict)
    """What is kept to be read, by the request that made it."""
    finished: dict[str, list[int]] = field(default_factory=dict)
    """Prompts that prefill computed, by request id."""
    wrong: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    read: int = 0
    """How often decode got its KV from prefill."""
    read_back: int = 0
    waiting: int = 0
    """Decode requests whose blocks wait for prefill, also after their client has left."""
    _done: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def install(self, stack: Stack) -> None:
        for engine in stack.prefills:
            engine.prefill, engine.render = self.prefill, self.render
        for engine in stack.decodes:
            engine.decode = self.decode

    async def render(self, engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        said = {"token_ids": tokens_of(seen.body), "features": None}
        return web.json_response(said if "chat" in seen.path else [said])

    async def prefill(self, engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        params, prompt = seen.body["kv_transfer_params"], tokens_of(seen.body)
        if params.get("remote_block_ids"):
            self._read_back(params, prompt)
        self.finished[seen.request_id] = prompt
        self._done[seen.request_id].set()
        located = self._keep(engine, seen, prompt, prefill=True)
        return web.json_response(
            {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": len(prompt)}, **located}
        )

    def _read_back(self, params: dict[str, Any], prompt: list[int]) -> None:
        held = self.kv.pop(params["remote_request_id"], None)
        if held is None:
            self.wrong.append("prefill read what decode keeps no more")
        elif prompt[: params["remote_num_tokens"]] != held:
            self.wrong.append("prefill read KV of another prompt")
        else:
            self.read_back += 1

    async def decode(self, engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        params, prompt = seen.body.get("kv_transfer_params"), tokens_of(seen.body)
        if params is not None:
            missing = [name for name in _NEEDED if params.get(name) is None]
            if missing or not params.get("do_remote_prefill"):
                self.dead.append(f"decode was sent {params}")
            elif self.transfer == "pull":
                self._pull(params, prompt)
            else:
                await self._registered(params, seen, prompt)
        if seen.body.get("stream"):
            response = await start_stream(request)
            for word in engine.words:
                await response.write(sse(word))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        if not self.back or params is None:
            return await speak(engine, request, seen)
        return self._handing_back(engine, seen, prompt)

    def _pull(self, params: dict[str, Any], prompt: list[int]) -> None:
        held = self.kv.pop(params["remote_request_id"], None)
        if held != prompt:
            self.wrong.append("decode read KV of another prompt")
        self.read += 1

    async def _registered(self, params: dict[str, Any], seen: Seen, prompt: list[int]) -> None:
        """Decode's blocks wait for prefill's write, whatever becomes of the request."""
        self.waiting += 1
        written = asyncio.create_task(self._written(params, seen.request_id))
        written.add_done_callback(lambda _: None)
        await asyncio.shield(written)
        if self.finished[seen.request_id] != prompt:
            self.wrong.append("decode got KV of another prompt")
        self.read += 1

    async def _written(self, params: dict[str, Any], request_id: str) -> None:
        if params["remote_engine_id"] == f"boot-{self.boot}":
            await self._done[request_id].wait()
            self.waiting -= 1
        else:
            await asyncio.Event().wait()  # nobody hears the registration

    def _handing_back(self, engine: FakeEngine, seen: Seen, prompt: list[int]) -> web.Response:
        text = " ".join(engine.words)
        made = [*(ord(c) for c in self.thinks + text), _END]
        located = self._keep(engine, seen, [*prompt, *made][:-1], prefill=False)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        answer: dict[str, Any] = {"object": "chat.completion", "choices": [choice], **located}
        if seen.body.get("return_token_ids"):
            choice["token_ids"] = made
            (answer if "messages" in seen.body else choice)["prompt_token_ids"] = prompt
        return web.json_response(answer)

    def _keep(self, engine: FakeEngine, seen: Seen, tokens: list[int], *, prefill: bool) -> dict[str, Any]:
        name = f"cmpl-{seen.request_id}-{next(self._numbers)}"
        self.kv[name] = tokens
        return {
            "kv_transfer_params": {
                "do_remote_prefill": prefill,
                "do_remote_decode": not prefill,
                "remote_block_ids": [[1, 2] if prefill else list(range(1, self.blocks + 1))],
                "remote_engine_id": f"boot-{self.boot}",
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": len(tokens),
                "transfer_mode": self.transfer,
            }
        }
