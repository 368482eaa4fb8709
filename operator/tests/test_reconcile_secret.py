"""How a pass writes the engines' Secret: by create and update, and what it lets others see of it."""

import base64
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from operator_world import ROTATE, SETTINGS, START, resource

from disagg_operator.errors import KubeError, classify
from disagg_operator.naming import KIND
from disagg_operator.pages import Answer, NoPage, Target
from disagg_operator.reconcile import Key, Reconciler

Manifest = dict[str, Any]
KEY = Key("default", "demo")
SECRET = ("Secret", "demo-control")


@dataclass
class Server:
    """An API server in memory, for one namespace; it keeps all that was asked of it."""

    objects: dict[tuple[str, str], Manifest] = field(default_factory=lambda: {(KIND, "demo"): resource()})
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    told: list[Manifest] = field(default_factory=list)
    refuse: Callable[[str, str], KubeError | None] = lambda verb, kind: None

    def _call(self, verb: str, kind: str, name: str) -> None:
        self.calls.append((verb, kind, name))
        error = self.refuse(verb, kind)
        if error is not None:
            raise error

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        self._call("get", kind, name)
        return self.objects.get((kind, name))

    async def children(self, namespace: str, name: str) -> list[Manifest]:
        return [item for (kind, _), item in self.objects.items() if kind not in (KIND, "Secret")]

    async def events(self, kind: str, namespace: str, name: str) -> list[Manifest]:
        return []

    async def apply(self, manifest: Manifest, *, status: bool = False) -> Manifest:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._call("status" if status else "apply", kind, name)
        if status:
            self.objects[kind, name]["status"] = manifest["status"]
            return self.objects[kind, name]
        return self._keep(manifest)

    async def create(self, manifest: Manifest) -> Manifest:
        kind = manifest["kind"]
        self._call("create", kind, manifest["metadata"].get("name", ""))
        if kind == "Event":
            self.told.append(manifest)
            return manifest
        if (kind, manifest["metadata"]["name"]) in self.objects:
            raise classify("create", 409, "already exists")
        return self._keep(manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        meta = manifest["metadata"]
        self._call("replace", manifest["kind"], meta["name"])
        there = self.objects[manifest["kind"], meta["name"]]["metadata"]
        if meta["resourceVersion"] != there["resourceVersion"]:
            raise classify("update", 409, "the object has been modified")
        return self._keep(manifest)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self._call("delete", kind, name)
        del self.objects[kind, name]

    def _keep(self, manifest: Manifest) -> Manifest:
        meta = manifest["metadata"]
        version = str(len(self.calls))
        kept = {
            "uid": f"{manifest['kind']}-{meta['name']}", "generation": 1, "creationTimestamp": START.isoformat(),
            **meta, "resourceVersion": version,
        }  # fmt: skip
        self.objects[manifest["kind"], meta["name"]] = {**manifest, "metadata": kept}
        return manifest

    def keys(self) -> list[bytes]:
        data = self.objects[SECRET]["data"]
        return [base64.b64decode(data[name]) for name in ("previous", "current", "next")]


async def _no_pages(targets: Mapping[str, Target]) -> dict[str, Answer]:
    return dict.fromkeys(targets, NoPage("no connection"))


class Setting:
    def __init__(self) -> None:
        self.server, self.now, self._made = Server(), START, 0
        self.reconciler = Reconciler(
            self.server,  # type: ignore[arg-type]
            SETTINGS,
            lambda: self.now,
            self._random,
            lambda key, conditions: None,
            _no_pages,
            lambda: (self.now - START).total_seconds(),
        )

    def _random(self, size: int) -> bytes:
        self._made += 1
        return bytes([self._made]) * size

    async def pass_(self) -> list[tuple[str, str, str]]:
        """What was written of the Secret in one pass."""
        before = len(self.server.calls)
        await self.reconciler.reconcile(KEY)
        return [c for c in self.server.calls[before:] if c[1] == "Secret" and c[0] != "get"]


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_it_is_created_first_and_never_applied(setting: Setting) -> None:
    await setting.reconciler.reconcile(KEY)
    writes = [call for call in setting.server.calls if call[0] not in ("get",)]
    assert writes[0] == ("create", *SECRET)
    assert not any(verb in ("apply", "delete") and kind == "Secret" for verb, kind, _ in writes)
    assert await setting.pass_() == []


async def test_a_rotation_is_an_update_with_an_event_and_nobody_sees_a_key(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await setting.reconciler.reconcile(KEY)
        setting.now += ROTATE + timedelta(seconds=1)
        assert await setting.pass_() == [("replace", *SECRET)]
        assert await setting.pass_() == []
    assert setting.server.keys() == [bytes([number]) * 32 for number in (2, 3, 4)]
    told = [(event["reason"], event["type"]) for event in setting.server.told]
    assert ("ControlKeysMade", "Normal") in told
    assert ("ControlKeysRotated", "Normal") in told
    seen = caplog.text + repr(setting.server.told) + repr(setting.server.objects[KIND, "demo"])
    for number in range(1, 5):
        assert base64.b64encode(bytes([number]) * 32).decode() not in seen
        assert repr(bytes([number]) * 4)[2:-1] not in seen


async def test_a_repair_is_a_warning(setting: Setting) -> None:
    await setting.reconciler.reconcile(KEY)
    setting.server.objects[SECRET]["data"]["next"] = ""
    assert await setting.pass_() == [("replace", *SECRET)]
    (event,) = (event for event in setting.server.told if event["reason"] == "ControlKeysRepaired")
    assert event["type"] == "Warning"
    assert "next missing or not 32 bytes long" in event["message"]


async def test_a_secret_that_changed_meanwhile_is_not_overwritten(setting: Setting) -> None:
    """Between looking and writing, somebody else has rotated."""
    await setting.reconciler.reconcile(KEY)
    setting.now += ROTATE + timedelta(seconds=1)
    get = setting.server.get

    async def get_an_old_one(kind: str, namespace: str, name: str) -> Manifest | None:
        found = await get(kind, namespace, name)
        if kind == "Secret" and found is not None:
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": "older"}}
        return found

    setting.server.get = get_an_old_one  # type: ignore[method-assign]
    before = setting.server.keys()
    with pytest.raises(KubeError, match="modified"):
        await setting.pass_()
    assert setting.server.keys() == before
    assert "ControlKeysRotated" not in [event["reason"] for event in setting.server.told]


async def test_without_the_right_to_read_it_the_pass_says_so(setting: Setting) -> None:
    forbidden = classify("read Secret default/demo-control", 403, "forbidden")
    setting.server.refuse = lambda verb, kind: forbidden if (verb, kind) == ("get", "Secret") else None
    with pytest.raises(KubeError, match="read Secret"):
        await setting.pass_()
    conditions = setting.server.objects[KIND, "demo"]["status"]["conditions"]
    assert any("read Secret default/demo-control" in condition["message"] for condition in conditions)


async def test_without_the_right_to_make_it_the_rest_is_applied_and_the_pass_fails(setting: Setting) -> None:
    forbidden = classify("create Secret in default", 403, "forbidden")
    setting.server.refuse = lambda verb, kind: forbidden if (verb, kind) == ("create", "Secret") else None
    with pytest.raises(KubeError, match="create Secret"):
        await setting.pass_()
    assert any(kind == "StatefulSet" for kind, _ in setting.server.objects)
