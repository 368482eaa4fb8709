"""Wiring: settings, client, queue, workers, watches, health. Started by `python -m disagg_operator`."""

import asyncio
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

from . import health, scrape
from .api.status import Condition
from .autoscale import Course
from .config import Settings
from .errors import KubeError
from .handlers import watch_children, watch_resources
from .kube import CHILD_KINDS, Kube, connect
from .lease import Lease
from .metrics import Metrics
from .naming import KIND
from .prometheus import Prometheus
from .queue import WorkQueue
from .reconcile import Key, ReadPages, Reconciler

_log = logging.getLogger(__name__)
STUCK_SECONDS = 600.0
"""A pass has a time-out on each request and takes seconds; one that takes this long never ends."""
CRD_SECONDS = 5.0


class Operator:
    """One running operator."""

    def __init__(self, settings: Settings, kube: Kube, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.kube = kube
        self.metrics = Metrics()
        self.queue: WorkQueue[Key] = WorkQueue(loop)
        self.metrics.watch_queue(lambda: len(self.queue))
        self._reconciler = Reconciler(
            kube,
            settings,
            lambda: datetime.now(UTC),
            os.urandom,
            self._show,
            _reader(settings),
            time.monotonic,
            self._show_course,
        )
        self._began: dict[Key, float] = {}
        self._waiting_for = f"the CRD of {KIND}"

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or a part that fails for good."""
        port, ready = self.settings.http_port, self._not_watching
        async with health.serve(port, self.metrics, alive=self._stuck, ready=ready):
            await self._wait_for_crd()
            lease = self._lease()
            if lease is None:
                await self._serve([])
                return
            self._waiting_for = f"the lease {lease.namespace}/{lease.name}"
            await lease.acquire()
            try:
                await self._serve([lease.keep()])
            finally:
                await lease.release()

    async def _serve(self, parts: list[Coroutine[Any, Any, None]]) -> None:
        namespaces = self.settings.watch_namespaces
        parts += [self._work() for _ in range(self.settings.workers)]
        parts += [
            watch_children(self.kube, kind, namespace, self._enqueue)
            for kind in CHILD_KINDS
            for namespace in namespaces or (None,)
        ]
        tasks = [asyncio.create_task(part) for part in parts]
        # Last: on its way out kopf cancels every task that began after it.
        tasks.append(asyncio.create_task(watch_resources(self._enqueue, namespaces)))
        self._waiting_for = ""
        _log.info("serving %s", ", ".join(namespaces) or "all namespaces")
        await _first_of(tasks)

    def _lease(self) -> Lease | None:
        settings = self.settings
        if not settings.lease_name:
            return None
        # A container that restarts keeps its pod's name and takes its lease at once.
        holder = settings.pod_name or f"{socket.gethostname()}-{os.getpid()}"
        return Lease(self.kube, settings.pod_namespace, settings.lease_name, holder, time.monotonic)

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            self._began[key] = time.monotonic()
            try:
                await self._pass(key)
            finally:
                self.metrics.reconcile_seconds.observe(time.monotonic() - self._began.pop(key))
                self.queue.done(key)

    async def _pass(self, key: Key) -> None:
        try:
            again = await self._reconciler.reconcile(key)
        except KubeError as error:
            self.metrics.reconcile_errors.labels(type(error).__name__).inc()
            wait = self.queue.retry(key)
            _log.warning("%s: %s; again in %.0f s", key, error, wait)
        except Exception as error:
            self.metrics.reconcile_errors.labels("Internal").inc()
            wait = self.queue.retry(key)
            _log.exception("%s: %s; again in %.0f s", key, error, wait)
        else:
            self.queue.succeeded(key)
            if again is not None:
                self.queue.add(key, again * random.uniform(0.9, 1.1))

    async def _wait_for_crd(self) -> None:
        while True:
            try:
                if await self.kube.serves(KIND):
                    return
                _log.warning("the API server does not know %s yet: install the CRDs", KIND)
            except KubeError as error:
                _log.warning("%s; trying again", error)
            await asyncio.sleep(CRD_SECONDS)

    def _enqueue(self, key: Key, after: float) -> None:
        self.queue.add(key, after)

    def _show(self, key: Key, conditions: tuple[Condition, ...]) -> None:
        self.metrics.show_conditions(key.namespace, key.name, conditions)

    def _show_course(self, key: Key, course: Course | None) -> None:
        self.metrics.show_course(key.namespace, key.name, course)

    def _stuck(self) -> str | None:
        now = time.monotonic()
        for key, began in self._began.items():
            if now - began > STUCK_SECONDS:
                return f"a pass over {key} has been running for {now - began:.0f} s"
        return None

    def _not_watching(self) -> str | None:
        return f"waiting for {self._waiting_for}" if self._waiting_for else None


def _reader(settings: Settings) -> ReadPages:
    """Where pods' metrics are read."""
    return Prometheus(settings.prometheus_url).read_pages if settings.prometheus_url else scrape.read_pages


async def _first_of(tasks: list[asyncio.Task[None]]) -> None:
    """Waits for one task to end, ends the others, raises what that one raised."""
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in done:
        task.result()


async def start(settings: Settings) -> None:
    """Connects and runs, until SIGTERM or SIGINT."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        # Until kopf runs, which replaces these: as process 1 of a container we would otherwise not hear them.
        loop.add_signal_handler(number, this.cancel)
    kube = await connect(len(settings.watch_namespaces) or 1)
    try:
        await Operator(settings, kube, loop).run()
    finally:
        await kube.close()


def main() -> None:
    """The process: settings from the environment, log lines to standard error."""
    settings = Settings.from_env()
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        asyncio.run(start(settings))
    except asyncio.CancelledError:
        _log.info("stopped")
