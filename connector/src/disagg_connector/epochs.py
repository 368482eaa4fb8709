"""Of which epoch and of which weights an engine's KV is: what peers must know before they exchange any with it.

Pure. The epoch is raised whenever what has been agreed on with peers is void: a reset of the prefix cache, new
weights, a pause for either. Every message that moves KV names its receiver's epoch. The *generation* says which
weights the KV was computed with; it is a part of the fingerprint, so engines of different generations exchange
nothing. While an engine is *closed* it exchanges nothing with anybody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Closed = Literal["paused", "updating", "stale"]
"""Why an engine exchanges nothing: it is paused, asleep included; its weights are being changed; it may hold KV of
weights before."""

BOOT = "boot"


@dataclass(frozen=True)
class Standing:
    """What is true of an engine's KV at one moment."""

    epoch: int = 0
    """How often what was agreed on with peers has become void since boot."""
    version: str = BOOT
    """What vLLM was told that the weights are, or that they are those it was started with."""
    updates: int = 0
    """How often the weights have been changed since then."""
    closed: frozenset[Closed] = frozenset()

    @property
    def generation(self) -> str:
        """Names the weights: equal on two engines that were changed alike. A version that vLLM was told speaks for
        the weights however they came about, so that an engine that joins late can have the same."""
        return f"{self.version}+{self.updates}"


class Epochs:
    """An engine's standing. Changed on the engine thread, read on any: `now` is replaced, never altered."""

    def __init__(self) -> None:
        self.now = Standing()

    @property
    def epoch(self) -> int:
        return self.now.epoch

    @property
    def is_open(self) -> bool:
        """Whether KV may be exchanged at all."""
        return not self.now.closed

    def advance(self) -> None:
        """What has been agreed on so far is void."""
        self.now = replace(self.now, epoch=self.now.epoch + 1)

    def changed(self) -> None:
        """The weights are others than before, not told which."""
        self.now = replace(self.now, epoch=self.now.epoch + 1, updates=self.now.updates + 1)

    def named(self, version: str) -> None:
        """The weights are what is called `version`."""
        self.now = replace(self.now, epoch=self.now.epoch + 1, version=version, updates=0)

    def close(self, reason: Closed) -> None:
        self.now = replace(self.now, closed=self.now.closed | {reason})

    def open(self, reason: Closed) -> None:
        self.now = replace(self.now, closed=self.now.closed - {reason})
