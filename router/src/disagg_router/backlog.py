"""The prompt tokens that engines have yet to compute for turns of this replica. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Work:
    """A prompt, `tokens` of which an engine has to compute."""

    pod: str
    tokens: int


@dataclass(slots=True)
class _Queue:
    since: float  # when the engine came to the first
    total: int = 0
    works: dict[Work, None] = field(default_factory=dict)  # in the order in which they came


class Backlog:
    """By pod. An engine is taken to compute prompts in the order in which they come, one after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[str, _Queue] = {}

    def add(self, pod: str, tokens: int) -> Work:
        """A prompt goes to the engine. It has to be given to `done` once that has computed it or lost it."""
        work = Work(pod, tokens)
        queue = self._queues.get(pod)
        if queue is None:
            queue = self._queues[pod] = _Queue(self._clock())
        queue.works[work] = None
        queue.total += tokens
        return work

    def done(self, work: Work) -> None:
        """Twice is once."""
        queue = self._queues.get(work.pod)
        if queue is None or work not in queue.works:
            return
        if next(iter(queue.works)) is work:
            queue.since = self._clock()
        del queue.works[work]
        queue.total -= work.tokens
        if not queue.works:
            del self._queues[work.pod]

    def ahead(self, pod: str, seconds_per_token: float) -> float:
        """Tokens before a prompt that would come now, less what the engine has done of the first at its usual pace."""
        queue = self._queues.get(pod)
        if queue is None:
            return 0.0
        first = next(iter(queue.works)).tokens
        elapsed = self._clock() - queue.since
        return queue.total - min(first, elapsed / seconds_per_token)
