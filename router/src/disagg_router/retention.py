"""How long decode engines keep a conversation that rests, by the turns that found it gone. Pure.

Engines do not tell what they evict. A turn whose conversation was taken to be on decode, and whose first token came as late as if
all of its prompt had to be computed, shows that decode had dropped it. Those that rest longest go first, so whatever has rested
as long is taken to be gone as well. How long that is changes with the load, so the belief fades.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

FADES_SECONDS = 30.0
"""In so long the time that conversations are taken to be kept doubles."""
MOST_IN_A_ROW = 3
"""Findings without a conversation that was there. After them the engine is rather slow than forgetful."""
LEAST_SECONDS = 1.0
"""A conversation that was gone counts as one that had rested for so long at least: half of nothing would be everything, and double
nothing is nothing. Of turns that overlap, the later one has not rested at all."""
_FORGOTTEN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _Finding:
    rested: float
    when: float
    in_a_row: int


class Retention:
    """By pod. Seconds are those that a conversation has rested, from the end of its last turn."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._findings: dict[str, _Finding] = {}

    def keeps(self, pod: str, rested: float) -> bool:
        """Whether a conversation is taken to be there still."""
        finding = self._findings.get(pod)
        if finding is None:
            return True
        faded = 2 ** ((finding.when - self._clock()) / FADES_SECONDS)  # comes to 0 in the long run
        # Half of it: the next attempt is when the belief has faded once, and not with the next turn.
        return rested * faded < finding.rested / 2

    def found_since(self, pod: str, when: float) -> bool:
        """Whether a conversation was found to be gone later than that: what was sent before may have waited behind its prompt."""
        finding = self._findings.get(pod)
        return finding is not None and finding.when > when

    def was_there(self, pod: str) -> None:
        """A conversation was there as believed."""
        finding = self._findings.get(pod)
        if finding is not None:
            self._findings[pod] = replace(finding, in_a_row=0)

    def was_gone(self, pod: str, rested: float) -> bool:
        """A conversation that had rested for so long seems not to be there any more; whether that is believed."""
        now = self._clock()
        finding = self._findings.get(pod)
        in_a_row = 1 if finding is None else finding.in_a_row + 1
        if in_a_row > MOST_IN_A_ROW:
            return False
        recent = {name: f for name, f in self._findings.items() if now - f.when < _FORGOTTEN_SECONDS}
        self._findings = {**recent, pod: _Finding(max(rested, LEAST_SECONDS), now, in_a_row)}
        return True

    def __len__(self) -> int:
        return len(self._findings)
