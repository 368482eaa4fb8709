"""The load and what else a decision rests on, from pages of metrics. Pure.

A pod whose latest page is not there, is older than `seen.MAX_AGE`, or lacks a sample that each has, is missing, and so is one
with a sample that is no finite number of at least 0. Loads are scaled up from the pods of a role that can be used to all,
as long as those are `LEAST_SHARE`; otherwise the load is not known. Of routers one is enough.

What is counted has to be seen twice. A pod that was seen once is not missing: it adds what waits there now and counts for
nothing else until the next look. Only while no pod of a component was seen twice, as after the operator's own start, is
the load not known.

Sums do not depend on the order of pods or lines, nor on how the series of an engine are divided by further labels.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..naming import Component
from ..pages import Answer, NoPage
from .inputs import DecodeLoad, Inputs, PrefillLoad, Reuse
from .learned import Lessons, learn
from .names import (
    ABORTED,
    BETWEEN_TOKENS,
    CACHE_CONFIG,
    CACHED,
    COMPUTED,
    DECISIONS,
    EXPIRED,
    FAILED_TRANSFERS,
    FIRST_BYTE,
    HITS,
    INSERTED,
    KV_USAGE,
    NAMES,
    PROMPT_TOKENS,
    RECOMPUTED,
    RETAINED,
    RUNNING,
    TRANSFERRED,
    WAITING,
    WAITING_TURNS,
)
from .seen import Labels, Seen

__all__ = ["NAMES", "NOTHING", "Sight", "measure", "see"]

LEAST_SHARE = 0.8
"""Of a role's pods, to speak for all of them."""
_LONGEST = 15
"""Digits of a number of blocks."""
LEAST_OBSERVED = 20
"""Within a window, for a percentile of them."""


@dataclass(frozen=True)
class Sight:
    """What was read of each ready pod so far, and what has been learned from it."""

    pods: Mapping[str, Seen] = field(default_factory=dict)
    at: float | None = None
    """When was looked last."""
    lessons: Lessons = field(default_factory=Lessons)


NOTHING = Sight()


def see(
    sight: Sight,
    pods: Mapping[Component, Collection[str]],
    pages: Mapping[str, Answer],
    now: float,
    window: float,
) -> Sight:
    """After one more look.

    `pods` are those that are ready, by their names; `pages` what they answered. `now` is in seconds of a clock that only has to
    count evenly, `window` in seconds. If the clock went back, what was read before is worth nothing.
    """
    before = sight.pods if sight.at is None or now >= sight.at else {}
    seen: dict[str, Seen] = {}
    for component, names in pods.items():
        for pod in names:
            known = before.get(pod)
            if known is None or known.component is not component:
                known = Seen(component)
            seen[pod] = known.looked(pages.get(pod, NoPage("not asked")), now, window)
    return Sight(seen, now, learn(sight.lessons, seen, now, window))


def measure(sight: Sight, now: float, window: float) -> Inputs:
    """What the last `window` seconds were like, which see() was told too."""
    prefill, decode, routers = (_Pods.of(sight, component, now) for component in Component)
    missing = [f"{pod}: {why}" for pod, seen in sight.pods.items() if (why := seen.why_missing(now))]
    missing += [
        f"{component}: no pod is ready"
        for component, pods in zip(Component, (prefill, decode, routers), strict=True)
        if not pods.ready
    ]
    load, unknown = _prefill_load(prefill, routers, sight.lessons.prompt_tokens, window)
    return Inputs(
        prefill=load,
        decode=_decode_load(decode, routers),
        missing=(*missing, *unknown),
        learned=sight.lessons.learned,
        failed_share=_failed_share(prefill, decode, routers),
        ttft_p95=_percentile(routers.rated, FIRST_BYTE, 0.95, streamed="true"),
        itl_p95=_percentile(decode.rated, BETWEEN_TOKENS, 0.95),
    )


@dataclass(frozen=True, slots=True)
class _Pods:
    """Those of one component."""

    ready: int
    usable: Sequence[Seen]

    @classmethod
    def of(cls, sight: Sight, component: Component, now: float) -> "_Pods":
        ready = [seen for seen in sight.pods.values() if seen.component is component]
        return cls(len(ready), [seen for seen in ready if not seen.why_missing(now)])

    @property
    def rated(self) -> Sequence[Seen]:
        """Those that were seen twice."""
        return [seen for seen in self.usable if seen.seconds]

    @property
    def enough(self) -> bool:
        """Whether they speak for all."""
        return bool(self.usable) and len(self.usable) >= LEAST_SHARE * self.ready

    def now(self, name: str) -> float | None:
        """The sum, scaled up to all; None if none has it."""
        found = [value for seen in self.usable if (value := seen.now(name)) is not None]
        return math.fsum(found) * self.ready / len(self.usable) if found else None

    def increase(self, name: str, **labels: str) -> float:
        """The sum of what was seen."""
        return math.fsum(seen.increase(name, **labels) for seen in self.rated)


def _prefill_load(
    prefill: _Pods, routers: _Pods, prompt: float | None, window: float
) -> tuple[PrefillLoad | None, Sequence[str]]:
    """The load, or what is not known of it beside pods that are missing. `prompt` is how many tokens a prompt has."""
    if not prefill.enough or not routers.usable:
        return None, ()
    unknown = [
        f"{component}: every pod was read only once so far"
        for component, pods in ((Component.PREFILL, prefill), (Component.ROUTER, routers))
        if not pods.rated
    ]
    if unknown:
        return None, unknown
    turns = (
        math.fsum(_legs(seen) / seen.seconds for seen in routers.rated) * routers.ready / len(routers.usable)
    )
    waiting = (prefill.now(WAITING) or 0.0) + (routers.now(WAITING_TURNS) or 0.0) * _prefill_share(routers)
    if prompt is None and (turns or waiting):
        return None, [
            f"{Component.PREFILL}: no prompt has been finished yet, so nobody knows how long they are"
        ]
    tokens, remote, local = _sum_of_sources(prefill.rated)
    latest, *reused = _sum_of_sources([seen.latest for seen in prefill.rated])
    # What was counted before the window goes out of it by its share of the time.
    share = min(1.0, window / max(seen.seconds for seen in prefill.rated))
    return PrefillLoad(
        offered=turns * (prompt or 0.0),
        tokens=tokens * share,
        reuse=Reuse(local / tokens, remote / tokens) if tokens else Reuse(),
        backlog=waiting * (prompt or 0.0),
        written_back=prefill.increase(INSERTED) * share,
        latest_tokens=latest,
        latest_reuse=math.fsum(reused) / latest if latest else 0.0,
    ), ()


def _sum_of_sources(pods: Sequence[Seen]) -> tuple[float, float, float]:
    """What _sources() says of all these pods, of which there is one at least."""
    tokens, remote, local = (math.fsum(parts) for parts in zip(*map(_sources, pods), strict=True))
    return tokens, remote, local


def _sources(seen: Seen) -> tuple[float, float, float]:
    """Prompt tokens of one pod: all, brought by decode, found in its cache otherwise.

    What decode wrote back is a local hit for vLLM; the connector counts it when a prompt finds it first, which is what bringing
    it has saved: without it prefill would have computed it once, and had it itself from then on. The connector counts when a
    prompt is about to run, vLLM when it has run, so the two may be a prompt apart: never more than the hits is taken.
    """
    computed, cached, transferred = (
        seen.increase(PROMPT_TOKENS, source=source) for source in (COMPUTED, CACHED, TRANSFERRED)
    )
    brought = min(seen.increase(HITS), cached)
    return math.fsum((computed, cached, transferred)), transferred + brought, cached - brought


def _legs(router: Seen) -> float:
    """Attempts at turns whose prompt prefill was to compute, with those that found no prefill; without those that decode computes
    by choice or because their kind of request has to be computed there."""
    return math.fsum(
        (
            router.increase(DECISIONS, placement="prefill"),
            router.increase(DECISIONS, placement="decode", reason="no_prefill"),
        )
    )


def _prefill_share(routers: _Pods) -> float:
    """Which share of the turns that wait prefill will have to do with, if they are like those that did not."""
    decided = routers.increase(DECISIONS)
    return math.fsum(map(_legs, routers.rated)) / decided if decided else 1.0


def _decode_load(decode: _Pods, routers: _Pods) -> DecodeLoad | None:
    if not decode.enough:
        return None
    usage = sorted(
        (share for seen in decode.usable for share in seen.engines(KV_USAGE).values()), reverse=True
    )
    fuller = usage[: (len(usage) + 1) // 2]
    scale = decode.ready / len(decode.usable)
    return DecodeLoad(
        pods=decode.ready,
        kv_usage=math.fsum(fuller) / len(fuller),
        fullest=usage[0],
        mean_usage=math.fsum(usage) / len(usage),
        running=decode.now(RUNNING) or 0.0,
        waiting=math.fsum(seen.waiting_for_place() for seen in decode.usable) * scale,
        retained=_retained(decode, routers),
    )


def _retained(decode: _Pods, routers: _Pods) -> float | None:
    blocks = math.fsum(_blocks(seen) for seen in decode.usable) * decode.ready / len(decode.usable)
    kept = routers.now(RETAINED)
    return min(1.0, kept / blocks) if kept is not None and blocks else None


def _blocks(seen: Seen) -> float:
    """KV blocks of a pod's engines; 0 if they do not say. vLLM shows the sum of all engines with each."""
    told = (dict(series).get("num_gpu_blocks", "") for series in seen.page.get(CACHE_CONFIG, {}))
    return max((int(blocks) for blocks in told if blocks.isdecimal() and len(blocks) <= _LONGEST), default=0)


def _failed_share(prefill: _Pods, decode: _Pods, routers: _Pods) -> float:
    """Transfers that failed or came too late, by attempt at a turn; at most 1.

    Those of vLLM's connectors, turns whose KV did not arrive, and write-backs that prefill had granted and did not take up.
    A write-back that was not granted, for lack of blocks say, moved nothing and is no failure.
    """
    failed = math.fsum(
        pods.increase(name)
        for pods in (prefill, decode)
        for name in (FAILED_TRANSFERS, EXPIRED, RECOMPUTED, ABORTED)
    )
    return min(1.0, failed / max(1.0, math.fsum(map(_legs, routers.rated))))


def _percentile(pods: Sequence[Seen], name: str, q: float, **labels: str) -> float | None:
    """Of what a histogram observed within the window, as PromQL's histogram_quantile has it: linear within a bucket, and the
    last finite bound for what is above it. None if it is too little to say."""
    buckets: dict[float, list[float]] = {}
    for seen in pods:
        for series, count in seen.increases(name, **labels).items():
            bound = _bound(series)
            if bound is not None:
                buckets.setdefault(bound, []).append(count)
    counts, least = [], 0.0
    for bound in sorted(buckets):
        least = max(least, math.fsum(buckets[bound]))  # of a process that began anew some may be missing
        counts.append((bound, least))
    if len(counts) < 2 or counts[-1][0] != math.inf or least < LEAST_OBSERVED:
        return None
    rank, lower, below = q * least, 0.0, 0.0
    for upper, count in counts:
        if count >= rank:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    raise AssertionError("the last bucket holds all")


def _bound(series: Labels) -> float | None:
    try:
        bound = float(dict(series).get("le", ""))
    except ValueError:
        return None
    return None if math.isnan(bound) else bound
