"""What to show when something failed: which pods are in trouble, their last log lines, recent warnings."""

from typing import Any

from e2e.cluster import ClusterError
from e2e.demo.stack import OPERATOR_NAMESPACE, OPERATOR_SELECTOR, Stack

_LOG_LINES = 25
_WARNINGS = 8


def troubles(pod: dict[str, Any]) -> dict[str, str]:
    """Container -> what keeps it from being ready. `` stands for the pod as a whole; empty when all is well. Pure."""
    status = pod.get("status") or {}
    found: dict[str, str] = {}
    scheduled = next((c for c in status.get("conditions") or [] if c["type"] == "PodScheduled"), None)
    if scheduled and scheduled["status"] != "True":
        found[""] = f"not scheduled: {scheduled.get('message') or scheduled.get('reason')}"
    initialized = all(_succeeded(c) for c in status.get("initContainerStatuses") or [])
    for container in status.get("initContainerStatuses") or []:
        if not _succeeded(container):
            found[container["name"]] = _state(container)
    for container in status.get("containerStatuses") or []:
        if initialized and (not container.get("ready") or container.get("restartCount")):
            found[container["name"]] = _state(container)
    return found


def _succeeded(container: dict[str, Any]) -> bool:
    ended = (container.get("state") or {}).get("terminated")
    return bool(ended and ended.get("exitCode") == 0)


def _state(container: dict[str, Any]) -> str:
    state = container.get("state") or {}
    restarts = f", {container['restartCount']} restarts" if container.get("restartCount") else ""
    if waiting := state.get("waiting"):
        return f"waiting, {waiting.get('reason')}: {waiting.get('message', '')}{restarts}".rstrip(": ")
    if ended := state.get("terminated"):
        return f"ended with {ended.get('exitCode')}, {ended.get('reason')}{restarts}"
    return f"running, {'ready' if container.get('ready') else 'not ready'}{restarts}"


def explain(stack: Stack) -> str:
    """A report on the operator's pod, the example's pods and recent warnings. Never raises."""
    parts: list[str] = []
    try:
        example = stack.inference
        for namespace, selector in (
            (OPERATOR_NAMESPACE, OPERATOR_SELECTOR),
            (example.namespace, example.selector),
        ):
            pods = stack.cluster.list("pods", namespace, selector)
            parts += [_about(stack, pod) for pod in pods] or [
                f"There are no pods with {selector} in {namespace}."
            ]
        parts += [_warning(event) for event in stack.warnings()[-_WARNINGS:]]
    except ClusterError as error:
        parts.append(str(error))
    return "\n".join(parts)


def _about(stack: Stack, pod: dict[str, Any]) -> str:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    wrong = troubles(pod)
    if not wrong:
        return f"pod {namespace}/{name}: ready"
    lines = []
    for container, state in wrong.items():
        lines.append(f"pod {namespace}/{name} {container}: {state}")
        if container:
            crashed = "restarts" in state and "running" not in state
            log = stack.log(namespace, name, container, _LOG_LINES, previous=crashed)
            lines += [f"    {line}" for line in log.splitlines()]
    return "\n".join(lines)


def _warning(event: dict[str, Any]) -> str:
    about = event.get("involvedObject") or {}
    return f"event {event.get('reason')} on {about.get('kind')}/{about.get('name')}: {event.get('message')}"
