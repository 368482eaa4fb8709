"""The replicas of this router, and which of them keeps what for a conversation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg_router.backends import LABEL_ROLE
from disagg_router.http1.message import Address
from disagg_router.pick import rank


@dataclass(frozen=True, slots=True)
class Replica:
    """A router pod that is ready, and the address of its admin port."""

    name: str
    admin: Address


def replicas_in(slices: Iterable[Mapping[str, Any]], admin_port: int) -> tuple[Replica, ...]:
    """The ready replicas among EndpointSlices, by name; of a dual stack pod's addresses the IPv4 one.

    The slices are those of the router's Service. It need not be headless: a slice names pods either way.
    """
    found: dict[str, tuple[str, str]] = {}
    for piece in slices:
        labels = (piece.get("metadata") or {}).get("labels") or {}
        family = piece.get("addressType")
        if labels.get(LABEL_ROLE) != "router" or family not in ("IPv4", "IPv6"):
            continue
        for endpoint in piece.get("endpoints") or ():
            name, addresses = (endpoint.get("targetRef") or {}).get("name"), endpoint.get("addresses")
            conditions = endpoint.get("conditions") or {}
            if (
                name
                and addresses
                and conditions.get("ready") is not False
                and not conditions.get("terminating")
            ):
                found[name] = min(found.get(name, (family, addresses[0])), (family, addresses[0]))
    return tuple(Replica(name, Address(host, admin_port)) for name, (_, host) in sorted(found.items()))


class Replicas:
    """The replicas as last seen. `me` is this one's name."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.ready: tuple[Replica, ...] = ()

    def publish(self, ready: tuple[Replica, ...]) -> None:
        self.ready = ready

    def owner(self, key: bytes) -> Replica | None:
        """Who keeps what is kept for this conversation; None if it is this replica, or if none is known.

        Rendezvous hashing, as for engines: a replica that comes or goes moves its own conversations only.
        """
        owner = max(self.ready, key=lambda replica: rank(key, replica.name), default=None)
        return None if owner is None or owner.name == self.me else owner
