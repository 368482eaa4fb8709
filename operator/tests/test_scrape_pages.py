"""Pages of metrics from real sockets: of engines that answer, and of all that does not."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from disagg_operator import scrape
from disagg_operator.mismatch import COUNTERS
from disagg_operator.pages import NoPage, Target
from disagg_operator.scrape import read_pages, samples
from disagg_operator.web import UnusableError

PAGE = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} not a number, and of no concern
# HELP disagg_kv_refused_messages_total Refused.
# TYPE disagg_kv_refused_messages_total counter
disagg_kv_refused_messages_total{engine="0",model_name="a b\\"}",reason="fingerprint"} 2.0
disagg_kv_refused_messages_created{engine="0",reason="fingerprint"} 1.7e+09
disagg_kv_writeback_offers_total{engine="0",result="fingerprint"} 3.0
"""
READ = [
    (
        "disagg_kv_refused_messages_total",
        {"engine": "0", "model_name": 'a b"}', "reason": "fingerprint"},
        2.0,
    ),
    ("disagg_kv_writeback_offers_total", {"engine": "0", "result": "fingerprint"}, 3.0),
]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[str, Handler], Awaitable[None]]


class Port:
    """One port on several addresses of this machine, as pods have it."""

    number = 0


def target(address: str, port: int | None = None, *names: str) -> Target:
    return Target("default", address, port or Port.number, frozenset(names or COUNTERS))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer for an answer that does come."""
    monkeypatch.setattr(scrape, "_CONNECT_SECONDS", 60)
    monkeypatch.setattr(scrape, "_PAGE_SECONDS", 60)
    monkeypatch.setattr(scrape, "_ALL_SECONDS", 120)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.ServerRunner] = []
    Port.number = 0

    async def start(address: str, handler: Handler) -> None:
        runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, address, Port.number).start()
        Port.number = runner.addresses[0][1]

    yield start
    for runner in runners:
        await runner.cleanup()


async def good(_: web.Request) -> web.StreamResponse:
    return web.Response(text=PAGE)


async def html(_: web.Request) -> web.StreamResponse:
    return web.Response(
        text="<html><body>disagg_kv_refused_messages_total</body></html>\n", content_type="text/html"
    )


async def empty(_: web.Request) -> web.StreamResponse:
    return web.Response()


async def admin(_: web.Request) -> web.StreamResponse:
    return web.Response(text="disagg_router_waiting_turns 3.0\n")


async def ill(_: web.Request) -> web.StreamResponse:
    return web.Response(text=PAGE, status=503)


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound(f"http://127.0.0.1:{Port.number}/metrics")


async def cut_off(request: web.Request) -> web.StreamResponse:
    """The connection ends before the page that was announced."""
    answer = web.StreamResponse(headers={"Content-Length": str(2 * len(PAGE))})
    await answer.prepare(request)
    await answer.write(PAGE.encode())
    assert request.transport is not None
    request.transport.close()
    return answer


async def half(_: web.Request) -> web.StreamResponse:
    return web.Response(text=PAGE[:-5])


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 2**20)


async def binary(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff\xfe\n")


async def slow(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(600)
    return web.Response()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (ill, "status 503"),
        (elsewhere, "status 302"),
        (html, "not a page of metrics"),
        (binary, "not a page of metrics"),
        (empty, "an empty page"),
        (cut_off, "its answer is cut off"),
        (half, "its answer is cut off"),
        (endless, "more than 4194304 bytes"),
        (slow, "no answer within 3 s"),
    ],
)
async def test_a_page_that_cannot_be_read_says_why_and_the_others_are_read(
    serve: Serve, bad: Handler, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bad is slow:
        monkeypatch.setattr(scrape, "_PAGE_SECONDS", 3)
    await serve("127.0.0.1", good)
    await serve("127.0.0.2", bad)
    pods = {"p": "127.0.0.1", "d": "127.0.0.2", "gone": "127.0.0.3"}
    found = await read_pages({pod: target(address) for pod, address in pods.items()})
    assert list(found) == ["p", "d", "gone"]
    assert found["d"] == NoPage(why)
    assert found["gone"] == NoPage("no connection")
    page = found["p"]
    assert not isinstance(page, NoPage)
    assert [(s.name, s.labels, s.value) for s in page] == READ


async def test_a_page_of_something_else_has_nothing_of_what_is_looked_for(serve: Serve) -> None:
    await serve("127.0.0.1", good)
    assert await read_pages({"p": target("127.0.0.1", None, "go_goroutines")}) == {"p": ()}


async def test_each_pod_is_asked_at_its_own_port_for_its_own_names(serve: Serve) -> None:
    await serve("127.0.0.1", good)
    engine, Port.number = Port.number, 0
    await serve("127.0.0.1", admin)
    found = await read_pages(
        {"p": target("127.0.0.1", engine), "router": target("127.0.0.1", None, "disagg_router_waiting_turns")}
    )
    assert [(s.name, s.value) for s in found["p"]] == [(name, value) for name, _, value in READ]
    assert [(s.name, s.value) for s in found["router"]] == [("disagg_router_waiting_turns", 3.0)]


async def test_many_pods_that_do_not_answer_take_no_longer_than_all_may(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "_ALL_SECONDS", 2)
    monkeypatch.setattr(scrape, "_AT_ONCE", 2)
    await serve("127.0.0.1", slow)
    async with asyncio.timeout(50):  # each of them has 60 s
        found = await read_pages({f"p{number}": target("127.0.0.1") for number in range(5)})
    assert {type(answer) for answer in found.values()} == {NoPage}


async def test_slow_pods_are_waited_for_all_at_once(serve: Serve) -> None:
    asked, everybody = itertools.count(1), asyncio.Event()

    async def not_before_all_are_asked(request: web.Request) -> web.StreamResponse:
        if next(asked) == 40:
            everybody.set()
        await everybody.wait()
        return await good(request)

    await serve("127.0.0.1", not_before_all_are_asked)
    async with asyncio.timeout(120):  # one after the other none is answered
        found = await read_pages({f"p{number}": target("127.0.0.1") for number in range(40)})
    assert {type(answer) for answer in found.values()} == {tuple}


async def test_an_address_of_ipv6(serve: Serve) -> None:
    try:
        await serve("::1", good)
    except OSError:
        pytest.skip("this machine has no IPv6")
    found = await read_pages({"p": target("::1")})
    assert isinstance(found["p"], tuple)


async def test_nobody_to_ask() -> None:
    assert await read_pages({}) == {}


def test_a_line_that_is_looked_for_must_be_readable() -> None:
    with pytest.raises(ValueError, match="convert string to float"):
        samples('disagg_kv_refused_messages_total{reason="fingerprint"} not a number\n', COUNTERS)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("".join(f'disagg_x_total{{n="{n}"}} 1\n' for n in range(5001)), "more than 5000 samples"),
        ('disagg_x_total{n="' + '\\"' * 100_000 + '"} 1\n', "a line of more than 4096 characters"),
        ("disagg_x_total{" + ",".join(f'n{n}=""' for n in range(10_000)) + "} 1\n", "a line of more than"),
    ],
    ids=["samples", "escapes", "labels"],
)
def test_a_page_that_would_take_long_to_parse_is_not_parsed(page: str, why: str) -> None:
    with pytest.raises(UnusableError, match=why):
        samples(page, {"disagg_x_total"})
    assert samples(page, {"another_total"}) == ()
