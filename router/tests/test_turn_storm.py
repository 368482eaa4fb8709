"""Everything fails at once, clients leave, and more turns come than may run: nothing is left behind, and all heals."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from aiohttp import web

from disagg_router.config import Overload
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up, hang_up_after, refuse, speak

TURNS = 150


def moody(dice: random.Random) -> Any:
    """An engine of which nobody knows what it will do next."""

    async def late(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(dice.random() * 0.02)
        return await speak(engine, request, seen)

    moods: list[Any] = [
        speak,
        speak,
        late,
        late,
        hang_up,
        hang_up_after(1),
        refuse(500, "no"),
        refuse(400, "no"),
    ]

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await dice.choice(moods)(engine, request, seen)

    return script


async def one(stack: Stack, dice: random.Random, number: int) -> int | None:
    """One client; None if it left, or saw its answer break off."""
    headers = {"X-Session-Id": f"s{dice.randrange(12)}"}
    path, body = dice.choice(
        [
            ("/v1/chat/completions", stack.chat(f"{number}", stream=dice.random() < 0.5)),
            ("/v1/responses", {"input": f"{number}", "stream": dice.random() < 0.5}),
            ("/tokenize", {"prompt": f"{number}"}),
        ]
    )
    patience = dice.random() * 0.05 if dice.random() < 0.2 else 60.0
    try:
        async with asyncio.timeout(patience):
            status, _ = await stack.post(body, path, headers=headers)
            return status
    except Exception:
        return None


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_left_behind_and_all_heals(make_stack: MakeStack, seed: int) -> None:
    dice = random.Random(seed)
    overload = Overload(turns_per_engine=4, waiting_turns=40, waiting_turns_per_session=10)
    stack = await make_stack(prefills=2, decodes=3, overload=overload)
    engines = stack.prefills + stack.decodes
    for engine in engines:
        engine.decode = engine.prefill = moody(dice)
    most = 0
    tasks = []
    for number in range(TURNS):
        tasks.append(asyncio.create_task(one(stack, dice, number)))
        if not number % 50:  # in three gusts, each of more turns than may run
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        stack.ahead += dice.random()
        if dice.random() < 0.05:
            stack.publish(*dice.sample(stack.backends, dice.randint(2, 5)))
        most = max(most, stack.router.gate.waiting)
    stack.publish(*stack.backends)
    statuses = await asyncio.gather(*tasks)
    assert set(statuses) <= {None, 200, 400, 429, 500, 502, 503}
    assert 200 in statuses
    gate = stack.router.gate
    await until(lambda: not gate.running and not gate.waiting, "all turns have left the gate")
    await until(stack.idle, "no leg is left")
    assert most <= 40

    for engine in engines:
        engine.decode = engine.prefill = speak
    stack.ahead += 60.0
    names = [f"after the storm {n}" for n in range(60)]
    assert {(await stack.post(stack.chat(name)))[0] for name in names} == {200}
    await until(stack.idle, "no leg is left")
    closed = [
        stack.metric("disagg_router_breakers", role=b.role, pod=b.name, state="closed")
        for b in stack.backends
    ]
    assert closed == [1.0] * 5
