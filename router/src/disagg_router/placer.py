"""Places prompts as `router.localPrefill` wants it, and learns from the turns that went as planned. Pure but for its memory.

Learned is only from a turn's first attempt, whose prompt was computed where it was meant to be, when its answer has begun. A
turn that its client left, that failed, or whose prompt decode had to compute says nothing of what such a turn costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from disagg_router.backlog import Backlog
from disagg_router.config import LocalPrefill
from disagg_router.cost import (
    Costs,
    Decision,
    Reason,
    Situation,
    cheaper,
    seconds_of_decode,
    threshold,
)
from disagg_router.learned import Guard, Learned
from disagg_router.legs import Body
from disagg_router.local_prefill import new_tokens
from disagg_router.pick import Choice
from disagg_router.session import Placement

LEAST_PIECES = 8
"""A stream of fewer says little of the time between tokens."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """How many tokens of a prompt an engine of either role would have to compute, by the router's estimate."""

    decode: int
    prefill: int


def lacking(body: Body, last: Placement | None, choice: Choice, asks_holder: bool) -> Lacking | None:
    """What of a prompt is new to the chosen engines, None if that cannot be told.

    `last`: the conversation's last turn, as far as this replica knows. `asks_holder`: prefill gets what it lacks of a conversation
    from decode.
    """
    decode_has_it = last is not None and last.decode == choice.decode.name
    of_decode = new_tokens(body, decode_has_it)
    if of_decode is None or choice.prefill is None:
        return None
    prefill_had_it = last is not None and last.prefill == choice.prefill.name
    prefill_has_it = prefill_had_it or (asks_holder and choice.holder is not None)
    of_prefill = of_decode if prefill_has_it is decode_has_it else new_tokens(body, prefill_has_it)
    return Lacking(of_decode, of_decode if of_prefill is None else of_prefill)


class Placer:
    """`settings` are None if prefill computes every turn. `backlog` is what engines have yet to compute."""

    def __init__(self, settings: LocalPrefill | None, backlog: Backlog, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._backlog = backlog
        self._learned = Learned()
        self._guard = Guard(clock)
        self._since_decode = self._since_prefill = 0
        self.ignored: Counter[str] = Counter()
        """Measurements that were none, by what they were of."""

    @property
    def learns(self) -> bool:
        return self._settings is not None and self._settings.mode == "Auto"

    @property
    def gap(self) -> float:
        """Seconds between the pieces of streams; 0 if that is not known."""
        return self._learned.gap.value

    @property
    def counts(self) -> dict[str, int]:
        """Measurements so far."""
        learned = self._learned
        return {
            "prefill": learned.prefill.count,
            "hand_over": learned.hand_over.count,
            "decode": learned.decode.count,
        }

    def costs(self) -> Costs:
        return self._learned.costs()

    def place(self, lacking: Lacking | None, decode: str, prefill: str, running: int) -> Decision:
        """Decide for a turn that could be computed by either of two pods. `running`: turns that decode's has in flight.

        `lacking` is None if that cannot be told. Called once for an attempt: what decode is given counts from then on.
        """
        if self._settings is None:
            return Decision("prefill", Reason.DISABLED)
        if lacking is None:
            return Decision("prefill", Reason.UNKNOWN_SIZE)
        if not self.learns:
            return threshold(lacking.decode, self._settings.max_tokens)
        costs = self._learned.costs()
        situation = Situation(
            decode_tokens=lacking.decode,
            prefill_tokens=lacking.prefill,
            decode_backlog=self._backlog.ahead(decode, costs.decode.per_token),
            prefill_backlog=self._backlog.ahead(prefill, costs.prefill.per_token),
            spare_seconds=self._guard.spare(decode, running, self.gap),
            since_decode=self._since_decode,
            since_prefill=self._since_prefill,
        )
        decision = cheaper(situation, costs, self._settings.max_tokens)
        if decision.placement == "decode":
            self._since_decode, self._since_prefill = 0, self._since_prefill + 1
            if running:
                self._guard.spend(decode, seconds_of_decode(lacking.decode, costs))
        else:
            self._since_decode, self._since_prefill = self._since_decode + 1, 0
        return decision

    def learn(self, decision: Decision, first_piece: float | None, prefill_leg: float | None) -> None:
        """A turn's answer has begun, so many seconds after its legs were sent.

        `first_piece` is None if the answer comes as a whole, `prefill_leg` if prefill's leg was not sent or is not over.
        """
        at = decision.situation
        if at is None:
            return
        learned = self._learned
        if decision.placement == "decode":
            if first_piece is not None:
                taken = learned.learn_decode(at.decode_backlog + at.decode_tokens, first_piece)
                self._note("decode", taken)
            return
        if prefill_leg is None:
            return
        self._note("prefill", learned.prefill.learn(at.prefill_backlog + at.prefill_tokens, prefill_leg))
        if first_piece is not None:
            taken = learned.hand_over.learn(at.decode_tokens, first_piece - prefill_leg)
            self._note("hand_over", taken)

    def learn_gap(self, pieces: int, seconds: float) -> None:
        """So many pieces of a stream came in so many seconds, after its first."""
        if self.learns and pieces >= LEAST_PIECES:
            self._note("gap", self._learned.gap.learn(seconds / pieces))

    def _note(self, what: str, taken: bool) -> None:
        if not taken:
            self.ignored[what] += 1
