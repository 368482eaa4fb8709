"""What decode engines keep of the last turns for prefill to read (mode BidirectionalPull). Pure but for the memory.

A handle is given out once: prefill's reading it makes decode let go of the blocks, and a second reader would read whatever
came to lie there. It ends before decode's own retention does, for the same reason. Of several router replicas each conversation
has one that keeps its handle (`ownership`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disagg_router.backends import Backend
from disagg_router.legs.handback import Handback

# Of decode's retention, from before decode can have begun to count it: the rest is for the next turn's way to prefill's reading.
_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Handle:
    """`kv` lies in `decode`."""

    decode: Backend
    kv: Handback

    def readable(self, backends: Iterable[Backend], prefill: Backend) -> bool:
        """Whether the engine is still there, leaving or not, and `prefill` may read from it."""
        here = any(
            b.name == self.decode.name and b.address == self.decode.address and b.takes_turns
            for b in backends
        )
        return here and self.decode.revision == prefill.revision


class Handles:
    """At most one a conversation; those put least recently go first."""

    def __init__(
        self,
        clock: Callable[[], float],
        retention_seconds: float,
        max_entries: int = 50_000,
        max_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self.seconds = retention_seconds * _SHARE
        """How long a handle lives."""
        self._clock = clock
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[float, Handle]] = OrderedDict()

    def put(self, key: bytes, handle: Handle, until: float | None = None) -> None:
        """Keep the handle of the conversation's newest turn, instead of an older one; `until` the clock shows that, if it is not
        a new one."""
        now = self._clock()
        self._drop(key)
        self._entries[key] = (now + self.seconds if until is None else until, handle)
        self._bytes += handle.kv.size
        while self._entries:
            oldest, (ends, _) = next(iter(self._entries.items()))
            full = len(self._entries) > self._max_entries or self._bytes > self._max_bytes
            if not full and ends > now:
                break
            self._drop(oldest)

    def take(self, key: bytes) -> Handle | None:
        """The conversation's handle, once."""
        until, handle = self._drop(key)
        return handle if self._clock() < until else None

    def _drop(self, key: bytes) -> tuple[float, Handle | None]:
        until, handle = self._entries.pop(key, (0.0, None))
        if handle is not None:
            self._bytes -= handle.kv.size
        return until, handle

    def usable(self) -> list[bytes]:
        """Whose handles could be used now."""
        now = self._clock()
        return [key for key, (until, _) in self._entries.items() if now < until]

    def blocks(self) -> int:
        """KV blocks that decode keeps, by the handles that could be used now; those that several name count for each."""
        now = self._clock()
        return sum(handle.kv.blocks for until, handle in self._entries.values() if now < until)

    def engines(self, backends: Iterable[Backend]) -> int:
        """Forget what engines kept that are away: they may come back without it. Returns how many handles that were."""
        there = {(b.name, b.address) for b in backends if b.takes_turns}
        lost = [
            key
            for key, (_, handle) in self._entries.items()
            if (handle.decode.name, handle.decode.address) not in there
        ]
        for key in lost:
            self._drop(key)
        return len(lost)

    def __len__(self) -> int:
        return len(self._entries)
