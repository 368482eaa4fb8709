"""The strategic merge of a role's template."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_operator.build.overlay import OverlayError, strategic_merge, with_labels

BASE = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "nodeSelector": {"x": "1"},
        "containers": [
            {
                "name": "main",
                "image": "vllm",
                "args": ["one", "two"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {}}],
        "tolerations": [{"key": "gpu"}],
    },
}


def merged(overlay: dict[str, Any]) -> Any:
    return strategic_merge(BASE, overlay)


def main_of(pod: Any) -> Any:
    return pod["spec"]["containers"][0]


def test_objects_merge_and_null_deletes() -> None:
    result = merged({"spec": {"nodeSelector": {"y": "2", "x": None}, "priorityClassName": "high"}})
    assert result["spec"]["nodeSelector"] == {"y": "2"}
    assert result["spec"]["priorityClassName"] == "high"
    assert main_of(result) == BASE["spec"]["containers"][0]  # type: ignore[index]


def test_a_container_is_merged_by_name_and_others_are_appended() -> None:
    sidecar = {"name": "sidecar", "image": "s"}
    result = merged({"spec": {"containers": [{"name": "main", "image": "mine"}, sidecar]}})
    assert (main_of(result)["image"], main_of(result)["args"]) == ("mine", ["one", "two"])
    assert result["spec"]["containers"][1] == sidecar


def test_a_variable_replaces_the_one_of_its_name_whole() -> None:
    result = merged({"spec": {"containers": [{"name": "main", "env": [{"name": "B", "value": "2"}]}]}})
    assert main_of(result)["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]


def test_a_volume_replaces_the_one_of_its_name_whole() -> None:
    result = merged({"spec": {"volumes": [{"name": "shm", "hostPath": {"path": "/x"}}]}})
    assert result["spec"]["volumes"] == [{"name": "shm", "hostPath": {"path": "/x"}}]


def test_a_mount_is_known_by_its_path() -> None:
    mounts = [{"name": "other", "mountPath": "/dev/shm"}, {"name": "m", "mountPath": "/m"}]
    result = merged({"spec": {"containers": [{"name": "main", "volumeMounts": mounts}]}})
    assert main_of(result)["volumeMounts"] == mounts


def test_other_lists_are_replaced() -> None:
    result = merged({"spec": {"tolerations": [], "containers": [{"name": "main", "args": ["x"]}]}})
    assert result["spec"]["tolerations"] == []
    assert main_of(result)["args"] == ["x"]


def test_an_item_can_be_deleted_and_an_object_replaced() -> None:
    result = merged(
        {
            "spec": {
                "nodeSelector": {"$patch": "replace", "z": "3"},
                "containers": [{"name": "main", "env": [{"name": "A", "$patch": "delete"}]}],
                "volumes": [{"name": "nothing", "$patch": "delete"}],
            }
        }
    )
    assert result["spec"]["nodeSelector"] == {"z": "3"}
    assert [variable["name"] for variable in main_of(result)["env"]] == ["B"]
    assert result["spec"]["volumes"] == BASE["spec"]["volumes"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ({"spec": {"containers": {"name": "main"}}}, "spec.containers must be a list, not an object"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0] must be an object with name"),
        ({"spec": {"containers": ["main"]}}, "spec.containers[0] must be an object with name"),
        ({"spec": {"volumes": {"a": 1}}}, "spec.volumes must be a list, not an object"),
        (
            {"spec": {"initContainers": "x"}},
            "spec.initContainers must be a list of objects with name, not a plain value",
        ),
        ({"spec": {"tolerations": {"key": "x"}}}, "spec.tolerations must be a list, not an object"),
        ({"spec": "text"}, "spec must be an object, not a plain value"),
    ],
    ids=str,
)
def test_another_shape_is_refused_with_its_path(overlay: dict[str, Any], said: str) -> None:
    with pytest.raises(OverlayError, match=said.replace("[", r"\[").replace("]", r"\]")):
        merged(overlay)


def test_labels_of_ours_win() -> None:
    assert with_labels({"metadata": {"labels": {"a": "theirs", "b": "2"}}}, {"a": "ours"})["metadata"][
        "labels"
    ] == {
        "a": "ours",
        "b": "2",
    }
    assert with_labels({}, {"a": "ours"}) == {"metadata": {"labels": {"a": "ours"}}}


json_objects = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abcd"), below, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abcd"), json_objects, max_size=3))
def test_an_empty_overlay_changes_nothing_and_a_merge_twice_is_one(overlay: dict[str, Any]) -> None:
    assert strategic_merge(BASE, {}) == BASE
    once = strategic_merge({}, overlay)
    assert strategic_merge(once, overlay) == once
