"""Why a pod does not come up, as Kubernetes tells it and as we tell the user."""

from typing import Any

import pytest

from disagg_operator.api.conditions import Reason
from disagg_operator.trouble import last_words, pod_trouble, refusal_in_condition, refusal_in_events


def pod(
    *, conditions: list[Any] | None = None, init: list[Any] | None = None, main: Any = None, **status: Any
) -> Any:
    return {
        "kind": "Pod",
        "metadata": {"name": "demo-prefill-0123abcd-0"},
        "spec": {"nodeName": "p5en-3"},
        "status": {
            "phase": "Pending",
            "conditions": conditions or [],
            "initContainerStatuses": init or [],
            "containerStatuses": [main] if main else [],
            **status,
        },
    }


def container(name: str = "main", *, last: Any = None, **state: Any) -> dict[str, Any]:
    return {
        "name": name,
        "image": "vllm:9",
        "state": state,
        "lastState": {"terminated": last} if last else {},
    }


def event(reason: str, message: str, time: str = "2026-01-01T00:00:00Z") -> Any:
    about = {"name": "demo-prefill-0123abcd-0"}
    return {"reason": reason, "message": message, "lastTimestamp": time, "involvedObject": about}


ROOT = 'failed to resolve reference "vllm:9": vllm:9: not found'


@pytest.mark.parametrize(
    ("case", "found", "reason", "said"),
    [
        (
            "nobody fits",
            pod(
                conditions=[
                    {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient efa"}
                ]
            ),
            Reason.UNSCHEDULABLE,
            "pod demo-prefill-0123abcd-0: 0/3 nodes: Insufficient efa",
        ),
        (
            "first pull",
            pod(main=container(waiting={"reason": "ErrImagePull", "message": ROOT})),
            Reason.IMAGE_PULL_FAILED,
            ROOT,
        ),
        (
            "backing off",
            pod(
                main=container(
                    waiting={
                        "reason": "ImagePullBackOff",
                        "message": f'Back-off pulling image "vllm:9": ErrImagePull: {ROOT}',
                    }
                )
            ),
            Reason.IMAGE_PULL_FAILED,
            ROOT,
        ),
        (
            "init container",
            pod(init=[container("connector", waiting={"reason": "ImagePullBackOff", "message": "x"})]),
            Reason.IMAGE_PULL_FAILED,
            "container connector",
        ),
        (
            "secret",
            pod(
                main=container(
                    waiting={"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
                )
            ),
            Reason.CONTAINER_CONFIG_ERROR,
            'secret "hub" not found',
        ),
        (
            "crash",
            pod(
                phase="Running",
                main=container(
                    waiting={"reason": "CrashLoopBackOff", "message": "back-off 20s"},
                    last={
                        "exitCode": 1,
                        "reason": "Error",
                        "message": "INFO start\nValueError: no such model\n",
                    },
                ),
            ),
            Reason.CRASH_LOOP,
            "ended with exit code 1: ValueError: no such model",
        ),
        (
            "restarted and loading again",
            pod(
                phase="Running", main=container(running={}, last={"exitCode": 1, "message": "ValueError: x"})
            ),
            Reason.CRASH_LOOP,
            "ValueError: x",
        ),
        (
            "memory",
            pod(phase="Running", main=container(terminated={"exitCode": 137, "reason": "OOMKilled"})),
            Reason.OUT_OF_MEMORY,
            "memory limit",
        ),
        (
            "evicted",
            pod(phase="Failed", reason="Evicted", message="The node was low on resource"),
            Reason.PODS_NOT_READY,
            "Evicted: The node was low on resource",
        ),
        (
            "probe",
            pod(phase="Running", main={**container(running={}), "started": True, "ready": False}),
            Reason.PODS_NOT_READY,
            "does not answer its readiness probe",
        ),
        (
            "node away",
            pod(
                phase="Running",
                conditions=[
                    {"type": "Ready", "status": "False"},
                    {"type": "ContainersReady", "status": "True"},
                ],
                main={**container(running={}), "started": True, "ready": True},
            ),
            Reason.PODS_NOT_READY,
            "runs on node p5en-3, which does not report to the cluster; see kubectl describe node p5en-3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_a_cause(case: str, found: Any, reason: Reason, said: str) -> None:
    trouble = pod_trouble(found)
    assert trouble is not None
    assert trouble.reason is reason
    assert said in trouble.message
    assert "demo-prefill-0123abcd-0" in trouble.message


def test_pulling_and_backing_off_read_alike() -> None:
    """The kubelet goes back and forth between them, and the status must not."""
    first = pod_trouble(pod(main=container(waiting={"reason": "ErrImagePull", "message": ROOT})))
    backing_off = f'Back-off pulling image "vllm:9": ErrImagePull: {ROOT}'
    later = pod_trouble(pod(main=container(waiting={"reason": "ImagePullBackOff", "message": backing_off})))
    assert first == later


def test_a_container_that_crashes_reads_alike_while_it_runs_and_while_it_waits() -> None:
    last = {"exitCode": 1, "message": "ValueError: x"}
    waits = pod_trouble(
        pod(main=container(waiting={"reason": "CrashLoopBackOff", "message": "40s"}, last=last))
    )
    assert pod_trouble(pod(main=container(running={}, last=last))) == waits


@pytest.mark.parametrize(
    "found",
    [
        pod(),
        pod(conditions=[{"type": "PodScheduled", "status": "True"}]),
        pod(main=container(waiting={"reason": "ContainerCreating"})),
        pod(main=container(waiting={"reason": "PodInitializing"}), init=[container("connector", running={})]),
        pod(
            init=[{**container("connector", terminated={"exitCode": 0}), "ready": True}],
            main=container(running={}),
        ),
        pod(phase="Running", main={**container(running={}), "started": False, "ready": False}),
        pod(
            phase="Running",
            conditions=[
                {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"},
                {"type": "ContainersReady", "status": "True"},
            ],
            main={**container(running={}), "started": True, "ready": True},
        ),
        pod(
            phase="Running",
            conditions=[
                {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
                {"type": "ContainersReady", "status": "False", "reason": "ContainersNotReady"},
            ],
            main={**container(running={}), "started": False, "ready": False},
        ),
    ],
)
def test_time_is_no_trouble(found: Any) -> None:
    assert pod_trouble(found) is None


def test_a_volume_that_cannot_be_mounted_shows_in_events_alone() -> None:
    events = [
        event("Scheduled", "x"),
        event("FailedMount", "old", "2026-01-01T00:00:00Z"),
        event("FailedMount", "hostPath type check failed: /data is not a directory", "2026-01-01T00:01:00Z"),
    ]
    trouble = pod_trouble(pod(main=container(waiting={"reason": "ContainerCreating"})), events)
    assert trouble is not None
    assert trouble.reason is Reason.VOLUME_MOUNT_FAILED
    assert trouble.message.endswith("/data is not a directory")


@pytest.mark.parametrize("progress", ["Pulling", "Created"])
def test_an_event_of_the_past_is_no_trouble(progress: str) -> None:
    mounts = event("FailedMount", "configmap not found", "2026-01-01T00:01:00Z")
    further = event(progress, "", "2026-01-01T00:01:00Z")
    waits = pod(main=container(waiting={"reason": "ContainerCreating"}))
    assert pod_trouble(waits, [mounts]) is not None
    assert pod_trouble(waits, [mounts, further]) is None
    assert pod_trouble(waits, [further, mounts]) is None


@pytest.mark.parametrize(
    ("message", "reason", "said"),
    [
        (
            'create Pod x-0 in StatefulSet x failed error: pods "x-0" is forbidden: exceeded quota: q, used: pods=6',
            Reason.QUOTA_EXCEEDED,
            'pods are refused: pods "x-0" is forbidden: exceeded quota: q, used: pods=6',
        ),
        (
            "create Pod x-0 in StatefulSet x failed error: Internal error occurred: failed calling webhook",
            Reason.POD_CREATION_FAILED,
            "failed calling webhook",
        ),
    ],
)
def test_a_controller_that_is_refused(message: str, reason: Reason, said: str) -> None:
    trouble = refusal_in_events([event("FailedCreate", message), event("FailedMount", "y")])
    assert trouble is not None
    assert trouble.reason is reason
    assert trouble.message.endswith(said)
    status = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": message}]}
    assert refusal_in_condition(status) == trouble


def test_no_refusal() -> None:
    assert refusal_in_events([]) is None
    assert refusal_in_condition({"conditions": [{"type": "Available", "status": "True"}]}) is None


VLLM = """\
(APIServer pid=1) INFO 11-29 22:10:00 [utils.py:200] non-default args: {}
(EngineCore pid=20) ERROR 11-29 22:10:01 [core.py:900] Traceback (most recent call last):
(EngineCore pid=20) ERROR 11-29 22:10:01 [core.py:900]   File "core.py", line 1, in run
(EngineCore pid=20) ERROR 11-29 22:10:01 [core.py:900] ValueError: No available memory for the cache blocks.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "vllm", line 8, in <module>
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (VLLM, "ValueError: No available memory for the cache blocks."),
        (
            "\n".join(VLLM.splitlines()[-1:]),
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ),
        ("a\nb\n\n", "b"),
        (
            "vllm serve: error: argument --block-size: invalid choice: '7'",
            "vllm serve: error: argument --block-size: invalid choice: '7'",
        ),
        (
            "huggingface_hub.errors.RepositoryNotFoundError: 401\nhint",
            "huggingface_hub.errors.RepositoryNotFoundError: 401",
        ),
        (
            "Traceback (most recent call last):\n"
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len (4096) is greater than 2048. [type=value_error, input_value=ArgsKwargs((), {...\n"
            "    For further information visit https://errors.pydantic.dev/2/v/value_error",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: "
            "Value error, max_model_len (4096) is greater than 2048.",
        ),
        ("", ""),
    ],
)
def test_last_words(text: str, line: str) -> None:
    assert last_words(text) == line
