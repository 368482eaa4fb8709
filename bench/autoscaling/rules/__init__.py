"""Rules that size the two pools: this project's, and those of its peers from their published descriptions.

A rule is asked every `period` seconds. It sees what pods' and routers' pages show (`Seen`), never what is coming. All of them are
told the same: the engine's speed and memory, the target for the time to first token, and how large the pools may get.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from bench.autoscaling.figures import H200, TTFT_SLO, Engine
from disagg_operator.scaling.inputs import Sizes

WINDOW = 60.0
"""Seconds over which increases of counters and percentiles are taken."""


@dataclass(frozen=True, slots=True)
class Told:
    """What somebody would configure."""

    most: int = 24
    """Pods of each role; one is the least."""
    engine: Engine = H200
    ttft_slo: float = TTFT_SLO
    start: float = H200.start
    """Seconds that pods have taken to become ready lately."""


@dataclass(frozen=True, slots=True)
class PrefillPod:
    """A ready prefill pod's page, and what the router knows of it."""

    waiting: int
    """Requests."""
    uncached_tokens: int
    """Of prompts, sent there and not computed yet."""


@dataclass(frozen=True, slots=True)
class DecodePod:
    """A ready decode pod's page."""

    usage: float
    """Of its KV cache, by what runs."""
    running: int
    waiting: int
    waiting_kv: float
    """KV of what waits, as a share of the cache."""


@dataclass(slots=True)
class Counters:
    """As pods and routers count. Tokens, but for `sent`."""

    offered: float = 0.0
    """Of prompts that routers sent."""
    sent: float = 0.0
    """Requests that routers sent."""
    answered: float = 0.0
    computed: float = 0.0
    """Of prompts, on prefill."""
    hit: float = 0.0
    """Of prompts, found in prefill's own cache."""
    pushed: float = 0.0
    """Of prompts, given by decode when asked."""
    written_back: float = 0.0
    """Whose KV decode put into prefill's cache."""

    def minus(self, before: "Counters") -> "Counters":
        """The increases since."""
        return Counters(
            self.offered - before.offered,
            self.sent - before.sent,
            self.answered - before.answered,
            self.computed - before.computed,
            self.hit - before.hit,
            self.pushed - before.pushed,
            self.written_back - before.written_back,
        )

    @property
    def finished(self) -> float:
        """Prompt tokens, however they came about."""
        return self.computed + self.hit + self.pushed

    @property
    def reuse(self) -> float:
        """Share of them that was not computed."""
        return (self.hit + self.pushed) / self.finished if self.finished else 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured."""

    now: float
    sizes: Sizes
    """As last decided."""
    ready: Sizes
    prefill: tuple[PrefillPod, ...]
    decode: tuple[DecodePod, ...]
    held_back: int
    """Requests for which routers have no pod."""
    window: Counters
    """Within the last `seconds`, `WINDOW` if the run is older than that."""
    seconds: float
    ttft_p95: float | None
    itl_p95: float | None
    draining: bool = False
    """Whether pods that were taken away still serve."""
    latest: Counters = field(default_factory=Counters)
    """Since the look before."""


class Rule(Protocol):
    """Has a memory of its own, so there is a new one for each run."""

    period: float

    def sizes(self, seen: Seen) -> Sizes:
        """What the pools are to be."""


MakeRule = Callable[[Told], Rule]
