"""The autoscaling of one DisaggInference, from look to look: whom to ask, what to decide, what to say. Pure.

`scaling` knows loads and sizes; this module knows the object, its pods and its status.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from statistics import median

from .api.conditions import Claim, ConditionType, Reason, cut, fails, holds
from .api.scaling import AutoscalingMode
from .api.status import (
    LearnedStatus,
    ReuseStatus,
    RoleScalingStatus,
    ScalingInputsStatus,
    ScalingStatus,
)
from .api.transfer import TransferMode
from .api.types import DisaggInferenceSpec, DisaggInferenceStatus
from .naming import ADMIN_PORT, ENGINES, HTTP_PORT, SCALER_KIND, Component, role_name
from .observe import Observed, Pod
from .pages import Answer, Target
from .pools import Pools, is_scaled, role_of
from .revision import parse_flags
from .scaling.history import EMPTY, History
from .scaling.inputs import DecodeLoad, Inputs, Limits, PrefillLoad, RoleLimits, Sizes
from .scaling.learned import resume as resume_lessons
from .scaling.names import NAMES
from .scaling.policy import Because, Decision, Outcome, decide
from .scaling.signals import NOTHING, Sight, measure, see
from .scaling.terms import Arithmetic

TICK_SECONDS = 15.0
_EARLY = 2.0
"""Seconds that a look may come before its time: the queue spreads passes by a tenth."""
TELL_EVERY = timedelta(seconds=60)
"""A status whose decision is the same is written again this often, for its numbers."""
LONG_WITHOUT_ROOM = timedelta(minutes=5)
"""A pod may wait for its node, or for a quota, so long; from then on there is no room, and asking for more is of no use."""
LONGEST_START = 1800.0
"""Seconds. A pod that took longer was in trouble, and says nothing of the next one's."""
_MOST_NAMED = 5
_MOST_TOLD = 2**53
"""Greater numbers are told as this one: no load has them, and a status with one would be refused."""
NOT_LOOKED = Inputs(None, None)


@dataclass(frozen=True)
class Course:
    """What is remembered between looks."""

    uid: str = ""
    """Whose."""
    revision: str = ""
    """Whose engines `sight` is about."""
    sight: Sight = NOTHING
    history: History = EMPTY
    looked_at: float | None = None
    """By the even clock."""
    inputs: Inputs = NOT_LOOKED
    full: str = ""
    """Why no pool may grow; empty if it may."""
    decision: Decision | None = None
    """The latest."""
    decided: datetime | None = None
    window: int = 0


def begin(uid: str, previous: DisaggInferenceStatus, revision: str) -> Course:
    """Where an operator begins that remembers nothing: with what the status says was learned of the same engines."""
    told = previous.scaling.learned if previous.scaling else None
    if told is None or previous.revision != revision:
        return Course(uid, revision)
    cost = told.remote_token_cost_milli
    lessons = resume_lessons(told.prefill_tokens_per_second, None if cost is None else cost / 1000)
    return Course(uid, revision, Sight(lessons=lessons))


def is_due(course: Course, now: float) -> bool:
    """Whether it is time for another look; also when the clock went back."""
    return course.looked_at is None or not 0 <= now - course.looked_at < TICK_SECONDS - _EARLY


def rest(course: Course, now: float) -> float:
    """Seconds until it is time for another look."""
    return 0.0 if is_due(course, now) or course.looked_at is None else course.looked_at + TICK_SECONDS - now


def targets(observed: Observed, namespace: str, revision: str) -> dict[str, Target]:
    """Whom to ask, by the name of each ready pod, and for what: routers and the engines of one revision."""
    return {
        pod.name: Target(namespace, pod.address, _port(component), NAMES[component])
        for component in Component
        for pod in _asked(observed, component, revision)
        if pod.address is not None
    }


def _asked(observed: Observed, component: Component, revision: str) -> list[Pod]:
    of = None if component is Component.ROUTER else revision
    return [pod for pod in observed.pods_of(component, of) if pod.ready]


def _port(component: Component) -> int:
    return ADMIN_PORT if component is Component.ROUTER else HTTP_PORT


def look(
    course: Course,
    spec: DisaggInferenceSpec,
    observed: Observed,
    pools: Pools,
    pages: Mapping[str, Answer],
    hold: str,
    full: str,
    even: float,
    now: datetime,
) -> Course:
    """The course after one more look.

    `pages` has the answers of `targets`, `hold` and `full` are what `why_held` and `why_full` say, `even` is the even clock's time.
    """
    window = spec.autoscaling.window_seconds
    pods = {
        component: [pod.name for pod in _asked(observed, component, course.revision)]
        for component in Component
    }
    sight = see(course.sight, pods, pages, even, window)
    inputs = measure(sight, even, window)
    sizes = _sizes(course, spec, pools)
    felt = inputs
    if any(sizes.of(component) > pool.size for component, pool in pools.items()):
        # Nobody has made the pools as large as was said. How long users wait in them says nothing about that size.
        felt = replace(inputs, ttft_p95=None, itl_p95=None)
    decision, history = decide(felt, limits(spec, observed), sizes, course.history, even, hold, full)
    return replace(
        course,
        sight=sight,
        history=history,
        looked_at=even,
        inputs=inputs,
        full=full,
        decision=decision,
        decided=now,
        window=window,
    )


def undone(course: Course, role: Component, why: str) -> Course:
    """The course if the latest decision could not be carried out for `role`: its size is what it was, and may change next time."""
    decision = course.decision
    if decision is None:
        return course
    held = replace(
        decision,
        outcome=Outcome.HELD,
        desired=decision.desired.with_size(role, decision.current.of(role)),
        detail=f"{decision.detail}; {why}" if decision.detail else why,
    )
    if role is Component.PREFILL:
        held = replace(held, prefill_because=Because.HELD)
    else:
        held = replace(held, decode_because=Because.HELD)
    kept = tuple(c for c in course.history.changes if (c.role, c.at) != (role, course.looked_at))
    return replace(course, decision=held, history=replace(course.history, changes=kept))


def _sizes(course: Course, spec: DisaggInferenceSpec, pools: Pools) -> Sizes:
    """The sizes that a decision begins from: what is, or where nobody carries decisions out, what it would have come to."""
    actual = Sizes(pools[Component.PREFILL].size, pools[Component.DECODE].size)
    if spec.autoscaling.mode is AutoscalingMode.AUTO or course.decision is None:
        return actual
    return course.decision.desired


def limits(spec: DisaggInferenceSpec, observed: Observed) -> Limits:
    """What the spec asks of a decision."""
    scaling = spec.autoscaling
    targets, behavior = scaling.targets, scaling.behavior
    cost = targets.remote_token_cost_milli
    return Limits(
        prefill=_role_limits(spec, Component.PREFILL),
        decode=_role_limits(spec, Component.DECODE),
        window=scaling.window_seconds,
        utilization=targets.prefill_utilization_percent / 100,
        drain_seconds=targets.backlog_drain_seconds,
        kv_usage=targets.decode_kv_usage_percent / 100,
        running=targets.decode_running_percent / 100,
        sequences=_sequences(spec),
        tokens_per_second=targets.prefill_tokens_per_second,
        remote_cost=None if cost is None else cost / 1000,
        ttft_target=_seconds(targets.time_to_first_token_milliseconds),
        itl_target=_seconds(targets.inter_token_latency_milliseconds),
        ratio_least=scaling.ratio.min_percent / 100,
        ratio_most=scaling.ratio.max_percent / 100,
        tolerance=behavior.tolerance_percent / 100,
        up_window=behavior.scale_up.stabilization_window_seconds,
        up_pods=behavior.scale_up.max_pods,
        down_window=behavior.scale_down.stabilization_window_seconds,
        down_pods=behavior.scale_down.max_pods,
        max_devices=scaling.max_devices,
        pod_start_seconds=_start_seconds(observed),
        decode_holds_reuse=spec.kv_transfer.mode is TransferMode.BIDIRECTIONAL_PULL,
    )


def _role_limits(spec: DisaggInferenceSpec, component: Component) -> RoleLimits:
    role = role_of(spec, component)
    least, most = role.fixed_replicas, role.fixed_replicas
    if role.scaling is not None:
        least, most = role.scaling.min_replicas, role.scaling.max_replicas
    return RoleLimits(least, most, role.parallelism.devices, role.parallelism.data)


def _sequences(spec: DisaggInferenceSpec) -> int | None:
    """What --max-num-seqs says; vLLM's default depends on the device and is not shown anywhere."""
    given = parse_flags((*spec.engine.extra_args, *spec.decode.extra_args)).get("max-num-seqs", "")
    return int(given) if given.isdecimal() and int(given) > 0 else None


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _start_seconds(observed: Observed) -> float:
    took = [
        (pod.ready_since - pod.created).total_seconds()
        for component in (Component.PREFILL, Component.DECODE)
        for pod in observed.pods_of(component)
        if pod.ready_since is not None and pod.created is not None
    ]
    usual = [seconds for seconds in took if 0 <= seconds <= LONGEST_START]
    return median(usual) if usual else 0.0


def why_held(name: str, spec: DisaggInferenceSpec, observed: Observed, *, rolling_out: bool) -> str:
    """Why no size of the DisaggInference `name` may change now; empty if it may."""
    if rolling_out:
        return "a rollout is in progress"
    if spec.rollout.paused:
        return "rollout.paused is true"
    for role in ENGINES:
        scaler = role_name(name, role)
        if (SCALER_KIND, scaler) not in observed.live:
            return f"{SCALER_KIND} {scaler} is not there yet"
    return ""


def why_full(observed: Observed, now: datetime) -> str:
    """Why no pool may grow now; empty if it may. They may shrink: that is how they come to fit again."""
    minutes = LONG_WITHOUT_ROOM.seconds // 60
    for workload in observed.workloads:
        refusal = workload.refusal if workload.component in ENGINES else None
        if refusal is not None and now - workload.applied > LONG_WITHOUT_ROOM:
            return f"{workload.kind} {workload.name} has got no more pods for {minutes} minutes: {refusal.message}"
    for pod in observed.pods:
        waits = pod.trouble is not None and pod.trouble.reason is Reason.UNSCHEDULABLE
        if not waits or pod.leaving or pod.component not in ENGINES or pod.created is None:
            continue
        if now - pod.created > LONG_WITHOUT_ROOM:
            return f"pod {pod.name} has found no node for {minutes} minutes"
    return ""


# What to say


def claim(course: Course) -> Claim:
    """The condition ScalingActive."""
    decision = course.decision
    if decision is None or decision.outcome is Outcome.BLIND:
        what = _named(course.inputs.missing) or "nobody has looked yet"
        return fails(
            ConditionType.SCALING_ACTIVE,
            Reason.METRICS_UNAVAILABLE,
            f"sizes are held, metrics are missing: {what}",
        )
    if decision.outcome is Outcome.HELD:
        return fails(ConditionType.SCALING_ACTIVE, Reason.SCALING_HELD, f"sizes are held: {decision.detail}")
    if decision.outcome is Outcome.CONFLICT:
        return fails(ConditionType.SCALING_ACTIVE, Reason.RATIO_CONFLICT, decision.detail)
    message = "sizes follow the load"
    if course.inputs.missing:
        message += f"; no pool shrinks, metrics are missing: {_named(course.inputs.missing)}"
    if course.full:
        message += f"; no pool grows: {course.full}"
    return holds(ConditionType.SCALING_ACTIVE, Reason.SCALING, message)


def _named(missing: tuple[str, ...]) -> str:
    more = len(missing) - _MOST_NAMED
    return ", ".join(missing[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def told(course: Course, previous: ScalingStatus | None) -> ScalingStatus | None:
    """status.scaling: the latest decision, or what is there while it is as good."""
    decision, decided = course.decision, course.decided
    if decision is None or decided is None:
        return previous
    new = ScalingStatus(
        decided_time=decided.replace(microsecond=0),
        reason=str(decision.outcome),
        message=cut(summary(decision)),
        prefill=_role_told(decision, Component.PREFILL),
        decode=_role_told(decision, Component.DECODE),
        inputs=_inputs_told(course.inputs, decision.arithmetic),
        learned=_learned_told(course.inputs),
    )
    if previous is None or not timedelta() <= new.decided_time - previous.decided_time < TELL_EVERY:
        return new
    return new if _gist(new) != _gist(previous) else previous


def _gist(status: ScalingStatus) -> object:
    """What makes a status worth writing before its time."""
    return [
        (role.current_replicas, role.desired_replicas, role.limited_by)
        for role in (status.prefill, status.decode)
        if role is not None
    ], (status.reason, status.learned is None)


def summary(decision: Decision) -> str:
    """One line with the numbers."""
    parts = []
    for component in (Component.PREFILL, Component.DECODE):
        now, then = decision.current.of(component), decision.desired.of(component)
        pods, because = need(decision, component), decision.because(component)
        size = f"{now} -> {then}" if now != then else str(now)
        why = [f"need {pods:.2f}"] if pods is not None else []
        why += [str(because)] if because is not None else []
        parts.append(f"{component} {size}" + (f" ({', '.join(why)})" if why else ""))
    if decision.detail:
        parts.append(decision.detail)
    return "; ".join(parts)


def need(decision: Decision, component: Component) -> float | None:
    """Pods before any bound or damping; None if that could not be calculated."""
    terms = decision.arithmetic
    if terms is None:
        return None
    if component is Component.DECODE:
        return terms.decode_pods
    return terms.prefill.pods if terms.prefill is not None else None


def _role_told(decision: Decision, component: Component) -> RoleScalingStatus:
    pods, because = need(decision, component), decision.because(component)
    return RoleScalingStatus(
        current_replicas=decision.current.of(component),
        desired_replicas=decision.desired.of(component),
        need_milli=_milli(pods),
        limited_by=None if because is None else str(because),
    )


def _inputs_told(inputs: Inputs, terms: Arithmetic | None) -> ScalingInputsStatus | None:
    if terms is None or inputs.prefill is None or inputs.decode is None:
        return None
    return _numbers(inputs, inputs.prefill, inputs.decode, terms)


def _numbers(
    inputs: Inputs, prefill: PrefillLoad, decode: DecodeLoad, terms: Arithmetic
) -> ScalingInputsStatus:
    speed = terms.speed
    return ScalingInputsStatus(
        offered_tokens_per_second=_whole(terms.offered),
        trend_tokens_per_second=_whole(terms.offered) - _whole(prefill.offered),
        backlog_tokens=_whole(prefill.backlog),
        reuse_milli=_thousandths(terms.reuse.total),
        growing_reuse_milli=_thousandths(terms.growing_reuse.total),
        growing_remote_reuse_milli=_thousandths(terms.growing_reuse.remote),
        shrinking_reuse_milli=_thousandths(terms.shrinking_reuse.total),
        shrinking_remote_reuse_milli=_thousandths(terms.shrinking_reuse.remote),
        tokens_per_second_per_pod=None if speed is None else _whole(speed.tokens_per_second),
        remote_token_cost_milli=None if speed is None else _thousandths(speed.remote_cost),
        decode_pods=decode.pods,
        mean_kv_usage_milli=_milli(decode.mean_usage),
        kv_usage_milli=_thousandths(decode.kv_usage),
        fullest_kv_usage_milli=_thousandths(decode.fullest),
        running_requests=_whole(decode.running),
        waiting_requests=_whole(decode.waiting),
        retained_milli=_milli(decode.retained),
        decode_steady_need_milli=_thousandths(terms.decode_pods / terms.decode_coming),
        decode_coming_milli=_thousandths(terms.decode_coming),
        ttft_milliseconds=_milli(inputs.ttft_p95),
        itl_milliseconds=_milli(inputs.itl_p95),
    )


def _learned_told(inputs: Inputs) -> LearnedStatus | None:
    speed, cost = inputs.learned.tokens_per_second, inputs.learned.remote_cost
    if speed is None and cost is None:
        return None
    return LearnedStatus(
        prefill_tokens_per_second=None if speed is None else _whole(speed),
        remote_token_cost_milli=_milli(cost),
    )


def _whole(value: float) -> int:
    return round(min(value, _MOST_TOLD))


def _thousandths(value: float) -> int:
    return _whole(value * 1000)


def _milli(value: float | None) -> int | None:
    return None if value is None else _thousandths(value)


def reuse(course: Course, previous: ReuseStatus | None, scaling: ScalingStatus | None) -> ReuseStatus | None:
    """status.reuse: of the same window as status.scaling."""
    load, decided = course.inputs.prefill, course.decided
    if load is None or not load.tokens or decided is None or scaling is None:
        return previous
    moment = decided.replace(microsecond=0)
    if scaling.decided_time != moment:
        return previous
    computed = load.tokens * max(0.0, 1.0 - load.reuse.total)
    return ReuseStatus(
        window_seconds=course.window,
        observed_time=moment,
        prompt_tokens=_whole(load.tokens),
        computed_tokens=_whole(computed),
        written_back_tokens=_whole(load.written_back),
        ratio_percent=round(100 * load.reuse.total),
    )


def is_active(spec: DisaggInferenceSpec) -> bool:
    """Whether there is anything to decide."""
    return is_scaled(spec) and not spec.suspend
