"""What the engines' own figures say of their speed. Pure.

Nobody can see how fast a prefill pod could be, only how fast it was, so the speed is learned from lower bounds, of which the
greater counts:

- what pods computed per second while requests waited all the time, less one prompt an engine, which may have been
  begun before; the 90th percentile of an hour;
- what they computed per second of their requests' prefill time, which requests that run side by side each count in full; the
  median of an hour.

What handling a token costs that decode brought is at most the time that its KV took to be written or read: transfers overlap
with computing. The median of an hour counts.

An hour without a sample does not make a pod slower: what was learned last stays.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles

from ..naming import Component
from .inputs import Learned
from .names import (
    COMPUTED,
    PREFILL_SECONDS,
    PREFILLS,
    PROMPT_TOKENS,
    PUSHED,
    READ_SECONDS,
    TO_PREFILL,
    TRANSFERRED,
    WAITING,
    WRITE_SECONDS,
)
from .seen import Seen, unbroken

KEPT_SECONDS = 3600.0
LEAST_SAMPLES = 5
"""Of one kind, before anything follows from them; each is of one pod and one window."""
LEAST_SPENT = 1e-3
"""Seconds of prefill, below which nothing is divided by them: no engine is so fast."""
LEAST_PROMPTS = 3
"""An engine has to have finished within a window, for what it computed to say anything."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A sample."""

    at: float
    value: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where one pod is."""

    sampled: float
    """Samples do not overlap: the next is of what comes after."""
    waiting_since: float | None
    """Since when there were requests waiting at every look; None if there are none."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """The samples of the last hour and what has been learned. Another revision's engines are others: begin anew then."""

    busy: tuple[Lesson, ...] = ()
    """Tokens per second of a pod where requests waited."""
    spent: tuple[Lesson, ...] = ()
    """Tokens per second of prefill time, times the pod's engines."""
    carried: tuple[Lesson, ...] = ()
    """Seconds of transfer for a token from decode."""
    by_busy: float | None = None
    by_spent: float | None = None
    seconds_per_token: float | None = None
    known_cost: float | None = None
    """Resumed, until `seconds_per_token` is learned."""
    prompt_tokens: float | None = None
    """Of a mean prompt on prefill, when one was finished last."""
    marks: Mapping[str, _Mark] = field(default_factory=dict)

    @property
    def learned(self) -> Learned:
        """All that is known."""
        bounds = [bound for bound in (self.by_busy, self.by_spent) if bound is not None]
        speed, cost = max(bounds, default=None), self.known_cost
        if speed is not None and self.seconds_per_token is not None:
            cost = min(1.0, self.seconds_per_token * speed)
        return Learned(speed, cost)


def resume(tokens_per_second: float | None, remote_cost: float | None) -> Lessons:
    """Where an operator begins that remembers nothing but what its status says."""
    return Lessons(by_busy=tokens_per_second, known_cost=remote_cost)


def learn(lessons: Lessons, pods: Mapping[str, Seen], now: float, window: float) -> Lessons:
    """After one more look at `pods`."""
    usable = {name: seen for name, seen in pods.items() if not seen.why_missing(now)}
    prefill = {name: seen for name, seen in usable.items() if seen.component is Component.PREFILL}
    marks = {name: mark for name, mark in lessons.marks.items() if name in pods and mark.sampled <= now}
    busy, spent, carried = (
        list(_fresh(kept, now)) for kept in (lessons.busy, lessons.spent, lessons.carried)
    )
    for name, seen in prefill.items():
        mark = _marked(marks.get(name), seen)
        if window <= seen.seconds <= unbroken(window) and seen.points[0].at >= mark.sampled:
            busy += _busy(seen, mark, now)
            spent += _spent(seen, now)
            mark = replace(mark, sampled=seen.points[-1].at)
        marks[name] = mark
    if not carried or now - carried[-1].at >= window:
        carried += _carried(usable.values(), now)
    return replace(
        lessons,
        busy=tuple(busy),
        spent=tuple(spent),
        carried=tuple(carried),
        by_busy=_settled(busy, 9, lessons.by_busy),
        by_spent=_settled(spent, 5, lessons.by_spent),
        seconds_per_token=_settled(carried, 5, lessons.seconds_per_token),
        prompt_tokens=_mean_prompt(prefill.values(), lessons.prompt_tokens),
        marks=marks,
    )


def _fresh(lessons: Sequence[Lesson], now: float) -> Sequence[Lesson]:
    return [lesson for lesson in lessons if 0 <= now - lesson.at < KEPT_SECONDS]


def _settled(lessons: Sequence[Lesson], tenths: int, before: float | None) -> float | None:
    """That quantile, or what was known before while there are too few."""
    if len(lessons) < LEAST_SAMPLES:
        return before
    return quantiles((lesson.value for lesson in lessons), n=10, method="inclusive")[tenths - 1]


def _marked(mark: _Mark | None, seen: Seen) -> _Mark:
    at = seen.points[-1].at
    before = mark or _Mark(seen.points[0].at, None)
    waiting = seen.waiting_for_place()
    since = at if before.waiting_since is None else before.waiting_since
    return replace(before, waiting_since=since if waiting else None)


def _finished(seen: Seen) -> float:
    """Prompts for each of the pod's engines; 0 if they are too few to say anything."""
    prompts = seen.increase(PREFILLS) / len(seen.engines(WAITING))
    return prompts if prompts >= LEAST_PROMPTS else 0.0


def _busy(seen: Seen, mark: _Mark, now: float) -> Iterator[Lesson]:
    prompts, computed = _finished(seen), seen.increase(PROMPT_TOKENS, source=COMPUTED)
    if prompts and computed and mark.waiting_since is not None and mark.waiting_since <= seen.points[0].at:
        yield Lesson(now, computed * (1 - 1 / prompts) / seen.seconds)


def _spent(seen: Seen, now: float) -> Iterator[Lesson]:
    seconds, computed = seen.increase(PREFILL_SECONDS), seen.increase(PROMPT_TOKENS, source=COMPUTED)
    if _finished(seen) and computed and seconds >= LEAST_SPENT:
        yield Lesson(now, computed / seconds * len(seen.engines(WAITING)))


def _carried(pods: Collection[Seen], now: float) -> Iterator[Lesson]:
    """In mode BidirectionalPush decode writes, in BidirectionalPull prefill reads; in the others nothing comes from decode."""
    seconds = math.fsum(
        seen.increase(WRITE_SECONDS, direction=TO_PREFILL)
        if seen.component is Component.DECODE
        else seen.increase(READ_SECONDS)
        for seen in pods
    )
    tokens = math.fsum(
        seen.increase(PUSHED, direction=TO_PREFILL)
        if seen.component is Component.DECODE
        else seen.increase(PROMPT_TOKENS, source=TRANSFERRED)
        for seen in pods
    )
    if tokens:
        yield Lesson(now, seconds / tokens)


def _mean_prompt(prefill: Collection[Seen], before: float | None) -> float | None:
    prompts = math.fsum(seen.increase(PREFILLS) for seen in prefill)
    return math.fsum(seen.increase(PROMPT_TOKENS) for seen in prefill) / prompts if prompts >= 1 else before
