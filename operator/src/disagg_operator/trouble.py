"""Why a pod does not come up, from what Kubernetes says about it: an ordered list of named checks, first hit wins. Pure.

Messages are kept free of counters and back-off times: they change every few seconds, and so would the status.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from .api.conditions import Reason
from .naming import Manifest


@dataclass(frozen=True)
class Trouble:
    """A cause and what to tell the user about it."""

    reason: Reason
    message: str


def pod_trouble(pod: Manifest, events: Sequence[Manifest] = ()) -> Trouble | None:
    """What keeps the pod from becoming ready, or None if it may just need time. `events` are about it."""
    for check in _CHECKS:
        found = check(pod)
        if found is not None:
            return found
    return _told_by_event(events)


def refusal_in_events(events: Sequence[Manifest]) -> Trouble | None:
    """Why a controller could not create pods, from its latest FailedCreate event."""
    failed = [event for event in events if event.get("reason") == "FailedCreate"]
    return _refusal(_latest(failed)["message"]) if failed else None


def refusal_in_condition(status: Manifest) -> Trouble | None:
    """The same from a Deployment's condition ReplicaFailure."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return _refusal(condition.get("message", ""))
    return None


def last_words(text: str) -> str:
    """The line of a dying program's last output that is most likely the cause: its last exception, else its last line.

    vLLM's front end ends with an exception that only points to an earlier one; that one is taken if it is there.
    """
    lines = [_LOG_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    causes = [line for line in raised if "See root cause above" not in line]
    for candidates in (causes, raised, lines):
        if candidates:
            return _with_detail(candidates[-1], lines)[:500]
    return ""


def _with_detail(line: str, lines: Sequence[str]) -> str:
    """A validation error of pydantic says only how many errors there are; the first of them is on the next line."""
    after = lines.index(line) + 1
    if _COUNT_OF_ERRORS.search(line) and after < len(lines):
        return f"{line}: {_INPUT_OF_ERROR.sub('', lines[after])}"
    return line


_LOG_PREFIX = re.compile(
    r"^(\((?:APIServer|EngineCore|Worker)[^)]*\)\s*)?"
    r"((?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\s+\[[^\]]*\]\s?)?"
)
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b|(vllm( serve)?|\S+\.py): error:)"
)
_COUNT_OF_ERRORS = re.compile(r"\d+ validation errors? for \S+$")
_INPUT_OF_ERROR = re.compile(r"\s*\[type=.*$")
_PULL_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_TELLING: dict[str, Reason | None] = {
    "FailedMount": Reason.VOLUME_MOUNT_FAILED,
    "FailedAttachVolume": Reason.VOLUME_MOUNT_FAILED,
    "FailedMapVolume": Reason.VOLUME_MOUNT_FAILED,
    "FailedCreatePodSandBox": Reason.PODS_NOT_READY,
    "NetworkNotReady": Reason.PODS_NOT_READY,
    "FailedPostStartHook": Reason.PODS_NOT_READY,
    # Volumes are mounted and the sandbox is there before any of these.
    "Pulling": None,
    "Pulled": None,
    "Created": None,
    "Started": None,
}
"""Reasons of events about a pod, and the trouble they tell of, if it is one."""


def _cannot_be_scheduled(pod: Manifest) -> Trouble | None:
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Trouble(
                Reason.UNSCHEDULABLE, f"{_named(pod)} {condition.get('message') or 'cannot be scheduled'}"
            )
    return None


def _image_cannot_be_pulled(pod: Manifest) -> Trouble | None:
    for container in _containers(pod):
        waiting = _waiting(container)
        if waiting.get("reason") in _PULL_REASONS:
            # The back-off message carries the first one after its name; without that part both read alike.
            why = waiting.get("message", "").split("ErrImagePull: ", 1)[-1]
            return Trouble(
                Reason.IMAGE_PULL_FAILED,
                f"{_named(pod)} cannot pull the image {container.get('image', '')} of its container "
                f"{container['name']}: {why or waiting['reason']}",
            )
    return None


def _container_cannot_be_created(pod: Manifest) -> Trouble | None:
    for container in _containers(pod):
        waiting = _waiting(container)
        if waiting.get("reason") in _CONFIG_REASONS:
            why = waiting.get("message") or waiting["reason"]
            return Trouble(
                Reason.CONTAINER_CONFIG_ERROR,
                f"{_named(pod)} cannot create its container {container['name']}: {why}",
            )
    return None


def _container_ended(pod: Manifest) -> Trouble | None:
    for container in _containers(pod):
        ended = (
            container.get("state", {}).get("terminated")
            or container.get("lastState", {}).get("terminated")
            or {}
        )
        if container.get("ready") or not ended or (ended.get("exitCode") == 0 and _waiting(container) == {}):
            continue
        what = f"{_named(pod)} container {container['name']}"
        if ended.get("reason") == "OOMKilled":
            return Trouble(Reason.OUT_OF_MEMORY, f"{what} was killed for exceeding its memory limit")
        words = last_words(ended.get("message", "")) or ended.get("reason", "")
        return Trouble(
            Reason.CRASH_LOOP,
            f"{what} ended with exit code {ended.get('exitCode')}: {words} (all of it: kubectl logs "
            f"{pod['metadata']['name']} -c {container['name']} --previous)",
        )
    return None


def _pod_failed(pod: Manifest) -> Trouble | None:
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
    return Trouble(Reason.PODS_NOT_READY, f"{_named(pod)} failed: {why or 'without a reason'}")


def _was_ready_once(pod: Manifest) -> Trouble | None:
    """Started and not ready: a startup probe that passed means that the model had been loaded."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if container.get("started") and not container.get("ready"):
            return Trouble(
                Reason.PODS_NOT_READY,
                f"{_named(pod)} container {container['name']} runs and does not answer its readiness probe",
            )
    return None


def _its_node_is_away(pod: Manifest) -> Trouble | None:
    """The kubelet finds containers and pod ready at once, unless a readiness gate is in between: a pod that is not has been marked
    by the node controller, which leaves the condition of its containers as it was."""
    node = pod.get("spec", {}).get("nodeName")
    found = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions") or []}
    ready, containers = found.get("Ready", {}), found.get("ContainersReady", {})
    if not node or (ready.get("status"), containers.get("status")) != ("False", "True"):
        return None
    if ready.get("reason") == "ReadinessGatesNotReady":
        return None
    return Trouble(
        Reason.PODS_NOT_READY,
        f"{_named(pod)} runs on node {node}, which does not report to the cluster; see kubectl describe node {node}",
    )


_CHECKS: tuple[Callable[[Manifest], Trouble | None], ...] = (
    _cannot_be_scheduled,
    _image_cannot_be_pulled,
    _container_cannot_be_created,
    _container_ended,
    _pod_failed,
    _was_ready_once,
    _its_node_is_away,
)


def _told_by_event(events: Sequence[Manifest]) -> Trouble | None:
    """What the kubelet could not do last, unless it has got further since; old events stay around for an hour."""
    telling = [event for event in events if event.get("reason") in _TELLING]
    if not telling:
        return None
    event = _latest(telling)
    reason = _TELLING[event["reason"]]
    if reason is None:
        return None
    return Trouble(reason, f"pod {event['involvedObject']['name']}: {event.get('message', '')}")


def _refusal(message: str) -> Trouble:
    """`create Pod x in StatefulSet y failed error: pods "x" is forbidden: exceeded quota: ...`"""
    refused_by_admission = "forbidden" in message
    reason = Reason.QUOTA_EXCEEDED if refused_by_admission else Reason.POD_CREATION_FAILED
    return Trouble(reason, f"pods are refused: {message.split('failed error: ', 1)[-1]}")


def _latest(events: Sequence[Manifest]) -> Manifest:
    return max(events, key=lambda event: (_moment(event), _TELLING.get(event["reason"], "") is None))


def _moment(event: Manifest) -> datetime:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(
        (datetime.fromisoformat(time) for time in times if time), default=datetime.min.replace(tzinfo=UTC)
    )


def _named(pod: Manifest) -> str:
    return f"pod {pod['metadata']['name']}:"


def _containers(pod: Manifest) -> Iterator[Manifest]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _waiting(container: Manifest) -> Manifest:
    waiting: Manifest = container.get("state", {}).get("waiting") or {}
    return waiting
