"""OpenTelemetry traces: a server span for each turn, with a client span for each request to an engine, sent as OTLP over HTTP.

Imported only by a router that is told where to send them. Spans wait in a queue of bounded length for a thread that
sends them; what the collector does or does not do never touches a turn. Names of attributes are those of OpenTelemetry's
semantic conventions (http.*, gen_ai.*) where there are any, else `disagg.*`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.config import Config, ConfigError
from disagg_router.http1 import RequestHead
from disagg_router.logs import event
from disagg_router.relay import CLIENT_GONE, passed_on
from disagg_router.spans import CANCELLED, Leg, Trace

_log = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""How long the router's end may wait for the last spans to be sent."""

_OPERATIONS: dict[legs.Endpoint, str] = {
    "chat": "chat",
    "responses": "chat",
    "completions": "text_completion",
}
# Fields of a turn's log line that are attributes of its span.
_ATTRIBUTES = {
    "request_id": "disagg.request_id",
    "client_request_id": "disagg.client_request_id",
    "streamed": "gen_ai.request.stream",
    "session": "gen_ai.conversation.id",
    "session_by": "disagg.session_by",
    "mode": "disagg.mode",
    "revision": "disagg.revision",
    "decode": "disagg.decode.pod",
    "decode_by": "disagg.decode.placement",
    "prefill": "disagg.prefill.pod",
    "prefill_by": "disagg.prefill.placement",
    "recomputed": "disagg.recompute.reason",
    "small": "disagg.small",
    "attempts": "disagg.attempts",
    "refused": "disagg.refused",
    "waited_seconds": "disagg.queue.wait_seconds",
    "broken": "disagg.broken",
    "client_left": "disagg.client_left",
}
# Of a text that a client chooses: the queue is bounded by its number of spans, not by their size.
_AGENT_BYTES = 256
_propagator = TraceContextTextMapPropagator()
# It complains of clients' headers, whole ones, and a client may send them with each request.
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


def _without_values(record: logging.LogRecord) -> bool:
    record.args = tuple("(not shown)" for _ in record.args or ())
    return True


# It quotes what it cannot read of OTEL_EXPORTER_OTLP_HEADERS, where secrets are.
logging.getLogger("opentelemetry.util.re").addFilter(_without_values)


class OpenTelemetry:
    """Makes the spans of turns, and sends them.

    The standard OTEL_* variables of the environment complete the configuration: sampling, headers, the queue, resource
    attributes.
    """

    def __init__(self, config: Config, endpoint: str) -> None:
        """`endpoint` is the collector's base URL. Raises ConfigError."""
        try:
            _ = urlsplit(endpoint).port
        except ValueError as exc:
            raise ConfigError(f"tracing.endpoint: {endpoint}: {exc}") from exc
        self._model = config.model.name
        self._scheme = "https" if config.tls else "http"
        ours = {
            "service.name": f"{config.name}-router",
            "service.namespace": config.namespace,
            "service.instance.id": socket.gethostname(),
        }
        try:
            # The environment has the last word.
            resource = Resource.create(ours).merge(OTELResourceDetector().detect())
            exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"tracing: {exc}; see the OTEL_* variables of the environment") from exc
        self._tracer = self._provider.get_tracer("disagg_router")

    def turn(self, endpoint: legs.Endpoint, head: RequestHead) -> Trace:
        route = legs.PATHS[endpoint]
        attributes: dict[str, str] = {
            "http.request.method": head.method,
            "http.route": route,
            "url.path": head.path,
            "url.scheme": self._scheme,
            "gen_ai.operation.name": _OPERATIONS[endpoint],
            "gen_ai.request.model": self._model,
        }
        agent = head.headers.get(b"user-agent")
        if agent is not None:
            attributes["user_agent.original"] = agent[:_AGENT_BYTES].decode("latin-1")
        parent = _propagator.extract(passed_on(head.headers), Context())
        name = f"{head.method} {route}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        return _Turn(self._tracer, span)

    async def stop(self) -> None:
        """Send what is left, for STOP_SECONDS at most."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(sent.set)

        # Not one of the loop's own threads, whose ends the process would wait for.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        try:
            await asyncio.wait_for(sent.wait(), STOP_SECONDS)
        except TimeoutError:
            event(_log, logging.WARNING, "the last spans could not be sent in time", seconds=STOP_SECONDS)


class _Turn:
    def __init__(self, tracer: api.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = api.set_span_in_context(span, Context())

    def leg(self, backend: Backend, path: str, request_id: str) -> Leg:
        attributes: dict[str, str | int] = {
            "http.request.method": "POST",
            "url.full": f"http://{backend.address}{path}",
            "server.address": backend.address.host,
            "server.port": backend.address.port,
            "disagg.role": backend.role,
            "disagg.pod": backend.name,
            "disagg.revision": backend.revision,
            "disagg.request_id": request_id,
        }
        return _Leg(self._tracer.start_span(backend.role, self._context, SpanKind.CLIENT, attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, facts: Mapping[str, Any]) -> None:
        span, status = self._span, facts["status"]
        attributes = {
            attribute: facts[field]
            for field, attribute in _ATTRIBUTES.items()
            if facts.get(field) is not None
        }
        if status != CLIENT_GONE:
            attributes["http.response.status_code"] = status
        span.set_attributes(attributes)
        broken = facts.get("broken")
        if broken is not None:
            _fail(span, "broken_answer", broken)
        elif status >= 500:
            _fail(span, str(status))
        span.end()


class _Leg:
    def __init__(self, span: Span) -> None:
        self._span = span
        self._status = 0
        self.headers: dict[str, str] = {}
        _propagator.inject(self.headers, api.set_span_in_context(span, Context()))

    def answered(self, status: int) -> None:
        self._status = status
        self._span.set_attribute("http.response.status_code", status)

    def end(self, error: str | None) -> None:
        if error == CANCELLED:
            self._span.set_attribute("disagg.cancelled", True)
        elif error is not None:
            _fail(self._span, error)
        elif self._status >= 400:
            _fail(self._span, str(self._status))
        self._span.end()


def _fail(span: Span, kind: str, description: str | None = None) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, description))
