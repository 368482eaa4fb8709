"""Names, labels and ports of everything that the operator makes: docs/wire-contract.md, sections 3 and 4.

Nothing else in the operator spells a child's name or a label key.
"""

from enum import StrEnum
from typing import Any

from .api.base import API_VERSION, GROUP
from .api.types import KIND as KIND
from .api.types import PLURAL as PLURAL
from .api.types import SCALER_KIND as SCALER_KIND
from .api.types import SCALER_PLURAL as SCALER_PLURAL

Manifest = dict[str, Any]
"""A Kubernetes object as JSON data."""

FIELD_MANAGER = "disagg-operator"
MAIN_CONTAINER = "main"
"""Of every pod: the engine or the router."""

HTTP_PORT = 8000
ADMIN_PORT = 8001
SIDE_CHANNEL_PORT = 5600
CONTROL_PORT = 5700

LABEL_NAME = f"{GROUP}/name"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_MODE = f"{GROUP}/transfer-mode"
LABEL_KEEP = f"{GROUP}/keep"
"""On the Service of engines, and so on their EndpointSlices: pods from this ordinal on are leaving and take no new turns."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
ANNOTATION_APPLIED = f"{GROUP}/applied"
"""On every child: the hash of what was applied last. Says, without asking anybody, whether a write is due."""
ANNOTATION_CONFIG = f"{GROUP}/config"
"""On the router's pod template: the hash of its configuration, so that a change rolls the router."""
ANNOTATION_LEAVING = f"{GROUP}/leaving-since"
"""On the same Service: since when they are."""
ANNOTATION_ROTATED = f"{GROUP}/keys-rotated-at"
"""On the Secret of the control channel: when its keys were last shifted."""

CONTROL_KEYS = ("previous", "current", "next")
"""Keys of that Secret, and so names of the files that the connector reads."""


class Component(StrEnum):
    """What a child belongs to; the value of the role label."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


ENGINES = (Component.PREFILL, Component.DECODE)


def engine_name(name: str, role: Component, revision: str) -> str:
    """The StatefulSet and headless Service of a role in a revision."""
    return f"{name}-{role}-{revision}"


def role_name(name: str, role: Component) -> str:
    """What a component has once, whatever the revision: the router's objects, a role's disruption budget and scaler."""
    return f"{name}-{role}"


def control_secret_name(name: str) -> str:
    """The Secret that both roles' engines recognize each other by, and the router's replicas too in mode BidirectionalPull."""
    return f"{name}-control"


def selector(name: str, role: Component, revision: str | None = None) -> dict[str, str]:
    """The labels that select a component's pods; never changes for an object's lifetime."""
    labels = {LABEL_NAME: name, LABEL_ROLE: str(role)}
    if revision is not None:
        labels[LABEL_REVISION] = revision
    return labels


def engines_selector(name: str, revision: str) -> dict[str, str]:
    """The labels that select the engine pods of both roles in a revision."""
    return {"app.kubernetes.io/name": "disagg-engine", LABEL_NAME: name, LABEL_REVISION: revision}


def labels(name: str, role: Component | None = None, revision: str | None = None) -> dict[str, str]:
    """All labels of a child and of its pods; without a role, of what engines of both share. Nothing is copied from the
    DisaggInference's own labels."""
    component = {} if role is None else {"app.kubernetes.io/component": str(role)}
    return {
        "app.kubernetes.io/name": "disagg-router" if role is Component.ROUTER else "disagg-engine",
        "app.kubernetes.io/instance": name,
        **component,
        "app.kubernetes.io/part-of": "disagg-inference",
        LABEL_MANAGED_BY: FIELD_MANAGER,
        **({LABEL_NAME: name} if role is None else selector(name, role, revision)),
    }


def owner_reference(name: str, uid: str) -> Manifest:
    """Makes a child a controlled dependent, so that it is garbage collected with its DisaggInference."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def endpoint(name: str, namespace: str, port: int, *, encrypted: bool) -> str:
    """The base URL that an OpenAI client in the cluster is given; `port` is that of the router's Service."""
    scheme = "https" if encrypted else "http"
    return f"{scheme}://{role_name(name, Component.ROUTER)}.{namespace}.svc:{port}/v1"
