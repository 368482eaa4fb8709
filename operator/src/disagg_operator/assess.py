"""What is true of a DisaggInference, as claims for its conditions: ordered lists of named checks, first hit wins. Pure.

`verdict` answers how far the spec is realized; `Ready`, `Reconciling` and `Stalled` are three ways to read it. The
conditions of the roles are about the revision that serves, which during a rollout is the old one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from .api.conditions import Claim, ConditionType, Reason, fails, find, holds
from .api.status import Condition
from .api.types import DisaggInferenceSpec
from .errors import KubeError, RefusedError
from .mismatch import Standing
from .naming import ENGINES, Component
from .observe import Observed, Pod, Workload
from .pools import Pools
from .rollout import Step


@dataclass(frozen=True)
class Refusal:
    """The spec as it stands is not carried out: nothing is applied, nothing pruned."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Facts:
    """All that an assessment may rest on."""

    generation: int
    spec: DisaggInferenceSpec | None
    """None if it cannot be read."""
    refusal: Refusal | None
    target: str
    """The spec's revision; empty if there is none."""
    step: Step
    observed: Observed
    changing: bool
    """Children are not yet as they should be: this pass applies or prunes some."""
    failures: Sequence[Exception]
    """What failed in this pass: requests, or the operator itself."""
    previous: Sequence[Condition]
    now: datetime
    engines: Standing
    """What engines were seen to refuse of each other."""
    pools: Pools
    """Empty if the spec cannot be read."""

    def wanted(self, component: Component) -> int:
        """Pods that are wanted."""
        if component is Component.ROUTER:
            return 0 if self.spec is None or self.spec.suspend else self.spec.router.replicas
        pool = self.pools.get(component)
        return pool.size if pool is not None else 0


class Stage(Enum):
    """How far the spec is realized."""

    DONE = auto()
    WORKING = auto()
    """It will be, or it may be if somebody helps: the deadline runs."""
    STUCK = auto()
    """It will not be without somebody's help."""
    OFF = auto()
    """Nothing runs, on purpose."""


@dataclass(frozen=True)
class Verdict:
    """The first check that held."""

    stage: Stage
    reason: Reason
    message: str


_WAITING = frozenset({Reason.PROGRESSING, Reason.PODS_STARTING, Reason.ROLLOUT_IN_PROGRESS, Reason.DRAINING})
"""Reasons that are nobody's fault."""


def is_trouble(reason: str) -> bool:
    """Whether a reason of Reconciling names an obstacle and not only time."""
    return reason not in _WAITING


def claims(facts: Facts) -> tuple[Claim, ...]:
    """What to put into status.conditions."""
    found = verdict(facts)
    roles = [_component_claim(facts, component, found) for component in Component]
    return (*_summary(found), *roles, _compatible(facts))


def verdict(facts: Facts) -> Verdict:
    """How far the spec is realized, with the deadline applied."""
    found = next(hit for check in _CHECKS if (hit := check(facts)) is not None)
    if found.stage is not Stage.WORKING or not _is_overdue(facts):
        return found
    deadline = facts.spec.rollout.progress_deadline_seconds if facts.spec else 0
    reason = found.reason if is_trouble(found.reason) else Reason.DEADLINE_EXCEEDED
    return Verdict(
        Stage.STUCK,
        reason,
        f"no progress for {deadline} s (rollout.progressDeadlineSeconds): {found.message}",
    )


def _summary(found: Verdict) -> list[Claim]:
    reason, message = found.reason, found.message
    match found.stage:
        case Stage.DONE:
            return [holds(ConditionType.READY, reason, message)]
        case Stage.WORKING:
            return [
                fails(ConditionType.READY, reason, message),
                holds(ConditionType.RECONCILING, reason, message),
            ]
        case Stage.STUCK:
            return [
                fails(ConditionType.READY, reason, message),
                holds(ConditionType.STALLED, reason, message),
            ]
        case Stage.OFF:
            return [fails(ConditionType.READY, reason, message)]


# The verdict's checks, in order


def _spec_is_refused(facts: Facts) -> Verdict | None:
    if facts.refusal is None:
        return None
    return Verdict(Stage.STUCK, facts.refusal.reason, facts.refusal.message)


def _name_is_taken(facts: Facts) -> Verdict | None:
    for stranger in facts.observed.strangers:
        what = f"{stranger.kind} {stranger.name}"
        if stranger.predecessor:
            message = (
                f"{what} belongs to a deleted DisaggInference of this name; waiting for it to be collected"
            )
            return Verdict(Stage.WORKING, Reason.NOT_OWNED, message)
        message = f"{what} exists and is not controlled by this DisaggInference: it is left alone. Delete it, or use another name"
        return Verdict(Stage.STUCK, Reason.NOT_OWNED, message)
    return None


def _child_is_refused(facts: Facts) -> Verdict | None:
    for failure in facts.failures:
        if isinstance(failure, RefusedError):
            if failure.by_quota:
                return Verdict(Stage.WORKING, Reason.QUOTA_EXCEEDED, str(failure))
            if failure.status == 403:
                return Verdict(Stage.WORKING, Reason.API_ERROR, str(failure))
            return Verdict(Stage.STUCK, Reason.INVALID_TEMPLATE, str(failure))
    return None


def _request_failed(facts: Facts) -> Verdict | None:
    for failure in facts.failures:
        if isinstance(failure, KubeError):
            return Verdict(Stage.WORKING, Reason.API_ERROR, f"{failure}; it is tried again")
    return None


def _operator_failed(facts: Facts) -> Verdict | None:
    if not facts.failures:
        return None
    what = f"{type(facts.failures[0]).__name__}: {facts.failures[0]}"
    return Verdict(
        Stage.WORKING, Reason.INTERNAL_ERROR, f"a fault of the operator, its log has the stack: {what}"
    )


def _is_suspended(facts: Facts) -> Verdict | None:
    if facts.spec is None or not facts.spec.suspend:
        return None
    pods = len(facts.observed.pods)
    if pods or facts.changing:
        return Verdict(Stage.WORKING, Reason.DRAINING, f"suspended; {pods} pods finish their turns")
    return Verdict(Stage.OFF, Reason.SUSPENDED, "spec.suspend is true: no pods run")


def _changes_take_effect(facts: Facts) -> Verdict | None:
    if not facts.changing:
        return None
    return _working(facts, Reason.PROGRESSING, "changes were applied and take effect")


def _pods_are_refused(facts: Facts) -> Verdict | None:
    for workload in _aimed_at(facts):
        if workload.refusal is not None:
            message = f"{workload.kind} {workload.name}: {workload.refusal.message}"
            return _working(facts, workload.refusal.reason, message)
    return None


def _pods_are_in_trouble(facts: Facts) -> Verdict | None:
    troubled = [pod for pod in _pods_aimed_at(facts) if pod.trouble is not None]
    if not troubled or troubled[0].trouble is None:
        return None
    first = troubled[0].trouble
    return _working(facts, first.reason, first.message + _and_more(troubled))


def _pods_are_starting(facts: Facts) -> Verdict | None:
    missing = []
    for component in Component:
        revision = None if component is Component.ROUTER else facts.target
        ready, wanted = facts.observed.ready(component, revision), facts.wanted(component)
        workload = _workload(facts, component, facts.target)
        if ready < wanted or workload is None or not workload.settled:
            missing.append(f"{component} {ready}/{wanted} ready")
    if not missing:
        return None
    reason = Reason.PODS_STARTING if facts.step.keep is None else Reason.ROLLOUT_IN_PROGRESS
    return _working(facts, reason, f"revision {facts.target} is coming up: {', '.join(missing)}")


def _old_revision_is_about_to_go(facts: Facts) -> Verdict | None:
    if facts.step.keep is None:
        return None
    return _working(facts, Reason.ROLLOUT_IN_PROGRESS, f"revision {facts.target} is ready and takes over")


def _everything_is_ready(facts: Facts) -> Verdict | None:
    return Verdict(Stage.DONE, Reason.READY, f"revision {facts.target} serves")


_CHECKS: tuple[Callable[[Facts], Verdict | None], ...] = (
    _spec_is_refused,
    _name_is_taken,
    _child_is_refused,
    _request_failed,
    _operator_failed,
    _is_suspended,
    _changes_take_effect,
    _pods_are_refused,
    _pods_are_in_trouble,
    _pods_are_starting,
    _old_revision_is_about_to_go,
    _everything_is_ready,
)


def _working(facts: Facts, reason: Reason, message: str) -> Verdict:
    """With a word about who serves in the meantime."""
    kept = facts.step.keep
    if kept is not None:
        ready = {component: facts.observed.ready(component, kept) for component in ENGINES}
        pods = f"{ready[Component.PREFILL]} prefill, {ready[Component.DECODE]} decode ready"
        message = f"{message}; revision {kept} serves meanwhile ({pods})"
    return Verdict(Stage.WORKING, reason, message)


# The deadline


def _is_overdue(facts: Facts) -> bool:
    """Whether there was no progress for as long as the spec allows.

    Progress is a change that we made, or a pod that became ready. Once stalled, only progress ends it.
    """
    if facts.spec is None or facts.changing:
        return False
    moments = [workload.applied for workload in _aimed_at(facts)]
    moments += [pod.ready_since for pod in _pods_aimed_at(facts) if pod.ready_since is not None]
    stalled = find(facts.previous, ConditionType.STALLED)
    if stalled is not None and stalled.observed_generation == facts.generation:
        return all(moment <= stalled.last_transition_time for moment in moments)
    reconciling = find(facts.previous, ConditionType.RECONCILING)
    moments.append(reconciling.last_transition_time if reconciling is not None else facts.now)
    deadline = timedelta(seconds=facts.spec.rollout.progress_deadline_seconds)
    return facts.now - max(moments) >= deadline


# Conditions of the parts


def _component_claim(facts: Facts, component: Component, found: Verdict) -> Claim:
    type_ = {
        Component.PREFILL: ConditionType.PREFILL_READY,
        Component.DECODE: ConditionType.DECODE_READY,
        Component.ROUTER: ConditionType.ROUTER_READY,
    }[component]
    revision = None if component is Component.ROUTER else facts.step.serving
    workload = _workload(facts, component, facts.step.serving)
    pods, ready = facts.observed.pods_of(component, revision), facts.observed.ready(component, revision)
    carried_out = facts.refusal is None
    if carried_out and facts.spec is not None and facts.spec.suspend:
        return fails(type_, Reason.SUSPENDED, "spec.suspend is true")
    if workload is None:
        return fails(type_, found.reason, found.message)
    as_asked = carried_out and revision in (None, facts.target)
    wanted = facts.wanted(component) if as_asked else workload.wanted
    count = f"{ready} of {wanted} pods ready"
    if ready >= wanted:
        return holds(type_, Reason.READY, count)
    troubled = [pod for pod in pods if pod.trouble is not None]
    trouble = workload.refusal or (troubled[0].trouble if troubled else None)
    if trouble is None:
        return fails(type_, Reason.PODS_STARTING, count)
    return fails(type_, trouble.reason, f"{count}; {trouble.message}{_and_more(troubled)}")


def _compatible(facts: Facts) -> Claim:
    refusal = facts.refusal
    if refusal is not None and refusal.reason is Reason.ARGUMENTS_DIFFER:
        return fails(ConditionType.REVISIONS_COMPATIBLE, refusal.reason, refusal.message)
    if facts.engines.refused_at is not None:
        return fails(ConditionType.REVISIONS_COMPATIBLE, Reason.FINGERPRINT_MISMATCH, facts.engines.message)
    message = "prefill and decode have the same KV layout"
    if facts.engines.blind:
        message += (
            "; whether engines refuse each other's KV is not known: no page of their metrics could be read"
        )
    return holds(ConditionType.REVISIONS_COMPATIBLE, Reason.COMPATIBLE, message)


# Selections


def _workload(facts: Facts, component: Component, revision: str) -> Workload | None:
    if component is Component.ROUTER:
        return facts.observed.router
    return facts.observed.engines(revision, component)


def _aimed_at(facts: Facts) -> list[Workload]:
    found = (_workload(facts, component, facts.target) for component in Component)
    return [workload for workload in found if workload is not None]


def _pods_aimed_at(facts: Facts) -> list[Pod]:
    return [
        pod
        for component in Component
        for pod in facts.observed.pods_of(component, None if component is Component.ROUTER else facts.target)
    ]


def _and_more(troubled: Sequence[Pod]) -> str:
    more = len(troubled) - 1
    return f" (and {more} more {'pod' if more == 1 else 'pods'})" if more > 0 else ""
