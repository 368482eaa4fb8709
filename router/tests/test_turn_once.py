"""A leg whose transfer parameters name blocks is never served twice, whatever becomes of its connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from disagg_router.config import Deadlines
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Script, Seen, sse, start_stream
from router.tests.test_modes_turns import converse, made


def cut_once(good: Script) -> Script:
    """Takes the first request, does all it asks for, and then something between the two cuts the connection."""
    done: list[Seen] = []

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        answer = await good(engine, request, seen)
        if not done:
            done.append(seen)
            assert request.transport is not None
            request.transport.close()
            await asyncio.Event().wait()
        return answer

    return script


def breakers(stack: Stack) -> dict[str, str]:
    return {b.name: stack.router.loads.state(b).value for b in stack.backends}


@pytest.mark.parametrize("mode", ["Pull", "Push", "BidirectionalPull"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_kept_connection_that_is_cut_ends_the_attempt(
    make_stack: MakeStack, mode: str, role: str
) -> None:
    stack, world = await made(make_stack, mode)
    await converse(stack, 1)
    await until(stack.idle, "the connections are kept")
    engine: Any = getattr(stack, role)
    setattr(engine, role, cut_once(getattr(engine, role)))
    await converse(stack, 2)
    await until(stack.idle, "all legs are over")
    assert (world.wrong, world.dead) == ([], [])
    legs_of_a_role = [seen for seen in engine.seen if seen.path.endswith("completions")]
    ids = [seen.request_id for seen in legs_of_a_role if seen.body.get("kv_transfer_params")]
    assert len(ids) == len(set(ids)), "every attempt has an id of its own"
    assert set(breakers(stack).values()) == {"closed"}, "nobody knows whose fault it was"


async def test_silence_that_a_client_can_ask_for_blames_nobody(make_stack: MakeStack) -> None:
    deadlines = Deadlines(connect_seconds=60, first_byte_seconds=60, idle_seconds=1, answer_seconds=60)
    stack = await make_stack(deadlines=deadlines)
    silent = asyncio.Event()

    async def quiet(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        answer = await start_stream(request)
        await answer.write(sse("one"))
        await silent.wait()
        return answer

    stack.decode.decode = quiet
    with pytest.raises(Exception, match=r"payload|closed|disconnected"):
        await stack.post(stack.chat(stream=True, stream_interval=100_000))
    silent.set()
    await until(stack.idle, "the turn is over")
    assert breakers(stack)["decode-0"] == "closed"


async def test_a_long_answer_of_prefill_is_no_fault(make_stack: MakeStack) -> None:
    """A response repeats its request's metadata and tools."""
    stack = await make_stack()
    good = stack.prefill.prefill

    async def repeats(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        engine.words = ["x" * len(seen.body["metadata"]["a"])]
        return await good(engine, request, seen)

    stack.prefill.prefill = repeats
    body = {"model": stack.chat()["model"], "input": "hi", "metadata": {"a": "x" * 1_500_000}}
    assert (await stack.post(body, "/v1/responses"))[0] == 200
    await until(stack.idle, "all legs are over")
    assert breakers(stack)["prefill-0"] == "closed"
    assert stack.metric("disagg_router_recomputed_turns_total", reason="prefill_broke") == 0
