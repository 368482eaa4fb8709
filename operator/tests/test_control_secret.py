"""The Secret that engines recognize each other by, over its life."""

import base64
import json
from datetime import timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from operator_world import ROTATE, START, World, key_policy, minimal_spec
from typer.testing import CliRunner

from disagg_operator.cli import app
from disagg_operator.control_secret import KeyPolicy, build_control_secret, next_write
from disagg_operator.naming import ANNOTATION_ROTATED, CONTROL_KEYS

KEY = ("Secret", "demo-control")


def keys(secret: dict[str, Any]) -> tuple[bytes | None, ...]:
    """Previous, current, next; None if there is none."""
    found = (secret.get("data", {}).get(name) for name in CONTROL_KEYS)
    return tuple(None if value is None else base64.b64decode(value) for value in found)


def letters(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) * 32 for number in numbers)


def reasons(world: World) -> list[str]:
    return [str(write.reason) for write in world.told]


@pytest.fixture
def world() -> World:
    made = World()
    made.reconcile()
    return made


def damage(world: World, **data: bytes | None) -> None:
    """Somebody edits the Secret."""
    secret = world.live[KEY]
    for name, value in data.items():
        if value is None:
            del secret["data"][name]
        else:
            secret["data"][name] = base64.b64encode(value).decode()


def test_it_is_made_before_any_pod_and_once() -> None:
    world = World()
    assert world.plan().secret is not None
    world.settle()
    secret = world.live[KEY]
    assert keys(secret) == letters(1, 2, 3)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert reasons(world) == ["ControlKeysMade"]


def test_sound_keys_are_never_made_anew(world: World) -> None:
    before = keys(world.live[KEY])
    world.edit(engine={"image": "vllm:2"})
    world.settle()
    world.edit(decode={"replicas": 3}, suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert keys(world.live[KEY]) == before
    assert reasons(world) == ["ControlKeysMade"]


def test_they_are_shifted_by_one_when_their_time_is_over(world: World) -> None:
    world.settle()
    pods = {name: pod.template for name, pod in world.pods.items()}
    world.now = START + ROTATE - timedelta(seconds=1)
    world.reconcile()
    assert keys(world.live[KEY]) == letters(1, 2, 3)
    world.now = START + ROTATE + timedelta(minutes=5)
    said = world.reconcile()
    assert keys(world.live[KEY]) == letters(2, 3, 4)
    assert [c.type for c in said.status.conditions if c.status == "True" and c.type == "Reconciling"] == []
    world.settle()
    assert reasons(world) == ["ControlKeysMade", "ControlKeysRotated"]
    assert {name: pod.template for name, pod in world.pods.items()} == pods, "no pod restarts"
    assert world.condition("Ready")["status"] == "True"  # type: ignore[index]


def test_an_operator_that_was_away_for_long_rotates_once(world: World) -> None:
    world.now = START + 10 * ROTATE
    world.settle()
    assert keys(world.live[KEY]) == letters(2, 3, 4)


@given(st.lists(st.integers(0, 3 * 24 * 60), max_size=40))
def test_a_key_is_known_for_a_period_before_and_after_it_signs(minutes: list[int]) -> None:
    """Whenever passes happen: what is accepted at one rotation's time is still accepted just before the next one."""
    policy = key_policy()
    secret, now = build_control_secret("default", "demo", "uid-1"), START
    write = next_write(secret, None, now, policy)
    assert write is not None
    live, changed_at = write.manifest, now
    for step in minutes:
        now += timedelta(minutes=step)
        write = next_write(secret, live, now, policy)
        if write is not None:
            assert now - changed_at >= ROTATE
            assert keys(write.manifest)[:2] == keys(live)[1:]
            live, changed_at = write.manifest, now
        assert len(set(keys(live))) == 3


def test_a_lost_secret_is_made_anew(world: World) -> None:
    world.delete(KEY)
    world.reconcile()
    assert keys(world.live[KEY]) == letters(4, 5, 6)


@pytest.mark.parametrize("bad", [None, b"", b"short", b"x" * 33])
@pytest.mark.parametrize(
    ("lost", "then"),
    [
        (("previous",), letters(4, 2, 3)),
        (("next",), letters(1, 2, 4)),
        # Engines know `next` already: the one that nobody can sign with any more is replaced by it.
        (("current",), letters(1, 3, 4)),
        (("current", "next"), letters(1, 4, 5)),
        (("previous", "current"), letters(4, 3, 5)),
        (("previous", "current", "next"), letters(4, 5, 6)),
    ],
)
def test_what_is_damaged_is_made_anew_and_the_rest_is_kept(
    world: World, bad: bytes | None, lost: tuple[str, ...], then: tuple[bytes, ...]
) -> None:
    world.now += timedelta(days=6)
    damage(world, **dict.fromkeys(lost, bad))
    world.reconcile()
    assert keys(world.live[KEY]) == then
    told = world.told[-1]
    assert told.is_repair
    assert all(name in told.message for name in lost)
    world.now += timedelta(days=6)
    world.reconcile()
    assert keys(world.live[KEY]) == then, "a new next one gets its whole period"


def test_text_that_is_no_base64_is_damage(world: World) -> None:
    world.live[KEY]["data"]["current"] = "???"
    world.reconcile()
    assert keys(world.live[KEY]) == letters(1, 3, 4)


@pytest.mark.parametrize("text", [None, "", "yesterday", "2026-01-01T00:00:00", "2999-01-01T00:00:00Z"])
def test_a_lost_or_absurd_time_counts_from_now(world: World, text: str | None) -> None:
    world.live[KEY]["metadata"]["annotations"][ANNOTATION_ROTATED] = text or ""
    if text is None:
        del world.live[KEY]["metadata"]["annotations"]
    world.now += timedelta(days=8)
    world.reconcile()
    assert keys(world.live[KEY]) == letters(1, 2, 3)
    world.now += ROTATE
    world.reconcile()
    assert keys(world.live[KEY]) == letters(2, 3, 4)


def test_what_others_put_into_it_stays(world: World) -> None:
    world.live[KEY]["metadata"]["labels"]["team"] = "a"
    world.live[KEY]["metadata"]["annotations"]["note"] = "b"
    damage(world, other=b"data")
    world.now += ROTATE
    world.reconcile()
    secret = world.live[KEY]
    assert (secret["metadata"]["labels"]["team"], secret["metadata"]["annotations"]["note"]) == ("a", "b")
    assert base64.b64decode(secret["data"]["other"]) == b"data"


def test_a_secret_of_somebody_else_is_not_touched() -> None:
    world = World()
    world.live[KEY] = {"kind": "Secret", "metadata": {"name": "demo-control", "uid": "theirs"}, "data": {}}
    assert world.plan().secret is None
    world.reconcile()
    assert world.live[KEY]["data"] == {}
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert stalled["reason"] == "NotOwned"
    assert "Secret demo-control" in stalled["message"]


def test_a_refused_spec_leaves_it_as_it_is(world: World) -> None:
    world.edit(kvTransfer={"loadFailurePolicy": "Fail"})
    world.now += ROTATE
    world.reconcile()
    assert keys(world.live[KEY]) == letters(1, 2, 3)


def test_keys_are_told_to_nobody_but_the_api_server(world: World, tmp_path: Any) -> None:
    policy = KeyPolicy(ROTATE, lambda size: b"\xaa" * size)
    write = next_write(build_control_secret("default", "demo", "uid-1"), None, START, policy)
    assert write is not None
    shown = repr(write) + write.message + json.dumps(world.resource["status"])
    for secret in (
        base64.b64encode(b"\xaa" * 32).decode(),
        base64.b64encode(b"\x02" * 32).decode(),
        "\\xaa",
        "aaaa",
    ):
        assert secret not in shown
    file = tmp_path / "di.yaml"
    spec = json.dumps(minimal_spec())
    file.write_text(
        f"apiVersion: inference.disagg.dev/v1alpha1\nkind: DisaggInference\nmetadata: {{name: x}}\nspec: {spec}\n"
    )
    printed = CliRunner().invoke(app, ["render", str(file)]).stdout
    assert "name: x-control" in printed
    secret = next(item for item in yaml.safe_load_all(printed) if item["kind"] == "Secret")
    assert secret.keys() == {"apiVersion", "kind", "metadata", "type"}
