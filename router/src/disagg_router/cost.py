"""What a turn's prompt costs on decode and on prefill, and which way is taken (`router.localPrefill`). Pure.

Seconds from a turn's dispatch to its first token, by what the router has learned (`learned`):

    on decode     decode.fixed + decode.per_token x (decode's backlog + what decode lacks)
    on prefill    prefill.fixed + prefill.per_token x (prefill's backlog + what prefill lacks)
                  + hand_over.fixed + hand_over.per_token x what decode lacks

The backlog is the prompt tokens that an engine has yet to compute before it comes to the turn (`backlog`). The cheaper way is
taken, but decode may not hold up what it generates for others: see `Guard` in `learned` for how much of its time a turn may use.

Tokens are the router's own estimate (`local_prefill`), the same in what is learned and what is asked.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import ceil
from typing import Literal

LEARNING_INTERVAL = 16
MEASURE_INTERVAL = 64
"""At most so many turns go the other way before one is sent this way to be measured, first while learning, then ever after.

Without it a way that was slow once would never be seen to have become fast again.
"""


class Reason(enum.StrEnum):
    """Why a turn's prompt is computed where it is. Where decode has to, the reason is that of `recomputed` instead."""

    DISABLED = "disabled"  # prefill computes every turn
    UNKNOWN_SIZE = "unknown_size"  # how much is new cannot be told, so prefill has it
    SMALL = "small"  # Threshold
    LARGE = "large"  # Threshold
    LEARNING = "learning"  # Auto, with Threshold's rule until enough has been measured
    MEASURE = "measure"  # Auto: this way has not been taken for long
    GUARD = "guard"  # Auto: decode would be sooner, but others would wait for their tokens
    CHEAPER = "cheaper"  # Auto


@dataclass(frozen=True, slots=True)
class Cost:
    """`fixed` seconds and `per_token` seconds a token."""

    fixed: float
    per_token: float

    def of(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What has been learned so far. `measured`: enough to go by."""

    prefill: Cost
    hand_over: Cost
    decode: Cost
    measured: bool


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a turn when it has to be placed."""

    decode_tokens: int
    """What decode lacks of the prompt: it computes it, or prefill moves it there."""
    prefill_tokens: int
    """What prefill lacks of the prompt."""
    decode_backlog: float
    prefill_backlog: float
    spare_seconds: float
    """How long decode may compute a prompt now."""
    since_decode: int
    """Turns since one was computed on decode by choice."""
    since_prefill: int
    """Turns since one was computed on prefill."""


@dataclass(frozen=True, slots=True)
class Belief:
    """That a decode engine still has a conversation, so that a turn is short there."""

    pod: str
    rested: float
    """Seconds since the conversation's last turn."""
    when: float
    """When the decision was made, by the router's clock."""
    tokens: int
    """What the engine has to compute beside, if it is wrong."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a turn's prompt is computed and why. What was not reckoned is None; times are in seconds."""

    placement: Literal["decode", "prefill"]
    reason: str
    new_tokens: int | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    situation: Situation | None = None
    belief: Belief | None = None

    def __str__(self) -> str:
        """As in the header `X-Disagg-Decision`."""
        parts = [f"placement={self.placement}", f"reason={self.reason}"]
        if self.new_tokens is not None:
            parts.append(f"new_tokens={self.new_tokens}")
        for name, seconds in (("decode_ms", self.decode_seconds), ("prefill_ms", self.prefill_seconds)):
            if seconds is not None:
                parts.append(f"{name}={ceil(seconds * 1e3)}")
        return "; ".join(parts)


def threshold(tokens: int, max_tokens: int) -> Decision:
    """Decode computes at most `max_tokens`."""
    if tokens <= max_tokens:
        return Decision("decode", Reason.SMALL, tokens)
    return Decision("prefill", Reason.LARGE, tokens)


def cheaper(at: Situation, costs: Costs, max_tokens: int) -> Decision:
    """The way that is sooner, if decode can afford it; Threshold's rule until enough has been measured to tell."""
    on_decode = costs.decode.of(at.decode_backlog + at.decode_tokens)
    on_prefill = costs.prefill.of(at.prefill_backlog + at.prefill_tokens)
    on_prefill += costs.hand_over.of(at.decode_tokens)
    affordable = seconds_of_decode(at.decode_tokens, costs) <= at.spare_seconds

    def decided(placement: Literal["decode", "prefill"], reason: Reason) -> Decision:
        return Decision(placement, reason, at.decode_tokens, on_decode, on_prefill, at)

    small = at.decode_tokens <= max_tokens
    if at.since_prefill >= (MEASURE_INTERVAL if costs.measured else LEARNING_INTERVAL):
        return decided("prefill", Reason.MEASURE)
    if not costs.measured:
        return decided("decode" if small and affordable else "prefill", Reason.LEARNING)
    if on_decode <= on_prefill:
        return decided("decode", Reason.CHEAPER) if affordable else decided("prefill", Reason.GUARD)
    if small and affordable and at.since_decode >= MEASURE_INTERVAL:
        return decided("decode", Reason.MEASURE)
    return decided("prefill", Reason.CHEAPER)


def seconds_of_decode(tokens: int, costs: Costs) -> float:
    """How long decode generates for nobody while it computes so many tokens.

    What it has before it is not known exactly, which makes a line through its measurements too flat. So a token is not taken to cost
    less there than on prefill, which runs the same model.
    """
    return max(costs.decode.per_token, costs.prefill.per_token) * tokens
