"""A running router: everything wired, started, drained and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_router import legs
from disagg_router.admin import Admin
from disagg_router.app import App
from disagg_router.attempt import Engines
from disagg_router.backends import Fleet
from disagg_router.certfile import CertFile
from disagg_router.config import Config
from disagg_router.discovery import Source
from disagg_router.dismissal import Dismissals
from disagg_router.gate import Gate
from disagg_router.handles import Handles
from disagg_router.http1 import Connections, EnginePool, ServerConnection
from disagg_router.keyfile import KeyFile
from disagg_router.load import LoadTable
from disagg_router.logs import event
from disagg_router.metrics import Metrics
from disagg_router.ownership import Owner, Peers
from disagg_router.passthrough import Passthrough
from disagg_router.placer import Placer
from disagg_router.replicas import Replicas
from disagg_router.seal import NONCE_BYTES, Channel
from disagg_router.secretdir import SecretDir
from disagg_router.session import Memory
from disagg_router.sharing import SharedHandles
from disagg_router.spans import Tracer, Untraced
from disagg_router.turn import Turns

if TYPE_CHECKING:
    from disagg_router.otel import OpenTelemetry

_log = logging.getLogger(__name__)


class Router:
    """Use `start`, then `drain`, then `stop`. Ports are known after `start`."""

    def __init__(
        self,
        config: Config,
        host: str = "0.0.0.0",
        clock: Callable[[], float] = time.monotonic,
        name: str = "",
    ) -> None:
        """`name` is what the EndpointSlices call this replica: its pod's name."""
        self.config = config
        self.fleet = Fleet()
        self.replicas = Replicas(name)
        self.loads = LoadTable(clock)
        self.placer = Placer(config.local_prefill, self.loads.backlog, clock)
        self._memory = Memory(clock)
        self._handles = Handles(clock, float(config.decode_retention_seconds))
        self._modes = {name: make() for name, make in legs.MODES.items()}
        keeps = self._modes[config.mode].hands_back
        self.metrics = Metrics(self.fleet, self.loads, self.placer, self._handles if keeps else None)
        self.admin = Admin(self.fleet, self.metrics, self._memory, self._handles)
        self.gate = Gate(config.overload, self.fleet, clock)
        self.port = 0
        self._host = host
        self._clock = clock
        self.fleet.watchers.append(self._tell_modes)
        self._connections = Connections()
        self._pool: EnginePool | None = None
        self._dismissals: Dismissals | None = None
        self._sharing: SharedHandles | None = None
        self._server: asyncio.Server | None = None
        self._traces: OpenTelemetry | None = None
        self._following: list[asyncio.Task[None]] = []
        self.metrics.connections.set_function(lambda: len(self._connections))
        self.metrics.running.set_function(lambda: self.gate.running)
        self.metrics.waiting.set_function(lambda: self.gate.waiting)
        self.metrics.turn_limit.set_function(lambda: self.gate.limit or 0)

    async def start(self, source: Source) -> None:
        """Listen, and follow the engines of `source`. Raises OSError if a port is taken, ConfigError for a
        configuration that cannot be used."""
        self._pool = EnginePool(float(self.config.deadlines.connect_seconds))
        self._dismissals = Dismissals(self._pool, _new_id)
        engines = Engines(
            self._pool,
            self.loads,
            self.config.deadlines,
            count_prompt_tokens=self.metrics.prompt_tokens.inc,
            count_prefill_failure=lambda failure: self.metrics.prefill_failures.labels(failure.value).inc(),
            count_handle=lambda result: self.metrics.handles.labels(result).inc(),
            dismiss=self._dismissals.send,
            let_finish=self._dismissals.let_finish,
            clock=self._clock,
        )
        sharing = self.config.handles
        secrets = SecretDir(Path(sharing.secret_dir)) if sharing else None
        self._sharing = self._shared_handles(self._pool, secrets)
        turns = Turns(
            self.config,
            self.fleet,
            self.gate,
            engines,
            self._modes,
            self._memory,
            self._sharing,
            self.placer,
            self.metrics,
            self._tracer(),
            self._clock,
            _new_id,
        )
        passthrough = Passthrough(self.fleet, engines, self.metrics, _new_id)
        keys = KeyFile(Path(self.config.auth.api_keys_file)) if self.config.auth else None
        app = App(self.config, self.fleet, turns, passthrough, self.metrics, _new_id, keys)
        tls = self.config.tls
        certificate = CertFile(Path(tls.certificate_file), Path(tls.key_file)) if tls else None
        limits = self.config.http_limits()
        await self.admin.start(self._host, self.config.ports.admin, keys)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ServerConnection(app.handle, app.admit, app.core_error, limits, self._connections),
            self._host,
            self.config.ports.http,
            backlog=2048,
            **(certificate.listening(limits) if certificate else {}),
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._follow("discovery; engines are as last seen", source.run(self.fleet.publish))
        if keys is not None:
            self._follow("following the API keys; they are as last read", keys.follow())
        if certificate is not None:
            self._follow("following the TLS certificate; it is as last read", certificate.follow())
        if secrets is not None:
            self._follow("following the replicas' secrets; they are as last read", secrets.follow())
        event(
            _log,
            logging.INFO,
            "serving",
            model=self.config.model.name,
            port=self.port,
            admin_port=self.admin.port,
            tls=certificate is not None,
        )

    def _tracer(self) -> Tracer:
        if self.config.tracing is None:
            return Untraced()
        # Not at the top: without traces nobody has to pay for it.
        from disagg_router.otel import OpenTelemetry

        self._traces = OpenTelemetry(self.config, self.config.tracing.endpoint)
        return self._traces

    def _shared_handles(self, pool: EnginePool, secrets: SecretDir | None) -> SharedHandles:
        """The handles of all replicas; without secrets each replica keeps its own."""
        store = self._handles
        count = self.metrics.handles.labels
        self.fleet.watchers.append(lambda: count("gone").inc(store.engines(self.fleet.backends)))
        peers, ask_seconds = None, 0.0
        if secrets is not None and self.config.handles is not None:
            channel = Channel(lambda: secrets.secrets, os.urandom(NONCE_BYTES))
            dropped = self.metrics.handle_messages_dropped.labels
            boot = os.urandom(NONCE_BYTES)
            self.admin.owner = Owner(store, channel, boot, self._clock, lambda why: dropped(why).inc())
            peers, ask_seconds = Peers(channel, self._clock), float(self.config.handles.ask_seconds)
        return SharedHandles(
            store, self.replicas, peers, pool, ask_seconds, self._clock, lambda result: count(result).inc()
        )

    def _tell_modes(self) -> None:
        for mode in self._modes.values():
            mode.engines(self.fleet.backends)

    def _follow(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Run something that goes on until the router stops."""

        def complain(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                _log.critical("ended: %s", what, exc_info=task.exception())

        task = asyncio.create_task(work)
        task.add_done_callback(complain)
        self._following.append(task)

    async def drain(self, delay_seconds: float, grace_seconds: float) -> int:
        """Say "not ready", wait for that to spread, stop listening, and let what is under way finish.

        Returns how many connections had to be cut when `grace_seconds` were over.
        """
        self.admin.draining = True
        self._connections.retiring = True
        await asyncio.sleep(delay_seconds)
        if self._server is not None:
            self._server.close()
        _log.info("not listening any more; %d connections are open", len(self._connections))
        await self._connections.drain(grace_seconds)
        return self._connections.kill()

    async def stop(self) -> None:
        """Give everything back; connections still open are cut."""
        if self._server is not None:
            self._server.close()
        self._connections.kill()
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        if self._dismissals is not None:
            await self._dismissals.close()
        if self._sharing is not None:
            await self._sharing.close()
        if self._pool is not None:
            self._pool.close()
        await self.admin.stop()
        if self._traces is not None:
            await self._traces.stop()


def _new_id() -> str:
    return uuid.uuid4().hex
