"""More turns than the engines may have: who waits, who is refused and how, and who frees a place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from aiohttp import web

from disagg_router.config import Overload
from router.tests.conftest import MODEL, MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up, never, speak, sse, start_stream


class Held:
    """Decode engines that answer one turn for every `release`, and remember the order of turns."""

    def __init__(self, stack: Stack) -> None:
        self.order: list[str] = []
        self.release = asyncio.Semaphore(0)
        for engine in stack.decodes:
            engine.decode = self.script

    async def script(self, engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        self.order.append(seen.body["messages"][0]["content"])
        await self.release.acquire()
        return await speak(engine, request, seen)


async def limited(make_stack: MakeStack, decodes: int = 1, **limits: Any) -> Stack:
    return await make_stack(decodes=decodes, overload=Overload(**{"turns_per_engine": 1, **limits}))


def send(stack: Stack, session: str, text: str, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    return asyncio.create_task(
        stack.post(stack.chat(text, **fields), headers={"X-Session-Id": session}), name=text
    )


async def waiting(stack: Stack, count: int) -> None:
    await until(lambda: stack.router.gate.waiting == count, f"{count} turns wait")


async def test_a_greedy_session_does_not_starve_another(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, waiting_turns=600, waiting_turns_per_session=600)
    held = Held(stack)
    greedy = [send(stack, "greedy", f"greedy {n}") for n in range(500)]
    await waiting(stack, 499)
    modest = [send(stack, "modest", f"modest {n}") for n in range(3)]
    await waiting(stack, 502)
    for _ in range(7):
        held.release.release()
    assert [status for status, _ in await asyncio.gather(*modest)] == [200] * 3
    assert [text.split()[0] for text in held.order[1:7]] == ["greedy", "modest"] * 3
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    await until(lambda: not stack.router.gate.waiting and not stack.router.gate.running, "all have left")
    await until(stack.idle, "no leg is left")


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, waiting_turns=2, waiting_turns_per_session=1)
    held = Held(stack)
    tasks = [send(stack, "a", "first")]
    await until(lambda: len(held.order) == 1, "one turn runs")
    tasks += [send(stack, "a", "second")]
    await waiting(stack, 1)
    for session, code in (("a", "session_queue_full"), ("b", ""), ("c", "queue_full")):
        if not code:
            tasks.append(send(stack, session, "third"))
            await waiting(stack, 2)
            continue
        async with stack.client.post(
            stack.url + "/v1/chat/completions", json=stack.chat(), headers={"X-Session-Id": session}
        ) as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) > 0
            assert response.headers["x-request-id"]
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", code)
        assert stack.metric("disagg_router_shed_turns_total", reason=code) == 1
    for _ in range(3):
        held.release.release()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3
    assert stack.metric("disagg_router_requests_total", endpoint="chat", code="429") == 2


async def test_waiting_has_an_end(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, wait_seconds=0.2)
    stack.decode.decode = never
    first = send(stack, "a", "first")
    await until(lambda: stack.decode.active == 1, "one turn runs")
    async with stack.client.post(stack.url + "/v1/chat/completions", json=stack.chat()) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        assert (await response.json())["error"]["code"] == "queue_deadline"
    assert stack.router.gate.waiting == 0
    assert len(stack.decode.seen) == 1
    assert stack.metric("disagg_router_shed_turns_total", reason="queue_deadline") == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: stack.router.gate.running == 0, "its place is free")


async def test_a_client_that_leaves_the_queue_frees_its_place(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, waiting_turns=1)
    held = Held(stack)
    tasks = [send(stack, "a", "first")]
    await until(lambda: len(held.order) == 1, "one turn runs")
    leaver = send(stack, "b", "leaver")
    await waiting(stack, 1)
    leaver.cancel()
    await waiting(stack, 0)
    tasks.append(send(stack, "c", "second"))
    await waiting(stack, 1)
    for _ in tasks:
        held.release.release()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 2
    assert held.order == ["first", "second"]
    assert stack.metric("disagg_router_requests_total", endpoint="chat", code="499") == 1


@pytest.mark.parametrize("ending", ["client leaves", "engine breaks", "stream breaks", "refused body"])
async def test_every_end_of_a_turn_frees_its_place(make_stack: MakeStack, ending: str) -> None:
    async def begin_and_break(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        assert request.transport is not None
        request.transport.close()
        return response

    stack = await limited(make_stack)
    scripts = {"client leaves": never, "engine breaks": hang_up, "stream breaks": begin_and_break}
    stack.decode.decode = scripts.get(ending, speak)
    if ending == "refused body":
        status, _ = await stack.post([])
        assert status == 400
    else:
        turn = send(stack, "a", "ends badly", stream=ending == "stream breaks")
        if ending == "client leaves":
            await until(lambda: stack.decode.active == 1, "the turn is under way")
            turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
    await until(lambda: stack.router.gate.running == 0, "the place is free")
    stack.decode.decode = speak
    assert (await send(stack, "a", "goes well"))[0] == 200


async def test_an_engine_that_becomes_ready_lets_those_that_wait_in(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, decodes=2)
    prefill, one, two = stack.backends
    stack.publish(prefill, one)
    held = Held(stack)
    tasks = [send(stack, f"{n}", f"turn {n}") for n in range(3)]
    await waiting(stack, 2)
    assert stack.metric("disagg_router_turn_limit") == 1
    stack.publish(prefill, one, two)
    await waiting(stack, 1)
    assert stack.metric("disagg_router_turn_limit") == 2
    for _ in tasks:
        held.release.release()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3


async def test_engines_that_are_leaving_let_nobody_in_unless_all_are(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, decodes=3)
    prefill, *decodes = stack.backends
    for leaving, limit in ((0, 3), (1, 2), (2, 1), (3, 3)):
        stack.publish(prefill, *(replace(b, leaving=n < leaving) for n, b in enumerate(decodes)))
        assert stack.metric("disagg_router_turn_limit") == limit


async def test_nobody_waits_for_engines_that_are_not_there(make_stack: MakeStack) -> None:
    stack = await limited(make_stack)
    held = Held(stack)
    first = send(stack, "a", "first")
    await until(lambda: len(held.order) == 1, "one turn runs")
    second = send(stack, "b", "second")
    await waiting(stack, 1)
    stack.publish(stack.backends[0])
    status, answer = await second
    assert (status, answer["error"]["code"]) == (503, "no_engine_ready")
    held.release.release()
    assert (await first)[0] == 200


async def test_the_openai_client_sees_a_rate_limit(make_stack: MakeStack) -> None:
    stack = await limited(make_stack, waiting_turns=0)
    stack.decode.decode = never
    first = send(stack, "a", "first")
    await until(lambda: stack.decode.active == 1, "one turn runs")
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "queue_full"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_turn_that_waited_for_its_predecessor_goes_where_that_went(make_stack: MakeStack) -> None:
    stack = await limited(make_stack)
    held = Held(stack)
    first = send(stack, "a", "first")
    await until(lambda: len(held.order) == 1, "one turn runs")
    second = send(stack, "a", "second")
    await waiting(stack, 1)
    held.release.release()
    held.release.release()
    assert [status for status, _ in await asyncio.gather(first, second)] == [200] * 2
    assert stack.metric("disagg_router_picks_total", role="decode", reason="session") == 1
    assert stack.metric("disagg_router_queue_wait_seconds_count") == 2
