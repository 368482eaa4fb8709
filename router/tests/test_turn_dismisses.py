"""Prefill hears of turns that decode's engine never will: its blocks are not kept for nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from router.tests.conftest import LONG, MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up, never, refuse


def dismissed(engine: FakeEngine) -> list[str]:
    """The turns that this engine was told to forget."""
    found = [seen.body.get("kv_transfer_params", {}).get("disagg", {}).get("dismiss") for seen in engine.seen]
    return [turn for turn in found if turn]


def turns(engine: FakeEngine) -> list[str]:
    return [seen.request_id for seen in engine.seen if seen.is_prefill]


def once_prefill_is_done(stack: Stack, script: Any) -> None:
    """Decode answers only when prefill has: the case in which closing prefill's leg is too late."""

    async def late(engine: FakeEngine, request: Any, seen: Seen) -> Any:
        await until(lambda: bool(turns(stack.prefill)) and not stack.prefill.active, "prefill has answered")
        return await script(engine, request, seen)

    stack.decode.decode = late


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_that_decode_refuses_is_dismissed(stack: Stack, stream: bool) -> None:
    once_prefill_is_done(stack, refuse(400, "this model's maximum context length is 512 tokens"))
    status, answer = await stack.post(stack.chat(stream=stream))
    assert (status, "maximum context length" in str(answer)) == (400, True)
    await until(lambda: dismissed(stack.prefill) == turns(stack.prefill), "prefill is told to forget it")
    assert len(turns(stack.prefill)) == 1
    await until(stack.idle, "no leg is left")


@pytest.mark.parametrize("script", [hang_up, refuse(503, "not now"), never])
async def test_every_attempt_that_fails_on_decode_is_dismissed(make_stack: MakeStack, script: Any) -> None:
    # No script answers, so nothing has to come in this time.
    stack = await make_stack(deadlines=msgspec.structs.replace(LONG, answer_seconds=0.5))
    once_prefill_is_done(stack, script)
    await stack.post(stack.chat())
    await until(lambda: dismissed(stack.prefill) == turns(stack.prefill), "prefill is told to forget them")


async def test_a_client_that_leaves_before_the_answer_is_dismissed(stack: Stack) -> None:
    once_prefill_is_done(stack, never)
    client = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: bool(stack.decode.active) and bool(turns(stack.prefill)), "the turn is under way")
    client.cancel()
    await until(lambda: dismissed(stack.prefill) == turns(stack.prefill), "prefill is told to forget it")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_that_decode_answers_is_not(stack: Stack, stream: bool) -> None:
    status, _ = await stack.post(stack.chat(stream=stream))
    assert status == 200
    await until(stack.idle, "no leg is left")
    assert dismissed(stack.prefill) == []


async def test_a_turn_that_prefill_refused_is_not(stack: Stack) -> None:
    stack.prefill.prefill = refuse(400, "no such option")
    await stack.post(stack.chat())
    await until(stack.idle, "no leg is left")
    assert dismissed(stack.prefill) == []
