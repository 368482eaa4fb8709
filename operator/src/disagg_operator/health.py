"""/healthz, /readyz and /metrics of the operator."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from .metrics import Metrics

Complaint = Callable[[], str | None]
"""None if all is well, else what is not."""


@asynccontextmanager
async def serve(port: int, metrics: Metrics, *, alive: Complaint, ready: Complaint) -> AsyncIterator[int]:
    """Serves on all addresses while the context is open; yields the port, which matters if 0 was asked for."""

    def answer(complaint: Complaint) -> Callable[[web.Request], object]:
        async def handler(_: web.Request) -> web.Response:
            trouble = complaint()
            return web.Response(text=f"{trouble or 'ok'}\n", status=503 if trouble else 200)

        return handler

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.router.add_get("/healthz", answer(alive))  # type: ignore[arg-type]
    app.router.add_get("/readyz", answer(ready))  # type: ignore[arg-type]
    app.router.add_get("/metrics", show_metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, port=port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
