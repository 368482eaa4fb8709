"""Whether engines refuse each other's KV: a decision from what they count on their /metrics. Pure.

Flags are compared before anything runs (`revision.differences`). What the connectors compare besides (weights, hash seed,
versions: docs/connector.md, "fingerprint") only they know, and they count a refusal when they meet. A count says
nothing about now; that it has grown between two looks does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from .api.conditions import ConditionType, Reason, find
from .api.status import Condition
from .naming import ENGINES, HTTP_PORT
from .observe import Observed
from .pages import Answer, NoPage, Target

ALWAYS_THERE: Mapping[str, str] = {
    "disagg_kv_refused_messages_total": "reason",
    "disagg_kv_writeback_offers_total": "result",
}
"""Counters of docs/wire-contract.md, section 2, and the label that is `fingerprint` for what is meant here."""
COUNTERS: Mapping[str, str] = {**ALWAYS_THERE, "disagg_kv_recomputed_requests_total": "reason"}
"""The last one is on the page only once it has counted."""
LOOK_EVERY = timedelta(seconds=10)
"""The least time between two looks: passes come in bursts, and engines have better things to do than to write pages."""
HOLD = timedelta(minutes=10)
"""How long a mismatch is told after the last refusal that was seen: engines meet only when there are turns."""
_MAX_NAMED = 5

Counts = Mapping[str, float]
"""By the counter's name, over all engines of the pod."""


@dataclass(frozen=True)
class Standing:
    """What the looks at one DisaggInference's engines have shown so far."""

    uid: str = ""
    """Whose engines."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """The newest that is known of each pod."""
    looked_at: datetime | None = None
    blind: bool = False
    """There were engines to look at, and not one page could be read."""
    refused_at: datetime | None = None
    """When a refusal was last seen, until that is long ago."""
    refusing: tuple[str, ...] = ()
    """The pods that counted it."""
    message: str = ""
    """What to say while `refused_at` is there."""


UNSEEN = Standing()


def resume(uid: str, previous: Sequence[Condition], now: datetime) -> Standing:
    """Where an operator begins that remembers nothing: a mismatch that was told is told for another HOLD."""
    told = find(previous, ConditionType.REVISIONS_COMPATIBLE)
    if told is None or told.reason != Reason.FINGERPRINT_MISMATCH:
        return Standing(uid)
    return Standing(uid, refused_at=now, message=told.message)


def is_due(standing: Standing, now: datetime) -> bool:
    """Whether it is time for another look."""
    return standing.looked_at is None or now - standing.looked_at >= LOOK_EVERY


def targets(observed: Observed, namespace: str) -> dict[str, Target]:
    """The engines to look at, by the name of each ready pod, and what to look for."""
    return {
        pod.name: Target(namespace, pod.address, HTTP_PORT, frozenset(COUNTERS))
        for role in ENGINES
        for pod in observed.pods_of(role)
        if pod.ready and pod.address is not None
    }


def unlearn(standing: Standing, observed: Observed) -> Standing:
    """The standing after a pass without a look: counts from before pods of two kinds ran are compared with none after it."""
    return replace(standing, counts={}) if _is_mixed(observed) else standing


def look(standing: Standing, observed: Observed, pages: Mapping[str, Answer], now: datetime) -> Standing:
    """The standing after a look. `pages` has an answer of each pod of `targets`.

    A blind look changes nothing, and neither does a pod without a page. While pods of two kinds run, refusals between them
    are what should happen: they are not held against anybody, and counting begins anew afterwards.
    """
    read = {pod: counts for pod, page in pages.items() if (counts := _counts(page)) is not None}
    standing = replace(unlearn(standing, observed), looked_at=now, blind=bool(pages) and not read)
    if standing.blind:
        return standing
    if _is_mixed(observed):
        return _expired(standing, read, pages, now)
    before = standing.counts
    kept = {pod: counts for pod, counts in before.items() if pod in pages}
    refusing = tuple(pod for pod, counts in read.items() if pod in before and _grew(before[pod], counts))
    standing = replace(standing, counts={**kept, **read})
    if not refusing:
        return _expired(standing, read, pages, now)
    return replace(standing, refused_at=now, refusing=refusing, message=_message(refusing))


def _expired(
    standing: Standing, read: Mapping[str, Counts], pages: Mapping[str, Answer], now: datetime
) -> Standing:
    """Forgets a mismatch that is long over; not while a pod that refused cannot be asked."""
    hidden = any(pod in pages and pod not in read for pod in standing.refusing)
    if standing.refused_at is None or hidden or now - standing.refused_at < HOLD:
        return standing
    return replace(standing, refused_at=None, refusing=(), message="")


def _counts(page: Answer) -> Counts | None:
    """None for what is not, or not all of, the page of an engine with the connector."""
    if isinstance(page, NoPage):
        return None
    counts: dict[str, float] = {}
    for sample in page:
        label = COUNTERS.get(sample.name)
        if label is None or sample.labels.get(label) != "fingerprint":
            continue
        if not math.isfinite(sample.value):
            return None
        counts[sample.name] = counts.get(sample.name, 0.0) + sample.value
    return counts if ALWAYS_THERE.keys() <= counts.keys() else None


def _grew(then: Counts, now: Counts) -> bool:
    """Whether something was counted in between. A count that has shrunk is that of an engine that began anew."""
    return any(value > 0 and value != then.get(name, 0.0) for name, value in now.items())


def _is_mixed(observed: Observed) -> bool:
    """Whether engines run side by side that need not fit: of two revisions, or while pods are replaced in place."""
    running = {
        (pod.component, pod.revision)
        for pod in observed.pods
        if pod.component in ENGINES and (pod.ready or pod.leaving)
    }
    replaced = any((w.component, w.revision) in running and not w.settled for w in observed.workloads)
    return replaced or len({revision for _, revision in running}) > 1


def _message(refusing: Sequence[str]) -> str:
    named, more = ", ".join(refusing[:_MAX_NAMED]), len(refusing) - _MAX_NAMED
    return (
        f"engines refuse each other's KV and compute turns anew, as counted by {named}"
        f"{f' and {more} more' if more > 0 else ''}. Their logs say what differs ('is not compatible, no KV is "
        "exchanged'): give both roles the same model revision and files, dtype, vLLM image and environment"
    )
