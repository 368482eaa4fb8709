"""From what is wanted and what was seen to what to do and what to say. Pure.

`make_plan` decides what to apply and what to prune; after that was tried, `report` says what became of it: the status,
events for what changed in it, and when to look again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import product

from .api.conditions import Claim, ConditionType, Reason, fails, find, merge
from .api.scaling import AutoscalingMode
from .api.status import Condition, ConditionStatus
from .api.transfer import TransferMode
from .api.types import DisaggInferenceSpec, DisaggInferenceStatus, RoleStatus, TransferStatus
from .assess import Facts, claims, is_trouble
from .autoscale import Course, claim, reuse, summary, told
from .build.children import sealed
from .build.services import build_engine_service
from .control_secret import KeyPolicy, SecretWrite, next_write
from .drift import is_due
from .mismatch import UNSEEN, Standing
from .naming import (
    ENGINES,
    LABEL_KEEP,
    LABEL_MODE,
    LABEL_REVISION,
    SCALER_KIND,
    Component,
    Manifest,
    endpoint,
    engine_name,
)
from .observe import ObjectKey, Observed
from .pools import Pool, Pools, fit, fixed_pools, is_scaled, pools, staying
from .rollout import RevisionState, Step, next_step
from .scalers import is_marked, marked, scaler_statuses
from .wanted import Wanted, key_of
from .writes import pinned

LOOK_AGAIN_WORKING = 10.0
"""Seconds. Some causes (a volume that cannot be mounted, a quota) show only in events, which nobody tells us about."""
LOOK_AGAIN_STALLED = 30.0
COMES_BACK = timedelta(minutes=10)
"""How long the engines of a revision that served are kept without a ready decode pod while another one comes up. Longer than a
pod takes to be replaced; not for ever, since the new revision may need their devices."""
SETTLE = timedelta(seconds=8)
"""Between the last pod of a new revision becoming ready and the old revision going: EndpointSlices have to be written and
routers have to read them, or for a moment nobody would answer."""


@dataclass(frozen=True)
class Plan:
    """What to do now. Doing it twice does nothing more."""

    step: Step
    secret: SecretWrite | None = None
    """First of all: pods do not start without it."""
    apply: tuple[Manifest, ...] = ()
    """With the uid of the object that was looked at, if it exists: another one of that name is not overwritten."""
    prune: tuple[Manifest, ...] = ()
    """Objects of ours that nothing asks for any more."""
    statuses: tuple[Manifest, ...] = ()
    """Of scalers, where they are not true any more."""
    pools: Pools = field(default_factory=dict)
    """Empty if the spec cannot be read."""


@dataclass(frozen=True)
class Notice:
    """A Kubernetes event about a transition."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class Report:
    """What to say."""

    status: DisaggInferenceStatus
    notices: tuple[Notice, ...]
    look_again_after: float | None
    """Seconds; None if nothing but an event or the resync is waited for."""


def make_plan(wanted: Wanted, observed: Observed, now: datetime, policy: KeyPolicy) -> Plan:
    """What to apply and prune. A refused spec leaves everything as it is, and everything that there is serves."""
    sizes = _pools(wanted, observed, now)
    step = next_step(wanted.target, revisions(wanted, observed, sizes, now), _served(wanted.previous, now))
    if wanted.refusal is not None:
        present = {workload.revision for workload in observed.workloads if workload.revision is not None}
        return Plan(step, apply=tuple(_called_back(wanted, observed, present)), pools=sizes)
    taken = {(stranger.kind, stranger.name) for stranger in observed.strangers}
    sized = (manifest for manifest in _sized(wanted, sizes) if key_of(manifest) not in taken)
    prune = tuple(
        item for key, item in observed.live.items() if key not in wanted.keys and not _is_kept(item, step)
    )
    secret = _secret_write(wanted, observed, taken, now, policy)
    kept = set() if step.keep is None else {step.keep}
    apply = (*_due(sized, observed.live), *_called_back(wanted, observed, kept))
    return Plan(step, secret, apply, prune, scaler_statuses(wanted, observed, sizes), sizes)


def _pools(wanted: Wanted, observed: Observed, now: datetime) -> Pools:
    if wanted.spec is None:
        return {}
    found = pools(wanted.owner.name, wanted.spec, wanted.target, observed, now)
    return found if wanted.refusal is None else staying(found)


def _sized(wanted: Wanted, sizes: Pools) -> Iterator[Manifest]:
    for manifest in fit(wanted.owner.name, wanted.manifests, wanted.target, sizes):
        yield sealed(manifest, wanted.owner)


def _due(manifests: Iterable[Manifest], live: Mapping[ObjectKey, Manifest]) -> Iterator[Manifest]:
    """What has to be applied of them."""
    for manifest in manifests:
        there = live.get(key_of(manifest))
        if there is not None and manifest["kind"] == SCALER_KIND:
            if not is_marked(there, manifest):
                yield marked(there, manifest)
        elif is_due(manifest, there):
            yield pinned(manifest, there)


def _called_back(wanted: Wanted, observed: Observed, revisions: set[str]) -> Iterator[Manifest]:
    """The Services of these revisions where routers are told of pods that will go. While a rollout lasts or the spec is refused they
    do not, and have to serve until it is over."""
    owner = wanted.owner
    for revision, component in product(sorted(revisions), ENGINES):
        live = observed.live.get(("Service", engine_name(owner.name, component, revision)))
        workload = observed.engines(revision, component)
        if live is None or workload is None:
            continue
        told = live["metadata"].get("labels") or {}
        leave = told.get(LABEL_KEEP, str(workload.wanted)) != str(workload.wanted)
        if leave and told.get(LABEL_MODE) in set(TransferMode):
            mode = TransferMode(told[LABEL_MODE])
            manifest = build_engine_service(owner.name, owner.namespace, component, revision, mode)
            yield pinned(sealed(manifest, owner), live)


def is_rolling_out(wanted: Wanted, observed: Observed, plan: Plan) -> bool:
    """Whether engines are being replaced, by those of another revision or in place."""
    replaced = any(w.component in ENGINES and w.replacing for w in observed.workloads)
    return replaced or plan.step.keep is not None or plan.step.serving != wanted.target


def rendered(wanted: Wanted) -> tuple[Manifest, ...]:
    """All children of a new object, as they would be applied."""
    return () if wanted.spec is None else tuple(_sized(wanted, fixed_pools(wanted.spec)))


def _secret_write(
    wanted: Wanted, observed: Observed, taken: set[ObjectKey], now: datetime, policy: KeyPolicy
) -> SecretWrite | None:
    if wanted.secret is None or key_of(wanted.secret) in taken:
        return None
    return next_write(wanted.secret, observed.live.get(key_of(wanted.secret)), now, policy)


def _served(previous: DisaggInferenceStatus, now: datetime) -> str | None:
    """The revision that answered when last seen, or did until a moment ago."""
    decode = find(previous.conditions, ConditionType.DECODE_READY)
    if decode is None:
        return None
    lost = decode.status is not ConditionStatus.TRUE
    return None if lost and now - decode.last_transition_time > COMES_BACK else previous.revision


def revisions(wanted: Wanted, observed: Observed, sizes: Pools, now: datetime) -> list[RevisionState]:
    """Every revision that has engines, and how far each can serve."""
    # Workloads are in the order of their age: of a revision's two, the older one tells the revision's.
    found = {w.revision: w for w in reversed(observed.workloads) if w.revision is not None}
    return [
        RevisionState(
            revision=name,
            created=workload.created,
            prefill_ready=observed.ready(Component.PREFILL, name),
            decode_ready=observed.ready(Component.DECODE, name),
            complete=name == wanted.target and _is_complete(wanted, observed, sizes, now),
        )
        for name, workload in found.items()
        if name is not None
    ]


def _is_complete(wanted: Wanted, observed: Observed, sizes: Pools, now: datetime) -> bool:
    """Whether the target's engines are as the spec asks, all of them, and have been long enough for routers to know."""
    if wanted.spec is None or wanted.refusal is not None:
        return False
    for component in ENGINES:
        workload = observed.engines(wanted.target, component)
        if workload is None or not workload.settled:
            return False
        known = [
            pod
            for pod in observed.pods_of(component, wanted.target)
            if pod.ready_since is not None and now - pod.ready_since >= SETTLE
        ]
        if len(known) < sizes[component].size:
            return False
    return True


def report(
    wanted: Wanted,
    observed: Observed,
    plan: Plan,
    failures: Sequence[Exception],
    now: datetime,
    engines: Standing = UNSEEN,
    course: Course | None = None,
) -> Report:
    """The status to write and the events to send, whatever became of the plan. `course` is None if nobody decides on sizes now."""
    facts, previous = _facts(wanted, observed, plan, failures, now, engines), wanted.previous
    about_all = (*claims(facts), *_scaling_claims(wanted, course))
    conditions = merge(previous.conditions, about_all, generation=wanted.generation, now=now)
    if course is not None:
        scaling = told(course, previous.scaling)
        reused = reuse(course, previous.reuse, scaling)
    elif wanted.spec is None or is_scaled(wanted.spec):
        # Suspended or refused: what was learned holds when it goes on.
        scaling, reused = previous.scaling, previous.reuse
    else:
        scaling, reused = None, None
    status = DisaggInferenceStatus(
        observed_generation=wanted.generation,
        conditions=conditions,
        roles=tuple(_role_status(facts, component) for component in Component),
        revision=_serving(wanted, observed, plan),
        kv_transfer=_transfer(wanted.spec),
        reuse=reused,
        scaling=scaling,
        endpoint=_endpoint(wanted),
    )
    events = notices(previous.conditions, conditions)
    if course is not None and wanted.spec is not None and scaling is not previous.scaling:
        events += _resizes(course, wanted.spec.autoscaling.mode)
    again = _soonest(_look_again(conditions), *(_ends(pool, now) for pool in plan.pools.values()))
    return Report(status, events, again)


def _scaling_claims(wanted: Wanted, course: Course | None) -> Iterator[Claim]:
    if course is not None:
        yield claim(course)
    elif wanted.refusal is not None and wanted.spec is not None and is_scaled(wanted.spec):
        yield fails(ConditionType.SCALING_ACTIVE, wanted.refusal.reason, wanted.refusal.message)


def _resizes(course: Course, mode: AutoscalingMode) -> tuple[Notice, ...]:
    """An event for a decision that changes a size; whoever owns the sizes in mode External tells of them itself."""
    decision = course.decision
    if decision is None or decision.desired == decision.current or mode is AutoscalingMode.EXTERNAL:
        return ()
    grown = any(decision.desired.of(role) > decision.current.of(role) for role in ENGINES)
    reason = Reason.SCALED_UP if grown else Reason.SCALED_DOWN
    if mode is AutoscalingMode.ADVISORY:
        reason = Reason.SCALING_ADVISED
    return (Notice("Normal", reason, summary(decision)),)


def report_blind(wanted: Wanted, failure: Exception, now: datetime) -> Report:
    """The report of a pass that could not read the cluster: what was said about pods before stands."""
    previous = wanted.previous
    said = report(wanted, Observed(), Plan(Step(wanted.target, None)), [failure], now)
    new = {c.type: c for c in said.status.conditions if c.type in _SUMMARY}
    kept = tuple(c for c in previous.conditions if c.type not in _SUMMARY)
    status = said.status.model_copy(
        update={
            "conditions": (*new.values(), *kept),
            "roles": previous.roles,
            "revision": previous.revision,
            "reuse": previous.reuse,
            "scaling": previous.scaling,
        }
    )
    return Report(status, notices(previous.conditions, status.conditions), said.look_again_after)


_SUMMARY = frozenset({ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED})


def _facts(
    wanted: Wanted,
    observed: Observed,
    plan: Plan,
    failures: Sequence[Exception],
    now: datetime,
    engines: Standing,
) -> Facts:
    return Facts(
        generation=wanted.generation,
        spec=wanted.spec,
        refusal=wanted.refusal,
        target=wanted.target,
        step=plan.step,
        observed=observed,
        changing=bool(plan.apply or plan.prune),
        failures=failures,
        previous=wanted.previous.conditions,
        now=now,
        engines=engines,
        pools=plan.pools,
    )


def _serving(wanted: Wanted, observed: Observed, plan: Plan) -> str | None:
    """The revision that answers; while none does, the last one that did if its engines are still there."""
    if observed.ready(Component.DECODE, plan.step.serving) > 0:
        return plan.step.serving
    present = {workload.revision for workload in observed.workloads}
    return wanted.previous.revision if wanted.previous.revision in present else None


def _role_status(facts: Facts, component: Component) -> RoleStatus:
    engines = component is not Component.ROUTER
    pods, desired, ready = (
        facts.observed.pods_of(component),
        facts.wanted(component),
        facts.observed.ready(component),
    )
    updated = [pod for pod in pods if not engines or pod.revision == facts.target]
    pool = facts.pools.get(component)
    return RoleStatus(
        name=str(component),
        revision=(facts.target or None) if engines else None,
        desired_replicas=desired,
        replicas=len(pods),
        updated_replicas=len(updated),
        ready_replicas=ready,
        ready=f"{ready}/{desired}",
        leaving_replicas=pool.leaving if pool else 0,
        leaving_until=pool.leaving_until if pool else None,
    )


def _endpoint(wanted: Wanted) -> str | None:
    if wanted.spec is None:
        return wanted.previous.endpoint
    router = wanted.spec.router
    return endpoint(
        wanted.owner.name, wanted.owner.namespace, router.service.port, encrypted=router.tls is not None
    )


def _transfer(spec: DisaggInferenceSpec | None) -> TransferStatus | None:
    return None if spec is None else TransferStatus(mode=spec.kv_transfer.mode, backend=spec.backend)


def _look_again(conditions: Sequence[Condition]) -> float | None:
    if find(conditions, ConditionType.RECONCILING):
        return LOOK_AGAIN_WORKING
    if find(conditions, ConditionType.STALLED):
        return LOOK_AGAIN_STALLED
    return None


def _ends(pool: Pool, now: datetime) -> float | None:
    return None if pool.leaving_until is None else max((pool.leaving_until - now).total_seconds(), 0.0)


def _soonest(*seconds: float | None) -> float | None:
    return min((s for s in seconds if s is not None), default=None)


def notices(before: Sequence[Condition], after: Sequence[Condition]) -> tuple[Notice, ...]:
    """One event for each transition that a person may want to know of."""
    old: Mapping[str, Condition] = {condition.type: condition for condition in before}
    told = []
    for condition in after:
        was = old.get(condition.type)
        same = was is not None and (was.status, was.reason) == (condition.status, condition.reason)
        kind = None if same else _kind_of_notice(condition, was)
        if kind is not None:
            told.append(Notice(kind, condition.reason, f"{condition.type}: {condition.message}"))
    return tuple(told)


def _kind_of_notice(condition: Condition, was: Condition | None) -> str | None:
    match condition.type:
        case ConditionType.READY:
            return "Normal" if condition.status is ConditionStatus.TRUE else None
        case ConditionType.RECONCILING:
            return "Warning" if is_trouble(condition.reason) else "Normal"
        case ConditionType.STALLED:
            return "Warning"
        case ConditionType.SCALING_ACTIVE if condition.reason == Reason.RATIO_CONFLICT:
            return "Warning"  # only a person can end it, whatever else held the sizes before
        case _:
            served = was is not None and was.status is ConditionStatus.TRUE
            return "Warning" if served and condition.reason != Reason.SUSPENDED else None


def _is_kept(item: Manifest, step: Step) -> bool:
    of = (item["metadata"].get("labels") or {}).get(LABEL_REVISION)
    return of is not None and of == step.keep
