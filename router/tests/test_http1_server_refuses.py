"""What the client-facing side refuses: ambiguous framing, oversized or slow requests, pipelining."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg_router.errors import error_response
from disagg_router.http1 import Exchange, HttpLimits, RequestHead, Response
from router.tests.conftest import until
from router.tests.wire import connect, core_server, echo

SMUGGLING = {
    "content-length and transfer-encoding": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil",
    "transfer-encoding and content-length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET /evil",
    "two content-lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "two equal content-lengths": b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list of content-lengths": b"Content-Length: 5, 5\r\n\r\nhello",
    "negative content-length": b"Content-Length: -1\r\n\r\n",
    "signed content-length": b"Content-Length: +5\r\n\r\nhello",
    "hexadecimal content-length": b"Content-Length: 0x5\r\n\r\nhello",
    "content-length of too many digits": b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "content-length with a blank in it": b"Content-Length: 1 0\r\n\r\nhello",
    "empty content-length": b"Content-Length: \r\n\r\nhello",
    "blank before the colon": b"Content-Length : 5\r\n\r\nhello",
    "folded header": b"Content-Length: 5\r\nX-A: b\r\n Transfer-Encoding: chunked\r\n\r\nhello",
    "chunked not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two transfer-encodings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunk size with a sign": b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "chunk size with 0x": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size overflow": b"Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
    "chunk longer than its size": b"Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
    "chunk size ends with LF": b"Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    "NUL in a header value": b"X-A: a\0b\r\nContent-Length: 0\r\n\r\n",
    "CR in a header value": b"X-A: a\rb\r\nContent-Length: 0\r\n\r\n",
    "header name with a blank": b"X A: b\r\nContent-Length: 0\r\n\r\n",
    "line without a colon": b"nonsense\r\nContent-Length: 0\r\n\r\n",
    "second host": b"Host: other\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("fields", SMUGGLING.values(), ids=SMUGGLING.keys())
async def test_ambiguous_framing_is_a_400_and_the_end_of_the_connection(fields: bytes) -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\n" + fields)
        status, head, body = await client.answer()
        assert status == 400
        assert b"connection: close" in head
        assert "error" in json.loads(body)
        assert await client.closed()
        assert core.handled == []


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"POST /x HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"POST x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /x HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET /x HTTP/1.7\r\nHost: a\r\n\r\n", 400),
        (b"GET /x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS on a plain port
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 400),  # and no Host
        (b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nExpect: a-miracle\r\nContent-Length: 1\r\n\r\n", 417),
    ],
)
async def test_a_head_that_is_not_http11_is_refused(start: bytes, status: int) -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(start)
        assert (await client.answer())[0] == status
        assert core.handled == []


@pytest.mark.parametrize("cut", [1, 7, 40])
async def test_a_refusal_does_not_depend_on_how_the_bytes_arrive(cut: int) -> None:
    request = b"POST /x HTTP/1.1\r\nHost: a\r\n" + SMUGGLING["content-length and transfer-encoding"]
    async with core_server() as core, connect(core.port) as client:
        for start in range(0, len(request), cut):
            client.writer.write(request[start : start + cut])
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 400
        assert core.handled == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=300), split=st.integers(0, 300))
def test_any_bytes_get_an_answer_or_a_wait_but_never_a_crash(noise: bytes, split: int) -> None:
    async def run() -> None:
        async with core_server() as core, connect(core.port) as client:
            await client.send(noise[:split])
            await client.send(noise[split:])
            client.half_close()
            answer = await client.rest()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
            await until(lambda: len(core.connections) == 0, "the connection is closed")

    asyncio.run(run())


async def test_a_head_that_never_ends_is_refused_at_the_limit() -> None:
    limits = HttpLimits(head_bytes=4096)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\nX-Long: ")
        await client.send(b"a" * 5000)
        assert (await client.answer())[0] == 431
        assert core.handled == []


async def test_too_many_header_fields_are_refused() -> None:
    limits = HttpLimits(header_fields=20)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(
            b"GET /x HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(30)) + b"\r\n"
        )
        assert (await client.answer())[0] == 431


async def test_trailers_count_towards_the_head() -> None:
    limits = HttpLimits(head_bytes=4096)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        await client.send(b"".join(b"X-%d: 1234567890\r\n" % i for i in range(400)) + b"\r\n")
        assert (await client.answer())[0] == 431
        assert core.handled == []


async def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    limits = HttpLimits(body_bytes=1000)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(
            b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await client.answer())[0] == 413
        assert await client.closed()


async def test_a_chunked_body_over_the_limit_is_refused_and_the_client_can_read_it() -> None:
    limits = HttpLimits(body_bytes=100_000)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        # A client that only writes until it is done: the refusal must survive what it still sends.
        for _ in range(50):
            client.writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert (await client.answer())[0] == 413
        assert core.handled == []


async def test_a_request_that_drips_in_is_given_up() -> None:
    limits = HttpLimits(request_seconds=0.1)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhel")
        assert (await client.answer())[0] == 408
        assert await client.closed()


async def test_a_silent_connection_is_closed() -> None:
    limits = HttpLimits(keep_alive_seconds=0.1)
    async with core_server(limits=limits) as core, connect(core.port) as client:
        assert await client.closed()


async def test_pipelined_requests_are_not_answered_and_the_connection_closes_after_the_first() -> None:
    request = b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
    async with core_server() as core, connect(core.port) as client:
        await client.send(request % b"first" + request % b"second")
        status, head, body = await client.answer()
        assert (status, body) == (200, b"POST /first hi")
        assert b"connection: close" in head
        assert await client.closed()
        assert core.handled == ["/first"]


async def test_bytes_during_an_answer_close_the_connection_after_it() -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        await echo(exchange)

    async with core_server(handler=wait) as core, connect(core.port) as client:
        await client.send(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: core.handled == ["/first"], "the first request is being answered")
        await client.send(b"GET /second HTTP/1.1\r\nHost: a\r\n\r\n")
        release.set()
        assert (await client.answer())[2] == b"GET /first "
        assert await client.closed()
        assert core.handled == ["/first"]


async def test_garbage_behind_a_request_does_not_spoil_its_answer() -> None:
    async with core_server() as core, connect(core.port) as client:
        await client.send(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n\x00\x01garbage")
        assert (await client.answer())[2] == b"GET /first "
        assert await client.closed()


async def test_what_admit_refuses_is_answered_before_the_body_comes() -> None:
    def admit(head: RequestHead) -> Response | None:
        return error_response(404, "no such path") if head.path == "/nope" else None

    async with core_server(admit=admit) as core, connect(core.port) as client:
        await client.send(
            b"POST /nope HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await client.answer())[0] == 404
        assert core.handled == []


async def test_a_handler_that_fails_is_a_500_in_the_apis_shape() -> None:
    async def fail(exchange: Exchange) -> None:
        raise RuntimeError("a secret detail")

    async with core_server(handler=fail) as core, connect(core.port) as client:
        await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        status, _, body = await client.answer()
        assert status == 500
        assert b"secret" not in body
