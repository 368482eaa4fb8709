"""The OpenAI-compatible surface: which paths there are and who answers them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec

from disagg_router.backends import Fleet
from disagg_router.config import Config
from disagg_router.errors import error_response, not_ready
from disagg_router.http1 import Exchange, RequestHead, Response
from disagg_router.metrics import Metrics
from disagg_router.turn import Turns

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class App:
    """Routes requests. `admit` sees a request's head, before its body is read; `handle` answers the whole request."""

    def __init__(self, config: Config, fleet: Fleet, turns: Turns, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        model = {
            "id": config.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "disagg-inference",
        }
        self._models = Response(200, msgspec.json.encode({"object": "list", "data": [model]}))
        self._posts: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/chat/completions": lambda exchange: turns.serve("chat", exchange),
            "/v1/completions": lambda exchange: turns.serve("completions", exchange),
        }
        self._gets: dict[str, Callable[[], Response]] = {
            "/v1/models": lambda: self._models,
            "/health": self._health,
            "/metrics": lambda: Response(200, metrics.render(), METRICS_TYPE),
        }

    def admit(self, head: RequestHead) -> Response | None:
        """Refuse what no handler would take: an unknown path, a wrong method, a body that is not JSON."""
        methods = (
            ("POST",) if head.path in self._posts else ("GET", "HEAD") if head.path in self._gets else ()
        )
        if not methods:
            return self._counted(
                error_response(404, f"Unknown path: {head.method} {head.path}.", code="unknown_url")
            )
        if head.method not in methods:
            message = f"{head.method} is not allowed on {head.path}; use {methods[0]}."
            return self._counted(error_response(405, message, headers={"allow": ", ".join(methods)}))
        if head.method == "POST":
            kind = (head.headers.get(b"content-type") or b"application/json").split(b";")[0].strip().lower()
            if kind != b"application/json" or head.headers.get(b"content-encoding") not in (
                None,
                b"identity",
            ):
                message = (
                    "The body must be sent as Content-Type: application/json without a Content-Encoding."
                )
                return self._counted(error_response(415, message))
        return None

    async def handle(self, exchange: Exchange) -> None:
        path = exchange.request.head.path
        post = self._posts.get(path)
        if post is not None:
            await post(exchange)
        else:
            exchange.respond(self._gets[path]())

    def core_error(self, status: int, message: str) -> Response:
        """The HTTP core's own refusals, in the API's shape."""
        return self._counted(error_response(status, message[:1].upper() + message[1:] + "."))

    def _counted(self, response: Response) -> Response:
        self._metrics.requests.labels("refused", str(response.status)).inc()
        return response

    def _health(self) -> Response:
        why = self._fleet.why_not_ready()
        if why is not None:
            return not_ready(f"Not healthy: {why}.")
        return Response(200, b'{"status":"ok"}')
