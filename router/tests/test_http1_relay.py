"""Whole bodies through the proxy core: whatever they hold and however they are cut, the client gets them unchanged."""

from __future__ import annotations

import asyncio
import itertools

import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_router.http1 import Address, BrokenAnswerError, EnginePool, Exchange
from disagg_router.http1.message import relayed_head, request_head
from router.tests.wire import Client, connect, core_server, raw_engine, read_request

# Pieces that look like framing, mixed with anything else.
PIECES = st.one_of(
    st.binary(min_size=1, max_size=60),
    st.sampled_from([b"0\r\n\r\n", b"\r\n", b"5\r\n", b"data: [DONE]\n\n"]),
)


async def read_chunked(client: Client) -> bytes:
    """Take the chunk framing off a body; fails if it ends too early."""
    body = b""
    while True:
        size = int(await asyncio.wait_for(client.reader.readuntil(b"\r\n"), 60), 16)
        body += (await asyncio.wait_for(client.reader.readexactly(size + 2), 60))[:-2]
        if size == 0:
            return body


async def through(pieces: list[bytes], cuts: list[int], cut_short: bool) -> tuple[bytes | None, bytes | None]:
    """What a client gets of a chunked body of `pieces` that an engine sends cut at `cuts`, and of the next answer."""
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    if cut_short:
        framed = framed[:-5]
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed
    points = sorted({0, len(answer), *(cut % len(answer) for cut in cuts)})

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for start, end in itertools.pairwise(points):
                writer.write(answer[start:end])
                await asyncio.sleep(0)
            if cut_short:
                return

    async with raw_engine(script) as engine:
        pool = EnginePool(60, idle_seconds=60)
        address = Address("127.0.0.1", engine.port)

        async def relay(exchange: Exchange) -> None:
            got = await pool.ask(address, request_head("POST", "/x", str(address), {}, 0), b"")
            got.relay(exchange, relayed_head(got.status, got.headers, {}, keep_alive=True, decoded=False))
            try:
                await got.ended
            except BrokenAnswerError:
                return  # the exchange has not ended, so the core breaks it off
            pool.release(got)

        async with core_server(handler=relay) as core, connect(core.port) as client:
            bodies: list[bytes | None] = []
            for _ in range(1 if cut_short else 2):
                await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
                await client.head()
                try:
                    bodies.append(await read_chunked(client))
                except asyncio.IncompleteReadError:
                    bodies.append(None)
            pool.close()
            if not cut_short:
                assert (
                    engine.accepted == 1
                )  # the first answer's end was found, so its connection was used again
            return bodies[0], bodies[-1]


@settings(max_examples=80, deadline=None)
@given(pieces=st.lists(PIECES, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_any_body_arrives_unchanged_and_its_end_is_found(pieces: list[bytes], cuts: list[int]) -> None:
    assert uvloop.run(through(pieces, cuts, cut_short=False)) == (b"".join(pieces),) * 2


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(PIECES, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_a_body_without_its_end_never_looks_whole(pieces: list[bytes], cuts: list[int]) -> None:
    assert uvloop.run(through(pieces, cuts, cut_short=True)) == (None, None)


async def test_the_tests_run_on_the_loop_of_production() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
