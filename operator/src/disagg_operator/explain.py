"""What the status of a DisaggInference says of its pools' sizes, for a person who has to trust it. Pure.

The status has what the latest decision rested on; with the spec's targets that is enough to do its arithmetic again, which is what
is shown. The same functions as in a decision are used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from .api.base import camel
from .api.conditions import ConditionType, find
from .api.scaling import AutoscalingMode
from .api.status import (
    DisaggInferenceStatus,
    LearnedStatus,
    RoleScalingStatus,
    ScalingInputsStatus,
    ScalingStatus,
)
from .api.types import DisaggInferenceSpec
from .autoscale import limits
from .naming import ENGINES, Component, role_name
from .observe import Observed
from .pools import is_scaled, role_of
from .scaling.inputs import DecodeLoad, Limits, PrefillLoad, Reuse
from .scaling.need import Speed
from .scaling.policy import Because
from .scaling.working import PODS, Step, decode_working, number, prefill_working
from .wanted import Wanted

LATE = timedelta(minutes=3)
"""Above what an operator that runs takes between two decisions that it writes down."""

WORTH_TELLING = 0.005
"""Of a pod, between its need and the same from the status' rounded figures."""

MEANINGS: Mapping[Because, str] = {
    Because.LEAST: "scaling.minReplicas lets it be no smaller; lower that if you trust fewer pods.",
    Because.MOST: "scaling.maxReplicas lets it be no larger; raise that if users wait.",
    Because.STABILIZATION: "the need was another one within behavior's stabilization window, or it grew or was not watched for so long; "
    "wait, or shorten stabilizationWindowSeconds.",
    Because.UP_RATE: "behavior.scaleUp.maxPods were added within a minute; the rest follows, or raise it.",
    Because.DOWN_RATE: "behavior.scaleDown.maxPods were taken within a window; the rest follows, or raise it.",
    Because.RATIO: "autoscaling.ratio made it larger than its need, or cannot be kept; widen it if that is too much.",
    Because.BUDGET: "autoscaling.maxDevices leaves no device for more; raise it, or let the other role have fewer.",
    Because.FULL: "no node, or no quota, has room for the pods that were asked for; add room, or wait until the load is lower.",
    Because.OTHER_POOL: "the other pool changes now, and only one of both shrinks at a time; wait.",
    Because.RETAINED: "decode's memory is full of what it keeps for prefill to read, and nobody waits for it; lower "
    "kvTransfer.decodeRetentionSeconds, which is cheaper than a pod.",
    Because.REUSE_AT_RISK: "prefill could not compute what would be lost with the KV of the pod that goes; wait until the "
    "load is lower.",
    Because.TRANSFERS_FAIL: "too many KV transfers fail, so nothing shrinks; look for the cause in the engines' logs.",
    Because.FLAPPING: "it has changed direction too often within the last hour to shrink; raise "
    "behavior.scaleDown.stabilizationWindowSeconds.",
    Because.MISSING: "metrics are missing, so nothing shrinks, nor grows if all of a pool's are; ScalingActive says whose, see that "
    "the operator can read them.",
    Because.UNKNOWN_SPEED: "nobody knows how many tokens a prefill pod computes per second; set "
    "targets.prefillTokensPerSecond, or wait until load has taught it.",
    Because.LATE_FIRST_TOKENS: "first tokens came later than targets.timeToFirstTokenMilliseconds for a while, so a pod was added "
    "whatever the need; look at what else delays them if it stays.",
    Because.SLOW_TOKENS: "tokens came slower than targets.interTokenLatencyMilliseconds for a while, so a pod was added whatever the "
    "need; look at what else delays them if it stays.",
    Because.HELD: "sizes are held until something else is over; ScalingActive says what.",
}
"""What each word of `limitedBy` means, and what to do: behind the word, in one sentence. docs/autoscaling.md has the same."""


@dataclass(frozen=True, slots=True)
class RoleAccount:
    """One pool."""

    role: str
    replicas: int
    """Pods that it is to have now."""
    current_replicas: int | None = None
    """Pods at the decision; None without one, as the next."""
    desired_replicas: int | None = None
    least: int | None = None
    """Of its bounds; None if nothing scales it, as the next."""
    most: int | None = None
    need_milli: int | None = None
    """As the operator calculated it, in thousandths."""
    limited_by: str | None = None
    meaning: str | None = None
    growing: tuple[Step, ...] = ()
    """How its need comes about; empty if it is not known."""
    shrinking: tuple[Step, ...] = ()
    """The same as shrinking counts it, where that differs."""
    leaving_replicas: int = 0
    """Pods that take no new turns."""
    leaving_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that there is to say."""

    namespace: str
    name: str
    mode: str | None
    """None if the spec cannot be read."""
    notes: tuple[str, ...]
    """What one has to know before the numbers; all that there is, without a decision."""
    decided: datetime | None = None
    reason: str | None = None
    message: str = ""
    roles: tuple[RoleAccount, ...] = ()
    inputs: ScalingInputsStatus | None = None
    learned: LearnedStatus | None = None

    def to_wire(self) -> dict[str, Any]:
        """As JSON data."""
        plain = {key: value for key, value in asdict(self).items() if key not in ("inputs", "learned")}
        parts = {"inputs": self.inputs, "learned": self.learned}
        wire: dict[str, Any] = _wire(plain)
        return wire | {key: part.to_wire() for key, part in parts.items() if part is not None}


def _wire(value: Any) -> Any:
    match value:
        case dict():
            return {camel(key): _wire(item) for key, item in value.items() if item is not None}
        case list() | tuple():
            return [_wire(item) for item in value]
        case datetime():
            return _moment(value)
        case _:
            return value


def account(wanted: Wanted, now: datetime) -> Account:
    """What the status of `wanted` says."""
    spec, status = wanted.spec, wanted.previous
    scaling = status.scaling
    notes = tuple(_notes(wanted, now))
    mode = None if spec is None else str(spec.autoscaling.mode)
    said = Account(wanted.owner.namespace, wanted.owner.name, mode, notes)
    if spec is None:
        return said
    told = {Component.PREFILL: scaling.prefill, Component.DECODE: scaling.decode} if scaling else {}
    inputs = scaling.inputs if scaling else None
    roles = tuple(_role(spec, status, component, told.get(component), inputs) for component in ENGINES)
    said = replace(said, roles=roles, inputs=inputs)
    if scaling is None:
        return said
    return replace(
        said,
        decided=scaling.decided_time,
        reason=scaling.reason,
        message=scaling.message,
        learned=scaling.learned,
    )


def _notes(wanted: Wanted, now: datetime) -> Iterator[str]:
    spec, status = wanted.spec, wanted.previous
    if status.observed_generation is None:
        yield "No operator has looked at it yet: is one running that serves this namespace?"
    elif status.observed_generation != wanted.generation:
        yield "The spec is newer than the status: the operator has not seen it yet."
    if wanted.refusal is not None:
        yield f"The spec is refused, so sizes stay as they are. {wanted.refusal.reason}: {wanted.refusal.message}"
    if spec is None:
        return
    yield _about_mode(wanted.owner.name, spec)
    if spec.suspend:
        yield "spec.suspend is true: there are no pods, and nothing is decided."
    active = find(status.conditions, ConditionType.SCALING_ACTIVE)
    if active is not None:
        yield f"ScalingActive is {active.status}, {active.reason}: {active.message}"
    if not is_scaled(spec) or spec.suspend or wanted.refusal is not None:
        return
    if status.scaling is None:
        yield (
            "Nothing has been decided yet. It takes ready pods of both roles and a router, and their metrics, read twice."
        )
        return
    if now - status.scaling.decided_time > LATE:
        yield "The decision is old: an operator that runs would have written a newer one."
    if _is_cost_assumed(spec, status.scaling):
        yield "What a token costs that decode brings is neither configured nor learned yet, so it is assumed."


def _is_cost_assumed(spec: DisaggInferenceSpec, scaling: ScalingStatus) -> bool:
    used = scaling.inputs.remote_token_cost_milli if scaling.inputs else None
    learned = scaling.learned.remote_token_cost_milli if scaling.learned else None
    return used is not None and learned is None and spec.autoscaling.targets.remote_token_cost_milli is None


def _about_mode(name: str, spec: DisaggInferenceSpec) -> str:
    scalers = " and ".join(role_name(name, component) for component in ENGINES)
    match spec.autoscaling.mode:
        case AutoscalingMode.DISABLED:
            return "Mode Disabled: sizes are those of the spec, and nothing is decided."
        case AutoscalingMode.ADVISORY:
            return "Mode Advisory: nothing is changed. What is decided is what mode Auto would have come to."
        case AutoscalingMode.EXTERNAL:
            return (
                f"Mode External: sizes are what somebody writes into the scalers {scalers}. What is decided is what mode Auto "
                "would have come to."
            )
        case AutoscalingMode.AUTO:
            return f"Mode Auto: what is decided is written into the scalers {scalers}."


def _role(
    spec: DisaggInferenceSpec,
    status: DisaggInferenceStatus,
    component: Component,
    told: RoleScalingStatus | None,
    inputs: ScalingInputsStatus | None,
) -> RoleAccount:
    pods = next((role for role in status.roles if role.name == component), None)
    role, scaled = role_of(spec, component), is_scaled(spec)
    bounds = role.scaling if scaled else None
    growing, shrinking = _steps(component, inputs, limits(spec, Observed())) if inputs else ((), ())
    return RoleAccount(
        role=str(component),
        replicas=pods.desired_replicas if pods else role.fixed_replicas,
        current_replicas=told.current_replicas if told else None,
        desired_replicas=told.desired_replicas if told else None,
        least=bounds.min_replicas if bounds else None,
        most=bounds.max_replicas if bounds else None,
        need_milli=told.need_milli if told else None,
        limited_by=told.limited_by if told else None,
        meaning=_meaning(told.limited_by) if told and told.limited_by else None,
        growing=growing,
        shrinking=shrinking,
        leaving_replicas=pods.leaving_replicas if pods else 0,
        leaving_until=pods.leaving_until if pods else None,
    )


def _meaning(word: str) -> str:
    try:
        return MEANINGS[Because(word)]
    except ValueError:
        return "a word of an operator of another version than this command."


def _steps(
    component: Component, inputs: ScalingInputsStatus, bounds: Limits
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Of growing and, where it is another calculation, of shrinking."""
    if component is Component.DECODE:
        return (*decode_working(_decode_load(inputs), bounds), *_decode_need(inputs)), ()
    speed, cost = inputs.tokens_per_second_per_pod, inputs.remote_token_cost_milli
    if not speed or cost is None:
        return (), ()
    growing = _reuse(inputs.growing_reuse_milli, inputs.growing_remote_reuse_milli)
    shrinking = _reuse(inputs.shrinking_reuse_milli, inputs.shrinking_remote_reuse_milli)
    offered, able = inputs.offered_tokens_per_second, Speed(speed, cost / 1000)
    measured = offered - inputs.trend_tokens_per_second
    load = PrefillLoad(measured, 0.0, Reuse(), inputs.backlog_tokens)
    return (
        prefill_working(load, offered, growing, able, bounds),
        prefill_working(load, measured, shrinking, able, bounds),
    )


def _decode_need(inputs: ScalingInputsStatus) -> Iterator[Step]:
    """From the need of the moment to that of the decision, by what only the operator remembers."""
    steady, coming = inputs.decode_steady_need_milli, inputs.decode_coming_milli
    if steady is not None and coming is not None:
        formula = f"{number(steady / 1000)} of the last minute x {number(coming / 1000)} coming"
        yield Step("need", formula, steady * coming / 1e6, PODS)


def _reuse(total: int, remote: int) -> Reuse:
    return Reuse((total - remote) / 1000, remote / 1000)


def _decode_load(inputs: ScalingInputsStatus) -> DecodeLoad:
    return DecodeLoad(
        pods=inputs.decode_pods,
        kv_usage=inputs.kv_usage_milli / 1000,
        mean_usage=None if inputs.mean_kv_usage_milli is None else inputs.mean_kv_usage_milli / 1000,
        fullest=inputs.fullest_kv_usage_milli / 1000,
        running=inputs.running_requests,
        waiting=inputs.waiting_requests,
        retained=None if inputs.retained_milli is None else inputs.retained_milli / 1000,
    )


# As text


def text(account: Account, now: datetime) -> str:
    """For a terminal."""
    lines = [f"{account.namespace}/{account.name}", *account.notes]
    if account.decided is not None:
        lines += [
            "",
            f"Decided {_ago(now - account.decided)} ago, {_moment(account.decided)}: {account.reason}",
        ]
        lines.append(account.message)
    if account.inputs is not None:
        lines += ["", *_measured(account.inputs)]
    for role in account.roles:
        lines += ["", *_about(role, now)]
    if account.decided is not None:
        lines += ["", *_learned(account.learned)]
    return "\n".join(lines) + "\n"


def _measured(inputs: ScalingInputsStatus) -> Iterator[str]:
    reuse, growing, shrinking = (
        number(milli / 1000)
        for milli in (inputs.reuse_milli, inputs.growing_reuse_milli, inputs.shrinking_reuse_milli)
    )
    yield f"reuse: measured {reuse}; growing counts on {growing}, shrinking on {shrinking}"
    trend = inputs.trend_tokens_per_second
    if trend:
        yield (
            f"offered: {inputs.offered_tokens_per_second} tokens/s, of which {trend} are the trend or held back while prompts wait"
        )
    late = {"time to first token": inputs.ttft_milliseconds, "between tokens": inputs.itl_milliseconds}
    known = [f"{what} {value} ms" for what, value in late.items() if value is not None]
    if known:
        yield f"95th percentiles: {', '.join(known)}"


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _about(role: RoleAccount, now: datetime) -> Iterator[str]:
    size = _pods(role.replicas)
    if role.current_replicas is not None and role.desired_replicas is not None:
        size = _pods(role.desired_replicas)
        if role.current_replicas != role.desired_replicas:
            size = f"{role.current_replicas} -> {size}"
        if role.replicas != role.desired_replicas:
            size += f" ({role.replicas} now)"
    bounds = "fixed" if role.least is None else f"between {role.least} and {role.most}"
    yield f"{role.role}: {size}, {bounds}"
    if role.shrinking:
        yield from _table("as growing counts", role.growing)
        yield from _table("as shrinking counts", role.shrinking)
    elif role.growing:
        yield from _table("", role.growing)
    elif role.current_replicas is not None:
        yield "  need: not known"
    yield from _rounded(role)
    if role.limited_by is not None:
        yield f"  {role.limited_by}: {role.meaning}"
    if role.leaving_replicas:
        yield (
            f"  {role.leaving_replicas} more {'pod takes' if role.leaving_replicas == 1 else 'pods take'} no new turns"
            + (
                ""
                if role.leaving_until is None
                else f" and will be stopped {_until(role.leaving_until, now)}"
            )
        )


def _table(title: str, steps: Sequence[Step]) -> Iterator[str]:
    if title:
        yield f"  {title}"
    margin = "    " if title else "  "
    what = max(len(step.what) for step in steps)
    formula = max(len(step.formula) for step in steps)
    for step in steps:
        yield f"{margin}{step.what:<{what}}  {step.formula:<{formula}}  = {step.result} {step.unit}"


def _rounded(role: RoleAccount) -> Iterator[str]:
    """Where the status' own need is another one."""
    if role.growing and role.need_milli is not None:
        told = role.need_milli / 1000
        if abs(role.growing[-1].value - told) >= WORTH_TELLING:
            yield f"  The operator came to {told:.3f}: its figures are not rounded, or the spec was another one."


def _learned(learned: LearnedStatus | None) -> Iterator[str]:
    if learned is None:
        yield "learned: nothing yet"
        return
    speed, cost = learned.prefill_tokens_per_second, learned.remote_token_cost_milli
    if speed is not None:
        yield f"learned: a prefill pod computes {speed} tokens/s"
    if cost is not None:
        yield f"learned: a token that decode brings costs {number(cost / 1000)} of a computed one"


def _moment(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _until(time: datetime, now: datetime) -> str:
    return f"in {_ago(time - now)}, {_moment(time)}" if time > now else "now"


def _ago(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
