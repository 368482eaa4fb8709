"""Whether an engine gets turns: a circuit breaker for every pod. Pure.

    closed ──(one failed connection, or five engine errors in a row)──► open
    open ──(its time is over)──► half-open: one turn at a time probes
    half-open ──(the probe succeeds)──► closed
    half-open ──(the probe fails)──► open, for twice as long, a minute at most

A probe is answered when the first piece of its answer is there. An answer that is not streamed may be long in coming and say
nothing until then: after a minute the next turn probes beside it.

What a client does wrong is no verdict at all: it neither opens a breaker nor closes one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_FAILURES = 5
_OPEN_SECONDS = (5.0, 60.0)
_PROBE_SECONDS = 60.0


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Blame(enum.Enum):
    """What a failure says about the engine."""

    NONE = "nothing: the client or another engine may be the cause"
    SOME = "something, if nothing but such failures comes"
    FULL = "enough: it cannot be reached, or broke off"


@dataclass(frozen=True, slots=True)
class Breaker:
    """The breaker of one pod. Every event gives the next one; `now` is a monotonic time in seconds.

    `failures`: failures in a row while closed. `opened`: how often it has opened since it was last closed; 0 is closed.
    `probed_until`: for so long the turn that probes keeps others away.
    """

    failures: int = 0
    opened: int = 0
    until: float = 0.0
    probed_until: float = 0.0

    def state(self, now: float) -> State:
        if not self.opened:
            return State.CLOSED
        return State.OPEN if now < self.until else State.HALF_OPEN

    def avoided(self, now: float) -> bool:
        """Whether turns go elsewhere if they can: it is open, or a probe is under way."""
        state = self.state(now)
        return state is State.OPEN or (state is State.HALF_OPEN and now < self.probed_until)

    def begin(self, now: float) -> tuple[Breaker, bool]:
        """A turn goes to the pod; True if it is the probe."""
        if self.state(now) is not State.HALF_OPEN or now < self.probed_until:
            return self, False
        return Breaker(self.failures, self.opened, self.until, now + _PROBE_SECONDS), True

    def end_probe(self) -> Breaker:
        """The probe is over. Without a verdict before, the next turn is the next probe."""
        return Breaker(self.failures, self.opened, self.until)

    def succeed(self) -> Breaker:
        return Breaker()

    def fail(self, blame: Blame, now: float, *, probe: bool) -> Breaker:
        """A turn on the pod has failed.

        While it is not closed only the probe counts: turns that had begun before it opened, or that had nowhere else
        to go, all fail at about the same time and say nothing new.
        """
        if blame is Blame.NONE or (self.opened and not probe):
            return self
        failures = self.failures + 1
        if not self.opened and blame is Blame.SOME and failures < _FAILURES:
            return Breaker(failures)
        least, most = _OPEN_SECONDS
        seconds = min(most, least * 2.0 ** min(self.opened, 16))
        return Breaker(0, self.opened + 1, now + seconds)
