"""Pods' pages of metrics, put together from what a Prometheus has scraped. Nothing here fails a pass.

For clusters where the operator may not connect to pods. It needs the labels `namespace` and `pod` on the series, as the Prometheus
operator and the usual Kubernetes configurations put there.

The newest sample of each series of the last minute is asked for, by instant queries with a range: only those say when a
sample was taken. All queries are of one moment of Prometheus' own clock, so that nobody's clock has to agree with another's. Of a
pod that several jobs scrape, the one counts that did last, and of what it has, the last scrape. Only labels that make a difference
are kept, and series that differ in others are added up, so that it does not matter which job that was.
"""

import asyncio
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from .pages import Answer, NoPage, Sample, Target
from .web import UnusableError, read_body, why_nothing

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 2.0
_SECONDS = 8.0
"""For everything: less than there is between two looks."""
_MAX_BYTES = 32 * 2**20
"""Of one answer. A sample has about 300 bytes, a pod about 300 samples an engine, a minute has two to four scrapes."""
_PODS_A_QUERY = 32
_AT_ONCE = 4
_RANGE_SECONDS = 60
"""Older samples say nothing of now."""
_SAME_SCRAPE = 1.0
"""Seconds between samples of one scrape, if a pod states times itself."""
_LABELS = frozenset(
    {
        *("engine", "model_name", "source", "reason", "result", "direction", "le"),
        *("streamed", "placement", "num_gpu_blocks"),
    }
)
"""What pods put on their samples and somebody looks at. A scrape adds others, `endpoint` for one, which routers have too."""

_Series = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that answers /api/v1/query below `url`."""

    url: str

    @property
    def _shown(self) -> str:
        """For conditions and events, which more people read than may know a password."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    async def read_pages(self, targets: Mapping[str, Target]) -> dict[str, Answer]:
        """What each pod's newest page has of the wanted samples, by the pod's name."""
        limit = aiohttp.ClientTimeout(total=_SECONDS, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE)
        answers: dict[str, Answer] = {}
        if not targets:
            return answers
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
            try:
                async with asyncio.timeout(_SECONDS):
                    now = await self._now(session)
                    found = await asyncio.gather(
                        *(self._pages(session, some, now) for some in _portions(targets))
                    )
            except Exception as error:  # whatever answers there, it is no reason to fail
                why = why_nothing(error, _SECONDS, "an answer that is none of Prometheus")
                _log.debug("no metrics of %s: %s (%s: %s)", self.url, why, type(error).__name__, error)
                return dict.fromkeys(targets, NoPage(f"Prometheus at {self._shown}: {why}"))
        for pages in found:
            answers.update(pages)
        return {pod: answers[pod] for pod in targets}

    async def _now(self, session: aiohttp.ClientSession) -> float:
        data = await self._query(session, {"query": "time()"})
        return float(data["result"][0])

    async def _pages(
        self, session: aiohttp.ClientSession, targets: Mapping[str, Target], now: float
    ) -> Mapping[str, Answer]:
        data = await self._query(session, {"query": _selector(targets), "time": f"{now:.3f}"})
        by_pod: dict[str, list[_Series]] = {}
        for series in data["result"]:
            by_pod.setdefault(series["metric"].get("pod", ""), []).append(series)
        return {pod: _page(by_pod.get(pod, ()), target.names, now) for pod, target in targets.items()}

    async def _query(self, session: aiohttp.ClientSession, form: Mapping[str, str]) -> Any:
        async with session.post(f"{self.url}/api/v1/query", data=form, allow_redirects=False) as answer:
            body = json.loads(await read_body(answer, _MAX_BYTES))
        if body["status"] != "success":
            raise UnusableError("it could not answer the query")
        return body["data"]


def _portions(targets: Mapping[str, Target]) -> Iterator[Mapping[str, Target]]:
    """Pods that can be asked for by one query: the same samples of pods of one namespace."""
    alike: dict[tuple[str, frozenset[str]], list[str]] = {}
    for pod, target in targets.items():
        alike.setdefault((target.namespace, target.names), []).append(pod)
    for pods in alike.values():
        for i in range(0, len(pods), _PODS_A_QUERY):
            yield {pod: targets[pod] for pod in pods[i : i + _PODS_A_QUERY]}


def _selector(targets: Mapping[str, Target]) -> str:
    """Names of pods, namespaces and samples hold no character that a string of PromQL would have to escape."""
    target = next(iter(targets.values()))
    names, pods = _one_of(target.names), _one_of(targets)
    return f'{{__name__=~"{names}",namespace="{target.namespace}",pod=~"{pods}"}}[{_RANGE_SECONDS}s]'


def _one_of(names: Collection[str]) -> str:
    return "|".join(name.replace(".", "[.]") for name in sorted(names))


def _page(found: Sequence[_Series], names: Collection[str], now: float) -> Answer:
    by_scrape: dict[tuple[str, str], list[tuple[float, Mapping[str, str], float]]] = {}
    for series in found:
        labels = series["metric"]
        if labels["__name__"] in names and series.get("values"):
            at, value = series["values"][-1]
            job = (labels.get("job", ""), labels.get("instance", ""))
            by_scrape.setdefault(job, []).append((float(at), labels, float(value)))
    if not by_scrape:
        return NoPage(f"Prometheus has no samples of it of the last {_RANGE_SECONDS} s")
    newest = {job: max(at for at, _, _ in scraped) for job, scraped in by_scrape.items()}
    job = min(by_scrape, key=lambda job: (-newest[job], -len(by_scrape[job]), job))
    age = max(0.0, now - newest[job])
    added: dict[tuple[str, frozenset[tuple[str, str]]], list[float]] = {}
    for at, labels, value in by_scrape[job]:
        if newest[job] - at <= _SAME_SCRAPE:
            added.setdefault((labels["__name__"], _kept(labels)), []).append(value)
    return tuple(Sample(name, dict(kept), sum(values), age) for (name, kept), values in added.items())


def _kept(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The pod's own: where the scrape has one of that name too, the pod's is called `exported_`."""
    own = {name: labels.get(f"exported_{name}", labels.get(name)) for name in _LABELS}
    return frozenset((name, str(value)) for name, value in own.items() if value is not None)
