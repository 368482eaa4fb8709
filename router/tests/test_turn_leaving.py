"""Engines that are about to be removed: they get no new turn, end what they have, and are asked for their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from router.tests.conftest import MODEL, MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, speak, sse, start_stream


def turn(conversation: int, number: int, **fields: Any) -> dict[str, Any]:
    """The turn of that number, from 0, of a conversation."""
    messages = [{"role": "user", "content": f"conversation {conversation}"}]
    for n in range(number):
        messages += [
            {"role": "assistant", "content": f"answer {n}"},
            {"role": "user", "content": f"and {n}?"},
        ]
    return {"model": MODEL, "messages": messages, **fields}


def leave(stack: Stack, *names: str) -> None:
    stack.publish(*(replace(b, leaving=b.name in names) for b in stack.backends))


def holders(engines: list[FakeEngine]) -> Iterator[int | None]:
    """Which decode engine prefill was told to ask, by its number, turn by turn."""
    for engine in engines:
        for seen in engine.seen:
            told = seen.body["kv_transfer_params"]["disagg"].get("decode")
            yield told["control_port"] - 5700 if told else None


async def test_no_new_turn_reaches_them_and_running_streams_end(make_stack: MakeStack) -> None:
    stack = await make_stack(prefills=2, decodes=2)
    release = asyncio.Event()

    async def held(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        await release.wait()
        await response.write(sse("two") + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    for engine in stack.decodes:
        engine.decode = held
    streams = [asyncio.create_task(stack.post(turn(n, 0, stream=True))) for n in range(12)]
    await until(lambda: sum(engine.active for engine in stack.decodes) == 12, "all streams have begun")
    await until(lambda: not any(engine.active for engine in stack.prefills), "prefill has computed them")
    going = (stack.prefills[1], stack.decodes[1])
    assert all(engine.seen for engine in going)

    leave(stack, "prefill-1", "decode-1")
    before = [len(engine.seen) for engine in going]
    for engine in stack.decodes:
        engine.decode = speak
    for conversation in range(24):  # remembered, and new
        for number in (1, 2):
            assert (await stack.post(turn(conversation, number, stream=number == 1)))[0] == 200
    assert [len(engine.seen) for engine in going] == before
    assert stack.metric("disagg_router_picks_total", role="decode", reason="moved") == before[1]
    for role in ("decode", "prefill"):
        name = "disagg_router_engines"
        assert stack.metric(name, role=role, revision="rev1", state="leaving") == 1
        assert stack.metric(name, role=role, revision="rev1", state="ready") == 1
    assert stack.metric("disagg_router_inflight_legs", role="decode", pod="decode-1") == before[1]

    release.set()
    for status, text in await asyncio.gather(*streams):
        assert (status, "two" in text, text.endswith("data: [DONE]\n\n")) == (200, True, True)
    await until(stack.idle, "nothing is left on them")


async def test_prefill_asks_the_leaving_engine_until_the_conversation_is_elsewhere(
    make_stack: MakeStack,
) -> None:
    stack = await make_stack(decodes=2)
    assert (await stack.post(turn(0, 0)))[0] == 200
    at = next(i for i, engine in enumerate(stack.decodes) if engine.seen)
    leave(stack, f"decode-{at}")
    for number in (1, 2):
        assert (await stack.post(turn(0, number)))[0] == 200
    assert list(holders(stack.prefills)) == [None, at, 1 - at]


async def test_a_router_without_memory_asks_where_the_conversation_would_have_been(
    make_stack: MakeStack,
) -> None:
    stack = await make_stack(decodes=2)
    for conversation in range(10):
        assert (await stack.post(turn(conversation, 0)))[0] == 200
    homes = [
        next(i for i, e in enumerate(stack.decodes) for s in e.seen if s.body["messages"][0] == said)
        for said in (turn(n, 0)["messages"][0] for n in range(10))
    ]
    assert set(homes) == {0, 1}

    restarted = await make_stack(decodes=2)
    leave(restarted, "decode-1")
    for conversation in range(10):
        assert (await restarted.post(turn(conversation, 1)))[0] == 200
    assert list(holders(restarted.prefills)) == homes
    assert [len(engine.seen) for engine in restarted.decodes] == [10, 0]


@pytest.mark.parametrize(
    "names", [["decode-0"], ["prefill-0"], ["decode-0", "prefill-0"]], ids=lambda names: "+".join(names)
)
async def test_the_only_engines_of_a_role_are_used(stack: Stack, names: list[str]) -> None:
    assert (await stack.post(turn(0, 0)))[0] == 200
    leave(stack, *names)
    for body in (turn(0, 1), turn(1, 0)):
        assert (await stack.post(body))[0] == 200
    assert (len(stack.prefill.seen), len(stack.decode.seen)) == (3, 3)
    async with stack.client.get(stack.url + "/health") as response:
        assert response.status == 200


async def test_an_engine_that_is_to_stay_after_all_is_used_again(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    leave(stack, "decode-0")
    leave(stack)
    for conversation in range(20):
        assert (await stack.post(turn(conversation, 0)))[0] == 200
    assert all(engine.seen for engine in stack.decodes)
