"""Writes that begin and end without waiting for the engine's steps.

Pure. Between the engine thread and the workers there is one envelope a step, so on a busy engine a write's order
waits for the next step, and its end for the one after. The control thread does two things earlier, and nothing else:
it hands the order to all ranks when the grant arrives, if the source blocks were pinned before (`Sender.reserve`); and
it commits a write-back when all ranks have told, over the same `Link`, that they have written.

Everything else stays as it is without this. The engine thread owns the transfer: it learns of the grant, follows
the write like any other, and lets go of the blocks when the step's reports have told the end, which ranks tell there
too. Only what has gone well is done early; a failure, another epoch, a cancellation or a grant of other blocks is left
to the engine thread. One lock decides who was first: after `settle` nothing begins here, after `revoke` or `end`
nothing is committed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from disagg_connector.epochs import Epochs
from disagg_connector.ports import Channel, Clock, Tally, WriteJob
from disagg_connector.protocol import Commit, Grant, Peer, Reply

COMMIT_TIMEOUT = 30.0
# What a grant's lease is taken to be shorter by here: the offer's way there and the clock's error.
LEASE_MARGIN = 1.0


class Link(Protocol):
    """The way to the ranks beside the engine's steps. `write` is the control thread's, the rest any thread's."""

    @property
    def path(self) -> str:
        """Where ranks find it, empty if there is none. They are told with a step's orders."""

    @property
    def is_ready(self) -> bool:
        """Whether every rank is there."""

    @property
    def is_lost(self) -> bool:
        """Whether an order or a report may have been lost. It stays so."""

    def write(self, job: WriteJob, deadline: float) -> None:
        """Hand an order to every rank, not to be begun after `deadline`. If that fails `is_lost` is true afterwards."""


class NoLink:
    """A `Link` that leaves everything to the engine's steps."""

    path = ""
    is_ready = False
    is_lost = False

    def write(self, job: WriteJob, deadline: float) -> None:
        raise AssertionError("nothing is reserved without a link")


@dataclass(frozen=True)
class Committed:
    """What became of a commit that was sent from here."""

    grant: Grant
    tally: Tally
    reply: Reply | None
    at: float
    """When the reply came; the engine thread may get to it later."""


@dataclass(frozen=True)
class Reservation:
    """Blocks that are pinned for a write, perhaps before its target is known."""

    xid: str
    peer: Peer
    first: int
    """Where they are in the chain of hashes that was offered."""
    blocks: tuple[int, ...]
    epoch: int
    """Of this engine."""
    at: float
    """When they were offered."""
    on_committed: Callable[[Committed], None]
    """On the engine thread."""


@dataclass(frozen=True)
class Begun:
    """A write that the ranks have been told of."""

    grant: Grant
    job: WriteJob
    deadline: float
    """When a rank must not begin it any more."""
    at: float
    """When the grant came."""


@dataclass
class _Flight:
    reservation: Reservation
    grant: Grant | None = None
    begun: Begun | None = None
    revoked: bool = False
    committed: bool = False
    told: dict[int, Tally] = field(default_factory=dict)
    """By rank."""


def time_left(grant: Grant, offered_at: float, now: float) -> float:
    """For how many seconds a write may be begun that was granted for an offer of then."""
    return grant.lease_seconds - (now - offered_at) - LEASE_MARGIN


class Direct:
    """The writes of one engine that are reserved, or have begun here. Any thread, as each method says."""

    def __init__(self, link: Link, channel: Channel, epochs: Epochs, clock: Clock, ranks: int) -> None:
        self._link = link
        self._channel = channel
        self._epochs = epochs
        self._clock = clock
        self._ranks = ranks
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}

    @property
    def path(self) -> str:
        """What ranks are to be told so that they come; empty when they have, or are not to."""
        return "" if self._link.is_ready or self._link.is_lost else self._link.path

    @property
    def is_ready(self) -> bool:
        return self._link.is_ready and not self._link.is_lost

    @property
    def is_lost(self) -> bool:
        return self._link.is_lost

    # --- Engine thread ----------------------------------------------------------------------------

    def reserve(self, reservation: Reservation) -> None:
        """From here on the write may begin."""
        with self._lock:
            self._flights[reservation.xid] = _Flight(reservation)

    def settle(self, xid: str) -> Begun | None:
        """A reserved write, if it has begun; if not, it never will."""
        with self._lock:
            flight = self._flights.get(xid)
            if flight is not None and flight.begun is None:
                del self._flights[xid]
            return None if flight is None else flight.begun

    def follow(self, reservation: Reservation, grant: Grant) -> None:
        """The ranks are ordered with a step to do this write: its end may be committed here all the same."""
        with self._lock:
            self._flights[reservation.xid] = _Flight(reservation, grant)

    def revoke(self, xid: str) -> None:
        """Leave it to the engine thread what to say of this write's end."""
        with self._lock:
            flight = self._flights.get(xid)
            if flight is not None:
                flight.revoked = True

    def end(self, xid: str) -> bool:
        """The write is over. Whether it has been committed here; if not, it never will."""
        with self._lock:
            flight = self._flights.pop(xid, None)
            return flight is not None and flight.committed

    # --- Control thread ---------------------------------------------------------------------------

    def answered(self, xid: str, reply: Reply) -> None:
        """Prefill has answered an offer; the engine thread will hear of it too, after this."""
        if not isinstance(reply, Grant):
            return
        with self._lock:
            flight = self._flights.get(xid)
            if flight is None or flight.grant is not None:
                return
            begun = self._begin(flight.reservation, reply)
            if begun is None:
                return
            flight.grant, flight.begun = begun.grant, begun
        self._link.write(begun.job, begun.deadline)

    def told(self, rank: int, xid: str, tally: Tally) -> None:
        """A rank is through with a write."""
        with self._lock:
            flight = self._flights.get(xid)
            if flight is None or flight.grant is None or rank in flight.told:
                return
            flight.told[rank] = tally
            if not self._may_commit(flight):
                return
            flight.committed = True
            grant, reservation = flight.grant, flight.reservation
        total = Tally()
        for each in flight.told.values():
            total.add(each)
        self._commit(reservation, grant, total)

    # --- Inside -----------------------------------------------------------------------------------

    def _is_current(self, reservation: Reservation) -> bool:
        now = self._epochs.now
        return now.epoch == reservation.epoch and not now.closed

    def _begin(self, reservation: Reservation, grant: Grant) -> Begun | None:
        """The write that a grant is for, if it is one for here."""
        now = self._clock()
        left = time_left(grant, reservation.at, now)
        start = grant.start - reservation.first
        end = start + len(grant.blocks)
        fits = grant.blocks and start >= 0 and end <= len(reservation.blocks)
        if not fits or left <= 0 or not self.is_ready or not self._is_current(reservation):
            return None
        job = WriteJob(
            reservation.xid, reservation.peer, reservation.blocks[start:end], tuple(grant.blocks), left
        )
        return Begun(grant, job, now + left, now)

    def _may_commit(self, flight: _Flight) -> bool:
        is_well = len(flight.told) == self._ranks and not any(tally.failed for tally in flight.told.values())
        return is_well and not flight.revoked and self._is_current(flight.reservation)

    def _commit(self, reservation: Reservation, grant: Grant, tally: Tally) -> None:
        replied_at: list[float] = []

        def on_reply(reply: Reply | None) -> None:
            at = replied_at[0] if replied_at else self._clock()
            reservation.on_committed(Committed(grant, tally, reply, at))

        self._channel.request(
            reservation.peer.address,
            Commit(reservation.peer.engine_id, grant.epoch, reservation.xid, True, tally.posted > 0),
            COMMIT_TIMEOUT,
            on_reply,
            lambda reply: replied_at.append(self._clock()),
        )
