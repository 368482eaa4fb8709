"""Lets turns in: the queue of `admission`, with waiting and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from disagg_router.admission import Admission, Refusal, Ticket
from disagg_router.backends import Fleet, staying
from disagg_router.config import Overload


class OverloadedError(Exception):
    """A turn was not let in. Its `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class Gate:
    """Turns enter one by one; the fleet's ready decode engines decide how many there may be, less those
    that are leaving while others stay.

    Without any nobody is kept waiting: such a turn has to be told so at once.
    """

    def __init__(self, settings: Overload, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._clock = clock
        self._admission = Admission(settings.waiting_turns, settings.waiting_turns_per_session)
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        fleet.watchers.append(self._refill)

    @property
    def running(self) -> int:
        return self._admission.running

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def limit(self) -> int | None:
        """Turns that may run at a time; None while no decode engine is ready."""
        engines = staying([b for b in self._fleet.backends if b.role == "decode" and b.takes_turns])
        return len(engines) * self._settings.turns_per_engine or None

    @asynccontextmanager
    async def place(self, session: bytes) -> AsyncIterator[float]:
        """A turn's place for the duration of the block; gives the seconds that it had to wait.

        Raises OverloadedError. Whoever is cancelled, waiting or inside, frees the place.
        """
        since = self._clock()
        ticket = self._admission.arrive(session, self.limit)
        if isinstance(ticket, Refusal):
            raise OverloadedError(ticket)
        try:
            if not ticket.started:
                await self._wait(ticket)
            yield self._clock() - since
        finally:
            self._admission.leave(ticket)
            self._refill()

    async def _wait(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        self._waiters[ticket] = waiter = loop.create_future()
        timer = loop.call_later(self._settings.wait_seconds, self._expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            del self._waiters[ticket]

    @staticmethod
    def _expire(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(OverloadedError(Refusal.QUEUE_DEADLINE))
            waiter.exception()  # a client that leaves in this moment does not ask for it

    def _refill(self) -> None:
        for ticket in self._admission.start(self.limit):
            waiter = self._waiters[ticket]
            if not waiter.done():  # else it leaves at once: its client has gone or its time was over
                waiter.set_result(None)
