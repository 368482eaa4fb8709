"""Saying what is wrong with a pod."""

from typing import Any

import pytest

from e2e.demo.diagnosis import troubles

DONE = {"name": "connector", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}


def _pod(main: dict[str, Any], init: dict[str, Any] = DONE) -> dict[str, Any]:
    return {"status": {"initContainerStatuses": [init], "containerStatuses": [{"name": "main", **main}]}}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (_pod({"ready": True, "state": {"running": {}}}), {}),
        (_pod({"ready": False, "state": {"running": {}}}), {"main": "running, not ready"}),
        (
            _pod({"ready": True, "restartCount": 2, "state": {"running": {}}}),
            {"main": "running, ready, 2 restarts"},
        ),
        (
            _pod(
                {
                    "restartCount": 3,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                }
            ),
            {"main": "waiting, CrashLoopBackOff: back-off, 3 restarts"},
        ),
        (
            _pod(
                {"ready": False, "state": {"waiting": {"reason": "PodInitializing"}}},
                {"name": "connector", "state": {"waiting": {"reason": "ImagePullBackOff"}}},
            ),
            {"connector": "waiting, ImagePullBackOff"},
        ),
        (
            {
                "status": {
                    "conditions": [
                        {"type": "PodScheduled", "status": "False", "message": "0/2 nodes available"}
                    ]
                }
            },
            {"": "not scheduled: 0/2 nodes available"},
        ),
    ],
)
def test_what_keeps_a_pod_from_being_ready_is_named(pod: dict[str, Any], expected: dict[str, str]) -> None:
    assert troubles(pod) == expected
