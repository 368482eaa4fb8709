"""Argo CD's health check, run by a Lua interpreter on objects as the operator writes them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lupa  # type: ignore[import-untyped]
import pytest

from disagg_operator.api.conditions import Claim, ConditionType, Reason, fails, holds, merge
from disagg_operator.api.types import DisaggInferenceStatus

SCRIPT = Path(__file__).parents[3] / "charts/disagg-operator/files/argocd-health.lua"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROGRESSING = (
    fails(ConditionType.READY, Reason.PODS_STARTING, "0/1"),
    holds(ConditionType.RECONCILING, Reason.PODS_STARTING, "prefill 0/1"),
)


def health(obj: dict[str, Any]) -> tuple[str, str]:
    """What Argo CD shows: status and message."""
    lua = lupa.LuaRuntime()
    lua.globals().obj = lua.table_from(obj, recursive=True)
    answer = lua.execute(SCRIPT.read_text())
    return answer["status"], answer["message"]


def inference(*claims: Claim, generation: int = 2, observed: int = 2, **spec: Any) -> dict[str, Any]:
    status = DisaggInferenceStatus(
        observed_generation=observed, conditions=merge((), claims, generation=observed, now=NOW)
    )
    return {"metadata": {"generation": generation}, "spec": spec, "status": status.to_wire()}


def test_a_new_object_that_nobody_has_seen_is_progressing() -> None:
    assert health({"metadata": {"generation": 1}, "spec": {}})[0] == "Progressing"


def test_a_status_about_an_older_generation_does_not_count() -> None:
    stale = inference(holds(ConditionType.READY, Reason.READY), generation=3, observed=2)
    assert health(stale)[0] == "Progressing"


@pytest.mark.parametrize(
    ("claims", "shown", "message"),
    [
        ((holds(ConditionType.READY, Reason.READY, "serves"),), "Healthy", "serves"),
        (PROGRESSING, "Progressing", "PodsStarting: prefill 0/1"),
        (
            (
                fails(ConditionType.READY, Reason.IMAGE_PULL_FAILED, "x"),
                holds(ConditionType.STALLED, Reason.IMAGE_PULL_FAILED, "no such image"),
            ),
            "Degraded",
            "ImagePullFailed: no such image",
        ),
        (
            (
                holds(ConditionType.READY, Reason.READY),
                holds(ConditionType.RECONCILING, Reason.ROLLOUT_IN_PROGRESS, "new"),
            ),
            "Progressing",
            "RolloutInProgress: new",
        ),
        ((fails(ConditionType.READY, Reason.CRASH_LOOP, "exit 1"),), "Degraded", "CrashLoop: exit 1"),
        ((), "Progressing", "waiting for the operator"),
    ],
)
def test_conditions_become_health(claims: tuple[Claim, ...], shown: str, message: str) -> None:
    assert health(inference(*claims)) == (shown, message)


def test_a_suspended_object_is_suspended_whatever_its_pods_do() -> None:
    assert health(inference(*PROGRESSING, suspend=True))[0] == "Suspended"
