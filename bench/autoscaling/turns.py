"""What clients send: conversations of turns. Pure data; see traces.py for where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.autoscaling.engines import Decode, Prefill


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that a client adds to its conversation, tokens that it gets, and the pause before its next turn."""

    new: int
    answer: int
    pause: float
    """Seconds from the end of this turn: a tool runs or somebody reads."""


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation as it will be: the same for every rule."""

    name: bytes
    """16 bytes, as the router's."""
    begins: float
    turns: tuple[Turn, ...]


@dataclass(slots=True, eq=False)
class Conversation:
    """One that runs. `tokens`: its length before the present turn."""

    script: Script
    turn: int = 0
    tokens: int = 0
    prefill: str | None = None
    """Pods of the last turn."""
    decode: str | None = None


@dataclass(slots=True, eq=False)
class Turned:
    """A turn's outcome: when it was sent, and after how long its first token came, if it did."""

    sent: float
    ttft: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at a turn."""

    conversation: Conversation
    outcome: Turned
    prompt: int
    answer: int
    decode: Decode | None = None
    """The pods that count it as in flight."""
    prefill: Prefill | None = None
    left: int = 0
    """Prompt tokens that prefill still has to compute."""
    begun: bool = False
    """Whether prefill has computed some of them."""
    joined: float = 0.0
    """When decode began on it."""
