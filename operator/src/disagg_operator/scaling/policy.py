"""How large the pools should be. Pure: what was measured, what is asked, what was decided before, and the time, in; a decision
with its reason out. terms.py has what the load asks for; here is what is done about it.

What is not known never makes a pool smaller.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from ..naming import ENGINES, Component
from .history import History, Resize
from .inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from .need import prefill_need
from .terms import FAILED_SHARE, GROW_REUSE_SECONDS, UP_SECONDS, Arithmetic, look, seconds_to_show

LATE_TICKS = 3
MOST_TURNS = 3
"""Changes of direction within an hour that shrinking may come to: growing, which is never refused, makes the fourth."""


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
    terms, tick = look(inputs, inputs.prefill, inputs.decode, limits, sizes, history, now)
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
        if (
            late is not None
            and wanted <= size
            and not self._history.moved(role, self._now, seconds_to_show(self._limits), 1)
        ):
            wanted, self._because[role] = size + 1, late
        if wanted <= size:
            if role is Component.PREFILL and self._terms.speed is None:
                self._because[role] = Because.UNKNOWN_SPEED
            return
        allowed = self._limits.up_pods - self._history.moved(role, self._now, UP_SECONDS, 1)
        if wanted - size > allowed:
            wanted, self._because[role] = size + max(allowed, 0), Because.UP_RATE
        self._sizes = self._sizes.with_size(role, wanted)

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
