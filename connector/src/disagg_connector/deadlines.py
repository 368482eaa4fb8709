"""Things to look at again at a time. Pure.

What waits costs nothing until its time has come: an engine calls the connector several times a step, with
hundreds of turns under way, and almost always nothing is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Heap entries that are out of date are dropped when they come up, or all at once when there are many.
_SLACK = 64


class Deadlines(Generic[Key]):
    """A time for each key. Setting and taking are O(log n), `next` is O(1) amortised."""

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: Key, when: float) -> None:
        """Look at `key` at `when`, in place of any earlier wish."""
        if self._at.get(key) == when:
            return
        self._at[key] = when
        self._made += 1
        heapq.heappush(self._heap, (when, self._made, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(when, number, key) for number, (key, when) in enumerate(self._at.items())]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """Do not look at `key` any more."""
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest time, or None if there is none."""
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take(self, now: float) -> list[Key]:
        """Keys whose time has come, the earliest first; they are forgotten here."""
        due: list[Key] = []
        while True:
            first = self.next()
            if first is None or first > now:
                return due
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            due.append(key)
