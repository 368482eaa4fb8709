"""The engine-facing side: what counts as an answer, as its end, and as a connection that may be used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from disagg_router.http1 import (
    Address,
    BrokenAnswerError,
    ConnectError,
    EngineAnswer,
    EnginePool,
    Exchange,
)
from disagg_router.http1.message import relayed_head, request_head
from router.tests.conftest import until
from router.tests.wire import connect, core_server, raw_engine, read_request

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def say(answer: bytes, then_close: bool = False) -> Script:
    """Answer every request with these bytes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(answer)
            if then_close:
                return

    return script


def pool_of_engines() -> EnginePool:
    """One that neither gives up a connection nor closes it while a test lasts."""
    return EnginePool(60, idle_seconds=60)


def ask(pool: EnginePool, port: int, **kwargs: Any) -> Coroutine[Any, Any, EngineAnswer]:
    address = Address("127.0.0.1", port)
    return pool.ask(address, request_head("POST", "/x", str(address), {}, 2), b"hi", **kwargs)


@pytest.mark.parametrize("framing", ["raw", "decoded"])
@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
async def test_the_end_of_a_body_is_found_however_the_bytes_arrive(framing: str, cut: int) -> None:
    # A payload that looks like the end of a chunked body must not be taken for it.
    body = chunk(b"data: 0\r\n\r\n") + chunk(b"0\r\n\r\n") + b"0\r\n\r\n"
    answer = CHUNKED + body

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for start in range(0, len(answer), cut):
            writer.write(answer[start : start + cut])
            await writer.drain()
            await asyncio.sleep(0)
        await read_request(reader)
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with raw_engine(script) as engine:
        pool = pool_of_engines()
        got = await ask(pool, engine.port, framing=framing)
        expected = b"data: 0\r\n\r\n0\r\n\r\n" if framing == "decoded" else body
        assert await got.read(1000) == expected
        pool.release(got)
        again = await ask(pool, engine.port)
        assert again.status == 204
        assert engine.accepted == 1
        pool.close()


async def test_content_length_bodies_and_empty_bodies_end_where_they_say() -> None:
    for answer, body in (
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
    ):
        async with raw_engine(say(answer)) as engine:
            pool = pool_of_engines()
            for _ in range(3):
                got = await ask(pool, engine.port)
                assert (got.status, await got.read(100)) == (200, body)
                pool.release(got)
            assert engine.accepted == 1
            pool.close()


BROKEN = {
    "no length": b"HTTP/1.1 200 OK\r\n\r\nhello",
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "not http": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "bad chunk size": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "switching protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20_000,
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN.keys())
async def test_an_answer_that_is_not_sound_http_is_broken(answer: bytes) -> None:
    async with raw_engine(say(answer)) as engine:
        pool = pool_of_engines()
        with pytest.raises(BrokenAnswerError):
            await (await ask(pool, engine.port)).read(10_000)
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + chunk(b"data: 1\n\n"),
        CHUNKED + b"ff\r\ndata: 1\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
    ],
)
async def test_a_connection_that_ends_before_its_body_breaks_the_answer(answer: bytes) -> None:
    async with raw_engine(say(answer, then_close=True)) as engine:
        pool = pool_of_engines()
        got = await ask(pool, engine.port)
        with pytest.raises(BrokenAnswerError, match="closed the connection after"):
            await got.read(10_000)
        pool.close()


async def test_an_engine_that_closes_before_it_answers_is_broken_not_stale() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)

    async with raw_engine(script) as engine:
        pool = pool_of_engines()
        with pytest.raises(BrokenAnswerError, match="before it answered"):
            await ask(pool, engine.port)
        assert engine.accepted == 1


async def test_bytes_behind_an_answer_break_it_and_the_connection_is_not_used_again() -> None:
    two = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    )
    async with raw_engine(say(two)) as engine:
        pool = pool_of_engines()
        for _ in range(2):
            with pytest.raises(BrokenAnswerError, match="after the end"):
                await ask(pool, engine.port)
        assert engine.accepted == 2
        pool.close()


async def test_an_unasked_for_answer_on_an_idle_connection_is_never_anybodys() -> None:
    released, gone = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await released.wait()
        if gone.is_set():
            return  # the second connection
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        try:
            await reader.read()
        finally:
            gone.set()

    async with raw_engine(script) as engine:
        pool = pool_of_engines()
        first = await ask(pool, engine.port)
        assert await first.read(10) == b"hi"
        pool.release(first)
        released.set()
        await asyncio.wait_for(gone.wait(), 60)
        second = await ask(pool, engine.port)
        assert await second.read(10) == b"hi"
        assert engine.accepted == 2
        pool.close()


async def test_connection_close_ends_the_connections_use() -> None:
    async with raw_engine(
        say(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
    ) as engine:
        pool = pool_of_engines()
        for _ in range(2):
            got = await ask(pool, engine.port)
            await got.read(10)
            pool.release(got)
        assert engine.accepted == 2
        pool.close()


async def test_an_answer_that_was_given_up_is_not_used_again_and_the_engine_sees_it() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + chunk(b"data: 1\n\n"))
        try:
            await reader.read()
        finally:
            gone.set()

    async with raw_engine(script) as engine:
        pool = pool_of_engines()
        got = await ask(pool, engine.port)
        got.close()
        pool.release(got)
        await asyncio.wait_for(gone.wait(), 60)
        await ask(pool, engine.port)
        assert engine.accepted == 2
        pool.close()


async def test_a_whole_answer_that_nobody_wanted_leaves_no_connection_behind() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno")
        try:
            await reader.read()
        finally:
            gone.set()

    async with raw_engine(script) as engine:
        pool = pool_of_engines()
        got = await ask(pool, engine.port)
        await got.ended
        got.close()
        await asyncio.wait_for(gone.wait(), 60)


async def test_an_answer_is_given_back_once_only() -> None:
    async with raw_engine(say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")) as engine:
        pool = pool_of_engines()
        got = await ask(pool, engine.port)
        await got.read(10)
        pool.release(got)
        pool.release(got)
        got.close()
        first, second = await asyncio.gather(ask(pool, engine.port), ask(pool, engine.port))
        assert [await a.read(10) for a in (first, second)] == [b"hi", b"hi"]
        assert engine.accepted == 2
        pool.close()


async def test_cancelling_the_question_closes_the_connection() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        try:
            await reader.read()
        finally:
            gone.set()

    async with raw_engine(script) as engine:
        task = asyncio.create_task(ask(pool_of_engines(), engine.port))
        await asyncio.wait_for(asked.wait(), 60)
        task.cancel()
        await asyncio.wait_for(gone.wait(), 60)


async def test_a_kept_connection_that_died_meanwhile_is_replaced() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The close races with the next request: it comes only when that request is there.
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await reader.readuntil(b"\r\n\r\n")

    async with raw_engine(script) as engine:
        pool = pool_of_engines()
        for _ in range(3):
            got = await ask(pool, engine.port)
            assert await got.read(10) == b"hi"
            pool.release(got)
        assert engine.accepted == 3
        pool.close()


async def test_idle_connections_are_closed_after_a_while() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await reader.read()
        gone.set()

    async with raw_engine(script) as engine:
        pool = EnginePool(60, idle_seconds=0.05)
        got = await ask(pool, engine.port)
        await got.read(10)
        pool.release(got)
        await asyncio.wait_for(gone.wait(), 60)


async def test_nobody_listening_is_a_connect_error() -> None:
    async with raw_engine(say(b"")) as engine:
        port = engine.port
    with pytest.raises(ConnectError, match=str(port)):
        await ask(pool_of_engines(), port)


async def test_a_body_over_the_readers_limit_is_broken() -> None:
    async with raw_engine(
        say(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 9_000_000)
    ) as engine:
        pool = pool_of_engines()
        got = await ask(pool, engine.port)
        with pytest.raises(BrokenAnswerError, match="more than 1000 bytes"):
            await got.read(1000)


async def test_server_sent_comments_are_not_yet_an_answer() -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + chunk(b": keep-alive\n\n"))
        await go_on.wait()
        writer.write(chunk(b"data: 1\n\n") + b"0\r\n\r\n")
        await reader.read()

    async with raw_engine(script) as engine:
        task = asyncio.create_task(ask(pool_of_engines(), engine.port))
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        go_on.set()
        got = await asyncio.wait_for(task, 60)
        assert await got.read(1000) == chunk(b": keep-alive\n\n") + chunk(b"data: 1\n\n") + b"0\r\n\r\n"


async def test_a_slow_client_stops_the_engine_from_being_read() -> None:
    total, written = 64 * 1024 * 1024, 0
    answers: list[EngineAnswer] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while written < total:
            writer.write(b"x" * 65536)
            await writer.drain()
            written += 65536

    async with raw_engine(script) as engine:

        async def relay(exchange: Exchange) -> None:
            answer = await ask(pool_of_engines(), engine.port)
            answers.append(answer)
            head = relayed_head(answer.status, answer.headers, {}, keep_alive=True, decoded=False)
            answer.relay(exchange, head)
            await answer.ended

        async with core_server(handler=relay) as core, connect(core.port) as client:
            await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            await client.head()
            await until(lambda: answers[0].paused, "the engine's socket is paused")
            assert written < total
            received = 0
            while received < total:
                received += len(await asyncio.wait_for(client.reader.read(1 << 20), 60))
            await until(lambda: written == total, "the engine could write all")


async def test_a_header_that_would_break_out_of_its_line_is_never_sent() -> None:
    with pytest.raises(ValueError, match="control character"):
        request_head("POST", "/x", "a", {"x-request-id": "1\r\nX-Evil: 1"}, 0)
