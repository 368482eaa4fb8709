"""Requests that any engine can answer, because they need the tokenizer alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from disagg_router.attempt import Engines
from disagg_router.backends import Backend, Fleet
from disagg_router.breaker import Blame
from disagg_router.errors import error_response, not_ready
from disagg_router.http1 import EngineAnswer, Exchange, Response, UpstreamError
from disagg_router.http1.message import request_head
from disagg_router.load import Hold
from disagg_router.logs import event
from disagg_router.metrics import Metrics
from disagg_router.pick import any_engine
from disagg_router.relay import CLIENT_GONE, client_id, passed_on, relay

_log = logging.getLogger(__name__)

_TRIES = 2


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str
    too_slow: bool = False


class Passthrough:
    """Sends a request to the least loaded engine, to another if that cannot be reached, and its answer back."""

    def __init__(self, fleet: Fleet, engines: Engines, metrics: Metrics, new_id: Callable[[], str]) -> None:
        self._fleet = fleet
        self._engines = engines
        self._metrics = metrics
        self._new_id = new_id

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request. Cancelled when the client goes, which closes the engine's connection."""
        head = exchange.request.head
        request_id, code = self._new_id(), CLIENT_GONE
        extra = {"x-request-id": client_id(head.headers) or request_id}
        failed: dict[str, _Failed] = {}
        try:
            for _ in range(_TRIES):
                loads = self._engines.loads
                backend = any_engine(
                    self._fleet.backends, loads.snapshot(self._fleet.backends), failed.keys()
                )
                if backend is None:
                    break
                with loads.hold(backend) as hold:
                    answer = await self._ask(backend, hold, exchange, request_id, failed)
                    if answer is not None:
                        code = answer.status
                        await self._relay(exchange, answer, extra)
                        return
            response = self._unanswered(failed)
            code = response.status
            exchange.respond(replace(response, headers={**response.headers, **extra}))
        finally:
            self._metrics.requests.labels(head.path.lstrip("/"), str(code)).inc()

    async def _ask(
        self, backend: Backend, hold: Hold, exchange: Exchange, request_id: str, failed: dict[str, _Failed]
    ) -> EngineAnswer | None:
        """Ask one engine; None if it cannot answer, with the reason in `failed`."""
        request = exchange.request
        fields = {
            "content-type": "application/json",
            "x-request-id": request_id,
            **passed_on(request.head.headers),
        }
        head = request_head("POST", request.head.path, str(backend.address), fields, len(request.body))
        seconds = self._engines.deadlines.first_byte_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._engines.pool.ask(
                    backend.address, head, request.body, "decoded" if request.head.http10 else "raw"
                )
        except TimeoutError:
            failed[backend.name] = _Failed(f"{backend.name} did not answer in {seconds:g} s", too_slow=True)
        except UpstreamError as exc:
            failed[backend.name] = _Failed(f"{backend.name}: {exc}")
            hold.failed(Blame.FULL, "passthrough")
        event(_log, logging.WARNING, "passing a request on failed", error=failed[backend.name].why)
        return None

    async def _relay(self, exchange: Exchange, answer: EngineAnswer, extra: dict[str, str]) -> None:
        pool, idle = self._engines.pool, self._engines.deadlines.idle_seconds
        try:
            http10 = exchange.request.head.http10
            if await relay(exchange, answer, pool, extra, idle, http10) is not None:
                self._metrics.broken.inc()
        finally:
            if not answer.ended.done():
                answer.close()

    def _unanswered(self, failed: dict[str, _Failed]) -> Response:
        if not failed:
            why = self._fleet.why_not_ready() or "no engine is left to try"
            return not_ready(f"No engine can take this request: {why}.")
        status = 504 if any(failure.too_slow for failure in failed.values()) else 502
        return error_response(status, f"No engine answered: {'; '.join(f.why for f in failed.values())}.")
