"""What decode engines keep of the last turns for prefill to read (mode BidirectionalPull). Pure but for the memory.

A handle is given out once: prefill's reading it makes decode let go of the blocks, and a second reader would read whatever
came to lie there. It ends before decode's own retention does, for the same reason. Another router replica does not know it;
a turn that goes there is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disagg_router.backends import Backend
from disagg_router.legs.handback import Handback

# Of decode's retention: the rest is for decode's answer on its way here, and the next turn's on its way to prefill's reading.
_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Handle:
    """`kv` lies in `decode`."""

    decode: Backend
    kv: Handback

    def readable(self, backends: Iterable[Backend], prefill: Backend) -> bool:
        """Whether the engine is still there, and `prefill` may read from it."""
        here = any(
            b.name == self.decode.name and b.address == self.decode.address and b.takes_turns
            for b in backends
        )
        return here and self.decode.revision == prefill.revision


class Handles:
    """At most one a conversation; those put least recently go first."""

    def __init__(
        self, clock: Callable[[], float], retention_seconds: float, max_entries: int = 50_000
    ) -> None:
        self._clock = clock
        self._seconds = retention_seconds * _SHARE
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, tuple[float, Handle]] = OrderedDict()

    def put(self, key: bytes, handle: Handle) -> None:
        """Keep the handle of the conversation's newest turn, instead of an older one."""
        now = self._clock()
        self._entries[key] = (now + self._seconds, handle)
        self._entries.move_to_end(key)
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if len(self._entries) <= self._max_entries and oldest[0] > now:
                break
            self._entries.popitem(last=False)

    def take(self, key: bytes) -> Handle | None:
        """The conversation's handle, once."""
        until, handle = self._entries.pop(key, (0.0, None))
        return handle if handle is not None and self._clock() < until else None

    def usable(self) -> list[bytes]:
        """Whose handles could be used now."""
        now = self._clock()
        return [key for key, (until, _) in self._entries.items() if now < until]

    def engines(self, backends: Iterable[Backend]) -> int:
        """Forget what engines kept that are away: they may come back without it. Returns how many handles that were."""
        there = {(b.name, b.address) for b in backends if b.takes_turns}
        lost = [
            key
            for key, (_, handle) in self._entries.items()
            if (handle.decode.name, handle.decode.address) not in there
        ]
        for key in lost:
            del self._entries[key]
        return len(lost)

    def __len__(self) -> int:
        return len(self._entries)
