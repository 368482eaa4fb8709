"""How large the pools should be. Pure: what was measured, what is asked, what was decided before, and the time, in; a decision
with its reason out.

Growing and shrinking are two questions. A pool grows by the reuse that is there now, if it was there for a while too; it shrinks
by the least reuse of a long time, since it waits until every look of that time allows it. What is not known never makes a pool smaller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, median

from ..naming import ENGINES, Component
from .history import History, Resize, Tick
from .inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from .need import DEFAULT_REMOTE_COST, FULL, DecodeNeed, PrefillNeed, Speed, decode_need, prefill_need

LEAST_TOKENS = 10_000.0
"""Of prompts within a window, for their reuse to mean anything; with fewer, none is counted on."""
LEAST_SHARE = 0.1
"""Of what one pod computes in a window: as good for engines that are too slow for so many tokens. Below it a pod is enough anyway."""
GROW_REUSE_SECONDS = 300.0
LATE_TICKS = 3
FAILED_SHARE = 0.01
MOST_TURNS = 3
"""Changes of direction within an hour that shrinking may come to: growing, which is never refused, makes the fourth."""
UP_SECONDS = 60.0
SMOOTH_SECONDS = 60.0
"""Decode's KV usage is taken as the mean of so long."""
MOST_COMING = 2.0
TREND_SECONDS = 60.0
MOST_AHEAD = 120.0
"""A trend of TREND_SECONDS says nothing of a later time, however long pods take to start."""
MOST_TREND = 2.0


class Because(StrEnum):
    """What kept a role's size from what its need would be, or moved it."""

    LEAST = "MinReplicas"
    MOST = "MaxReplicas"
    STABILIZATION = "Stabilization"
    UP_RATE = "ScaleUpRate"
    DOWN_RATE = "ScaleDownRate"
    RATIO = "Ratio"
    BUDGET = "Budget"
    FULL = "NoRoom"
    OTHER_POOL = "OtherPoolFirst"
    RETAINED = "RetainedKV"
    REUSE_AT_RISK = "ReuseAtRisk"
    TRANSFERS_FAIL = "TransfersFail"
    FLAPPING = "Flapping"
    MISSING = "MetricsMissing"
    UNKNOWN_SPEED = "UnknownSpeed"
    LATE_FIRST_TOKENS = "TimeToFirstToken"
    SLOW_TOKENS = "InterTokenLatency"
    HELD = "Held"


class Outcome(StrEnum):
    """What a decision comes to."""

    GROWN = "ScaledUp"
    SHRUNK = "ScaledDown"
    STEADY = "Steady"
    HELD = "Held"
    BLIND = "MetricsUnavailable"
    CONFLICT = "RatioConstraintViolated"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The terms of a decision, for people who have to trust it."""

    reuse: Reuse
    """As measured."""
    growing_reuse: Reuse
    """As counted on for growing."""
    shrinking_reuse: Reuse
    """As counted on for shrinking, at this look: a pool shrinks to the greatest wish of a whole window, so by its least reuse."""
    offered: float
    """Prompt tokens per second that prefill's need is of: with the trend, and with what clients hold back while prompts wait."""
    speed: Speed | None
    prefill: PrefillNeed | None
    decode: DecodeNeed
    decode_pods: float = 0.0
    """Decode's need over a minute, with what will come to it."""
    decode_coming: float = 1.0
    """By what factor more will come to it: so much of decode_pods."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why."""

    outcome: Outcome
    current: Sizes
    desired: Sizes
    prefill_because: Because | None = None
    decode_because: Because | None = None
    detail: str = ""
    """What an outcome that is none of the roles' alone was about: what is missing, what holds."""
    arithmetic: Arithmetic | None = None
    """None if too little was known to calculate."""

    def because(self, role: Component) -> Because | None:
        """What limited or moved one role."""
        return self.prefill_because if role is Component.PREFILL else self.decode_because


def decide(
    inputs: Inputs,
    limits: Limits,
    sizes: Sizes,
    history: History,
    now: float,
    hold: str = "",
    full: str = "",
) -> tuple[Decision, History]:
    """The decision of one tick and what to remember of it.

    `sizes` are the pools' sizes as last decided. `hold` is why nothing may change now (a rollout), `full` why nothing may grow
    (pods that cannot be scheduled); sight goes on during either. The caller carries the decision out or not (Advisory); the history takes it that
    it is.
    """
    history = history.seen_until(now, limits.down_window)
    if inputs.prefill is None or inputs.decode is None:
        missing = ", ".join(inputs.missing) or "no pods"
        return _unchanged(Outcome.BLIND, sizes, Because.MISSING, missing), history
    terms, tick = _look(inputs, inputs.prefill, inputs.decode, limits, sizes, history, now)
    history = history.with_tick(tick, max(GROW_REUSE_SECONDS, limits.down_window, limits.up_window))
    if hold:
        return replace(_unchanged(Outcome.HELD, sizes, Because.HELD, hold), arithmetic=terms), history
    choice = _Choice(inputs, inputs.prefill, inputs.decode, limits, sizes, history, now, terms)
    decision = choice.made(full)
    changes = [
        Resize(now, role, decision.desired.of(role) - sizes.of(role))
        for role in ENGINES
        if decision.desired.of(role) != sizes.of(role)
    ]
    return decision, history.with_changes(*changes)


def _unchanged(outcome: Outcome, sizes: Sizes, because: Because, detail: str) -> Decision:
    return Decision(outcome, sizes, sizes, because, because, detail)


# What the load asks for


def _look(
    inputs: Inputs,
    load: PrefillLoad,
    decode_load: DecodeLoad,
    limits: Limits,
    sizes: Sizes,
    history: History,
    now: float,
) -> tuple[Arithmetic, Tick]:
    speed = _speed(inputs, limits)
    reuse = load.reuse if load.tokens >= _least_tokens(speed, limits) else Reuse()
    growing = _growing_reuse(reuse, inputs, limits, history, now)
    past, ahead = history.within(now, TREND_SECONDS), min(limits.pod_start_seconds, MOST_AHEAD)
    waited = load.backlog > load.offered
    sent = _sent(load, waited, limits, history, now)
    work = sent * (1.0 - growing.total)
    more = 1.0  # A pod that was taken away has its conversations computed anew once: that is no trend.
    if not history.moved(Component.PREFILL, now, 2 * TREND_SECONDS, -1):
        more = _trend([(t.at, t.work) for t in past], now, work, ahead)
    offered = max(sent, load.offered * more)
    up = None if speed is None else prefill_need(load, offered, growing, speed, limits)
    down = None if speed is None else prefill_need(load, load.offered, reuse, speed, limits)
    decode = decode_need(decode_load, limits)
    coming = max(sent, load.offered * _trend([(t.at, t.sent) for t in past], now, sent, ahead))
    # What waits for decode counts already for what is to come.
    factor = _coming(coming, load, limits) if decode_load.waiting < 1 else 1.0
    decode_pods = _steady_decode(decode, decode_load, history, now) * factor
    terms = Arithmetic(load.reuse, growing, reuse, offered, speed, up, decode, decode_pods, factor)
    late = limits.ttft_target is not None and (inputs.ttft_p95 or 0.0) > limits.ttft_target
    slow = limits.itl_target is not None and (inputs.itl_p95 or 0.0) > limits.itl_target
    tick = Tick(
        at=now,
        reuse=reuse,
        offered=load.offered,
        sent=sent,
        waited=waited,
        work=work,
        up=Sizes(
            _grown(up.pods if up else None, sizes.prefill, limits),
            _grown(decode_pods, sizes.decode, limits),
        ),
        down=Sizes(
            _shrunk(max(down.pods, up.pods) if up and down else None, sizes.prefill, limits),
            max(_shrunk(decode_pods, sizes.decode, limits), math.ceil(decode.pods * limits.kv_usage / FULL)),
        ),
        decode_need=decode.pods,
        late_first_tokens=late,
        slow_tokens=slow,
    )
    return terms, tick


def _least_tokens(speed: Speed | None, limits: Limits) -> float:
    return (
        LEAST_TOKENS
        if speed is None
        else min(LEAST_TOKENS, LEAST_SHARE * speed.tokens_per_second * limits.window)
    )


def _growing_reuse(reuse: Reuse, inputs: Inputs, limits: Limits, history: History, now: float) -> Reuse:
    """What is there now, and was there in the middle of the last minutes; of transfers that fail, nothing.

    A pool that may shrink by the reuse of a shorter time must not grow again by that of a longer one.
    """
    past = [t.reuse.total for t in history.within(now, min(GROW_REUSE_SECONDS, limits.down_window))]
    counted = reuse.scaled(min([reuse.total, median([*past, reuse.total])]))
    return replace(counted, remote=0.0) if inputs.failed_share > FAILED_SHARE else counted


def _sent(load: PrefillLoad, waited: bool, limits: Limits, history: History, now: float) -> float:
    """What clients would send if none waited: the most of the last minutes, as those whose prompts wait send nothing new.

    Also while such a time is in the window that the load is measured over, so that clients that come again are no trend.
    """
    if not waited and not any(t.waited for t in history.within(now, limits.window)):
        return load.offered
    past = history.within(now, min(GROW_REUSE_SECONDS, limits.down_window))
    return max([load.offered, *(t.offered for t in past)])


def _trend(values: Sequence[tuple[float, float]], now: float, value: float, ahead: float) -> float:
    """By what factor a growing value will have grown in `ahead` seconds, at most 2.

    It has to have grown in both halves of the time of `values` (time, value): a step is no slope.
    """
    if len(values) < 2 or value <= 0 or ahead <= 0:
        return 1.0
    (first_at, first), (middle_at, middle) = values[0], values[len(values) // 2]
    if not first_at < middle_at < now:
        return 1.0
    slope = min((middle - first) / (middle_at - first_at), (value - middle) / (now - middle_at))
    return min(1.0 + max(0.0, slope) * ahead / value, MOST_TREND)


def _coming(offered: float, load: PrefillLoad, limits: Limits) -> float:
    """How much more than now will come to decode: what prefill holds up reaches it when prefill has grown, and so does the trend."""
    served = load.tokens / limits.window
    if served <= 0:
        return 1.0
    return min(max(offered / served, 1.0), MOST_COMING)


def _steady_decode(need: DecodeNeed, load: DecodeLoad, history: History, now: float) -> float:
    """The mean of a minute, since KV usage is read at one moment; the moment's own if requests wait or an engine is full."""
    if load.waiting >= 1 or load.fullest >= FULL:
        return need.pods
    return fmean([need.pods, *(t.decode_need for t in history.within(now, SMOOTH_SECONDS))])


def _speed(inputs: Inputs, limits: Limits) -> Speed | None:
    rate = limits.tokens_per_second or inputs.learned.tokens_per_second
    if rate is None or rate <= 0:
        return None
    cost = limits.remote_cost if limits.remote_cost is not None else inputs.learned.remote_cost
    return Speed(rate, DEFAULT_REMOTE_COST if cost is None else cost)


def _grown(need: float | None, size: int, limits: Limits) -> int:
    return math.ceil(need) if need is not None and need > size * (1 + limits.tolerance) else size


def _shrunk(need: float | None, size: int, limits: Limits) -> int:
    """One pod less has to be enough with the tolerance to spare, or the pool would grow again at once."""
    if need is None:
        return size
    return math.ceil(need * (1 + limits.tolerance))


# What may be done about it


class _Choice:
    """One decision in the making: the sizes so far and what has limited each role last."""

    def __init__(
        self,
        inputs: Inputs,
        prefill: PrefillLoad,
        decode: DecodeLoad,
        limits: Limits,
        sizes: Sizes,
        history: History,
        now: float,
        terms: Arithmetic,
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._inputs, self._limits, self._history, self._now = inputs, limits, history, now
        self._current = self._sizes = sizes
        self._terms = terms
        self._because: dict[Component, Because | None] = dict.fromkeys(ENGINES)
        self._detail = ""

    def made(self, full: str) -> Decision:
        """Grow, shrink, then whatever bounds both pools together."""
        for role in ENGINES:
            self._grow(role)
        if full:
            self._do_not_grow()
        self._shrink_one()
        for role in ENGINES:
            self._clamp(role)
        conflict = not self._keep_ratio()
        self._keep_budget()
        if full:
            self._do_not_grow()
        return Decision(
            self._outcome(conflict),
            self._current,
            self._sizes,
            self._because[Component.PREFILL],
            self._because[Component.DECODE],
            self._detail,
            self._terms,
        )

    def _outcome(self, conflict: bool) -> Outcome:
        if conflict:
            return Outcome.CONFLICT
        differences = [self._sizes.of(role) - self._current.of(role) for role in ENGINES]
        if any(d > 0 for d in differences):
            return Outcome.GROWN
        return Outcome.SHRUNK if any(d < 0 for d in differences) else Outcome.STEADY

    def _bounds(self, role: Component) -> RoleLimits:
        return self._limits.prefill if role is Component.PREFILL else self._limits.decode

    def _set(self, role: Component, size: int, because: Because | None) -> None:
        self._sizes = self._sizes.with_size(role, size)
        self._because[role] = because

    # Growing

    def _grow(self, role: Component) -> None:
        size = self._current.of(role)
        now_wanted = self._history.ticks[-1].up.of(role)
        window = self._history.within(self._now, self._limits.up_window)
        wanted = min(t.up.of(role) for t in window)
        if now_wanted > wanted:
            self._because[role] = Because.STABILIZATION
        if role is Component.DECODE and wanted > size and self._is_price_of_reuse():
            wanted, self._because[role] = size, Because.RETAINED
        late = self._late(role)
        if late is not None and wanted <= size and not self._history.moved(role, self._now, self._effect, 1):
            wanted, self._because[role] = size + 1, late
        if wanted <= size:
            if role is Component.PREFILL and self._terms.speed is None:
                self._because[role] = Because.UNKNOWN_SPEED
            return
        allowed = self._limits.up_pods - self._history.moved(role, self._now, UP_SECONDS, 1)
        if wanted - size > allowed:
            wanted, self._because[role] = size + max(allowed, 0), Because.UP_RATE
        self._sizes = self._sizes.with_size(role, wanted)

    @property
    def _effect(self) -> float:
        """Seconds until a pod that was added shows in what users wait for."""
        return UP_SECONDS + self._limits.pod_start_seconds

    def _late(self, role: Component) -> Because | None:
        """Whether users have waited too long for a while, and this role is what they waited for."""
        if self._history.late(LATE_TICKS, tokens=True) and role is Component.DECODE:
            return Because.SLOW_TOKENS
        if not self._history.late(LATE_TICKS, tokens=False):
            return None
        waits_for_decode = self._decode.waiting >= 1
        waits = (
            waits_for_decode
            if role is Component.DECODE
            else self._prefill.backlog > 0 and not waits_for_decode
        )
        return Because.LATE_FIRST_TOKENS if waits else None

    def _is_price_of_reuse(self) -> bool:
        """Whether decode would be large enough without what it keeps for prefill, and nobody waits: then a shorter retention
        is the cheaper way."""
        need = self._terms.decode
        if need.without_retained is None or self._decode.waiting >= 1:
            return False
        rest = max(need.without_retained, need.sequences or 0.0)
        return rest <= self._current.decode * (1 + self._limits.tolerance)

    def _do_not_grow(self) -> None:
        for role in ENGINES:
            if self._sizes.of(role) > self._current.of(role):
                self._set(role, self._current.of(role), Because.FULL)

    # Shrinking

    def _shrink_one(self) -> None:
        """The pool with more to spare by share; never both in one tick."""
        wanted = {role: self._shrink_to(role) for role in ENGINES}
        spare = {role: (self._current.of(role) - size) for role, size in wanted.items()}
        able = [role for role in ENGINES if spare[role] > 0]
        if not able:
            return
        if any(self._sizes.of(role) > self._current.of(role) for role in ENGINES):
            for role in able:
                self._because[role] = Because.OTHER_POOL
            return
        chosen = max(able, key=lambda role: spare[role] / self._current.of(role))
        for role in able:
            if role is not chosen:
                self._because[role] = Because.OTHER_POOL
        self._set(chosen, wanted[chosen], self._because[chosen])

    def _shrink_to(self, role: Component) -> int:
        size, limits = self._current.of(role), self._limits
        now_wanted = self._history.ticks[-1].down.of(role)
        if now_wanted >= size or self._sizes.of(role) > size:
            return size
        target = max(now_wanted, self._bounds(role).least)
        if target >= size:
            self._because[role] = Because.LEAST
            return size
        why = self._why_not_smaller(role)
        if why is not None:
            self._because[role] = why
            return size
        target = max(target, *(t.down.of(role) for t in self._history.within(self._now, limits.down_window)))
        if target >= size:
            self._because[role] = Because.STABILIZATION
            return size
        allowed = limits.down_pods - self._history.moved(role, self._now, limits.down_window, -1)
        if size - target > allowed:
            target, self._because[role] = size - max(allowed, 0), Because.DOWN_RATE
        if target < size and not self._fits_without(role, size, target):
            self._because[role] = Because.REUSE_AT_RISK
            return size
        return target

    def _why_not_smaller(self, role: Component) -> Because | None:
        if self._inputs.missing:
            return Because.MISSING
        if self._inputs.failed_share > FAILED_SHARE:
            return Because.TRANSFERS_FAIL
        turns = self._history.turns(role, self._now) + (self._history.last_sign(role, self._now) > 0)
        if turns > MOST_TURNS:
            return Because.FLAPPING
        window = self._limits.down_window
        if not self._history.covers(self._now, window) or self._history.moved(role, self._now, window, 1):
            return Because.STABILIZATION
        return None

    def _fits_without(self, role: Component, size: int, target: int) -> bool:
        """Whether prefill could carry the load while the KV that goes with the leaving pods is missing.

        Prefill's own cache goes with a prefill pod. What decode holds goes with a decode pod only if nothing of it was
        written back. For that while prefill's whole speed is counted, without the share that is planned to be free.
        """
        speed, load = self._terms.speed, self._prefill
        if speed is None:
            return True
        kept, reuse = target / size, self._terms.shrinking_reuse
        if role is Component.PREFILL:
            reuse, pods = Reuse(reuse.local * kept, reuse.remote * kept), target
        elif self._limits.decode_holds_reuse:
            reuse, pods = Reuse(reuse.local, reuse.remote * kept), self._current.prefill
        else:
            return True
        need = prefill_need(load, load.offered, reuse, speed, replace(self._limits, utilization=1.0))
        return need.pods <= pods

    # Both pools together

    def _clamp(self, role: Component) -> None:
        bounds, size = self._bounds(role), self._sizes.of(role)
        if size < bounds.least:
            self._set(role, bounds.least, Because.LEAST)
        elif size > bounds.most:
            self._set(role, bounds.most, Because.MOST)

    def _clamped(self, sizes: Sizes) -> Sizes:
        p, d = self._limits.prefill, self._limits.decode
        return Sizes(
            min(max(sizes.prefill, p.least), p.most),
            min(max(sizes.decode, d.least), d.most),
        )

    def _keep_ratio(self) -> bool:
        """Raises the smaller side until the ratio holds; False if its bounds do not let it, and then the larger side grows no
        further than they do."""
        limits, sizes = self._limits, self._sizes
        if sizes.decode == 0 or sizes.prefill == 0:
            return True
        ratio = sizes.prefill / sizes.decode
        if ratio < limits.ratio_least:
            role, raised = Component.PREFILL, math.ceil(sizes.decode * limits.ratio_least - 1e-9)
        elif ratio > limits.ratio_most:
            role, raised = Component.DECODE, math.ceil(sizes.prefill / limits.ratio_most - 1e-9)
        else:
            return True
        if raised > self._bounds(role).most:
            self._detail = (
                f"{sizes.prefill} prefill and {sizes.decode} decode pods would be out of autoscaling.ratio, and {role} "
                f"may not have the {raised} pods that it would take (scaling.maxReplicas {self._bounds(role).most})"
            )
            self._because = dict.fromkeys(ENGINES, Because.RATIO)
            self._sizes = self._nearest_to_ratio(role)
            return False
        self._set(role, raised, Because.RATIO)
        return True

    def _nearest_to_ratio(self, smaller: Component) -> Sizes:
        """What may be done although the `smaller` side cannot keep the ratio: nothing makes it worse, and a larger side that is
        too large already may still shrink."""
        limits, current, aim = self._limits, self._clamped(self._current), self._sizes
        if smaller is Component.PREFILL:
            larger, beside = Component.DECODE, 1 / limits.ratio_least
        else:
            larger, beside = Component.PREFILL, limits.ratio_most
        most = math.floor(self._bounds(smaller).most * beside + 1e-9)
        size = min(aim.of(larger), max(most, current.of(larger)))
        least = math.ceil(size / beside - 1e-9) if size <= most else 0
        return current.with_size(larger, size).with_size(
            smaller, max(current.of(smaller), aim.of(smaller), least)
        )

    def _keep_budget(self) -> None:
        """Of what would be added, the pool that lacks more by share goes first; what is there is never taken away."""
        most = self._limits.max_devices
        if most is None:
            return
        aim, sizes = self._sizes, self._current
        used = sum(min(sizes.of(role), aim.of(role)) * self._bounds(role).devices for role in ENGINES)
        given = {role: min(sizes.of(role), aim.of(role)) for role in ENGINES}
        while True:
            lacking = [
                role
                for role in ENGINES
                if given[role] < aim.of(role) and used + self._bounds(role).devices <= most
            ]
            if not lacking:
                break
            role = min(lacking, key=lambda role: given[role] / max(aim.of(role), 1))
            given[role] += 1
            used += self._bounds(role).devices
        for role in ENGINES:
            if given[role] < aim.of(role):
                self._set(role, given[role], Because.BUDGET)
