"""The clients' port over TLS: real sockets, Python's own client."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path

import pytest
from aiohttp import web

from disagg_router.certfile import CertFile
from disagg_router.config import Tls
from disagg_router.http1 import Exchange, HttpLimits, Response
from router.tests.certificates import Authority, serial
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, sse, start_stream
from router.tests.wire import Client, connect, core_server, echo

AUTHORITY = Authority()
GET = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"


async def encrypted(make_stack: MakeStack, folder: Path) -> Stack:
    certificate, key = AUTHORITY.pair().write(folder)
    return await make_stack(tls=Tls(certificate_file=str(certificate), key_file=str(key)))


def certificate(folder: Path) -> CertFile:
    return CertFile(*AUTHORITY.pair().write(folder))


def chat(stack: Stack, **fields: object) -> bytes:
    body = json.dumps(stack.chat(**fields)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def shown(client: Client) -> int:
    return serial(client.writer.get_extra_info("ssl_object"))


async def test_turns_are_answered_one_after_the_other_on_a_connection(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    stack = await encrypted(make_stack, tmp_path)
    async with connect(stack.router.port, AUTHORITY.client()) as client:
        for _ in range(3):
            await client.send(chat(stack))
            status, _, body = await client.answer()
            assert status == 200
            assert json.loads(body)["choices"]


async def test_a_stream_comes_piece_by_piece(make_stack: MakeStack, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        await go_on.wait()
        await response.write(sse("two") + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    stack = await encrypted(make_stack, tmp_path)
    stack.decode.decode = slow
    async with connect(stack.router.port, AUTHORITY.client()) as client:
        await client.send(chat(stack, stream=True))
        assert b"200 OK" in await client.head()
        assert b"one" in await client.reader.readuntil(b"\n\n")
        go_on.set()
        assert b"two" in await client.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("polite", [True, False], ids=["with a goodbye", "without one"])
async def test_a_client_that_leaves_stops_both_engines(
    make_stack: MakeStack, tmp_path: Path, polite: bool
) -> None:
    async def forever(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        await asyncio.Event().wait()
        raise AssertionError

    stack = await encrypted(make_stack, tmp_path)
    stack.decode.decode = forever
    async with connect(stack.router.port, AUTHORITY.client()) as client:
        await client.send(chat(stack, stream=True))
        await client.reader.readuntil(b"\n\n")
        client.writer.close() if polite else client.reset()
        await until(stack.idle, "nothing is left of the turn")


async def test_an_open_connection_outlives_its_certificate(make_stack: MakeStack, tmp_path: Path) -> None:
    """The file is looked at by the running router itself."""
    stack = await encrypted(make_stack, tmp_path)
    async with connect(stack.router.port, AUTHORITY.client()) as before:
        await before.send(GET % b"health")
        assert (await before.answer())[0] == 200
        new = AUTHORITY.pair()
        new.write(tmp_path)
        async with asyncio.timeout(60):
            while True:
                async with connect(stack.router.port, AUTHORITY.client()) as after:
                    if shown(after) == new.serial:
                        break
                await asyncio.sleep(0.05)
        await before.send(chat(stack))
        assert (await before.answer())[0] == 200
        assert shown(before) != new.serial


async def test_the_admin_port_stays_as_it_is(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await encrypted(make_stack, tmp_path)
    async with stack.client.get(f"http://127.0.0.1:{stack.router.admin.port}/readyz") as response:
        assert response.status == 200


async def test_a_client_that_trusts_another_authority_is_not_served(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    stack = await encrypted(make_stack, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        async with connect(stack.router.port, Authority().client()):
            pass
    async with connect(stack.router.port, AUTHORITY.client()) as client:
        await client.send(GET % b"health")
        assert (await client.answer())[0] == 200


# -- the core --------------------------------------------------------------------------------------------------


async def test_who_says_nothing_is_cut_at_the_handshakes_limit(tmp_path: Path) -> None:
    limits = HttpLimits(handshake_seconds=0.1)
    async with core_server(certificate=certificate(tmp_path), limits=limits) as core:
        async with connect(core.port) as silent, connect(core.port) as half:
            await half.send(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello
            assert await silent.closed()
            assert await half.closed()
        assert len(core.connections) == 0
        assert core.handled == []


async def test_who_speaks_plain_http_is_cut_and_others_are_served(tmp_path: Path) -> None:
    async with core_server(certificate=certificate(tmp_path)) as core:
        async with connect(core.port) as plain:
            await plain.send(GET % b"x")
            assert b"HTTP/" not in await plain.rest()
        assert core.handled == []
        async with connect(core.port, AUTHORITY.client()) as client:
            await client.send(GET % b"x")
            assert (await client.answer())[2] == b"GET /x "
        assert core.handled == ["/x"]


async def test_large_bodies_go_both_ways(tmp_path: Path) -> None:
    body = bytes(range(256)) * 32768
    async with (
        core_server(certificate=certificate(tmp_path), handler=echo) as core,
        connect(core.port, AUTHORITY.client()) as client,
    ):
        head = b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        await client.send(head % len(body) + body)
        assert (await client.answer())[2] == b"POST /x " + body
        assert await client.closed()


async def test_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    async def flood(exchange: Exchange) -> None:
        for _ in range(256):
            exchange.write(b"x" * 65536)
        await asyncio.Event().wait()

    limits = HttpLimits(stall_seconds=0.1)
    async with (
        core_server(certificate=certificate(tmp_path), handler=flood, limits=limits) as core,
        connect(core.port, AUTHORITY.client()) as client,
    ):
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET % b"x")
        await until(lambda: core.cancelled == 1, "the handler is cancelled")
        await until(lambda: len(core.connections) == 0, "the connection is closed")


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_answer_that_breaks_off_is_visibly_broken(tmp_path: Path, version: bytes) -> None:
    async def break_off(exchange: Exchange) -> None:
        framing = b"transfer-encoding: chunked\r\n" if not exchange.request.head.http10 else b""
        exchange.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n4\r\nhalf\r\n")
        await asyncio.sleep(0)
        exchange.abort()

    async with (
        core_server(certificate=certificate(tmp_path), handler=break_off) as core,
        connect(core.port, AUTHORITY.client()) as client,
    ):
        await client.send(b"GET /x HTTP/%s\r\nHost: a\r\n\r\n" % version)
        if version == b"1.1":
            assert b"0\r\n\r\n" not in await client.rest()
        else:
            with pytest.raises(ConnectionResetError):
                await client.rest()


async def test_a_refused_body_does_not_cost_the_client_its_answer(tmp_path: Path) -> None:
    limits = HttpLimits(body_bytes=10, linger_seconds=0.1)
    async with (
        core_server(certificate=certificate(tmp_path), limits=limits) as core,
        connect(core.port, AUTHORITY.client()) as client,
    ):
        await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 100_000)
        assert (await client.answer())[0] == 413
        await until(lambda: len(core.connections) == 0, "the connection is closed")


async def test_draining_does_not_wait_for_idle_clients_that_do_not_say_goodbye(tmp_path: Path) -> None:
    limits = HttpLimits(goodbye_seconds=0.1)
    async with (
        core_server(certificate=certificate(tmp_path), limits=limits) as core,
        connect(core.port, AUTHORITY.client()) as idle,
    ):
        await idle.send(GET % b"x")
        await idle.answer()
        idle.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await core.connections.drain(60)
        assert core.connections.kill() == 0


async def test_draining_does_not_wait_for_a_request_on_a_connection_whose_handshake_is_late(
    tmp_path: Path,
) -> None:
    limits = HttpLimits(goodbye_seconds=1)
    async with (
        core_server(certificate=certificate(tmp_path), limits=limits) as core,
        connect(core.port, AUTHORITY.client()) as idle,
        connect(core.port) as late,
    ):
        await idle.send(GET % b"x")
        await idle.answer()
        idle.writer.transport.pause_reading()  # type: ignore[attr-defined]
        draining = asyncio.create_task(core.connections.drain(60))
        await asyncio.sleep(0)
        await late.writer.start_tls(AUTHORITY.client(), server_hostname="localhost")
        assert await late.closed()
        await draining
        assert core.connections.kill() == 0


async def test_a_client_that_still_reads_is_not_cut_at_the_goodbyes_limit(tmp_path: Path) -> None:
    body = b"x" * 32 * 1024 * 1024

    async def answer(exchange: Exchange) -> None:
        exchange.respond(Response(200, body))

    def ask(port: int) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port))
        client = AUTHORITY.client().wrap_socket(plain, server_hostname="localhost")
        client.sendall(GET % b"x")
        return client

    def read_all(client: ssl.SSLSocket) -> bytes:
        with client:
            return b"".join(iter(lambda: client.recv(65536), b""))

    limits = HttpLimits(goodbye_seconds=0.05)
    async with core_server(certificate=certificate(tmp_path), handler=answer, limits=limits) as core:
        client = await asyncio.to_thread(ask, core.port)
        await until(lambda: core.handled == ["/x"], "the request is answered")
        draining = asyncio.create_task(core.connections.drain(60))
        # Long enough for the limit to pass several times, while the client does not read.
        await asyncio.sleep(0.3)
        assert (await asyncio.to_thread(read_all, client)).endswith(b"\r\n\r\n" + body)
        await draining
        assert core.connections.kill() == 0


async def test_draining_lets_answers_finish(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        exchange.respond(Response(200, b"done"))

    async with (
        core_server(certificate=certificate(tmp_path), handler=wait) as core,
        connect(core.port, AUTHORITY.client()) as busy,
    ):
        await busy.send(GET % b"x")
        await until(lambda: core.handled == ["/x"], "the request is being answered")
        draining = asyncio.create_task(core.connections.drain(60))
        release.set()
        assert (await busy.answer())[2] == b"done"
        assert await busy.closed()
        await draining
        assert core.connections.kill() == 0
