"""How many pods each pool of engines is to have, and how pods leave it. Pure.

A pool that gets smaller loses the KV of its highest ordinals. So these pods take no new turns first, which a label on their
Service tells the routers; the turns that come in the meantime bring what they hold elsewhere; then they go. Where a size
comes from (the spec, Auto, an HPA) makes no difference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from .api.scaling import AutoscalingMode
from .api.types import DisaggInferenceSpec, Role
from .naming import (
    ANNOTATION_LEAVING,
    ENGINES,
    LABEL_KEEP,
    SCALER_KIND,
    Component,
    Manifest,
    engine_name,
    role_name,
)
from .observe import Observed


@dataclass(frozen=True)
class Pool:
    """One role's pods of the revision that the spec asks for."""

    size: int
    """Pods that are wanted."""
    held: int
    """What its StatefulSet is to have: more than `size` while pods are leaving."""
    leaving_since: datetime | None = None
    """Set while the routers are told that pods from ordinal `size` on are leaving."""
    leaving_until: datetime | None = None
    """When they are stopped."""
    resumes_with: int = 0
    """Of a suspended pool: the size that it will have again. A new scaler has it, since an HPA leaves one of 0 alone for good."""

    @property
    def leaving(self) -> int:
        """Pods that take no new turns."""
        return self.held - self.size


Pools = Mapping[Component, Pool]


def role_of(spec: DisaggInferenceSpec, component: Component) -> Role:
    """The spec of a role of engines."""
    return spec.prefill if component is Component.PREFILL else spec.decode


def is_scaled(spec: DisaggInferenceSpec) -> bool:
    """Whether the sizes are kept in DisaggInferenceScalers."""
    return spec.autoscaling.mode is not AutoscalingMode.DISABLED


def pools(name: str, spec: DisaggInferenceSpec, target: str, observed: Observed, now: datetime) -> Pools:
    """Both roles' pools in the revision `target` of the DisaggInference `name`."""
    return {component: _pool(name, spec, component, target, observed, now) for component in ENGINES}


def staying(pools: Pools) -> Pools:
    """The same sizes while nobody carries them out: no pod leaves."""
    return {
        component: replace(pool, held=pool.size, leaving_since=None, leaving_until=None)
        for component, pool in pools.items()
    }


def fixed_pools(spec: DisaggInferenceSpec) -> Pools:
    """Both roles' pools as the spec alone says."""
    sizes = {component: role_of(spec, component).fixed_replicas for component in ENGINES}
    return {
        component: Pool(0, 0, resumes_with=size) if spec.suspend else Pool(size, size)
        for component, size in sizes.items()
    }


def scaled_size(name: str, spec: DisaggInferenceSpec, component: Component, observed: Observed) -> int:
    """The size that is kept apart from the spec: the scaler's, within the role's bounds.

    Without a scaler, be it new or deleted by somebody, it is that of the role's newest StatefulSet: a pool does not shrink
    because the number was lost.
    """
    role = role_of(spec, component)
    scaler = observed.live.get((SCALER_KIND, role_name(name, component)))
    if scaler is not None:
        size = int(scaler["spec"]["replicas"])
    else:
        found = [w.wanted for w in observed.workloads if w.component is component]
        size = found[-1] if found else role.fixed_replicas
    if role.scaling is None:
        return size
    return min(max(size, role.scaling.min_replicas), role.scaling.max_replicas)


def handover_seconds(spec: DisaggInferenceSpec, component: Component) -> int:
    """How long pods leave. KV that prefill is still to read from decode has to live as long as it was promised."""
    promised = spec.kv_transfer.effective_decode_retention_seconds if component is Component.DECODE else None
    return max(role_of(spec, component).drain.handover_seconds, promised or 0)


def _pool(
    name: str, spec: DisaggInferenceSpec, component: Component, target: str, observed: Observed, now: datetime
) -> Pool:
    if is_scaled(spec):
        size = scaled_size(name, spec, component, observed)
    else:
        size = role_of(spec, component).fixed_replicas
    if spec.suspend:
        return Pool(0, 0, resumes_with=size)
    workload = observed.engines(target, component)
    beyond = [
        p for p in observed.pods if (p.component, p.revision) == (component, target) and p.ordinal >= size
    ]
    if workload is None or (workload.wanted <= size and not beyond):
        return Pool(size, size)
    since = _leaving_since(observed.live.get(("Service", engine_name(name, component, target))), size, now)
    until = since + timedelta(seconds=handover_seconds(spec, component))
    hold_kv = any(pod.loaded and not pod.leaving for pod in beyond)
    if workload.wanted <= size or now >= until or not hold_kv:
        # Routers are told until the last of them has ended: they hear of a pod's end later than we do.
        return Pool(size, size, since)
    return Pool(size, workload.wanted, since, until)


def _leaving_since(service: Manifest | None, size: int, now: datetime) -> datetime:
    """Since when the routers are told of the same pods; `now` if they are not yet, or the time that is written cannot be."""
    meta = service["metadata"] if service is not None else {}
    if (meta.get("labels") or {}).get(LABEL_KEEP) == str(size):
        try:
            since = datetime.fromisoformat((meta.get("annotations") or {})[ANNOTATION_LEAVING]).astimezone(
                UTC
            )
        except (KeyError, ValueError, OverflowError):
            return now
        return min(since, now)
    return now


def fit(name: str, manifests: Iterable[Manifest], target: str, pools: Pools) -> tuple[Manifest, ...]:
    """The manifests with what the pools say in them: the number of pods, who is leaving, the size of a new scaler."""
    changes: dict[tuple[str, str], Manifest] = {}
    for component, pool in pools.items():
        engines = engine_name(name, component, target)
        changes["StatefulSet", engines] = {"spec": {"replicas": pool.held}}
        changes[SCALER_KIND, role_name(name, component)] = {
            "spec": {"replicas": pool.size or pool.resumes_with}
        }
        if pool.leaving_since is not None:
            moment = pool.leaving_since.astimezone(UTC).isoformat(timespec="seconds")
            changes["Service", engines] = {
                "metadata": {
                    "labels": {LABEL_KEEP: str(pool.size)},
                    "annotations": {ANNOTATION_LEAVING: moment},
                }
            }
    return tuple(
        _merged(item, changes.get((item["kind"], item["metadata"]["name"]), {})) for item in manifests
    )


def _merged(item: Manifest, change: Manifest) -> Manifest:
    merged = dict(item)
    for key, value in change.items():
        merged[key] = _merged(item.get(key, {}), value) if isinstance(value, dict) else value
    return merged
