"""The Secret that engines of one DisaggInference recognize each other by: when it is written, and with what. Pure.

It holds three keys of 32 random bytes. Engines sign with `current` and accept all three (docs/connector.md), so two
engines may be one rotation apart, which they are for as long as kubelets take to bring a change to their pods. A key
is `next` for a whole period before anybody signs with it, and is accepted for another one afterwards.

The keys of a Secret that is sound are never replaced, only shifted. It is written by create and by update of the
version that was looked at, so of two writers one fails.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from .api.conditions import Reason
from .naming import (
    ANNOTATION_ROTATED,
    CONTROL_KEYS,
    Manifest,
    control_secret_name,
    labels,
    owner_reference,
)

KEY_BYTES = 32

Keys = Mapping[str, bytes]
"""By the names of CONTROL_KEYS."""


@dataclass(frozen=True)
class KeyPolicy:
    """How keys are made and for how long."""

    every: timedelta
    """Between two rotations."""
    fresh: Callable[[int], bytes]
    """So many random bytes."""


@dataclass(frozen=True)
class SecretWrite:
    """What to write, and what to tell about it. The manifest holds keys: it is for the API server alone."""

    manifest: Manifest = field(repr=False)
    exists: bool
    reason: Reason
    message: str

    @property
    def is_repair(self) -> bool:
        return self.reason is Reason.CONTROL_KEYS_REPAIRED


def build_control_secret(namespace: str, name: str, uid: str) -> Manifest:
    """The Secret of a DisaggInference, without its keys."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": control_secret_name(name),
            "namespace": namespace,
            "labels": labels(name),
            "ownerReferences": [owner_reference(name, uid)],
        },
        "type": "Opaque",
    }


def next_write(
    empty: Manifest, live: Manifest | None, now: datetime, policy: KeyPolicy
) -> SecretWrite | None:
    """What is due, if anything. `empty` is the Secret without keys, `live` the one that is there and ours."""
    name = empty["metadata"]["name"]
    if live is None:
        keys = {key: policy.fresh(KEY_BYTES) for key in CONTROL_KEYS}
        message = f"Secret {name}: keys for the engines' control channel were made"
        return SecretWrite(_with_keys(empty, keys, now), False, Reason.CONTROL_KEYS_MADE, message)
    found = {key: _key(live, key) for key in CONTROL_KEYS}
    lost = [key for key, value in found.items() if value is None]
    if lost:
        message = (
            f"Secret {name}: {', '.join(lost)} missing or not {KEY_BYTES} bytes long, made anew. Engines may not exchange "
            "KV until the Secret has reached their pods, about a minute; until then they compute it"
        )
        repaired = _with_keys(live, _repaired(found, policy), now)
        return SecretWrite(repaired, True, Reason.CONTROL_KEYS_REPAIRED, message)
    sound = {key: value for key, value in found.items() if value is not None}
    rotated = _rotated_at(live)
    if rotated is None or rotated - now > policy.every:
        message = f"Secret {name}: the time of its last rotation made no sense, the next one counts from now"
        return SecretWrite(_with_keys(live, sound, now), True, Reason.CONTROL_KEYS_ROTATED, message)
    if now - rotated < policy.every:
        return None
    shifted = {"previous": sound["current"], "current": sound["next"], "next": policy.fresh(KEY_BYTES)}
    message = f"Secret {name}: engines sign with the next key"
    return SecretWrite(_with_keys(live, shifted, now), True, Reason.CONTROL_KEYS_ROTATED, message)


def _repaired(found: Mapping[str, bytes | None], policy: KeyPolicy) -> Keys:
    """Every sound key stays accepted. If the one to sign with is lost, the next takes its place: engines know it already."""
    keys = dict(found)
    if keys["current"] is None:
        keys["current"], keys["next"] = keys["next"], None
    return {key: keys[key] or policy.fresh(KEY_BYTES) for key in CONTROL_KEYS}


def _with_keys(secret: Manifest, keys: Keys, now: datetime) -> Manifest:
    """The Secret as it is, with these keys as of now."""
    encoded = {key: base64.b64encode(value).decode() for key, value in keys.items()}
    meta = secret["metadata"]
    moment = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    annotations = {**(meta.get("annotations") or {}), ANNOTATION_ROTATED: moment}
    return {
        **secret,
        "metadata": {**meta, "annotations": annotations},
        "data": {**(secret.get("data") or {}), **encoded},
    }


def _key(secret: Manifest, key: str) -> bytes | None:
    """A key, if there is one and it is sound."""
    try:
        value = base64.b64decode((secret.get("data") or {})[key], validate=True)
    except (KeyError, TypeError, binascii.Error):
        return None
    return value if len(value) == KEY_BYTES else None


def _rotated_at(secret: Manifest) -> datetime | None:
    text = (secret["metadata"].get("annotations") or {}).get(ANNOTATION_ROTATED, "")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
