"""Loads over time: who arrives when, and what happens to pods and caches. Seeded; the same for every rule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import cos, pi
from random import Random

from bench.autoscaling.turns import Script, Turn
from disagg_operator.naming import Component

WARM_UP = 300.0
"""Seconds at the beginning that are left out of the results: the first conversations are all new."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Kind:
    """What conversations are like. Tokens."""

    turns: Span
    first: Span
    """A first prompt, beside the system prompt."""
    new: Span
    """Added in later turns: what tools gave, or somebody wrote."""
    answer: Span
    pause: float
    """Mean seconds between turns, exponential."""

    def script(self, random: Random, begins: float) -> Script:
        """One conversation."""
        turns = tuple(
            Turn(
                random.randint(*(self.new if n else self.first)),
                random.randint(*self.answer),
                random.expovariate(1 / self.pause),
            )
            for n in range(random.randint(*self.turns))
        )
        return Script(random.randbytes(16), begins, turns)


ASSISTANT = Kind((4, 10), (2000, 6000), (200, 1500), (150, 500), 20.0)
"""Somebody works with an assistant: documents first, then questions."""
AGENT = Kind((12, 24), (3000, 8000), (200, 2400), (60, 300), 4.0)
"""An agent with tools: many turns, short answers, results of tools up to a file."""
CHAT = Kind((4, 8), (1000, 3000), (100, 700), (150, 400), 10.0)
"""Short prompts, so that one is in time even if all of it has to be computed."""
SINGLE = Kind((1, 1), (1500, 6000), (1, 1), (100, 300), 1.0)
"""Nothing to come back for."""


@dataclass(frozen=True)
class Trace:
    """`losses` are (when, role, ordinal) of pods that die. `start`: seconds that pods take to become ready, if not the engine's."""

    name: str
    seconds: float
    scripts: tuple[Script, ...]
    first_sizes: Span
    """Pods at the beginning, prefill and decode: what the load needs then."""
    system: int = 2000
    """Tokens that all prompts begin with."""
    event_at: float | None = None
    """When what the trace is about happens; recovery is measured from then on."""
    flush_at: float | None = None
    """From then on no prompt goes on with what is cached of its conversation: clients have begun to put something new in front."""
    losses: tuple[tuple[float, Component, int], ...] = ()
    start: float | None = None


def _arrivals(random: Random, seconds: float, most: float, rate: Callable[[float], float]) -> list[float]:
    """Times of a Poisson process of a rate that is at most `most`."""
    times: list[float] = []
    now = 0.0
    while True:
        now += random.expovariate(most)
        if now >= seconds:
            return times
        if random.random() * most < rate(now):
            times.append(now)


def _scripts(
    seed: int, name: str, seconds: float, kind: Kind, most: float, rate: Callable[[float], float]
) -> tuple[Script, ...]:
    random = Random(f"{seed} {name}")
    return tuple(kind.script(random, at) for at in _arrivals(random, seconds, most, rate))


def _bump(now: float, begins: float, lasts: float, edge: float) -> float:
    """0 outside, 1 inside, straight lines between."""
    return min(max(min(now - begins, begins + lasts - now) / edge, 0.0), 1.0)


HOUR = 3600.0


@cache
def traces(seed: int) -> tuple[Trace, ...]:
    """All of them."""

    def made(
        name: str, kind: Kind, seconds: float, most: float, rate: Callable[[float], float]
    ) -> tuple[Script, ...]:
        return _scripts(seed, name, seconds, kind, most, rate)

    def flat(per_second: float) -> Callable[[float], float]:
        return lambda now: per_second

    def bursts(now: float) -> float:
        """Twice, within two minutes, to three times the load, for five minutes, and back."""
        return 0.5 + max(_bump(now, 1200, 420, 120), _bump(now, 2400, 420, 120))

    def day(now: float) -> float:
        return 0.75 - 0.55 * cos(2 * pi * now / (2 * HOUR))

    return (
        Trace("steady", HOUR, made("steady", ASSISTANT, HOUR, 0.8, flat(0.8)), (2, 5)),
        Trace("burst", HOUR, made("burst", ASSISTANT, HOUR, 1.5, bursts), (2, 4)),
        Trace("diurnal", 2 * HOUR, made("diurnal", ASSISTANT, 2 * HOUR, 1.3, day), (1, 2)),
        Trace("agents", HOUR, made("agents", AGENT, HOUR, 0.4, flat(0.4)), (3, 5)),
        Trace(
            "reuse collapse",
            HOUR,
            made("collapse", CHAT, HOUR, 1.0, flat(1.0)),
            (2, 3),
            event_at=1800,
            flush_at=1800,
            system=500,
        ),
        Trace(
            "pod loss",
            HOUR,
            made("loss", ASSISTANT, HOUR, 0.8, flat(0.8)),
            (2, 5),
            event_at=1800,
            losses=((1800, Component.PREFILL, 0), (2700, Component.DECODE, 0)),
        ),
        Trace("slow start", HOUR, made("slow", ASSISTANT, HOUR, 1.5, bursts), (2, 4), start=300),
        Trace(
            "single turns",
            HOUR,
            made("single", SINGLE, HOUR, 5, lambda now: 3 - 2 * cos(2 * pi * now / HOUR)),
            (1, 1),
            system=500,
        ),
    )
