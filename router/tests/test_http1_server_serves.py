"""What the client-facing side serves, and how it couples to a client that is slow or gone."""

from __future__ import annotations

import asyncio

import pytest

from disagg_router.http1 import Exchange, HttpLimits, Response
from router.tests.conftest import until
from router.tests.wire import connect, core_server, echo

GET = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"


class TapSource:
    """A source that counts how often it is paused and resumed."""

    def __init__(self) -> None:
        self.paused = 0
        self.resumed = 0

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.resumed += 1


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with core_server() as core, connect(core.port) as client:
        for name in (b"a", b"b", b"c"):
            await client.send(GET % name)
            assert (await client.answer())[2] == b"GET /%s " % name
        assert len(core.connections) == 1


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_a_chunked_request_is_put_together_however_it_arrives(cut: int) -> None:
    request = (
        b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n1;ext=1\r\n \r\n5\r\nworld\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    async with core_server() as core, connect(core.port) as client:
        for start in range(0, len(request), cut):
            client.writer.write(request[start : start + cut])
            await asyncio.sleep(0)
        assert (await client.answer())[2] == b"POST /x hello world"
        await client.send(GET % b"next")
        assert (await client.answer())[2] == b"GET /next "


async def test_expect_100_continue_is_answered_once_the_head_is_good() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n")
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hi")
        assert (await client.answer())[2] == b"POST /x hi"


async def test_connection_close_is_honoured() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        _, head, body = await client.answer()
        assert b"connection: close" in head
        assert body == b"GET /x "
        assert await client.closed()


async def test_http10_gets_its_answer_and_a_close() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.answer())[2] == b"GET /x "
        assert await client.closed()


async def test_an_offer_to_upgrade_is_ignored() -> None:
    """Java's client offers h2c with its first request; the request has to be served all the same."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n" + upgrade + b"\r\nhi")
        assert (await client.answer())[2] == b"POST /x hi"


async def test_absolute_form_and_head_are_served() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"GET http://a/x?y=1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer())[2] == b"GET /x "
        await client.send(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"content-length: 8" in await client.head()
        await client.send(GET % b"next")
        assert (await client.answer())[2] == b"GET /next "


async def test_line_ends_between_requests_are_ignored() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi\r\n")
        assert (await client.answer())[2] == b"POST /x hi"
        await client.send(b"\r\n" + GET % b"next")
        assert (await client.answer())[2] == b"GET /next "


@pytest.mark.parametrize("leave", ["reset", "half_close"])
async def test_a_client_that_leaves_cancels_its_handler(leave: str) -> None:
    async def wait(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with core_server(handler=wait) as core, connect(core.port) as client:
        await client.send(GET % b"x")
        await until(lambda: core.handled == ["/x"], "the request is being answered")
        getattr(client, leave)()
        await until(lambda: core.cancelled == 1, "the handler is cancelled")
        await until(lambda: len(core.connections) == 0, "the connection is closed")


async def test_a_client_that_leaves_in_mid_request_leaves_nothing_behind() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\nhal")
        await until(lambda: len(core.connections) == 1, "the connection is open")
        client.half_close()
        await until(lambda: len(core.connections) == 0, "the connection is closed")
        assert core.handled == []


async def test_a_slow_reader_pauses_the_source_and_reading_on_resumes_it() -> None:
    source = TapSource()
    total = 8 * 1024 * 1024

    async def flood(exchange: Exchange) -> None:
        exchange.begin(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total, source)
        for _ in range(total // 65536):
            exchange.write(b"x" * 65536)
        exchange.end()

    async with core_server(handler=flood) as core, connect(core.port) as client:
        await client.send(GET % b"x")
        await until(lambda: source.paused > 0, "the source is paused")
        assert len((await client.answer())[2]) == total
        # Whether resumed or not is nobody's business once the exchange has ended: the source is let go.
        await client.send(GET % b"y")
        await client.answer()
        assert core.handled == ["/x", "/y"]


async def test_a_source_is_resumed_while_the_exchange_lasts() -> None:
    source = TapSource()
    size = 8 * 1024 * 1024

    async def flood(exchange: Exchange) -> None:
        exchange.begin(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (size + 1), source)
        exchange.write(b"x" * size)
        await until(lambda: source.resumed > 0, "the source is resumed")
        exchange.write(b"y")
        exchange.end()

    async with core_server(handler=flood) as core, connect(core.port) as client:
        await client.send(GET % b"x")
        await until(lambda: source.paused == 1, "the source is paused")
        assert len((await client.answer())[2]) == size + 1


async def test_a_connection_that_was_read_slowly_is_still_closed_when_silent() -> None:
    total = 8 * 1024 * 1024

    async def flood(exchange: Exchange) -> None:
        exchange.begin(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total, TapSource())
        exchange.write(b"x" * total)
        exchange.end()

    limits = HttpLimits(keep_alive_seconds=3)  # the client must have asked by then
    async with core_server(handler=flood, limits=limits) as core, connect(core.port) as client:
        await client.send(GET % b"x")
        assert len((await client.answer())[2]) == total
        assert await client.closed()


async def test_a_client_that_never_reads_is_given_up() -> None:
    async def flood(exchange: Exchange) -> None:
        exchange.begin(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", TapSource())
        exchange.write(b"x" * 16 * 1024 * 1024)
        await asyncio.Event().wait()

    limits = HttpLimits(stall_seconds=0.1)
    async with core_server(handler=flood, limits=limits) as core, connect(core.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET % b"x")
        await until(lambda: core.cancelled == 1, "the handler is cancelled")
        await until(lambda: len(core.connections) == 0, "the connection is closed")


async def test_a_client_that_asks_on_without_reading_is_given_up() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.respond(
            Response(200, b"x" * (16 * 1024 * 1024 if exchange.request.head.path == "/large" else 1))
        )

    limits = HttpLimits(stall_seconds=1)
    async with core_server(handler=answer, limits=limits) as core, connect(core.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET % b"large")
        await until(lambda: core.handled == ["/large"], "the first request is answered")
        await client.send(GET % b"small")
        await until(lambda: len(core.connections) == 0, "the connection is closed", seconds=10)
        assert core.handled == ["/large"]


async def test_a_client_that_had_not_read_before_its_body_came_is_given_up() -> None:
    async def wait(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    admitted = asyncio.Event()
    limits = HttpLimits(stall_seconds=0.2)
    server = core_server(handler=wait, limits=limits, admit=lambda head: admitted.set())
    async with server as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
        await admitted.wait()
        for connection in list(core.connections._open):
            connection.pause_writing()  # as the transport does for a `100 Continue` too many
        await client.send(b"hi")
        await until(lambda: core.cancelled == 1, "the handler is cancelled", seconds=10)


async def test_a_client_that_stops_reading_near_the_end_of_the_last_answer_is_given_up() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.respond(Response(200, b"x" * 16 * 1024 * 1024))

    limits = HttpLimits(stall_seconds=0.2)
    async with core_server(handler=answer, limits=limits) as core, connect(core.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await until(lambda: core.handled == ["/x"], "the request is answered")
        for connection in list(core.connections._open):
            connection.resume_writing()  # as the transport does when little is left
        await until(lambda: len(core.connections) == 0, "the connection is closed", seconds=10)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_aborted_answer_is_visibly_broken(version: bytes) -> None:
    async def break_off(exchange: Exchange) -> None:
        framing = b"transfer-encoding: chunked\r\n" if not exchange.request.head.http10 else b""
        exchange.begin(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n", TapSource())
        exchange.write(b"4\r\nhalf\r\n")
        await asyncio.sleep(0)
        exchange.abort()

    async with core_server(handler=break_off) as core, connect(core.port) as client:
        await client.send(b"GET /x HTTP/%s\r\nHost: a\r\n\r\n" % version)
        if version == b"1.1":
            assert b"0\r\n\r\n" not in await client.rest()
        else:
            # Without chunks a clean close would look like the end, so it has to be a reset.
            with pytest.raises(ConnectionResetError):
                await client.rest()


async def test_draining_closes_idle_connections_and_lets_answers_finish() -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        exchange.respond(Response(200, b"done"))

    async with core_server(handler=wait) as core, connect(core.port) as busy, connect(core.port) as idle:
        await busy.send(GET % b"x")
        await until(lambda: core.handled == ["/x"] and len(core.connections) == 2, "one is busy, one idle")
        draining = asyncio.create_task(core.connections.drain(60))
        assert await idle.closed()
        release.set()
        _, head, body = await busy.answer()
        assert body == b"done"
        assert b"connection: close" in head
        await draining
        assert core.connections.kill() == 0


async def test_draining_has_a_limit() -> None:
    async def wait(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with core_server(handler=wait) as core, connect(core.port) as client:
        await client.send(GET % b"x")
        await until(lambda: core.handled == ["/x"], "the request is being answered")
        await core.connections.drain(0.05)
        assert core.connections.kill() == 1
        await until(lambda: core.cancelled == 1, "the handler is cancelled")


async def test_echo_answers_a_large_body_whole() -> None:
    body = bytes(range(256)) * 8192
    async with core_server(handler=echo) as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer())[2] == b"POST /x " + body


@pytest.mark.parametrize("method", [b"GET", b"OPTIONS"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_means_nothing_is_dropped_and_not_kept(method: bytes, chunked: bool) -> None:
    body = b"1388\r\n" + b"x" * 5000 + b"\r\n0\r\n\r\n" if chunked else b"x" * 5000
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 5000"
    async with core_server() as core, connect(core.port) as client:
        for _ in range(2):
            await client.send(method + b" /x HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n" + body)
            assert (await client.answer())[2] == method + b" /x "


async def test_a_body_that_means_nothing_is_bounded_all_the_same() -> None:
    limits = HttpLimits(body_bytes=1000)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(
            b"GET /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n" + b"x" * 5000
        )
        assert (await client.answer())[0] == 413
        assert core.handled == []
