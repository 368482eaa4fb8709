"""What a decision remembers of the ones before it. Pure.

Stabilization needs the wishes of a whole window. A gap in them (the operator was away, metrics were missing, a clock
jumped) makes what is older worthless, so that a pool never shrinks on less than a window of unbroken sight.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from ..naming import Component
from .inputs import Reuse, Sizes

MAX_GAP = 90.0
"""Seconds between two ticks above which they do not belong to the same unbroken time: six of the operator's ticks."""
LATE_TICK = 30.0
"""Seconds between two ticks of which one in between was missed; that is no gap, however short a window is."""
HOUR = 3600.0
"""Seconds within which changes of direction are counted."""


@dataclass(frozen=True, slots=True)
class Tick:
    """One look at the load. `at` is in seconds of a clock that only has to count evenly."""

    at: float
    reuse: Reuse
    offered: float
    """Prompt tokens per second that routers sent."""
    up: Sizes
    """As large as the load asks for."""
    down: Sizes
    """As small as the load allows."""
    sent: float = 0.0
    """Prompt tokens per second that clients would have sent if none had waited."""
    waited: bool = False
    """More waited for prefill than came in a second."""
    work: float = 0.0
    """Of `sent`, prompt tokens to compute per second."""
    decode_need: float = 0.0
    """Pods, before rounding."""
    late_first_tokens: bool = False
    """TTFT was above its target."""
    slow_tokens: bool = False
    """ITL was above its target."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A pool was resized."""

    at: float
    role: Component
    by: int
    """Pods; negative when it shrank."""


@dataclass(frozen=True)
class History:
    """Ticks of unbroken sight, and the changes of the last hour or of what may not be forgotten before; both oldest first."""

    ticks: tuple[Tick, ...] = ()
    changes: tuple[Resize, ...] = ()

    def seen_until(self, now: float, keep: float = HOUR) -> "History":
        """Without what a gap or a clock that went back makes worthless, and changes of more than an hour and `keep` seconds ago."""
        changes = tuple(c for c in self.changes if 0 <= now - c.at < max(HOUR, keep))
        unbroken = bool(self.ticks) and 0 <= now - self.ticks[-1].at <= MAX_GAP
        return History(self.ticks if unbroken else (), changes)

    def with_tick(self, tick: Tick, keep: float) -> "History":
        """With one more; those older than `keep` seconds go, but for one that shows that there were such."""
        ticks = (*self.ticks, tick)
        first = next((i for i, t in enumerate(ticks) if tick.at - t.at < keep), len(ticks) - 1)
        return replace(self, ticks=ticks[max(first - 1, 0) :])

    def with_changes(self, *changes: Resize) -> "History":
        """With what was decided."""
        return replace(self, changes=(*self.changes, *changes))

    def within(self, now: float, seconds: float) -> tuple[Tick, ...]:
        """The ticks of so many last seconds."""
        return tuple(t for t in self.ticks if now - t.at <= seconds)

    def covers(self, now: float, seconds: float) -> bool:
        """Whether sight was unbroken for so long. A gap that is longer than that itself would leave nothing to go by."""
        seen_since, longest = now, max(seconds, LATE_TICK)
        for tick in reversed(self.ticks):
            if seen_since - tick.at > longest:
                break
            seen_since = tick.at
        return bool(self.ticks) and now - seen_since >= seconds

    def moved(self, role: Component, now: float, seconds: float, sign: int) -> int:
        """Pods that were added to (sign 1) or taken from (-1) a role within so many last seconds."""
        return sum(
            abs(c.by) for c in self.changes if c.role is role and c.by * sign > 0 and now - c.at < seconds
        )

    def turns(self, role: Component, now: float) -> int:
        """How often the role's size changed its direction within the last hour."""
        signs = [c.by > 0 for c in self.changes if c.role is role and now - c.at < HOUR]
        return sum(one != other for one, other in pairwise(signs))

    def last_sign(self, role: Component, now: float) -> int:
        """1 if the role grew last, -1 if it shrank, 0 if it did neither within the last hour."""
        last = next((c.by for c in reversed(self.changes) if c.role is role and now - c.at < HOUR), 0)
        return (last > 0) - (last < 0)

    def late(self, count: int, *, tokens: bool) -> bool:
        """Whether each of so many last ticks had slow tokens, or late first ones."""
        last = self.ticks[-count:]
        return len(last) == count and all(t.slow_tokens if tokens else t.late_first_tokens for t in last)


EMPTY = History()
