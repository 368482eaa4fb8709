"""What a DisaggInference asks for, read from the object that a user wrote. Pure."""

from dataclasses import dataclass

from pydantic import ValidationError

from .api.conditions import Reason
from .api.support import not_implemented
from .api.types import DisaggInference, DisaggInferenceSpec, DisaggInferenceStatus
from .assess import Refusal
from .build.children import Children, Owner, build_children
from .build.overlay import OverlayError
from .config import Settings
from .control_secret import build_control_secret
from .naming import Manifest
from .observe import ObjectKey
from .reserved import evasions
from .revision import differences, revision


@dataclass(frozen=True)
class Wanted:
    """What a DisaggInference asks for, or why it is not carried out."""

    owner: Owner
    generation: int
    previous: DisaggInferenceStatus
    spec: DisaggInferenceSpec | None
    refusal: Refusal | None
    target: str
    manifests: tuple[Manifest, ...] = ()
    """Of all children, before the sizes of pools that are known only from the cluster."""
    secret: Manifest | None = None
    """The control channel's, without its keys; it is never applied but written as `control_secret` decides."""

    @property
    def keys(self) -> frozenset[ObjectKey]:
        """Kind and name of every child."""
        secret = () if self.secret is None else (self.secret,)
        return frozenset(key_of(manifest) for manifest in (*self.manifests, *secret))


def key_of(manifest: Manifest) -> ObjectKey:
    """Kind and name."""
    return manifest["kind"], manifest["metadata"]["name"]


def read(resource: Manifest, settings: Settings) -> Wanted:
    """What the resource asks for. Never raises for what a user may have written: that becomes a refusal."""
    meta = resource["metadata"]
    owner = Owner(meta["namespace"], meta["name"], meta["uid"])
    try:
        parsed = DisaggInference.model_validate(resource)
    except ValidationError as error:
        why = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        message = f"{why}. Is the CRD of another version than the operator?"
        return Wanted(
            owner, meta["generation"], _old_status(resource), None, Refusal(Reason.INVALID_SPEC, message), ""
        )
    spec = parsed.spec
    target = revision(spec, settings.connector_image)
    refusal, children = _children(owner, spec, settings)
    manifests = children.manifests if children else ()
    secret = build_control_secret(owner.namespace, owner.name, owner.uid) if children else None
    return Wanted(owner, meta["generation"], parsed.status, spec, refusal, target, manifests, secret)


def _children(
    owner: Owner, spec: DisaggInferenceSpec, settings: Settings
) -> tuple[Refusal | None, Children | None]:
    gaps = not_implemented(spec)
    if gaps:
        return Refusal(Reason.NOT_IMPLEMENTED, "; ".join(map(str, gaps))), None
    evading = evasions(spec)
    if evading:
        return Refusal(Reason.RESERVED_ARGUMENT, "; ".join(evading)), None
    unequal = differences(spec)
    if unequal:
        what = "; ".join(map(str, unequal))
        message = f"{what}: KV of one could not be read by the other. Set it once, in engine.extraArgs"
        return Refusal(Reason.ARGUMENTS_DIFFER, message), None
    try:
        return None, build_children(owner, spec, settings)
    except OverlayError as error:
        return Refusal(Reason.INVALID_TEMPLATE, f"template: {error}"), None


def _old_status(resource: Manifest) -> DisaggInferenceStatus:
    try:
        return DisaggInferenceStatus.model_validate(resource.get("status") or {})
    except ValidationError:
        return DisaggInferenceStatus()
