"""Who answers at an address: asked once per boot, remembered, asked again when it looks restarted.

Pure. The router names addresses only; engine id, NIXL address, TP size and fingerprint of the engine
there come from a `Hello` on its control port.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from disagg_connector.hashes import differences
from disagg_connector.ports import Channel, Clock
from disagg_connector.protocol import WIRE_VERSION, Address, Hello, Peer, Reply, Welcome
from disagg_connector.remembered import Remembered

logger = logging.getLogger(__name__)

# A busy machine answers late; turns do not wait that long (decode.PEER_WAIT).
HELLO_TIMEOUT = 5.0
# An address that did not answer is not asked again for this long: turns go on locally meanwhile.
RETRY_AFTER = 3.0
# Addresses remembered. More than a deployment has; bounds what wrong params can make us keep.
MAX_ENTRIES = 4096

Verdict = Literal["asking", "ready", "incompatible", "unreachable"]


@dataclass
class _Entry:
    verdict: Verdict
    peer: Peer | None = None
    tried_at: float = 0.0
    asking: bool = False
    stale: bool = False
    explained: str = ""
    """The differences that the log has told of."""
    told: str = ""
    """The engine id that `on_ready` was called for."""


@dataclass(frozen=True)
class Resolution:
    """What is known about an address; `peer` is set if `verdict` is "ready"."""

    verdict: Verdict
    peer: Peer | None = None


class Peers:
    """Engines by address. Engine thread only."""

    def __init__(
        self,
        channel: Channel,
        clock: Clock,
        fingerprint: Callable[[], dict[str, str]],
        objection: Callable[[Peer], str],
        on_gone: Callable[[Peer], None],
        on_ready: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        """`on_gone` is called for a boot that another has taken the place of, `on_ready` once for every boot
        that KV can be exchanged with."""
        self._channel = channel
        self._clock = clock
        self._fingerprint = fingerprint
        self._objection = objection
        self._on_gone = on_gone
        self._on_ready = on_ready
        self._entries: dict[Address, _Entry] = {}
        self._gone = Remembered()

    def resolve(self, address: Address) -> Resolution:
        """What is known now; asks in the background if that is not enough."""
        entry = self._entries.get(address)
        if entry is None:
            entry = self._add(address)
            self._ask(address, entry)
        elif not entry.asking and self._wants_asking(entry):
            if entry.stale:
                entry.verdict = "asking"
            # Else what is known stands until there is an answer: no turn waits for an address that is dead.
            self._ask(address, entry)
        return Resolution(entry.verdict, entry.peer if entry.verdict == "ready" else None)

    def doubt(self, address: Address) -> None:
        """What answers there may be another boot or epoch than we think: ask again before using it."""
        entry = self._entries.get(address)
        if entry is not None and entry.verdict == "ready":
            entry.stale = True

    def reconsider(self) -> None:
        """This engine's own fingerprint is another: whoever is no match as known may have become one, too."""
        for entry in self._entries.values():
            if entry.peer is not None and entry.verdict in ("ready", "incompatible"):
                objection = self._objection(entry.peer)
                entry.verdict = "incompatible" if objection else "ready"
                entry.stale = bool(objection)

    def met(self, peer: Peer) -> bool:
        """A peer has introduced itself: whoever had its address before is gone. False if it is itself one of
        those, whose message has come late."""
        if peer.engine_id in self._gone:
            return False
        entry = self._entries.get(peer.address)
        if entry is None:
            entry = self._add(peer.address)
        if _is_news(entry.peer, peer):
            self._replace(entry, peer)
            objection = self._objection(peer)
            entry.verdict = "incompatible" if objection else "ready"
            # It has not said what its fingerprint is made of: it is asked, for the log.
            entry.tried_at = float("-inf") if objection else self._clock()
            self._tell(entry)
        return True

    def _add(self, address: Address) -> _Entry:
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.pop(next(iter(self._entries)))
        entry = self._entries[address] = _Entry("asking")
        return entry

    def _wants_asking(self, entry: _Entry) -> bool:
        if entry.stale:
            return True
        return entry.verdict != "ready" and self._clock() - entry.tried_at >= RETRY_AFTER

    def _ask(self, address: Address, entry: _Entry) -> None:
        entry.asking = True
        entry.stale = False
        self._channel.request(
            address, Hello(WIRE_VERSION), HELLO_TIMEOUT, lambda reply: self._welcomed(address, entry, reply)
        )

    def _welcomed(self, address: Address, entry: _Entry, reply: Reply | None) -> None:
        entry.asking = False
        entry.tried_at = self._clock()
        if not isinstance(reply, Welcome) or reply.peer.engine_id in self._gone:
            if entry.verdict != "unreachable":
                logger.warning("No connector answers at %s (%s); turns go on locally", address, reply)
            entry.verdict = "unreachable"
            return
        if _is_news(entry.peer, reply.peer):
            self._replace(entry, reply.peer)
        objection = self._objection(entry.peer or reply.peer)
        if reply.wire == WIRE_VERSION and not objection:
            if entry.verdict != "ready":
                logger.info("Peer at %s is %s %s", address, reply.role, reply.peer.engine_id)
            entry.verdict = "ready"
            self._tell(entry)
            return
        entry.verdict = "incompatible"
        why = differences(self._fingerprint(), reply.parts) or objection or f"wire version {reply.wire}"
        if why != entry.explained:
            entry.explained = why
            logger.error("Peer at %s is not compatible, no KV is exchanged: %s", address, why)

    def _tell(self, entry: _Entry) -> None:
        """Say once for a boot that it is ready."""
        if entry.verdict == "ready" and entry.peer is not None and entry.told != entry.peer.engine_id:
            entry.told = entry.peer.engine_id
            self._on_ready(entry.peer)

    def _replace(self, entry: _Entry, peer: Peer) -> None:
        old, entry.peer = entry.peer, peer
        if old is not None and old.engine_id != peer.engine_id:
            logger.info("Peer at %s restarted: %s is now %s", peer.address, old.engine_id, peer.engine_id)
            self._gone.add(old.engine_id)
            self._on_gone(old)


def _is_news(known: Peer | None, told: Peer) -> bool:
    """Whether a peer is another boot or a later epoch than known; of one boot messages may overtake each other."""
    return known is None or known.engine_id != told.engine_id or told.epoch > known.epoch
