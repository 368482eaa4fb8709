"""A collector of OpenTelemetry traces (OTLP over HTTP) that shows what it has been sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router.tests.conftest import until

KINDS = {2: "server", 3: "client"}
STATUSES = {0: "unset", 2: "error"}


@dataclass(frozen=True)
class Span:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[str]
    status: str
    resource: dict[str, Any]

    @property
    def traceparent(self) -> str:
        """What names this span as the parent of others."""
        return f"00-{self.trace_id}-{self.span_id}-01"


class Collector:
    """While `answers` is not set it takes spans and does not answer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.headers: list[dict[str, str]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> Collector:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        self.answers.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def named(self, *names: str) -> list[Span]:
        """Wait for spans of exactly these names, in any order; they come in the order of `names`."""
        wanted = Counter(names)

        def here() -> bool:
            return Counter(span.name for span in self.spans) >= wanted

        await until(here, f"spans {names} have come")
        assert len(self.spans) == len(names), [span.name for span in self.spans]
        left = list(self.spans)
        found = []
        for name in names:
            found.append(next(span for span in left if span.name == name))
            left.remove(found[-1])
        return found

    async def _take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        for of_resource in message.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [_span(span, resource) for span in scope.spans]
        self.asked.set()
        await self.answers.wait()
        return web.Response(content_type="application/x-protobuf")


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        events=[event.name for event in span.events],
        status=STATUSES[span.status.code],
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
