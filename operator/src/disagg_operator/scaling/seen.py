"""One pod's metrics over time. Pure.

Counters are followed series by series (a name and its labels) from one page to the next: one that is below what it was has
begun anew at 0, and so has one that was not there. What they grow by adds up to totals, which never shrink; those are kept
at a few points of the window and one before it, and between two points the increase is their difference.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..naming import Component
from ..pages import Answer, NoPage
from .history import MAX_GAP
from .names import CAPACITY, KV_USAGE, REQUIRED, WAITING, WAITING_BY_REASON, counts

Labels = tuple[tuple[str, str], ...]
"""Sorted by their names."""
Values = Mapping[str, Mapping[Labels, float]]
"""By the sample's name and its labels."""

MAX_AGE = 60.0
"""Seconds after which a page says nothing of now."""
MAX_OUTAGE = 900.0
"""A pod that can be read again after less than so many seconds has a rate at once: the mean since it was read last."""
LEAST_SECONDS = 1.0
"""Between two points: over less, a rate is noise."""
_POINTS = 8
"""About so many points of a window are kept."""
MOST_SERIES = 5_000
"""Of one pod, in all the time that it is watched. An engine has about a hundred; labels that never come again would fill memory."""
MOST_LABEL_TEXT = 1_000
"""Characters of one series' labels."""
_TOO_MANY = f"more than {MOST_SERIES} series"
_MOST = 1e18
"""No count that means anything is above, and products of those below are finite."""


@dataclass(frozen=True, slots=True)
class Point:
    """By how much the counters had grown until then, from the pod's first page on."""

    at: float
    totals: Values


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one pod."""

    component: Component
    why: str = ""
    """Why the latest look showed nothing that can be used; empty if it did."""
    page: Values = field(default_factory=dict)
    """The newest that could be used."""
    last: Values = field(default_factory=dict)
    """The newest value of each counter that ever was on a page; it stands for one that a later page lacks."""
    points: tuple[Point, ...] = ()
    """Oldest first; the last is that of `page`."""

    def looked(self, answer: Answer, now: float, window: float) -> "Seen":
        """After one more look."""
        page = _values(self.component, answer)
        if isinstance(answer, NoPage) or isinstance(page, str):
            return replace(self, why=str(page))
        at = now - max(sample.age for sample in answer)
        if self.points and at - self.points[-1].at < LEAST_SECONDS:
            return replace(self, why="")  # what was seen before, once more
        counters = {name: series for name, series in page.items() if counts(name)}
        point = Point(at, self._totals(counters))
        last = {
            **self.last,
            **{name: {**self.last.get(name, {}), **series} for name, series in counters.items()},
        }
        if sum(map(len, last.values())) > MOST_SERIES:
            return replace(self, why=_TOO_MANY)
        points = _kept((*self.points, point), window)
        return Seen(self.component, "", page, last, points)

    def _totals(self, counters: Values) -> Values:
        if not self.points:
            return {}
        before = self.points[-1].totals
        totals = dict(before)
        for name, series in counters.items():
            last, total = self.last.get(name, {}), dict(before.get(name, {}))
            for labels, value in series.items():
                was = last.get(labels, 0.0)
                total[labels] = total.get(labels, 0.0) + (value - was if value >= was else max(0.0, value))
            totals[name] = total
        return totals

    def why_missing(self, now: float) -> str:
        """Why it cannot be used now; empty if it can."""
        if self.why or not self.points:
            return self.why or "not asked"
        return (
            ""
            if 0 <= now - self.points[-1].at <= MAX_AGE
            else f"its newest page is not of the last {MAX_AGE:g} s"
        )

    @property
    def latest(self) -> "Seen":
        """The same as far as the last two looks show it."""
        return replace(self, points=self.points[-2:])

    @property
    def seconds(self) -> float:
        """What an increase is over; 0 if there is only one look so far."""
        return self.points[-1].at - self.points[0].at if self.points else 0.0

    def increase(self, name: str, **labels: str) -> float:
        """Of all series with this name and these labels, within `seconds`."""
        return math.fsum(self.increases(name, **labels).values())

    def increases(self, name: str, **labels: str) -> Mapping[Labels, float]:
        """The same series by series."""
        if len(self.points) < 2:
            return {}
        first, last = (point.totals.get(name, {}) for point in (self.points[0], self.points[-1]))
        return {
            series: max(0.0, total - first.get(series, 0.0))
            for series, total in last.items()
            if _has(series, labels)
        }

    def now(self, name: str, **labels: str) -> float | None:
        """The sum of all series with this name and these labels on the newest page; None if there is none."""
        found = [value for series, value in self.page.get(name, {}).items() if _has(series, labels)]
        return math.fsum(found) if found else None

    def waiting_for_place(self) -> float:
        """Requests that an engine could not begin yet; without those whose KV is on its way, where vLLM tells them apart."""
        placeless = self.now(WAITING_BY_REASON, reason=CAPACITY)
        return (self.now(WAITING) or 0.0) if placeless is None else placeless

    def engines(self, name: str) -> Mapping[str, float]:
        """The greatest value of a share that is not divided by other labels, by engine."""
        found: dict[str, float] = {}
        for series, value in self.page.get(name, {}).items():
            engine = _engine(series)
            found[engine] = max(value, found.get(engine, 0.0))
        return found


def unbroken(window: float) -> float:
    """The most seconds that a window's increase may be over if looks were missed at most for as long as a tick may be late."""
    return window + window / _POINTS + MAX_GAP


def _has(series: Labels, labels: Mapping[str, str]) -> bool:
    return labels.items() <= dict(series).items() if labels else True


def _engine(series: Labels) -> str:
    return dict(series).get("engine", "")


def _kept(points: tuple[Point, ...], window: float) -> tuple[Point, ...]:
    """Those within the window and one before it. One from long before it only if there is no other to compare with."""
    now = points[-1].at
    within = [point for point in points if now - point.at < window]
    if len(within) > 2 and within[-2].at - within[-3].at < window / _POINTS:
        del within[-2]
    before = [point for point in points if now - point.at >= window][-1:]
    longest = unbroken(window) if len(within) > 1 else window + MAX_OUTAGE
    return tuple(point for point in (*before, *within) if now - point.at <= longest)


def _values(component: Component, answer: Answer) -> Values | str:
    """All of a page, or why it cannot be used."""
    if isinstance(answer, NoPage):
        return answer.why
    if len(answer) > MOST_SERIES:
        return _TOO_MANY
    found: dict[str, dict[Labels, float]] = {}
    for sample in answer:
        if sum(len(key) + len(value) for key, value in sample.labels.items()) > MOST_LABEL_TEXT:
            return f"the labels of {sample.name} are too long"
        if not math.isfinite(sample.value):
            return f"{sample.name} is no finite number"
        # A histogram's sum goes down if something less than nothing was observed, as vLLM does with requests that fail early.
        least = -_MOST if sample.name.endswith("_sum") else 0.0
        most = 1.0 if sample.name == KV_USAGE else _MOST
        if not least <= sample.value <= most:
            return f"{sample.name} is not between {least:g} and {most:g}"
        series = tuple(sorted(sample.labels.items()))
        if series in found.setdefault(sample.name, {}):
            return f"{sample.name} is there twice"
        found[sample.name][series] = sample.value
    return _gap(component, found) or found


def _gap(component: Component, found: Values) -> str:
    """Which required sample is not there, or not there for each engine."""
    required = sorted(REQUIRED[component])
    engines = {_engine(series) for name in required for series in found.get(name, {})}
    for name in required:
        lacking = engines - {_engine(series) for series in found.get(name, {})}
        if lacking or not engines:
            of = f" of engine {min(lacking)}" if len(engines) > 1 else ""
            return f"no {name}{of} on its page"
    return ""
