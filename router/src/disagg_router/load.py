"""What this replica has in flight on each engine, and which engines it could not reach just now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from disagg_router.pick import Load


class LoadTable:
    """Counts by pod name. `hold` is the only way to count, so that a count is always given back."""

    def __init__(self, clock: Callable[[], float], suspect_seconds: float = 5.0) -> None:
        self._clock = clock
        self._suspect_seconds = suspect_seconds
        self._inflight: dict[str, int] = {}
        self._suspect_until: dict[str, float] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Count one leg on the pod for the duration of the block."""
        self._inflight[name] = self._inflight.get(name, 0) + 1
        try:
            yield
        finally:
            left = self._inflight[name] - 1
            if left:
                self._inflight[name] = left
            else:
                del self._inflight[name]

    def suspect(self, name: str) -> None:
        """Keep turns away from the pod for a moment."""
        self._suspect_until[name] = self._clock() + self._suspect_seconds

    def clear(self, name: str) -> None:
        """The pod answered: no suspicion is left."""
        self._suspect_until.pop(name, None)

    @property
    def inflight(self) -> dict[str, int]:
        return self._inflight

    def snapshot(self) -> Load:
        now = self._clock()
        for name in [name for name, until in self._suspect_until.items() if until <= now]:
            del self._suspect_until[name]
        return Load(self._inflight, self._suspect_until.keys())
