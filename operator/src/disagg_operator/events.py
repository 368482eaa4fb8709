"""Kubernetes events about a DisaggInference: told once, at a transition, and never worth failing a pass for."""

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Protocol

from .errors import KubeError
from .naming import FIELD_MANAGER, Manifest
from .plan import Notice

_log = logging.getLogger(__name__)
_LONGEST = 1024  # the API server's limit for an event's message


class Creator(Protocol):
    """Where objects are created; `Kube` is one."""

    async def create(self, manifest: Manifest) -> Manifest: ...


async def tell(kube: Creator, about: Manifest, notices: Iterable[Notice], now: datetime) -> None:
    """Posts the notices as events about an object."""
    for notice in notices:
        try:
            await kube.create(event(about, notice, now))
        except KubeError as error:
            _log.info("an event was lost: %s", error)


def event(about: Manifest, notice: Notice, now: datetime) -> Manifest:
    """The Event object of core/v1."""
    meta = about["metadata"]
    moment = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
        },
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message[:_LONGEST],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
