"""Events in, keys out: the only module that imports kopf. Nothing is decided here.

kopf watches the DisaggInferences, by low-level event handlers alone, so that it adds neither finalizers nor annotations
to them. Children are watched by `Kube.watch`: kopf cannot select by label on the server, and would make this process
read every pod of the cluster.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import kopf
from kopf._cogs.structs.references import Insights

from .api.base import GROUP, VERSION
from .naming import LABEL_NAME, PLURAL, Manifest
from .reconcile import Key

Enqueue = Callable[[Key, float], None]
"""Wants a pass for a key, after so many seconds."""
SETTLE_SECONDS = 0.2
"""Changes of children come in bursts (a StatefulSet, its pods, its Service): they are one reason for a pass, not ten."""


class Watcher(Protocol):
    """Where children are watched; `Kube` is one."""

    def watch(self, kind: str, namespace: str | None) -> AsyncIterator[Manifest]: ...


def make_registry(enqueue: Enqueue) -> kopf.OperatorRegistry:
    """The handlers of DisaggInferences."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**context: Any) -> Any:
        return kopf.login_with_service_account(**context) or kopf.login_via_client(**context)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def changed(type: str | None, namespace: str | None, name: str, body: kopf.Body, **_: Any) -> None:
        # A coroutine, though it awaits nothing: kopf calls plain functions in another thread, and the queue is this one's.
        if namespace is not None and (type != "MODIFIED" or is_news(body)):
            enqueue(Key(namespace, name), 0.0)

    return registry


def is_news(body: Any) -> bool:
    """Whether a modified object has a spec that no status is about yet. Our own status writes come back as events too."""
    meta, status = body.get("metadata", {}), body.get("status") or {}
    return meta.get("generation") != status.get("observedGeneration") or "deletionTimestamp" in meta


class NotListedError(Exception):
    """kopf has found nothing to watch, and will not look again: this process must end."""


async def watch_resources(enqueue: Enqueue, namespaces: Sequence[str]) -> None:
    """Runs kopf until SIGTERM or SIGINT. The CRD must be there. Raises NotListedError if kopf does not find it."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # events are ours to post
    settings.peering.standalone = True
    settings.scanning.disabled = True  # no rights on CRDs and namespaces are needed
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 600
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    insights = Insights()  # private, but elsewhere kopf says in a line of its log only what it has not found
    found = asyncio.create_task(insights.ready_resources.wait())
    running = asyncio.create_task(
        kopf.operator(
            registry=make_registry(enqueue),
            settings=settings,
            insights=insights,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
    )
    try:
        await asyncio.wait((found, running), return_when=asyncio.FIRST_COMPLETED)
        if found.done() and not insights.watched_resources:
            # An API server serves a new CRD some time before or after it lists its group, and each server for itself.
            raise NotListedError(
                f"the API server does not list {PLURAL}.{GROUP} yet, though it has served them"
            )
        await running
    finally:
        found.cancel()
        running.cancel()
        await asyncio.gather(found, running, return_exceptions=True)


async def watch_children(kube: Watcher, kind: str, namespace: str | None, enqueue: Enqueue) -> None:
    """Enqueues the owner of every child of `kind` that changes. Endless."""
    async for meta in kube.watch(kind, namespace):
        owner = (meta.get("labels") or {}).get(LABEL_NAME)
        if owner:
            enqueue(Key(meta["namespace"], owner), SETTLE_SECONDS)
        await asyncio.sleep(0)  # a long first list must not keep others from their turn
