"""When a write is due."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import SETTINGS, parsed_spec

from disagg_operator.build.children import Owner, build_children, sealed
from disagg_operator.drift import covers, is_due
from disagg_operator.naming import ANNOTATION_APPLIED, Manifest


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({"a": 1, "more": 2}, {"a": 1}),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}),
        ([{"name": "theirs"}, {"name": "x", "protocol": "TCP"}], [{"name": "x"}]),
        ({"memory": "1"}, {"memory": "1000m"}),
        ({"memory": "4Gi"}, {"memory": "4096Mi"}),
        ({"cpu": "1k"}, {"cpu": "1e3"}),
        ({}, {"empty": {}, "none": [], "text": "", "no": False}),
    ],
    ids=str,
)
def test_covered(live: Any, wanted: Any) -> None:
    assert covers(live, wanted)


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({}, {"a": 1}),
        ({"a": 2}, {"a": 1}),
        ({"a": [2, 1]}, {"a": [1, 2]}),
        ({"a": [1]}, {"a": [1, 2]}),
        ([{"name": "y"}], [{"name": "x"}]),
        ({"memory": "4Gi"}, {"memory": "4G"}),
        ({"a": {}}, {"a": {"b": 1}}),
        ({"a": "x"}, {"a": {"b": 1}}),
        ({"a": "x"}, {"a": [1]}),
        ({}, {"replicas": 1}),
    ],
    ids=str,
)
def test_not_covered(live: Any, wanted: Any) -> None:
    assert not covers(live, wanted)


def test_zero_replicas_are_not_the_same_as_none() -> None:
    """A missing number is a default, which for replicas is 1."""
    assert not covers({}, {"replicas": 0})


json_values = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=2), below, max_size=3),
)


@given(json_values)
def test_everything_covers_itself(value: Any) -> None:
    assert covers(value, value)


def _children(owner: Owner, **changes: Any) -> list[Manifest]:
    return [
        sealed(child, owner) for child in build_children(owner, parsed_spec(**changes), SETTINGS).manifests
    ]


def test_every_child_is_due_when_absent_or_outdated_and_not_once_applied() -> None:
    owner = Owner("default", "demo", "uid")
    now = _children(owner)
    later = _children(owner, router={"replicas": 5})
    for manifest in now:
        assert is_due(manifest, None)
        assert not is_due(manifest, manifest)
    due = [m["kind"] for m, live in zip(later, now, strict=True) if is_due(m, live)]
    assert due == ["Deployment"]


def test_a_field_that_somebody_changed_makes_a_write_due() -> None:
    manifest = _children(Owner("default", "demo", "uid"))[2]
    changed = {**manifest, "spec": {**manifest["spec"], "replicas": 9}}
    assert is_due(manifest, changed)
    assert ANNOTATION_APPLIED in manifest["metadata"]["annotations"]
