"""The writer's side of a transfer: source blocks are pinned until every rank is through with them.

Pure. Both engines send: prefill a prompt's KV, decode a turn's. What the owner of the target blocks may
rely on is `cancel`: its answer means that no write for the transfer is in flight or will ever start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg_connector.direct import Begun, Direct, Reservation
from disagg_connector.ports import Channel, Clock, Orders, Pool, Steps, Tally, Token, WriteJob
from disagg_connector.protocol import Grant, Peer, Released
from disagg_connector.remembered import Remembered

# Blocks are reserved for a write whose target is not known yet only while so much of the pool stays free, only for so
# much of it, and only for so many seconds: what waits for a peer must not stand in the way of a request.
RESERVED_LEAVE_FREE = 1 / 10
RESERVED_AT_MOST = 1 / 20
RESERVED_SECONDS = 1.0
# Of one write. An order between steps must fit into a message (`link.MAX_MESSAGE_BYTES`).
RESERVED_AT_ONCE = 8192

# From when a write may not begin any more. It takes milliseconds, and seconds if it is large; one into an engine that is frozen, or
# that has lost its network, may never end. The engine does not step for ever for its sake, since neither a pause nor a shutdown
# would ever end: its end is told with whatever step comes.
PATIENCE = 60.0

# Cancelled transfers remembered, so that a request that overtook its cancellation starts nothing.
TOMBSTONES = 8192


@dataclass(frozen=True)
class Sent:
    """The end of an outgoing transfer. `ok` is False if any rank failed or nothing was written."""

    xid: str
    peer: Peer
    blocks: int
    ok: bool
    wrote: bool
    size: int
    seconds: float = 0.0
    """How long the slowest rank took to write."""


@dataclass
class _Sending:
    job: WriteJob
    deadline: float
    fence: int
    on_done: Callable[[Sent], None]
    called_off: bool = False
    tally: Tally = field(default_factory=Tally)
    waiting: list[Token] = field(default_factory=list)


@dataclass(frozen=True)
class _Reserved:
    blocks: tuple[int, ...]
    until: float
    on_done: Callable[[Grant, Sent], None]


class Sender:
    """All outgoing transfers of this engine. Engine thread only."""

    def __init__(
        self, pool: Pool, channel: Channel, direct: Direct, clock: Clock, steps: Steps, ranks: int
    ) -> None:
        self._pool = pool
        self._channel = channel
        self._direct = direct
        self._clock = clock
        self._steps = steps
        self._ranks = ranks
        self._sending: dict[str, _Sending] = {}
        self._busy_until = float("-inf")
        self._due: dict[str, _Sending] = {}
        """Not handed to the workers yet."""
        self._to_stop: list[str] = []
        """Handed over, and called off since."""
        self._reserved: dict[str, _Reserved] = {}
        """Not begun as far as is known here; `_settle` finds out."""
        self._reserved_blocks = 0
        self._begun: dict[str, Begun] = {}
        """Begun without a step, and `answered` has not been called yet."""
        self._linked: set[str] = set()
        """Handed to the workers over the link and not through."""
        self._tombstones = Remembered(TOMBSTONES)
        self.pinned = 0
        """Source blocks of all transfers."""

    @property
    def busy(self) -> bool:
        """Whether a transfer needs engine steps to get on, as far as there is reason to expect that it does."""
        return bool(self._sending) and self._clock() < self._busy_until

    def is_cancelled(self, xid: str) -> bool:
        """Whether the owner of the target blocks has taken them back."""
        return xid in self._tombstones

    def start(
        self,
        xid: str,
        peer: Peer,
        local: Sequence[int],
        remote: Sequence[int],
        start_within: float,
        on_done: Callable[[Sent], None],
        fence: int = 0,
    ) -> None:
        """Write `local` blocks, already pinned, into the peer's `remote` ones; unpins them at the end.

        Not before step `fence` is over, and not later than `start_within` seconds from now.
        """
        if len(local) != len(remote):
            raise ValueError(f"transfer {xid}: {len(local)} blocks into {len(remote)}")
        job = WriteJob(xid, peer, tuple(local), tuple(remote), start_within)
        sending = _Sending(job, self._clock() + start_within, fence, on_done)
        self._follow(sending)
        self._due[xid] = sending
        self.pinned += len(job.local)
        if self.is_cancelled(xid):
            self._finish(sending)

    # --- Before the target is known ---------------------------------------------------------------

    def reserve(self, reservation: Reservation, on_done: Callable[[Grant, Sent], None]) -> bool:
        """Pin blocks for a write that may begin as soon as it is granted, without a step. `answered` must be called
        when it is known whether that has happened. False, and nothing is done, if there is no room or no link."""
        blocks, pool = reservation.blocks, self._pool
        total = self._reserved_blocks + len(blocks)
        too_many = total > pool.total * RESERVED_AT_MOST or len(blocks) > RESERVED_AT_ONCE
        too_few = pool.free() - len(blocks) < pool.total * RESERVED_LEAVE_FREE
        if not self._direct.is_ready or too_many or too_few or self.is_cancelled(reservation.xid):
            return False
        pool.pin(blocks)
        self.pinned += len(blocks)
        self._reserved_blocks = total
        self._reserved[reservation.xid] = _Reserved(blocks, self._clock() + RESERVED_SECONDS, on_done)
        self._direct.reserve(reservation)
        return True

    def answered(self, xid: str) -> Begun | None:
        """Prefill has answered, or has not: what has begun of it. If nothing, nothing is reserved any more."""
        self._settle(xid)
        return self._begun.pop(xid, None)

    def make_room(self, blocks: int) -> None:
        """The engine wants so many blocks: what is only reserved must not keep them from it."""
        if self._reserved and self._pool.free() - blocks < self._pool.total * RESERVED_LEAVE_FREE:
            self._settle_all()

    def next_deadline(self) -> float | None:
        """When the oldest reservation ends."""
        return next((reserved.until for reserved in self._reserved.values()), None)

    def _settle_all(self) -> None:
        for xid in list(self._reserved):
            self._settle(xid)

    def _settle(self, xid: str) -> None:
        """A reserved write is a transfer like any other if it has begun; else it never will, and its blocks are free."""
        reserved = self._reserved.pop(xid, None)
        if reserved is None:
            return
        self._reserved_blocks -= len(reserved.blocks)
        begun = self._direct.settle(xid)
        self._release(reserved.blocks if begun is None else self._not_granted(reserved, begun))
        if begun is None:
            return
        grant = begun.grant
        self._follow(_Sending(begun.job, begun.deadline, 0, lambda sent: reserved.on_done(grant, sent)))
        self._begun[xid] = begun
        self._linked.add(xid)

    def _not_granted(self, reserved: _Reserved, begun: Begun) -> tuple[int, ...]:
        kept = set(begun.job.local)
        return tuple(block for block in reserved.blocks if block not in kept)

    def _release(self, blocks: tuple[int, ...]) -> None:
        self._pool.unpin(blocks)
        self.pinned -= len(blocks)

    # --- Under way --------------------------------------------------------------------------------

    def cancel(self, xid: str, token: Token) -> None:
        """The owner of the target blocks wants them back: answer as soon as that is safe."""
        self._tombstones.add(xid)
        self._settle(xid)
        sending = self._sending.get(xid)
        if sending is None:
            self._channel.answer(token, Released(wrote=True))
            return
        sending.waiting.append(token)
        self._call_off(sending)

    def give_up(self, xid: str) -> None:
        """Do not start this transfer if it has not been started."""
        sending = self._sending.get(xid)
        if sending is not None:
            self._call_off(sending)

    def give_up_all(self) -> None:
        """The KV in this engine's cache is no longer what the transfers were promised as."""
        self._settle_all()
        for xid in list(self._sending):
            self.give_up(xid)

    def fill(self, orders: Orders) -> None:
        """Put what is due into a step's orders."""
        orders.cancels += [xid for xid in self._to_stop if xid in self._sending]
        self._to_stop.clear()
        now = self._clock()
        self.make_room(0)
        for xid in [xid for xid, reserved in self._reserved.items() if now >= reserved.until]:
            self._settle(xid)
        if self._direct.is_lost:
            # Perhaps not every rank has been told. One that has does not do it twice.
            for xid in sorted(self._linked):
                orders.writes.append(self._order(self._sending[xid], now))
            self._linked.clear()
        for xid, sending in list(self._due.items()):
            if now >= sending.deadline:
                self._finish(sending)
            elif sending.fence <= self._steps.processed:
                del self._due[xid]
                orders.writes.append(self._order(sending, now))

    def _order(self, sending: _Sending, now: float) -> WriteJob:
        job = sending.job
        return WriteJob(job.xid, job.peer, job.local, job.remote, sending.deadline - now)

    def report(self, xid: str, tally: Tally) -> None:
        """What ranks told of a transfer; each rank reports exactly once."""
        self._settle(xid)
        sending = self._sending.get(xid)
        if sending is None:
            return
        sending.tally.add(tally)
        if sending.tally.done >= self._ranks:
            self._finish(sending)

    def _follow(self, sending: _Sending) -> None:
        self._sending[sending.job.xid] = sending
        self._busy_until = max(self._busy_until, sending.deadline + PATIENCE)

    def _call_off(self, sending: _Sending) -> None:
        xid = sending.job.xid
        if xid in self._due:
            self._finish(sending)
        elif not sending.called_off:
            sending.called_off = True
            self._direct.revoke(xid)
            self._to_stop.append(xid)

    def _finish(self, sending: _Sending) -> None:
        job = sending.job
        del self._sending[job.xid]
        self._due.pop(job.xid, None)
        self._linked.discard(job.xid)
        self._release(job.local)
        tally = sending.tally
        ok = tally.done >= self._ranks and not tally.failed
        for token in sending.waiting:
            self._channel.answer(token, Released(wrote=tally.posted > 0))
        wrote = tally.posted > 0
        sending.on_done(Sent(job.xid, job.peer, len(job.local), ok, wrote, tally.size, tally.seconds))
