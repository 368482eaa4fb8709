"""What a transfer mode decides about a turn: the transfer parameters of its two legs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from disagg_router.backends import Backend
from disagg_router.legs.body import Body


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of a turn's legs. `holder` is the decode engine that has the conversation's KV, if there is one."""

    prefill: Backend
    decode: Backend
    holder: Backend | None = None


class Mode(Protocol):
    """A way to move KV between the legs of a turn; there is one module for each."""

    def prefill_leg(self, body: Body, pair: Pair) -> bytes:
        """The body for prefill."""

    def decode_leg(self, body: Body, pair: Pair) -> bytes:
        """The body for decode, when prefill computes the prompt."""

    def dismissal(self, turn: str) -> bytes:
        """A completion that makes prefill forget the prompt of the turn whose legs had this request id."""
