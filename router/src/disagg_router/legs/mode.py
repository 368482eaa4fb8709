"""What a transfer mode decides about a turn: the transfer parameters of its two legs, and when decode's leg can go out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from disagg_router.backends import Backend
from disagg_router.legs.body import Body

Params = Mapping[str, Any] | msgspec.Raw
"""The content of `kv_transfer_params`."""


class UnusableAnswerError(Exception):
    """Decode cannot get the prompt's KV by what prefill answered. The message says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of a turn's legs. `holder` is the decode engine that has the conversation's KV, if there is one."""

    prefill: Backend
    decode: Backend
    holder: Backend | None = None


class Mode(Protocol):
    """A way to move KV between the legs of a turn; there is one module for each."""

    @property
    def hands_back(self) -> bool:
        """Whether decode's answers that are not streamed say how the next turn's prefill can read the turn's KV."""

    @property
    def asks_holder(self) -> bool:
        """Whether prefill gets what it lacks of a conversation from the decode engine that holds it."""

    @property
    def finishes_prefill(self) -> bool:
        """Whether a prefill leg has to run to its end once decode was told of it, even if nobody wants the turn any more."""

    def why_local(self, body: Body) -> str | None:
        """Why decode has to compute this prompt itself in this mode, or None if prefill can."""

    def beforehand(self, pair: Pair) -> Params | None:
        """The parameters of decode's leg if they are known before prefill has answered: both legs then go out at once."""

    def prefill_leg(self, body: Body, pair: Pair, held: Params | None = None) -> bytes:
        """The body for prefill. `held`: what decode handed back after the turn before, if this turn continues it."""

    def heard(self, pair: Pair, answer: bytes, told: Params | None) -> Params:
        """The parameters of decode's leg, now that prefill has answered; `told` are those that decode has already.

        Raises UnusableAnswerError.
        """

    def failed(self, prefill: Backend) -> None:
        """A prefill leg has failed there."""

    def decode_leg(self, body: Body, params: Params) -> bytes:
        """The body for decode, when prefill computes the prompt."""

    def dismissal(self, turn: str) -> bytes | None:
        """A completion that makes prefill forget the prompt of the turn whose legs had this request id, if there is one."""

    def engines(self, backends: Iterable[Backend]) -> None:
        """The engines are these from now on."""


class Stateless:
    """What modes have in common that know nothing of engines beforehand and take every prompt."""

    hands_back = False
    asks_holder = False
    finishes_prefill = False

    def why_local(self, body: Body) -> str | None:
        return None

    def failed(self, prefill: Backend) -> None:
        pass

    def engines(self, backends: Iterable[Backend]) -> None:
        pass
