"""The receiver's side of a transfer: blocks of ours that a peer may write into.

Pure. Two rules keep a late write from ever reaching a block that somebody else uses:

* a block that was offered as a target is owned until its transfer ends: committed and complete, or
  given back by the writer;
* if the writer does not answer, the block is held (quarantined) until the writer says that it is
  through, or is known to be dead, or so long that no network would still deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg_connector.deadlines import Deadlines
from disagg_connector.hashes import first_missing
from disagg_connector.ports import Channel, Clock, Pool, Token
from disagg_connector.protocol import (
    DUPLICATE,
    GAP,
    HAVE,
    NO_BLOCKS,
    RESTARTED,
    Cancel,
    Offer,
    Peer,
    Refused,
    Released,
    Reply,
)

CANCEL_TIMEOUT = 2.0
CANCEL_RETRY_MAX = 30.0
# After a writer's own word that its write is over, bytes may still be on their way through a NIC.
SETTLE = 2.0
# After a writer's process is known to be gone: what its kernel or NIC had accepted has landed by then.
SETTLE_GONE = 10.0
# No sign of the writer at all. Longer than TCP's or an RDMA queue pair's own retries take to give up.
HOLD_LIMIT = 1200.0


# --- Admission ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """How many blocks may be given to landings, seen at one moment."""

    free: int
    total: int
    min_free_percent: int
    reserved: int
    """Blocks of the standing reserve that are not in use."""

    @property
    def floor(self) -> int:
        """Blocks that stay free, and of the prefix cache the hottest, which stay cached."""
        return -(-self.total * self.min_free_percent // 100)

    @property
    def grantable(self) -> int:
        """Free blocks beyond the floor, and the reserve."""
        return max(0, self.free - self.floor) + self.reserved


@dataclass(frozen=True)
class Admission:
    """Grant blocks for chain[start : start + count], or deny with `reason`."""

    reason: str = ""
    start: int = 0
    count: int = 0


def admit(
    offer: Offer,
    is_held: Callable[[bytes], bool],
    in_flight: Callable[[bytes], bool],
    room: Room,
) -> Admission:
    """Whether an offer is taken up, and for which blocks. The first check that holds decides."""
    index = first_missing(offer.hashes, is_held)
    if index == len(offer.hashes):
        return Admission(HAVE)
    start = offer.skip + index
    if start < offer.first:
        return Admission(GAP)
    if in_flight(offer.hashes[index]):
        return Admission(DUPLICATE)
    count = min(len(offer.hashes) - index, room.grantable)
    if count <= 0:
        return Admission(NO_BLOCKS)
    return Admission("", start, count)


# --- Blocks that may still be written into ---------------------------------------------------------


@dataclass
class _Held:
    xid: str
    blocks: tuple[int, ...]
    peer: Peer
    since: float
    interval: float = CANCEL_TIMEOUT
    answered: bool = False
    release_at: float | None = None
    request: str = ""


class HeldBlocks:
    """Blocks whose transfer was called off, until it is certain that no write can reach them."""

    def __init__(self, pool: Pool, channel: Channel, clock: Clock) -> None:
        self._pool = pool
        self._channel = channel
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._look_at: Deadlines[str] = Deadlines()
        self.count = 0
        """Blocks whose writer has not answered: what the quarantine gauge shows."""

    @property
    def empty(self) -> bool:
        return not self._held

    def hold(self, xid: str, blocks: Sequence[int], peer: Peer, request: str = "") -> None:
        """Take over blocks that are pinned, and ask their writer to let go of them."""
        now = self._clock()
        held = _Held(xid, tuple(blocks), peer, now, request=request)
        self._held[xid] = held
        self.count += len(held.blocks)
        self._ask(held)

    def settle(self, xid: str, blocks: Sequence[int], peer: Peer) -> None:
        """Take over blocks that are pinned and whose writer is through with them, for a moment."""
        now = self._clock()
        held = _Held(xid, tuple(blocks), peer, now, answered=True, release_at=now + SETTLE)
        self._held[xid] = held
        self._look_at.set(xid, now + SETTLE)

    def peer_is_gone(self, engine_id: str) -> None:
        """The process with this engine id has ended."""
        for held in self._held.values():
            if held.peer.engine_id == engine_id:
                self._release_after(held, SETTLE_GONE)

    def tick(self) -> None:
        """Release what is due, ask again where no answer came."""
        now = self._clock()
        for xid in self._look_at.take(now):
            held = self._held[xid]
            if held.release_at is not None or now - held.since >= HOLD_LIMIT:
                self._answer_known(held)
                del self._held[xid]
                self._pool.unpin(held.blocks)
            else:
                self._ask(held)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return self._look_at.next()

    def _ask(self, held: _Held) -> None:
        message = Cancel(held.peer.engine_id, held.xid, held.request)
        self._channel.request(
            held.peer.address, message, CANCEL_TIMEOUT, lambda reply: self._answered(held, reply)
        )

    def _answered(self, held: _Held, reply: Reply | None) -> None:
        if held.xid not in self._held:
            return
        match reply:
            case Released(wrote=wrote):
                self._release_after(held, SETTLE if wrote else 0.0)
            case Refused(reason=reason, engine_id=engine) if (
                reason == RESTARTED and engine != held.peer.engine_id
            ):
                self._release_after(held, SETTLE_GONE)
            case _:
                held.interval = min(held.interval * 2, CANCEL_RETRY_MAX)
                if held.release_at is None:
                    again = min(self._clock() + held.interval, held.since + HOLD_LIMIT)
                    self._look_at.set(held.xid, again)
                # One look at an address at a time: what it shows is true of all that are held for that engine.
                peer = held.peer
                self._channel.probe(peer.address, lambda: self.peer_is_gone(peer.engine_id))

    def _release_after(self, held: _Held, seconds: float) -> None:
        self._answer_known(held)
        if held.release_at is None and held.xid in self._held:
            held.release_at = self._clock() + seconds
            self._look_at.set(held.xid, held.release_at)

    def _answer_known(self, held: _Held) -> None:
        if not held.answered:
            held.answered = True
            self.count -= len(held.blocks)


# --- Landings of write-backs, on prefill -----------------------------------------------------------


@dataclass
class Landing:
    """A grant: `blocks` are to receive chain[start:], `prefix` are the blocks that hold chain[skip:start]."""

    xid: str
    peer: Peer
    hashes: Sequence[bytes]
    """chain[skip:]"""
    skip: int
    start: int
    blocks: tuple[int, ...]
    prefix: tuple[int, ...]
    epoch: int
    expires: float
    want: str = ""
    tokens: bytes = b""
    """Of the last blocks of `hashes`, see `Offer.tokens`."""
    ranks_landed: int = 0
    commit: Token | None = None
    """Who waits for the answer to its `Commit`, once that has come."""

    @property
    def targets(self) -> Sequence[bytes]:
        """The hashes of `blocks`."""
        first = self.start - self.skip
        return self.hashes[first : first + len(self.blocks)]


@dataclass
class Landings:
    """All grants in force, and which hashes are on their way."""

    by_xid: dict[str, Landing] = field(default_factory=dict)
    in_flight: dict[bytes, str] = field(default_factory=dict)
    ends: Deadlines[str] = field(default_factory=Deadlines)
    committed: set[str] = field(default_factory=set)
    """Landings that wait for NIXL's announcement alone."""
    blocks: int = 0
    """How many blocks all of them have."""

    def add(self, landing: Landing) -> None:
        self.by_xid[landing.xid] = landing
        self.blocks += len(landing.blocks)
        self.ends.set(landing.xid, landing.expires)
        for block_hash in landing.targets:
            self.in_flight[block_hash] = landing.xid

    def commit(self, landing: Landing, token: Token, expires: float) -> None:
        """Decode says that it is through; NIXL must have announced the data by `expires`."""
        landing.commit = token
        self.committed.add(landing.xid)
        self.ends.set(landing.xid, expires)

    def remove(self, xid: str) -> Landing | None:
        self.ends.drop(xid)
        self.committed.discard(xid)
        landing = self.by_xid.pop(xid, None)
        if landing is not None:
            self.blocks -= len(landing.blocks)
            for block_hash in landing.targets:
                if self.in_flight.get(block_hash) == xid:
                    del self.in_flight[block_hash]
        return landing
