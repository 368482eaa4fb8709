"""What is not implemented is found; what is by default is implemented."""

from typing import Any

import pytest

from disagg_operator.api.support import NOT_IMPLEMENTED, not_implemented
from disagg_operator.api.types import DisaggInferenceSpec

MINIMAL: dict[str, Any] = {"model": {"uri": "hf://Qwen/Qwen3-32B"}, "engine": {"image": "x"}}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("spec.model.uri", {"model": {"uri": "s3://bucket/model"}}, "s3://"),
    ("spec.prefill.parallelism.pipeline", {"prefill": {"parallelism": {"pipeline": 2}}}, "2"),
    ("spec.prefill.parallelism.data", {"prefill": {"parallelism": {"data": 8}}}, "8"),
    ("spec.decode.parallelism.pipeline", {"decode": {"parallelism": {"pipeline": 2}}}, "2"),
    ("spec.decode.parallelism.data", {"decode": {"parallelism": {"data": 2}}}, "2"),
    (
        "spec.decode.parallelism.tensor",
        {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 3}}},
        "3 beside 2 in prefill",
    ),
    ("spec.kvTransfer.loadFailurePolicy", {"kvTransfer": {"loadFailurePolicy": "Fail"}}, "Fail"),
    ("spec.rollout.strategy", {"rollout": {"strategy": "Recreate"}}, "Recreate"),
    ("spec.rollout.maxSurge", {"rollout": {"maxSurge": 0}}, "0"),
    ("spec.rollout.maxUnavailable", {"rollout": {"maxUnavailable": 1}}, "1"),
    ("spec.rollout.paused", {"rollout": {"paused": True}}, "true"),
    ("spec.rollout.revisionHistoryLimit", {"rollout": {"revisionHistoryLimit": 3}}, "3"),
    ("spec.networkPolicy.enabled", {"networkPolicy": {"enabled": True}}, "true"),
]


def test_everything_that_is_on_by_default_is_implemented() -> None:
    assert not_implemented(DisaggInferenceSpec.model_validate(MINIMAL)) == ()


@pytest.mark.parametrize(("path", "fields", "value"), CASES, ids=[case[0] for case in CASES])
def test_a_value_that_is_not_implemented_is_found_and_named(
    path: str, fields: dict[str, Any], value: str
) -> None:
    (found,) = not_implemented(DisaggInferenceSpec.model_validate(MINIMAL | fields))
    assert (found.path, found.value) == (path, value)
    assert found.supported
    assert str(found).startswith(f"{path}: {value} is not implemented yet; use ")


@pytest.mark.parametrize(("prefill", "decode"), [(1, 8), (8, 1), (4, 8), (4, 4)])
def test_tensor_sizes_may_differ_if_one_is_a_multiple_of_the_other(prefill: int, decode: int) -> None:
    fields = {
        role: {"parallelism": {"tensor": size}} for role, size in (("prefill", prefill), ("decode", decode))
    }
    assert not_implemented(DisaggInferenceSpec.model_validate(MINIMAL | fields)) == ()


def test_every_entry_of_the_table_has_a_case() -> None:
    assert {gap.path for gap in NOT_IMPLEMENTED} == {path for path, _, _ in CASES}


def test_all_are_reported_at_once_in_the_order_of_the_api() -> None:
    fields = MINIMAL | {
        "suspend": True,
        "networkPolicy": {"enabled": True},
        "kvTransfer": {"loadFailurePolicy": "Fail"},
    }
    found = not_implemented(DisaggInferenceSpec.model_validate(fields))
    assert [u.path for u in found] == ["spec.kvTransfer.loadFailurePolicy", "spec.networkPolicy.enabled"]
