"""How many turns run at a time, and who is next. Pure.

Up to a limit turns start at once; those above it wait, and a place that becomes free goes round the sessions that wait,
one turn each. So what a session has to wait for depends on how many sessions wait, not on how many turns the others have
sent. Waiting is bounded, for all together and for each session.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque


class Refusal(enum.Enum):
    """Why a turn was not let in. The value is the `reason` of metrics and the error's `code`."""

    QUEUE_FULL = "queue_full"
    SESSION_QUEUE_FULL = "session_queue_full"
    QUEUE_DEADLINE = "queue_deadline"


class Ticket:
    """One turn's place, in the queue or among those that run."""

    __slots__ = ("over", "session", "started")

    def __init__(self, session: bytes) -> None:
        self.session = session
        self.started = False
        self.over = False


class Admission:
    """The queue. After each call `start` says which turns begin; a `limit` of None is none."""

    def __init__(self, max_waiting: int, max_waiting_per_session: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_per_session = max_waiting_per_session
        self._queues: OrderedDict[bytes, deque[Ticket]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    def arrive(self, session: bytes, limit: int | None) -> Ticket | Refusal:
        """A turn asks for a place. Its ticket has `started` or waits."""
        ticket = Ticket(session)
        if self._fits(limit) and not self.waiting:
            self._run(ticket)
            return ticket
        if self.waiting >= self._max_waiting:
            return Refusal.QUEUE_FULL
        queue = self._queues.get(session)
        if queue is not None and len(queue) >= self._max_waiting_per_session:
            return Refusal.SESSION_QUEUE_FULL
        self._queues.setdefault(session, deque()).append(ticket)
        self.waiting += 1
        return ticket

    def start(self, limit: int | None) -> list[Ticket]:
        """Let in whoever is next while there is room."""
        started = []
        while self._queues and self._fits(limit):
            session, queue = self._queues.popitem(last=False)
            ticket = queue.popleft()
            if queue:
                self._queues[session] = queue
            self.waiting -= 1
            self._run(ticket)
            started.append(ticket)
        return started

    def leave(self, ticket: Ticket) -> None:
        """A turn is over, or does not wait any longer. Leaving twice is leaving once."""
        if ticket.over:
            return
        ticket.over = True
        if ticket.started:
            self.running -= 1
            return
        queue = self._queues[ticket.session]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.session]
        self.waiting -= 1

    def _fits(self, limit: int | None) -> bool:
        return limit is None or self.running < limit

    def _run(self, ticket: Ticket) -> None:
        ticket.started = True
        self.running += 1
