"""Configurations that are refused, and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg_router.config import ConfigError, load, parse

GOOD: dict[str, Any] = {"version": 1, "namespace": "default", "name": "demo", "model": {"name": "m"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ["version"]),
        ({"name": ""}, ["name"]),
        ({"model": {}}, ["model", "name"]),
        ({"model": {"name": 7}}, ["model.name", "str"]),
        ({"mode": "Teleport"}, ["mode", "Teleport"]),
        ({"ports": {"http": 70000}}, ["ports.http", "65535"]),
        ({"ports": {"engine": 0}}, ["ports.engine"]),
        ({"ports": {"htpp": 1}}, ["ports", "htpp"]),
        ({"deadlines": {"idleSeconds": 0}}, ["deadlines.idleSeconds"]),
        ({"deadlines": {"idleSeconds": "60"}}, ["deadlines.idleSeconds"]),
        ({"session": {"keys": ["a b"]}}, ["session.keys"]),
        ({"session": {"bodyFields": [""]}}, ["session.bodyFields"]),
        ({"policy": "Random"}, ["policy", "Random"]),
        ({"tracing": {}}, ["tracing", "endpoint"]),
        ({"tracing": {"endpoint": "http://user:word@collector:4318"}}, ["tracing.endpoint"]),
        ({"limits": {"bodyBytes": 1}}, ["limits.bodyBytes"]),
        ({"sesion": {}}, ["sesion"]),
        ({"auth": {}}, ["auth", "apiKeysFile"]),
        ({"auth": {"apiKeysFile": ""}}, ["auth.apiKeysFile"]),
        ({"auth": {"apiKeys": ["inline"]}}, ["auth"]),
        ({"localPrefill": {"mode": "Auto"}}, ["localPrefill", "maxTokens"]),
        ({"localPrefill": {"maxTokens": 9, "mode": "Sometimes"}}, ["localPrefill.mode", "Sometimes"]),
        ({"overload": {"turnsPerEngine": 0}}, ["overload.turnsPerEngine"]),
        ({"overload": {"waitSeconds": 0}}, ["overload.waitSeconds"]),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(json.dumps({**GOOD, **change}).encode(), "router.json")
    message = str(caught.value)
    assert message.startswith("router.json: ")
    for word in words:
        assert word in message


def test_broken_json_and_missing_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse(b"{", "router.json")
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read.*--config"):
        load(tmp_path / "nowhere.json")


def test_fractions_of_a_second_are_fine() -> None:
    read = parse(json.dumps({**GOOD, "deadlines": {"connectSeconds": 0.5}}).encode(), "router.json")
    assert read.deadlines.connect_seconds == 0.5
    assert read.deadlines.idle_seconds == 120
