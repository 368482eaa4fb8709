"""An engine's answer on its way to the client, the same for every endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace

from disagg_router.http1 import EngineAnswer, EnginePool, Exchange, Headers, Response, UpstreamError
from disagg_router.http1.message import relayed_head

CLIENT_GONE = 499
"""Counted for a client that left before its answer began; nobody gets it."""

_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PASSED_ON = (b"traceparent", b"tracestate")


def client_id(headers: Headers) -> str | None:
    """The client's own X-Request-Id, if it is one that can be echoed."""
    value = headers.get(b"x-request-id")
    return value.decode() if value and _CLIENT_ID.fullmatch(value) else None


def named(response: Response, headers: Headers, new_id: Callable[[], str]) -> Response:
    """A router-made answer with the X-Request-Id that its client sent, else with a new one."""
    ids = {"x-request-id": client_id(headers) or new_id()}
    return replace(response, headers={**response.headers, **ids})


def passed_on(headers: Headers) -> dict[str, str]:
    """The only headers of a client that engines see."""
    found = {name.decode(): headers.get(name) for name in _PASSED_ON}
    return {name: value.decode("latin-1") for name, value in found.items() if value}


async def relay(
    exchange: Exchange,
    answer: EngineAnswer,
    pool: EnginePool,
    extra: dict[str, str],
    idle_seconds: float,
    decoded: bool,
) -> str | None:
    """Pass an answer that has begun on to the client, to its end; None if it was whole, else why it was not.

    `decoded`: it comes without its chunked framing, so that only the end of the connection ends it.
    """
    exchange.keep_alive = exchange.may_keep_alive() and not decoded
    head = relayed_head(
        answer.status,
        answer.headers,
        extra,
        keep_alive=exchange.keep_alive,
        decoded=decoded,
    )
    answer.relay(exchange, head)
    broken = await _to_its_end(answer, idle_seconds)
    if broken is None:
        pool.release(answer)
    else:
        exchange.abort()
    return broken


async def _to_its_end(answer: EngineAnswer, idle_seconds: float) -> str | None:
    while True:
        reads = answer.reads
        done, _ = await asyncio.wait([answer.ended], timeout=idle_seconds)
        if done:
            error = answer.ended.exception()
            return str(error) if isinstance(error, UpstreamError) else None
        if answer.reads == reads and not answer.paused:
            return f"the engine was silent for {idle_seconds:g} s"
