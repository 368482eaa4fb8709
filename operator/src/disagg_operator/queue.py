"""A work queue with the three guarantees that level-triggered reconciling rests on.

1. A key waits at most once, however many events name it.
2. A key is worked on by one worker at a time; named meanwhile, it is worked on once more afterwards.
3. A key whose pass failed comes back later and later; one that asked to be looked at again comes back then, or earlier
   if an event names it.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Timer(Protocol):
    """A pending call; asyncio's TimerHandle is one."""

    def cancel(self) -> None: ...

    def when(self) -> float: ...


class Timers(Protocol):
    """A clock that calls back; an asyncio event loop is one."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer: ...


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait after the n-th failure in a row: doubling from `first` up to `longest`, spread by `jitter`."""

    first: float = 1.0
    longest: float = 300.0
    jitter: float = 0.1

    def seconds(self, failures: int) -> float:
        """The wait after `failures` (1 or more) failures in a row."""
        wait = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        return wait * (1 + random.uniform(-self.jitter, self.jitter))


class WorkQueue(Generic[K]):
    """The queue of one event loop; not thread-safe."""

    def __init__(self, timers: Timers, backoff: Backoff = Backoff()) -> None:
        self._timers = timers
        self._backoff = backoff
        self._ready: deque[K] = deque()
        self._named: set[K] = set()  # wanted: waiting in _ready, or to be put back when its worker is done
        self._worked_on: set[K] = set()
        self._due: dict[K, Timer] = {}
        self._failures: dict[K, int] = {}
        self._arrival = asyncio.Event()

    def add(self, key: K, after: float = 0.0) -> None:
        """Wants a pass for `key`, now or in `after` seconds. Of several wishes the earliest counts."""
        if after <= 0:
            self._cancel(key)
            self._want(key)
            return
        if key in self._named and key not in self._worked_on:
            return  # it is about to be worked on anyway
        pending = self._due.get(key)
        if pending is not None:
            if pending.when() <= self._timers.time() + after:
                return
            pending.cancel()
        self._due[key] = self._timers.call_later(after, lambda: self._fire(key))

    def retry(self, key: K) -> float:
        """Wants another pass after a failed one; returns in how many seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        wait = self._backoff.seconds(self._failures[key])
        self.add(key, wait)
        return wait

    def succeeded(self, key: K) -> None:
        """Forgets earlier failures of `key`."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Waits for a key and hands it out; `done` must be called for it."""
        while not self._ready:
            self._arrival.clear()
            await self._arrival.wait()
        key = self._ready.popleft()
        self._named.discard(key)
        self._worked_on.add(key)
        self._cancel(key)  # this pass decides anew when to look again
        return key

    def done(self, key: K) -> None:
        """The worker is finished with `key`."""
        self._worked_on.discard(key)
        if key in self._named:
            self._push(key)

    def __len__(self) -> int:
        """Keys waiting for a worker now; not those that are due later."""
        return len(self._ready)

    def _want(self, key: K) -> None:
        if key in self._named:
            return
        self._named.add(key)
        if key not in self._worked_on:
            self._push(key)

    def _push(self, key: K) -> None:
        self._ready.append(key)
        self._arrival.set()

    def _fire(self, key: K) -> None:
        self._due.pop(key, None)
        self._want(key)

    def _cancel(self, key: K) -> None:
        pending = self._due.pop(key, None)
        if pending is not None:
            pending.cancel()
