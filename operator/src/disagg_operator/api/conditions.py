"""Conditions of a DisaggInference: which there are, the reasons they give, and how they are merged. Pure.

`Ready`, `Reconciling` and `Stalled` follow kstatus, so that `kubectl wait`, Flux and Argo CD understand them:
`Reconciling` and `Stalled` are only present while true.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from .status import Condition, ConditionStatus


class ConditionType(StrEnum):
    """What a condition is about."""

    READY = "Ready"
    """The spec is realized: all pods of the revision that it asks for are ready."""
    RECONCILING = "Reconciling"
    """The spec's state is not reached yet and progress is being made. Absent otherwise."""
    STALLED = "Stalled"
    """The spec's state cannot be reached without somebody's help. Absent otherwise."""
    PREFILL_READY = "PrefillReady"
    """All prefill pods of the serving revision are ready."""
    DECODE_READY = "DecodeReady"
    """All decode pods of the serving revision are ready."""
    ROUTER_READY = "RouterReady"
    """All router pods are ready."""
    KV_TRANSFER_READY = "KVTransferReady"
    """KV was seen to move between the pools of the serving revision."""
    FABRIC_READY = "FabricReady"
    """Nodes offer the network devices that the pods request."""
    REVISIONS_COMPATIBLE = "RevisionsCompatible"
    """Prefill and decode can read each other's KV: their flags allow it, and their engines do not refuse it."""
    SCALING_ACTIVE = "ScalingActive"
    """Autoscaling decides. Absent with autoscaling.mode Disabled."""


ABSENT_UNLESS_TRUE = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})


class Reason(StrEnum):
    """Why a condition is as it is. A reason never changes its meaning; tools may match on it."""

    # Good ends
    READY = "Ready"
    """Everything that the condition is about is there."""
    SUSPENDED = "Suspended"
    """spec.suspend is true: no pods, on purpose."""

    # On the way
    PROGRESSING = "Progressing"
    """Changes were applied and take effect."""
    PODS_STARTING = "PodsStarting"
    """Pods exist, are scheduled, and their containers are starting or loading the model."""
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    """A new revision is coming up beside the one that serves."""
    DRAINING = "Draining"
    """Pods that are no longer wanted finish their turns."""

    # The user must act
    NOT_IMPLEMENTED = "NotImplemented"
    """The spec asks for something that this version accepts but cannot do yet."""
    INVALID_SPEC = "InvalidSpec"
    """The spec cannot be read; the CRD is older or newer than the operator."""
    INVALID_TEMPLATE = "InvalidTemplate"
    """The API server refuses a child that was made with the user's template."""
    ARGUMENTS_DIFFER = "ArgumentsDiffer"
    """extraArgs give prefill and decode different KV layouts."""
    RESERVED_ARGUMENT = "ReservedArgument"
    """extraArgs set, by an abbreviation, a flag that is the operator's."""
    NOT_OWNED = "NotOwned"
    """An object with the name of a child exists and belongs to somebody else."""

    # Pods that do not come up
    UNSCHEDULABLE = "Unschedulable"
    """No node fits a pod."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota or admission policy refuses a pod."""
    POD_CREATION_FAILED = "PodCreationFailed"
    """The API server refuses a pod for another reason."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """An image cannot be pulled."""
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    """A container cannot be created: a Secret, ConfigMap or key is missing."""
    VOLUME_MOUNT_FAILED = "VolumeMountFailed"
    """A volume cannot be mounted: no such claim or directory."""
    CRASH_LOOP = "CrashLoop"
    """A container ends again and again."""
    OUT_OF_MEMORY = "OutOfMemory"
    """A container was killed for its memory."""
    PODS_NOT_READY = "PodsNotReady"
    """Pods run and do not answer their readiness probe, were evicted, or are on a node that does not report."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """rollout.progressDeadlineSeconds have passed without progress."""

    # KV transfer and fabric
    NOT_PROVEN = "NotProven"
    """Nobody has yet seen KV move on this revision."""
    PROVEN = "Proven"
    """KV was seen to move in every direction that the mode has."""
    NO_KV_TRANSFER = "NoKVTransfer"
    """Turns were answered and no KV moved."""
    NOT_REQUIRED = "NotRequired"
    """The condition does not apply, as FabricReady without a fabric."""
    DEVICES_AVAILABLE = "DevicesAvailable"
    """Nodes offer enough of the fabric's devices."""
    DEVICES_MISSING = "DevicesMissing"
    """No node offers the fabric's devices, or too few."""
    COMPATIBLE = "Compatible"
    """Both roles have the same KV layout."""
    FINGERPRINT_MISMATCH = "FingerprintMismatch"
    """Running engines refuse each other's KV; turns are computed anew."""

    # Scaling
    SCALING = "Scaling"
    """Autoscaling has what it needs to decide."""
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    """Metrics are missing or stale, so sizes are held."""
    SCALING_HELD = "ScalingHeld"
    """Sizes are held until something else is over: a rollout, a scaler that cannot be written."""
    RATIO_CONFLICT = "RatioConstraintViolated"
    """autoscaling.ratio and the roles' bounds cannot both be kept at this load, so sizes are held."""
    SCALED_UP = "ScaledUp"
    """A pool was made larger. Told as an event alone, as the next two."""
    SCALED_DOWN = "ScaledDown"
    """A pool was made smaller."""
    SCALING_ADVISED = "ScalingAdvised"
    """Mode Auto would have changed a size."""

    # The control channel's keys; told as events alone
    CONTROL_KEYS_MADE = "ControlKeysMade"
    """The Secret was made."""
    CONTROL_KEYS_ROTATED = "ControlKeysRotated"
    """Its keys were shifted, or the time from which the next rotation counts was set."""
    CONTROL_KEYS_REPAIRED = "ControlKeysRepaired"
    """Keys were missing or of the wrong length, and were made anew."""

    # The operator itself
    API_ERROR = "APIError"
    """The API server refused or failed a request; it is tried again."""
    INTERNAL_ERROR = "InternalError"
    """A bug in the operator; its log has the stack."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a pass holds to be true of one condition, before it is given its times."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: str = ""


MAX_MESSAGE = 4096


def holds(type_: ConditionType, reason: Reason, message: str = "") -> Claim:
    """A claim that the condition is true."""
    return Claim(type_, ConditionStatus.TRUE, reason, message)


def fails(type_: ConditionType, reason: Reason, message: str) -> Claim:
    """A claim that the condition is false; the message says why and what to do."""
    return Claim(type_, ConditionStatus.FALSE, reason, message)


def unknown(type_: ConditionType, reason: Reason, message: str) -> Claim:
    """A claim that nobody can tell."""
    return Claim(type_, ConditionStatus.UNKNOWN, reason, message)


def merge(
    previous: Sequence[Condition], claims: Iterable[Claim], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Conditions for the status: one per claim, in the order of the claims.

    `lastTransitionTime` is kept from `previous` as long as the status is the same, so writing the result twice changes
    nothing. What is not claimed goes away, as do `Reconciling` and `Stalled` when they are not true. Of two claims about
    one type the first counts. Long messages are cut.
    """
    before = {c.type: c for c in previous}
    moment = now.astimezone(UTC).replace(microsecond=0)
    merged: dict[str, Condition] = {}
    for claim in claims:
        if claim.type in merged:
            continue
        if claim.type in ABSENT_UNLESS_TRUE and claim.status is not ConditionStatus.TRUE:
            continue
        old = before.get(claim.type)
        same = old is not None and old.status is claim.status
        merged[claim.type] = Condition(
            type=claim.type,
            status=claim.status,
            observed_generation=generation,
            last_transition_time=old.last_transition_time if old is not None and same else moment,
            reason=claim.reason,
            message=cut(claim.message),
        )
    return tuple(merged.values())


def find(conditions: Iterable[Condition], type_: ConditionType) -> Condition | None:
    """The condition of that type, if present."""
    return next((c for c in conditions if c.type == type_), None)


def cut(message: str) -> str:
    """No longer than a status may have it."""
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
