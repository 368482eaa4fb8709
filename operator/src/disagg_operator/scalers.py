"""DisaggInferenceScalers that are there: who writes their number, and what their status says. Pure.

Whoever scales does: with mode Auto that is us, after a decision. Nothing else that is written to a scaler changes its number.
"""

from collections.abc import Mapping

from .api.scaling import AutoscalingMode
from .autoscale import Course
from .build.children import sealed
from .build.scalers import build_scaler, scaler_status
from .drift import covers
from .naming import ENGINES, SCALER_KIND, Component, Manifest, role_name
from .observe import Observed
from .pools import Pools
from .wanted import Wanted, key_of
from .writes import status_of, unchanged


def is_marked(live: Manifest, wanted: Manifest) -> bool:
    """Whether a scaler that is there is known as ours: all of it that is kept up."""
    ours = wanted["metadata"]
    return covers(live["metadata"], {"labels": ours["labels"], "ownerReferences": ours["ownerReferences"]})


def marked(live: Manifest, wanted: Manifest) -> Manifest:
    """What makes it so. It keeps its number, and is written only if it is still the one that was looked at."""
    return {**unchanged(wanted, live), "spec": live["spec"]}


def scaler_statuses(wanted: Wanted, observed: Observed, sizes: Pools) -> tuple[Manifest, ...]:
    """Without pods that are leaving: an HPA whose wish is near the number that it reads would take that, and call them back."""
    found = []
    for component in ENGINES:
        scaler = observed.live.get((SCALER_KIND, role_name(wanted.owner.name, component)))
        if scaler is None or key_of(scaler) not in wanted.keys:
            continue
        pods = max(len(observed.pods_of(component)) - sizes[component].leaving, 0)
        status = scaler_status(wanted.owner.name, component, pods, scaler["metadata"]["generation"])
        if scaler.get("status") != status:
            found.append(status_of(scaler, status))
    return tuple(found)


def scaler_writes(wanted: Wanted, observed: Observed, course: Course) -> Mapping[Component, Manifest]:
    """The scalers with the sizes that were decided on just now, where they are others; nothing unless the mode is Auto."""
    decision = course.decision
    if wanted.spec is None or wanted.spec.autoscaling.mode is not AutoscalingMode.AUTO or decision is None:
        return {}
    writes = {}
    for component in ENGINES:
        size = decision.desired.of(component)
        manifest = build_scaler(wanted.owner.name, wanted.owner.namespace, component, size)
        live = observed.live.get(key_of(manifest))
        if live is not None and live["spec"]["replicas"] != size:
            writes[component] = sealed(manifest, wanted.owner)
    return writes


def resized(write: Manifest, looked_at: Manifest, live: Manifest | None) -> Manifest | None:
    """One of these for the scaler as it is now; None if somebody has made it another one, or given it another number, since it was
    looked at: that stands."""
    if live is None or live["metadata"]["uid"] != looked_at["metadata"]["uid"]:
        return None
    return unchanged(write, live) if live["spec"]["replicas"] == looked_at["spec"]["replicas"] else None
