"""What a pass saw, in the operator's own words. Pure: objects as the API server gave them in, one `Observed` out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from .naming import (
    FIELD_MANAGER,
    KIND,
    LABEL_REVISION,
    LABEL_ROLE,
    MAIN_CONTAINER,
    Component,
    Manifest,
)
from .trouble import Trouble, pod_trouble, refusal_in_condition, refusal_in_events

ObjectKey = tuple[str, str]
"""Kind and name; everything that is looked at is in one namespace."""
MAX_QUESTIONS = 4
"""Objects whose events are asked for in one pass: one is enough to name a cause, and events cost the API server dear."""


@dataclass(frozen=True)
class Stranger:
    """An object that has the name of a child of ours and another owner, so it is not touched."""

    kind: str
    name: str
    predecessor: bool
    """It belongs to a deleted DisaggInference of the same name, and is about to be collected."""


@dataclass(frozen=True)
class Pod:
    """A pod that carries our labels."""

    name: str
    component: Component | None
    revision: str | None
    ready: bool
    ready_since: datetime | None
    """A pod that became ready is progress, which restarts the deadline."""
    leaving: bool
    """Being deleted: it finishes its turns and counts for nothing."""
    trouble: Trouble | None
    """What keeps it from becoming ready, if it is more than time."""
    address: str | None = None
    """Its IP address, once it has one."""
    created: datetime | None = None
    loaded: bool = False
    """Its engine runs and has loaded its model, so it may hold KV, also while it does not answer its readiness probe."""

    @property
    def ordinal(self) -> int:
        """Its place in its StatefulSet; of another pod -1. The highest goes first."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdecimal() else -1


@dataclass(frozen=True)
class Workload:
    """A StatefulSet of engines or the router's Deployment."""

    kind: str
    name: str
    component: Component
    revision: str | None
    """Of engines; the router has none."""
    wanted: int
    """spec.replicas, as it is now and not as it will be applied."""
    settled: bool
    """Its controller has seen the present spec and every pod is of the present template."""
    replacing: bool
    """Some of its pods are of an older template, or nobody knows yet. A pod that does not exist is of none."""
    created: datetime
    """Of two revisions that serve equally well the older is kept: it has proved itself."""
    applied: datetime
    """When we last changed it: the deadline for progress counts from here."""
    refusal: Trouble | None
    """Why its controller cannot create pods. A pod that does not exist has no status that could tell."""


@dataclass(frozen=True)
class Observed:
    """Everything a decision may rest on, gathered once."""

    live: Mapping[ObjectKey, Manifest] = field(default_factory=dict)
    """Children that we own; to compare with what they should be, and to prune."""
    strangers: tuple[Stranger, ...] = ()
    """Names that are taken; reported, never touched."""
    workloads: tuple[Workload, ...] = ()
    """Engines of every revision and the router."""
    pods: tuple[Pod, ...] = ()
    """Of all revisions, also those whose workload is gone: they may still be draining."""

    def engines(self, revision: str, component: Component) -> Workload | None:
        """The StatefulSet of a role in a revision."""
        found = (w for w in self.workloads if w.revision == revision and w.component is component)
        return next(found, None)

    @property
    def router(self) -> Workload | None:
        """The router's Deployment."""
        return next((w for w in self.workloads if w.component is Component.ROUTER), None)

    def pods_of(self, component: Component, revision: str | None = None) -> tuple[Pod, ...]:
        """The pods of a component that stay, in the order of their names; of one revision or of all."""
        return tuple(
            pod
            for pod in self.pods
            if pod.component is component
            and not pod.leaving
            and (revision is None or pod.revision == revision)
        )

    def ready(self, component: Component, revision: str | None = None) -> int:
        """How many of them are ready."""
        return sum(pod.ready for pod in self.pods_of(component, revision))


def observe(
    uid: str,
    objects: Iterable[Manifest],
    by_name: Iterable[Manifest] = (),
    events: Mapping[ObjectKey, Sequence[Manifest]] | None = None,
) -> Observed:
    """`objects` carry our name label, `by_name` have a wanted name without it; `events` are about some of
    them.

    What is owned by the DisaggInference with `uid` is ours, everything else of those names belongs to strangers.
    """
    events = events or {}
    live: dict[ObjectKey, Manifest] = {}
    strangers: list[Stranger] = []
    pods: list[Pod] = []
    for item in [*objects, *by_name]:
        kind, name = item["kind"], item["metadata"]["name"]
        if kind == "Pod":
            pods.append(_pod(item, events.get((kind, name), ())))
        elif is_ours(item, uid):
            live[kind, name] = item
        else:
            strangers.append(Stranger(kind, name, predecessor=_controller(item).get("kind") == KIND))
    workloads = (
        _workload(item, events.get(key, ()))
        for key, item in live.items()
        if key[0] in ("StatefulSet", "Deployment") and _component(item) is not None
    )
    return Observed(
        live=live,
        strangers=tuple(strangers),
        workloads=tuple(sorted(workloads, key=lambda w: (w.created, w.name))),
        pods=tuple(sorted(pods, key=lambda p: (len(p.name), p.name))),
    )


def open_questions(objects: Iterable[Manifest]) -> tuple[ObjectKey, ...]:
    """The objects whose status does not say why they are not as they should be; their events may."""
    questions: list[ObjectKey] = []
    for item in objects:
        kind, name, status = item["kind"], item["metadata"]["name"], item.get("status", {})
        if kind == "StatefulSet" and status.get("replicas", 0) < item["spec"].get("replicas", 1):
            questions.append((kind, name))
        elif kind == "Pod" and status.get("phase", "Pending") == "Pending":
            pod = _pod(item, ())
            if pod.trouble is None and not pod.leaving:
                questions.append((kind, name))
    # Workloads first: a refusal keeps all pods from existing, a pod's trouble only that one.
    questions.sort(key=lambda key: (key[0] != "StatefulSet", len(key[1]), key[1]))
    return tuple(questions[:MAX_QUESTIONS])


def is_ours(item: Manifest, uid: str) -> bool:
    """Whether the DisaggInference with `uid` controls it."""
    return _controller(item).get("uid") == uid


def _controller(item: Manifest) -> Manifest:
    owners: list[Manifest] = item["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def _component(item: Manifest) -> Component | None:
    role = (item["metadata"].get("labels") or {}).get(LABEL_ROLE)
    return Component(role) if role in set(Component) else None


def _workload(item: Manifest, events: Sequence[Manifest]) -> Workload:
    meta, spec, status = item["metadata"], item["spec"], item.get("status", {})
    wanted = spec.get("replicas", 1)
    component = _component(item)
    assert component is not None
    created = _time(meta["creationTimestamp"])
    exist, updated = status.get("replicas", 0), status.get("updatedReplicas", 0)
    seen, short = status.get("observedGeneration", 0) >= meta["generation"], exist < wanted
    return Workload(
        kind=item["kind"],
        name=meta["name"],
        component=component,
        revision=meta["labels"].get(LABEL_REVISION),
        wanted=wanted,
        settled=seen and updated >= wanted,
        replacing=not seen or updated < min(exist, wanted),
        created=created,
        applied=_applied(meta) or created,
        refusal=(refusal_in_events(events) or refusal_in_condition(status)) if short else None,
    )


def _applied(meta: Manifest) -> datetime | None:
    for entry in meta.get("managedFields") or []:
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and "time" in entry:
            return _time(entry["time"])
    return None


def _pod(item: Manifest, events: Sequence[Manifest]) -> Pod:
    meta, status = item["metadata"], item.get("status", {})
    condition: Manifest = next((c for c in status.get("conditions") or [] if c["type"] == "Ready"), {})
    ready = condition.get("status") == "True"
    since = condition.get("lastTransitionTime")
    return Pod(
        name=meta["name"],
        component=_component(item),
        revision=(meta.get("labels") or {}).get(LABEL_REVISION),
        ready=ready,
        ready_since=_time(since) if ready and since else None,
        leaving="deletionTimestamp" in meta,
        trouble=None if ready else pod_trouble(item, events),
        address=status.get("podIP"),
        created=_time(meta["creationTimestamp"]) if "creationTimestamp" in meta else None,
        loaded=ready or _has_started(status),
    )


def _has_started(status: Manifest) -> bool:
    """The main container's startup probe has passed since it began; false again while it restarts."""
    containers = status.get("containerStatuses") or []
    return any(one["name"] == MAIN_CONTAINER and one.get("started") is True for one in containers)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
