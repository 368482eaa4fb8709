"""What to do when an attempt at a turn fails before the client was answered. Pure.

The rules are an ordered list; the first that applies decides.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from disagg_router.breaker import Blame


class Failure(enum.Enum):
    """Why an attempt failed. The value is the `reason` of metrics and logs."""

    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_REFUSED = (
        "prefill_refused"  # a 4xx: an option that prefill does not take, or the client's own mistake
    )
    PREFILL_BROKE = "prefill_broke"  # its connection ended, or what it sent is not HTTP
    PREFILL_ERROR = "prefill_error"  # a 5xx
    PREFILL_DEADLINE = "prefill_deadline"
    PREFILL_ANSWER = "prefill_answer"  # it answered, and decode cannot get the KV by what it said
    DECODE_UNREACHABLE = "decode_unreachable"
    DECODE_BROKE = "decode_broke"  # its connection ended, or what it sent is not HTTP
    DECODE_ERROR = "decode_error"  # a 5xx, or a stream that begins with an engine error
    DECODE_DEADLINE = "decode_deadline"

    @property
    def of_prefill(self) -> bool:
        return self.name.startswith("PREFILL")


_BROKEN = frozenset(
    {Failure.PREFILL_UNREACHABLE, Failure.PREFILL_BROKE, Failure.DECODE_UNREACHABLE, Failure.DECODE_BROKE}
)


def blame(failure: Failure, *, streamed: bool) -> Blame:
    """What a failed leg says about the engine that it was on."""
    if failure in (Failure.PREFILL_REFUSED, Failure.PREFILL_ANSWER):
        return Blame.NONE
    if failure is Failure.DECODE_DEADLINE and not streamed:
        return Blame.NONE  # an answer that comes as a whole may be late because it is long
    return Blame.FULL if failure in _BROKEN else Blame.SOME


class Action(enum.Enum):
    LOCAL_SAME = "the same decode engine computes the prompt itself"
    LOCAL_OTHER = "another decode engine computes the prompt itself"
    PAIR_OTHER = "another decode engine, with prefill"
    GIVE_UP = "the client gets an error"


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is known when an attempt has failed."""

    with_prefill: bool
    decode_failures: int  # in this turn, this one included
    other_decode: bool  # whether another decode engine is ready
    budget_left: bool


def next_action(failure: Failure, attempt: Attempt) -> Action:
    """Decide what follows a failed attempt."""
    if failure.of_prefill:
        # Not a second try of the same thing but the plain way to serve: it needs no budget.
        return Action.LOCAL_SAME
    if attempt.decode_failures > 1 or not attempt.budget_left:
        return Action.GIVE_UP
    if failure is Failure.DECODE_DEADLINE:
        if not attempt.with_prefill:
            return Action.GIVE_UP  # it computes by itself and is slow: another one would be no faster
        return Action.LOCAL_OTHER if attempt.other_decode else Action.LOCAL_SAME
    if attempt.other_decode:
        return Action.PAIR_OTHER
    if failure is Failure.DECODE_UNREACHABLE or not attempt.with_prefill:
        return Action.GIVE_UP
    return Action.LOCAL_SAME


class RetryBudget:
    """Lets repeated decode legs be a share of all turns at most, so that a sick pool is not hit twice as hard.

    Every turn earns `ratio` of a retry, up to `reserve`, which is also what a fresh router starts with.
    """

    def __init__(self, ratio: float = 0.2, reserve: float = 20.0) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._tokens = reserve

    def earn(self) -> None:
        self._tokens = min(self._reserve, self._tokens + self._ratio)

    @property
    def left(self) -> bool:
        return self._tokens >= 1.0

    def spend(self) -> None:
        self._tokens -= 1.0
