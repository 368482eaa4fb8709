"""What the simulated clients do (conversations of turns, the same for every policy) and how fast their engines are.

`LARGE` is what docs/benchmarks/connector-gpu.md measured (Qwen3-32B's shape on H200, eager): 32,768 prompt tokens in 4.18 s, 35 ms a
step, KV at 0.8 us a token. `front` and `hand_over`, what a turn takes beside engine steps, are set so that a lone turn of 150 new
tokens takes what was measured there: 0.144 s on one engine, 0.277 s through prefill. `FAST` and `SLOW` are made up from it, to see
what is decided for a model of about 8B, and for one that is large for its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

Span = tuple[int, int]


@dataclass(frozen=True)
class Speed:
    """In seconds; `budget` in prompt tokens a step."""

    step: float = 0.035
    per_answer: float = 1e-4
    per_token: float = 4.18 / 32768
    budget: int = 8192
    front: float = 0.07
    hand_over: float = 0.1
    transfer_per_token: float = 8e-7


LARGE = Speed()
FAST = Speed(step=0.012, per_answer=3e-5, per_token=LARGE.per_token / 5, front=0.03, hand_over=0.05)
SLOW = Speed(step=0.06, per_token=LARGE.per_token * 5)


@dataclass(frozen=True)
class Turn:
    """`new`: tokens of the prompt that no engine has computed. `estimate`: what the router takes them for."""

    new: int
    estimate: int
    answer: int
    pause: float
    """Seconds from the end of the turn before."""
    first: bool
    """Of its conversation."""


@dataclass(frozen=True)
class Mix:
    """`sessions` conversations at a time, each followed by another, for so many simulated `seconds`.

    `new` are the kinds of later turns, by weight: tokens from ... to.
    """

    name: str
    sessions: int
    turns: Span
    first: Span
    new: tuple[tuple[float, Span], ...]
    answer: Span
    pause: float
    """Mean seconds between two turns, exponential: a tool runs or somebody reads."""
    speed: Speed = LARGE
    seconds: float = 360.0
    memory: int | None = None
    """Tokens whose KV an engine holds; as many as there are if it is not given."""

    def session(self, seed: int, number: int) -> Iterator[Turn]:
        """The turns of one client, conversation after conversation, without end."""
        random = Random(f"{seed} {self.name} {number}")
        kinds = [span for _, span in self.new]
        weights = [weight for weight, _ in self.new]
        while True:
            for turn in range(random.randint(*self.turns)):
                span = self.first if turn == 0 else random.choices(kinds, weights)[0]
                new = random.randint(*span)
                # Three bytes are taken for a token that mostly has four, and texts differ.
                estimate = max(int(new * 4 / 3 * random.lognormvariate(0, 0.15)), 1)
                answer = random.randint(*self.answer)
                yield Turn(new, estimate, answer, random.expovariate(1 / self.pause), first=turn == 0)


_SMALL: Span = (40, 300)
_MIXED = ((0.8, _SMALL), (0.15, (500, 2000)), (0.05, (4000, 12000)))
_MEDIUM = ((0.8, _SMALL), (0.2, (500, 2000)))
MIXES = (
    Mix("small tool results", 24, (8, 16), (2000, 6000), ((1.0, _SMALL),), (50, 200), 1.0),
    Mix("long documents", 6, (3, 6), (4000, 12000), ((1.0, (2000, 8000)),), (100, 400), 4.0, seconds=1200),
    Mix("mixed", 16, (6, 12), (2000, 8000), _MIXED, (50, 300), 2.0, seconds=720),
    Mix("prefill busy", 20, (2, 5), (6000, 14000), ((1.0, _SMALL),), (50, 200), 2.0, seconds=720),
    Mix("decode busy", 96, (8, 16), (1000, 3000), ((1.0, _SMALL),), (200, 600), 1.0),
    Mix("quiet", 2, (6, 12), (1000, 4000), ((0.5, _SMALL), (0.5, (300, 3000))), (50, 200), 3.0, seconds=1800),
    Mix("mixed, fast engines", 48, (6, 12), (2000, 8000), _MIXED, (50, 300), 2.0, FAST, 240),
    Mix("mixed, slow engines", 4, (6, 12), (1000, 3000), _MEDIUM, (50, 300), 3.0, SLOW, 1800),
)
LITTLE_MEMORY = (
    Mix(
        "mixed, little memory", 16, (6, 12), (2000, 8000), _MIXED, (50, 300), 2.0, seconds=720, memory=170_000
    ),
    Mix(
        "people, little memory",
        40,
        (6, 12),
        (2000, 8000),
        _MIXED,
        (50, 300),
        20.0,
        seconds=1200,
        memory=400_000,
    ),
)
"""Engines that cannot hold all conversations that are going on."""
