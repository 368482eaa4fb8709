"""Simulated time and what happens in it."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Of two things at one time the one that was asked for first is first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Call so at this time."""
        heapq.heappush(self._events, (when, next(self._order), what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Call so after so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, args))

    def run(self, until: float) -> None:
        """Let everything happen up to this time."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, args = heapq.heappop(events)
            what(*args)
        self.now = until
