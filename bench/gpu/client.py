"""One turn of a conversation as a client sees it: streamed, with the time of every token."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.gpu.modes import Protocol, upstream_id
from connector.tests.engine.conversation import body, decode_params, prefill_params
from e2e.engines import Engine
from e2e.ports import HOST

_TURN_SECONDS = 120.0


@dataclass
class Answer:
    """What came back, and when (seconds of `time.perf_counter`)."""

    asked: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of every token; tokens of one chunk share theirs."""
    prefill_token: int | None = None
    """The token that prefill made, where there is one and it was looked at."""
    transfer_params: Mapping[str, Any] | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked


class Turns:
    """Takes turns of one conversation by the protocol of a mode."""

    def __init__(
        self, http: aiohttp.ClientSession, engines: Mapping[str, Engine], protocol: Protocol
    ) -> None:
        self._http = http
        self._engines = engines
        self._protocol = protocol
        self._held_by_decode: Mapping[str, Any] | None = None

    async def take(self, prompt: list[int], tokens: int) -> Answer:
        """Raises `RuntimeError` if an engine refuses or the answer is not `tokens` long."""
        async with asyncio.timeout(_TURN_SECONDS):
            answer = await self._legs(prompt, tokens)
        if len(answer.tokens) != tokens:
            raise RuntimeError(f"{len(answer.tokens)} tokens came for {tokens}")
        return answer

    async def _legs(self, prompt: list[int], tokens: int) -> Answer:
        request, answer = uuid.uuid4().hex, Answer(time.perf_counter())
        decode = self._engines["decode"]
        if self._protocol == "plain":
            return await self._stream(decode, body(prompt, tokens), request, answer)
        prefill = self._engines["prefill"]
        if self._protocol in ("pull", "bidirectional_pull"):
            first = await self._post(prefill, body(prompt, 1, self._pull_params()), request)
            answer.prefill_token = first["choices"][0]["token_ids"][0]
            await self._stream(decode, body(prompt, tokens, first["kv_transfer_params"]), request, answer)
            self._held_by_decode = answer.transfer_params
            return answer
        async with asyncio.TaskGroup() as legs:
            one = legs.create_task(self._post(prefill, body(prompt, 1, self._prefill_params()), request))
            legs.create_task(
                self._stream(decode, body(prompt, tokens, self._decode_params()), request, answer)
            )
        answer.prefill_token = one.result()["choices"][0]["token_ids"][0]
        return answer

    def _pull_params(self) -> Mapping[str, Any]:
        if self._protocol == "bidirectional_pull" and self._held_by_decode is not None:
            return self._held_by_decode
        return {"do_remote_decode": True, "do_remote_prefill": False}

    def _prefill_params(self) -> Mapping[str, Any]:
        if self._protocol == "push":
            return {"do_remote_decode": True, "do_remote_prefill": False}
        return prefill_params(self._engines["decode"])

    def _decode_params(self) -> Mapping[str, Any]:
        prefill = self._engines["prefill"]
        if self._protocol != "push":
            return decode_params(prefill)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": upstream_id("prefill"),
            "remote_host": HOST,
            "remote_port": prefill.ports.side_channel,
            "remote_request_id": "unused",
            "tp_size": 1,
        }

    async def _post(self, engine: Engine, content: Mapping[str, Any], request: str) -> dict[str, Any]:
        async with self._request(engine, content, request) as answer:
            return dict(await answer.json())

    async def _stream(
        self, engine: Engine, content: Mapping[str, Any], request: str, answer: Answer
    ) -> Answer:
        async with self._request(engine, {**content, "stream": True}, request) as chunks:
            async for line in chunks.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"{engine.name} broke off: {chunk['error']}")
                found = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                answer.times += [time.perf_counter()] * len(found)
                answer.tokens += found
                answer.transfer_params = chunk.get("kv_transfer_params") or answer.transfer_params
        return answer

    def _request(self, engine: Engine, content: Mapping[str, Any], request: str) -> Any:
        return self._http.post(
            f"{engine.url}/v1/completions",
            json=content,
            headers={"X-Request-Id": request},
            raise_for_status=_check,
        )


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RuntimeError(f"{answer.url} answered {answer.status}: {(await answer.text())[:500]}")
