"""Pages put together from a Prometheus. The server here is a fake that answers as its HTTP API is documented; no Prometheus runs."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiohttp import web

from disagg_operator import prometheus
from disagg_operator.pages import NoPage, Sample, Target
from disagg_operator.prometheus import Prometheus

NOW = 1_700_000_000.5
NAMES = frozenset({"vllm:num_requests_waiting", "vllm:prompt_tokens_by_source_total"})


class Fake:
    """Keeps what was asked; answers the time, and the series that a test has put there."""

    def __init__(self) -> None:
        self.series: list[dict[str, Any]] = []
        self.asked: list[Mapping[str, str]] = []
        self.answer: web.Response | None = None
        self.silent = False
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert (request.method, request.path) == ("POST", "/prefix/api/v1/query")
        form = {name: str(value) for name, value in (await request.post()).items()}
        self.asked.append(form)
        if self.silent:
            await asyncio.Event().wait()
        if self.answer is not None:
            return self.answer
        if form["query"] == "time()":
            return success("scalar", [NOW, str(NOW)])
        return success("matrix", self.series)

    def scraped(self, pod: str, name: str, value: str, *, ago: float = 5.0, **labels: str) -> None:
        """A series with an older sample and this one."""
        metric = {"__name__": name, "pod": pod, "namespace": "team", "job": "pods", **labels}
        self.series.append({"metric": metric, "values": [[NOW - ago - 15, "0"], [NOW - ago, value]]})


def success(kind: str, result: object) -> web.Response:
    return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer for an answer that does come."""
    monkeypatch.setattr(prometheus, "_CONNECT_SECONDS", 60)
    monkeypatch.setattr(prometheus, "_SECONDS", 60)


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    server = Fake()
    runner = web.ServerRunner(web.Server(server.handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/prefix"
    yield server
    await runner.cleanup()


def target(*names: str) -> Target:
    return Target("team", "10.0.0.1", 8000, frozenset(names) or NAMES)


async def read(fake: Fake, *pods: str) -> Any:
    return await Prometheus(fake.url).read_pages({pod: target() for pod in pods})


WAITING, TOKENS = sorted(NAMES)


async def test_the_newest_samples_of_each_pod_are_its_page(fake: Fake) -> None:
    fake.scraped("p-0", WAITING, "3", engine="0", instance="10.0.0.1:8000", namespace="team")
    fake.scraped("p-1", TOKENS, "1e3", ago=7.5, engine="0", source="local_compute")
    found = await read(fake, "p-0", "p-1", "p-2")
    assert found == {
        "p-0": (Sample(WAITING, {"engine": "0"}, 3.0, 5.0),),
        "p-1": (Sample(TOKENS, {"engine": "0", "source": "local_compute"}, 1000.0, 7.5),),
        "p-2": NoPage("Prometheus has no samples of it of the last 60 s"),
    }


async def test_what_is_asked_for(fake: Fake) -> None:
    pods = {"p-0.a": target(), "p-1": target(), "r-0": target("disagg_router_waiting_turns")}
    await Prometheus(fake.url).read_pages(pods)
    clock, *queries = fake.asked
    assert clock == {"query": "time()"}
    assert {form["time"] for form in queries} == {"1700000000.500"}, "all of one moment, by Prometheus' clock"
    assert sorted(form["query"] for form in queries) == [
        '{__name__=~"disagg_router_waiting_turns",namespace="team",pod=~"r-0"}[60s]',
        '{__name__=~"vllm:num_requests_waiting|vllm:prompt_tokens_by_source_total",namespace="team",'
        'pod=~"p-0[.]a|p-1"}[60s]',
    ]


async def test_many_pods_take_several_queries(fake: Fake) -> None:
    found = await read(fake, *(f"p-{n}" for n in range(70)))
    assert len(found) == 70
    assert len(fake.asked) == 1 + 3


async def test_a_pod_that_two_jobs_scrape_counts_once(fake: Fake) -> None:
    fake.scraped("p-0", WAITING, "3", ago=20, engine="0", instance="a", namespace="team")
    fake.scraped("p-0", WAITING, "4", ago=5, engine="0", instance="b", job="other", container="vllm")
    assert (await read(fake, "p-0"))["p-0"] == (Sample(WAITING, {"engine": "0"}, 4.0, 5.0),)
    fake.series.reverse()
    assert (await read(fake, "p-0"))["p-0"] == (Sample(WAITING, {"engine": "0"}, 4.0, 5.0),)


async def test_a_series_that_the_last_scrape_has_not_is_gone(fake: Fake) -> None:
    fake.scraped("p-0", WAITING, "3", ago=5, engine="0")
    fake.scraped("p-0", WAITING, "9", ago=20, engine="1")
    assert (await read(fake, "p-0"))["p-0"] == (Sample(WAITING, {"engine": "0"}, 3.0, 5.0),)


async def test_labels_of_the_scrape_make_no_series(fake: Fake) -> None:
    fake.scraped("p-0", TOKENS, "3", source="job's own", exported_source="local_compute", endpoint="http")
    fake.scraped("p-0", TOKENS, "4", source="job's own", exported_source="local_compute", endpoint="admin")
    assert (await read(fake, "p-0"))["p-0"] == (Sample(TOKENS, {"source": "local_compute"}, 7.0, 5.0),)


async def test_a_label_is_text_whatever_comes(fake: Fake) -> None:
    fake.scraped("p-0", WAITING, "3")
    fake.series[0]["metric"]["engine"] = 5
    assert (await read(fake, "p-0"))["p-0"] == (Sample(WAITING, {"engine": "5"}, 3.0, 5.0),)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e400"])
async def test_what_is_no_number_stays_none(fake: Fake, value: str) -> None:
    fake.scraped("p-0", WAITING, value)
    (sample,) = (await read(fake, "p-0"))["p-0"]
    assert not abs(sample.value) < 1e308


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (web.Response(status=503), "status 503"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "status 302"),
        (web.Response(text="<html>"), "an answer that is none of Prometheus"),
        (web.Response(text="[]"), "an answer that is none of Prometheus"),
        (web.json_response({"status": "error", "error": "x"}), "it could not answer the query"),
        (success("vector", []), "an answer that is none of Prometheus"),
        (success("scalar", ["now"]), "an answer that is none of Prometheus"),
    ],
    ids=["503", "302", "HTML", "JSON", "error", "nothing", "no time"],
)
async def test_what_is_no_answer_is_said_of_every_pod(fake: Fake, answer: web.Response, why: str) -> None:
    fake.answer = answer
    assert await read(fake, "p-0", "p-1") == dict.fromkeys(
        ("p-0", "p-1"), NoPage(f"Prometheus at {fake.url}: {why}")
    )


async def test_a_large_answer_is_not_read_to_its_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_MAX_BYTES", 1000)
    fake.scraped("p-0", WAITING, "3", model_name="m" * 1000)
    assert await read(fake, "p-0") == {"p-0": NoPage(f"Prometheus at {fake.url}: more than 1000 bytes")}


async def test_a_silent_one_is_not_waited_for_for_long(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_SECONDS", 0.3)
    fake.silent = True
    async with asyncio.timeout(60):
        assert await read(fake, "p-0") == {"p-0": NoPage(f"Prometheus at {fake.url}: no answer within 0.3 s")}


async def test_nobody_there() -> None:
    """Its address is told, a password in it is not."""
    found = await Prometheus("http://me:secret@127.0.0.1:1/below").read_pages({"p-0": target()})
    assert found == {"p-0": NoPage("Prometheus at http://127.0.0.1:1/below: no connection")}


async def test_nobody_to_ask_for(fake: Fake) -> None:
    assert await Prometheus(fake.url).read_pages({}) == {}
    assert fake.asked == []
