"""Places prompts as `router.localPrefill` wants it, and learns from the turns that went as planned. Pure but for its memory.

Learned is only from a turn's first attempt, whose prompt was computed where it was meant to be, when its answer has begun. A
turn that its client left, that failed, or whose prompt decode had to compute says nothing of what such a turn costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from disagg_router.backlog import Backlog
from disagg_router.config import LocalPrefill
from disagg_router.cost import (
    Belief,
    Costs,
    Decision,
    Reason,
    Situation,
    cheaper,
    seconds_of_decode,
    threshold,
)
from disagg_router.learned import ENOUGH, Guard, Learned
from disagg_router.legs import Body
from disagg_router.local_prefill import all_tokens, new_tokens
from disagg_router.pick import Choice
from disagg_router.retention import Retention
from disagg_router.session import Placement

LEAST_PIECES = 8
"""A stream of fewer says little of the time between tokens."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """How many tokens of a prompt an engine of either role would have to compute, by the router's estimate."""

    decode: int
    prefill: int
    whole: int
    """All of the prompt, which decode lacks if it has dropped the conversation."""
    rested: float | None = None
    """Seconds since the end of the conversation's last turn, if that was on this decode engine."""


def lacking(
    body: Body, last: Placement | None, rested: float | None, choice: Choice, asks_holder: bool
) -> Lacking | None:
    """What of a prompt is new to the chosen engines, None if that cannot be told.

    `last`: the conversation's last turn, as far as this replica knows, and `rested` the seconds since its end. `asks_holder`:
    prefill gets what it lacks of a conversation from decode.
    """
    decode_has_it = last is not None and last.decode == choice.decode.name
    of_decode = new_tokens(body, decode_has_it)
    if of_decode is None or choice.prefill is None:
        return None
    prefill_had_it = last is not None and last.prefill == choice.prefill.name
    prefill_has_it = prefill_had_it or (asks_holder and choice.holder is not None)
    of_prefill = of_decode if prefill_has_it is decode_has_it else new_tokens(body, prefill_has_it)
    return Lacking(
        decode=of_decode,
        prefill=of_decode if of_prefill is None else of_prefill,
        whole=all_tokens(body),
        rested=rested if decode_has_it else None,
    )


class Placer:
    """`settings` are None if prefill computes every turn. `backlog` is what engines have yet to compute."""

    def __init__(self, settings: LocalPrefill | None, backlog: Backlog, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._backlog = backlog
        self._clock = clock
        self._learned = Learned()
        self._guard = Guard(clock)
        self._retention = Retention(clock)
        self._since_decode = self._since_prefill = 0
        self.ignored: Counter[str] = Counter()
        """Measurements that were none, by what they were of."""
        self.gone = 0
        """Turns for which decode had dropped a conversation that it was believed to have."""

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
        belief = self._belief(lacking, decode)
        gone = belief is None and lacking.rested is not None
        decode_tokens = lacking.whole if gone else lacking.decode
        situation = Situation(
            decode_tokens=decode_tokens,
            prefill_tokens=lacking.prefill,
            decode_backlog=self._backlog.ahead(decode, costs.decode.per_token),
            prefill_backlog=self._backlog.ahead(prefill, costs.prefill.per_token),
            spare_seconds=self._guard.spare(decode, running, self.gap),
            since_decode=self._since_decode,
            since_prefill=self._since_prefill,
        )
        decision = replace(cheaper(situation, costs, self._settings.max_tokens), belief=belief)
        if decision.placement == "decode":
            self._since_decode, self._since_prefill = 0, self._since_prefill + 1
            if running:
                self._guard.spend(decode, seconds_of_decode(decode_tokens, costs))
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
            gone = None if first_piece is None else self._found_gone(decision, first_piece)
            if first_piece is not None and gone is not None:
                tokens = at.decode_backlog + at.decode_tokens + gone
                self._note("decode", learned.learn_decode(tokens, first_piece))
            return
        if prefill_leg is None:
            return
        self._note("prefill", learned.prefill.learn(at.prefill_backlog + at.prefill_tokens, prefill_leg))
        if first_piece is not None:
            taken = learned.hand_over.learn(at.decode_tokens, first_piece - prefill_leg)
            self._note("hand_over", taken)

    def _belief(self, lacking: Lacking, decode: str) -> Belief | None:
        if lacking.rested is None or not self._retention.keeps(decode, lacking.rested):
            return None
        return Belief(decode, lacking.rested, self._clock(), lacking.whole - lacking.decode)

    def _found_gone(self, decision: Decision, first_piece: float) -> int | None:
        """Tokens of a conversation that decode was believed to have and had dropped, by when its answer began; 0 if it had it.

        None if the turn was under way when another conversation was found to be gone: it may have waited behind that one's prompt.
        """
        belief, expected = decision.belief, decision.decode_seconds
        if belief is not None and self._retention.found_since(belief.pod, belief.when):
            return None
        if belief is None or expected is None or self._learned.decode.count < ENOUGH:
            return 0
        late = seconds_of_decode(belief.tokens, self._learned.costs())
        # A difference that is smaller than what is expected is noise; above that, what is nearer to the one than to the other is that.
        if late < expected:
            return 0
        if first_piece <= expected + late / 2:
            self._retention.was_there(belief.pod)
            return 0
        if not self._retention.was_gone(belief.pod, belief.rested):
            return 0
        self.gone += 1
        return belief.tokens

    def learn_gap(self, pieces: int, seconds: float) -> None:
        """So many pieces of a stream came in so many seconds, after its first."""
        if self.learns and pieces >= LEAST_PIECES:
            self._note("gap", self._learned.gap.learn(seconds / pieces))

    def _note(self, what: str, taken: bool) -> None:
        if not taken:
            self.ignored[what] += 1
