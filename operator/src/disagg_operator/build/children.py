"""All children of a DisaggInference for its present spec, ready to be applied."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from ..api.types import AutoscalingMode, DisaggInferenceSpec
from ..config import Settings
from ..naming import ANNOTATION_APPLIED, ENGINES, Component, Manifest, owner_reference
from ..revision import revision
from .disruption import build_disruption_budget
from .engine import build_engines
from .rbac import build_role, build_role_binding, build_service_account
from .router import build_router, build_router_config
from .scalers import build_scaler
from .services import build_engine_service, build_router_service


@dataclass(frozen=True)
class Owner:
    """The DisaggInference that children are made for."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class Children:
    """What should exist for a spec, with the pools' sizes as the spec alone says."""

    revision: str
    """Of the engines among `manifests`."""
    manifests: tuple[Manifest, ...]


def build_children(owner: Owner, spec: DisaggInferenceSpec, settings: Settings) -> Children:
    """Raises OverlayError if a template cannot be merged."""
    name, namespace = owner.name, owner.namespace
    digits = revision(spec, settings.connector_image)
    config = build_router_config(name, namespace, spec)
    manifests = [
        # A Service first: the router finds a pod by it, and a pod's name resolves by it.
        *(build_engine_service(name, namespace, role, digits, spec.kv_transfer.mode) for role in ENGINES),
        *(build_engines(name, namespace, spec, role, digits, settings) for role in ENGINES),
        *(build_disruption_budget(name, namespace, component) for component in Component),
        *(build_scaler(name, namespace, role, fixed) for role, fixed in _scaled_roles(spec)),
        build_service_account(name, namespace),
        build_role(name, namespace),
        build_role_binding(name, namespace),
        config,
        build_router(name, namespace, spec, config, settings),
        build_router_service(name, namespace, spec.router),
    ]
    return Children(digits, tuple(manifests))


def _scaled_roles(spec: DisaggInferenceSpec) -> Iterator[tuple[Component, int]]:
    if spec.autoscaling.mode is not AutoscalingMode.DISABLED:
        yield Component.PREFILL, spec.prefill.fixed_replicas
        yield Component.DECODE, spec.decode.fixed_replicas


def sealed(manifest: Manifest, owner: Owner) -> Manifest:
    """With the owner reference and the annotation that says what was applied; the last that is done to a manifest."""
    meta = {**manifest["metadata"], "ownerReferences": [owner_reference(owner.name, owner.uid)]}
    text = json.dumps({**manifest, "metadata": meta}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    meta["annotations"] = {**meta.get("annotations", {}), ANNOTATION_APPLIED: digest}
    return {**manifest, "metadata": meta}
