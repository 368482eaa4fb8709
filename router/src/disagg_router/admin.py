"""The admin port: what Kubernetes and Prometheus ask, apart from the clients' port."""

from __future__ import annotations

from aiohttp import web

from disagg_router.app import METRICS_TYPE
from disagg_router.backends import Fleet
from disagg_router.metrics import Metrics


class Admin:
    """`/healthz` answers while the process works; `/readyz` once a list of engines has been seen and until draining.

    Ready does not ask for ready engines: a router that says 503 with a reason helps clients more than a Service
    without endpoints.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self.draining = False
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self.draining:
            return web.Response(status=503, text="draining\n")
        if not self._fleet.synced:
            return web.Response(status=503, text="no list of engines seen yet\n")
        return web.Response(text="ok\n")

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"content-type": METRICS_TYPE})
