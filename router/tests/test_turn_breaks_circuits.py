"""Turns and the circuit breakers of engines: who is left alone, who is probed, and who is never blamed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from aiohttp import web

from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import (
    FakeEngine,
    Seen,
    hang_up,
    hang_up_after,
    never,
    refuse,
    speak,
    sse,
    start_stream,
)


def state(stack: Stack, pod: str) -> str:
    role = pod.partition("-")[0]
    name = "disagg_router_breakers"
    [now] = [s for s in ("closed", "open", "half_open") if stack.metric(name, role=role, pod=pod, state=s)]
    return now


_numbers = itertools.count()


async def ask(stack: Stack, count: int, **fields: Any) -> list[int]:
    """New conversations, one after the other: remembered ones would stay where they were."""
    names = [f"conversation {next(_numbers)}" for _ in range(count)]
    answers = [await stack.post(stack.chat(name, **fields)) for name in names]
    return [status for status, _ in answers]


async def test_an_engine_that_answers_errors_is_left_alone_after_five(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    stack.decode.decode = refuse(500, "Internal server error")
    assert await ask(stack, 40) == [200] * 40
    assert len(stack.decode.seen) == 5
    assert state(stack, "decode-0") == "open"
    assert state(stack, "decode-1") == "closed"
    opened = stack.metric("disagg_router_breaker_openings_total", role="decode", reason="decode_error")
    assert opened == 1


async def test_a_suspect_engine_is_probed_by_one_turn_at_a_time(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    stack.decode.decode = hang_up
    await ask(stack, 20)
    assert state(stack, "decode-0") == "open"
    reached = len(stack.decode.seen)
    assert reached == 1

    stack.ahead += 5.0
    release = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await release.wait()
        return await speak(engine, request, seen)

    stack.decode.decode = slow
    turns = [asyncio.create_task(stack.post(stack.chat(f"other {n}"))) for n in range(20)]
    await until(lambda: sum(t.done() for t in turns) == 19, "all but the probe are served by the other")
    assert len(stack.decode.seen) == reached + 1
    assert state(stack, "decode-0") == "half_open"
    release.set()
    assert {status for status, _ in await asyncio.gather(*turns)} == {200}
    assert state(stack, "decode-0") == "closed"
    await ask(stack, 20)
    assert len(stack.decode.seen) > reached + 3


async def test_a_probe_is_answered_by_its_first_byte(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    stack.decode.decode = hang_up
    await ask(stack, 20)
    stack.ahead += 5.0
    release = asyncio.Event()

    async def long(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        await release.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    for engine in stack.decodes:
        engine.decode = long
    turns = [asyncio.create_task(stack.post(stack.chat(f"other {n}", stream=True))) for n in range(20)]
    await until(lambda: state(stack, "decode-0") == "closed", "the probe closes the breaker while it goes on")
    assert stack.decode.active
    release.set()
    assert {status for status, _ in await asyncio.gather(*turns)} == {200}


async def test_a_probe_whose_client_leaves_is_no_verdict(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    stack.decode.decode = hang_up
    await ask(stack, 20)
    stack.ahead += 5.0
    stack.decode.decode = never
    turns = [asyncio.create_task(stack.post(stack.chat(f"other {n}"))) for n in range(20)]
    await until(lambda: stack.decode.active == 1, "the probe is under way")
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    await until(stack.idle, "no leg is left")
    assert state(stack, "decode-0") == "half_open"
    stack.decode.decode = speak
    assert await ask(stack, 20) == [200] * 20
    assert state(stack, "decode-0") == "closed"


async def test_what_clients_do_wrong_opens_nothing(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    for engine in (*stack.decodes, stack.prefill):
        engine.decode = engine.prefill = refuse(400, "no")
    assert await ask(stack, 30) == [400] * 30
    for engine in stack.decodes:
        engine.decode = never
    turns = [asyncio.create_task(stack.post(stack.chat(f"{n}", stream=True))) for n in range(20)]
    await until(lambda: sum(e.active for e in stack.decodes) == 20, "all turns wait")
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    await until(stack.idle, "no leg is left")
    assert {state(stack, b.name) for b in stack.backends} == {"closed"}


async def test_a_refusal_is_no_recovery_either(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    stack.decode.decode = hang_up
    await ask(stack, 20)
    stack.ahead += 5.0
    for engine in stack.decodes:
        engine.decode = refuse(400, "no")
    await ask(stack, 20)
    assert state(stack, "decode-0") == "half_open"


async def test_an_engine_that_breaks_its_answers_off_is_left_alone(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    stack.decode.decode = hang_up_after(2)
    broken = 0
    for n in range(20):
        try:
            await stack.post(stack.chat(f"conversation {n}", stream=True))
        except Exception:
            broken += 1
    assert broken == len(stack.decode.seen) == 1
    assert state(stack, "decode-0") == "open"


async def test_the_only_engine_is_asked_however_suspect_it_is(stack: Stack) -> None:
    stack.decode.decode = hang_up
    assert await ask(stack, 3) == [502] * 3
    assert state(stack, "decode-0") == "open"
    stack.decode.decode = speak
    assert await ask(stack, 3) == [200] * 3
    assert state(stack, "decode-0") == "closed"


@pytest.mark.parametrize("script", [hang_up, refuse(500, "Internal server error")])
async def test_prefill_that_fails_is_not_asked_until_it_is_probed(stack: Stack, script: Any) -> None:
    stack.prefill.prefill = script

    async def waits(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (never if "kv_transfer_params" in seen.body else speak)(engine, request, seen)

    stack.decode.decode = waits
    assert await ask(stack, 8) == [200] * 8
    assert len(stack.prefill.seen) == (1 if script is hang_up else 5)
    assert state(stack, "prefill-0") == "open"
    stack.ahead += 5.0
    stack.prefill.prefill = stack.decode.decode = speak
    assert await ask(stack, 1) == [200]
    await until(lambda: state(stack, "prefill-0") == "closed", "the probe closes prefill's breaker")
