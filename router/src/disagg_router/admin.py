"""The admin port: what Kubernetes and Prometheus ask, apart from the clients' port."""

from __future__ import annotations

import re
from functools import partial

import msgspec
from aiohttp import web

from disagg_router.app import METRICS_TYPE
from disagg_router.backends import Fleet
from disagg_router.errors import error_response, unauthorized
from disagg_router.handles import Handles
from disagg_router.http1 import Headers, Response
from disagg_router.keyfile import KeyFile
from disagg_router.keys import why_refused
from disagg_router.metrics import Metrics
from disagg_router.ownership import MESSAGE_BYTES, Owner
from disagg_router.session import KEY_BYTES, Memory
from disagg_router.sharing import PATH

_SESSIONS, _MOST_SESSIONS = 100, 10_000


class Admin:
    """`/healthz` answers while the process works; `/readyz` once a list of engines has been seen and until draining.
    `/debug/sessions` tells who has an API key where this replica thinks that conversations are.

    Ready does not ask for ready engines: a router that says 503 with a reason helps clients more than a Service
    without endpoints.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics, memory: Memory, handles: Handles) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._memory = memory
        self._handles = handles
        self._keys: KeyFile | None = None
        self.draining = False
        self.owner: Owner | None = None
        """Who answers other replicas, if they share handles; to be set before `start`."""
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int, keys: KeyFile | None) -> None:
        self._keys = keys
        app = web.Application(client_max_size=MESSAGE_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/debug/sessions", self._serve_sessions)
        if self.owner is not None:
            app.router.add_post(PATH, partial(self._answer_replica, self.owner))
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

    async def _serve_sessions(self, request: web.Request) -> web.Response:
        response = self._why_not(request) or self._sessions(request.query.get("limit", str(_SESSIONS)))
        return web.Response(
            status=response.status,
            body=response.body,
            headers={"content-type": response.content_type, **response.headers},
        )

    def _why_not(self, request: web.Request) -> Response | None:
        if self._keys is None:
            return error_response(
                403,
                "Conversations are shown to who has an API key, and this router has none: set "
                "spec.router.auth.apiKeySecretRef of its DisaggInference.",
                code="api_keys_not_configured",
            )
        why = why_refused(self._keys.ring, Headers(request.raw_headers))
        return None if why is None else unauthorized(why)

    def _sessions(self, limit: str) -> Response:
        if not re.fullmatch("[1-9][0-9]{0,4}", limit) or int(limit) > _MOST_SESSIONS:
            return error_response(400, f"`limit` must be a number from 1 to {_MOST_SESSIONS}.", param="limit")
        # A handle is kept by the name of its conversation and, behind that, of the salt of its KV.
        with_handle = {key[:KEY_BYTES] for key in self._handles.usable()}
        leaving = {backend.name for backend in self._fleet.backends if backend.leaving}
        sessions = [
            {
                "session": key.hex(),
                "revision": placement.revision,
                "decode": placement.decode,
                "prefill": placement.prefill,
                "age_seconds": round(age, 1),
                "handle": key in with_handle,
                "leaving": not leaving.isdisjoint((placement.decode, placement.prefill)),
            }
            for key, age, placement in self._memory.newest(int(limit))
        ]
        return Response(200, msgspec.json.encode({"remembered": len(self._memory), "sessions": sessions}))

    async def _answer_replica(self, owner: Owner, request: web.Request) -> web.Response:
        try:
            message = await request.read()
        except web.HTTPRequestEntityTooLarge:
            self._metrics.handle_messages_dropped.labels("too_large").inc()
            raise
        answer = owner.answer(message)
        if answer is None:
            return web.Response(status=403)
        return web.Response(body=answer, content_type="application/octet-stream")
