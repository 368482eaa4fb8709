"""The engines behind a router: what a turn may be sent to. Pure.

`from_slices` turns EndpointSlices (as JSON, discovery.k8s.io/v1) into `Backend`s. The endpoint slice controller copies
the labels of a headless Service to its slices, so a slice says itself which role and revision it holds, and which of its
pods are about to be removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disagg_router.http1.message import Address

Role = Literal["prefill", "decode"]

LABEL_NAME = "inference.disagg.dev/name"
LABEL_ROLE = "inference.disagg.dev/role"
LABEL_REVISION = "inference.disagg.dev/revision"
LABEL_MODE = "inference.disagg.dev/transfer-mode"
LABEL_KEEP = "inference.disagg.dev/keep"

_COUNT = re.compile("[0-9]+")
_ORDINAL = re.compile("-([0-9]+)$")


@dataclass(frozen=True, slots=True)
class Backend:
    """One engine pod.

    `name` is the pod's name: it stays when the pod is replaced, so that a conversation keeps its home. `ready` and
    `terminating` are the endpoint's conditions; `revision` decides who may exchange KV with whom.
    """

    name: str
    role: Role
    revision: str
    address: Address
    control_port: int
    zone: str = ""
    ready: bool = True
    terminating: bool = False
    mode: str = ""
    """How it moves KV; empty if its Service does not say, which means as the router is configured."""
    leaving: bool = False
    """It will be removed soon, and until then serves what it has. New turns go to others if there are any (`staying`)."""

    @property
    def takes_turns(self) -> bool:
        """Whether it can serve turns."""
        return self.ready and not self.terminating

    @property
    def state(self) -> str:
        if self.terminating:
            return "terminating"
        if not self.ready:
            return "not_ready"
        return "leaving" if self.leaving else "ready"


def staying(backends: Sequence[Backend]) -> Sequence[Backend]:
    """Those that are not leaving; all of them if all are, since an engine that leaves is better than none."""
    return [b for b in backends if not b.leaving] or backends


def from_slices(
    slices: Iterable[Mapping[str, Any]], engine_port: int, control_port: int
) -> tuple[Backend, ...]:
    """All engines of the slices, by name. A pod that is listed twice (dual stack, or while slices are rebalanced)
    counts once: IPv4 before IPv6, and an entry that takes turns before one that does not."""
    best: dict[str, tuple[tuple[bool, bool], Backend]] = {}
    for piece in slices:
        labels = (piece.get("metadata") or {}).get("labels") or {}
        role, revision = labels.get(LABEL_ROLE), labels.get(LABEL_REVISION)
        family = piece.get("addressType")
        if role not in ("prefill", "decode") or not revision or family not in ("IPv4", "IPv6"):
            continue
        port = _http_port(piece.get("ports") or (), engine_port)
        for endpoint in piece.get("endpoints") or ():
            addresses = endpoint.get("addresses") or ()
            if not addresses:
                continue
            conditions = endpoint.get("conditions") or {}
            target = endpoint.get("targetRef") or {}
            backend = Backend(
                name=target.get("name") or addresses[0],
                role=role,
                revision=revision,
                address=Address(addresses[0], port),
                control_port=control_port,
                zone=endpoint.get("zone") or "",
                # An absent condition means "unknown", to be taken as ready (EndpointConditions.ready).
                ready=conditions.get("ready") is not False,
                terminating=conditions.get("terminating") is True,
                mode=labels.get(LABEL_MODE) or "",
                leaving=_is_leaving(target.get("name") or "", labels.get(LABEL_KEEP) or ""),
            )
            rank = (backend.takes_turns, family == "IPv4")
            if backend.name not in best or rank > best[backend.name][0]:
                best[backend.name] = (rank, backend)
    return tuple(backend for _, (_, backend) in sorted(best.items()))


def _is_leaving(pod: str, keep: str) -> bool:
    """Whether a StatefulSet that keeps so many pods will remove this one: it numbers them from 0, and removes the highest."""
    ordinal = _ORDINAL.search(pod)
    return ordinal is not None and _COUNT.fullmatch(keep) is not None and int(ordinal[1]) >= int(keep)


def _http_port(ports: Iterable[Mapping[str, Any]], default: int) -> int:
    for port in ports:
        if port.get("name") == "http" and port.get("port"):
            return int(port["port"])
    return default


class Fleet:
    """The engines as last seen; the one place that discovery writes and turns read. `watchers` hear of every change."""

    def __init__(self) -> None:
        self.backends: tuple[Backend, ...] = ()
        self.synced = False
        self.watchers: list[Callable[[], None]] = []

    def publish(self, backends: tuple[Backend, ...]) -> None:
        self.backends = backends
        self.synced = True
        for watcher in self.watchers:
            watcher()

    def why_not_ready(self) -> str | None:
        """None if some revision has both roles ready, else what is missing."""
        if not self.synced:
            return "the router has not yet seen any list of engines"
        ready = {
            role: {b.revision for b in self.backends if b.role == role and b.takes_turns} for role in _ROLES
        }
        missing = [role for role in _ROLES if not ready[role]]
        if missing:
            return f"no {' and no '.join(missing)} engine is ready"
        if not ready["prefill"] & ready["decode"]:
            return "no revision has both a prefill and a decode engine ready"
        return None


_ROLES: tuple[Role, Role] = ("prefill", "decode")
