"""A turn with little new runs on decode alone where that is wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from aiohttp import web

from disagg_router.config import LocalPrefill
from router.tests.conftest import MODEL, MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up, refuse

LONG = "word " * 2000
FEW = LocalPrefill(max_tokens=200)


def history(*more: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": LONG}]
    for answer, question in zip(more[::2], more[1::2], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages}


def turns(stack: Stack, where: str) -> float:
    return stack.metric("disagg_router_turns_total", prefill=where)


async def test_little_goes_to_decode_and_much_to_prefill(make_stack: MakeStack) -> None:
    stack = await make_stack(local_prefill=FEW)
    assert (await stack.post(history()))[0] == 200
    assert (await stack.post(history("an answer " * 900, "go on")))[0] == 200
    assert (await stack.post(history("an answer " * 900, "go on", "more", LONG)))[0] == 200
    await until(stack.idle, "all legs are over")
    assert len(stack.decode.seen) == 3
    assert "kv_transfer_params" not in stack.decode.seen[1].body
    assert [len(seen.body["messages"]) for seen in stack.prefill.seen] == [1, 5]
    holder = stack.prefill.seen[1].body["kv_transfer_params"]["disagg"]["decode"]
    assert holder["control_port"] == 5700, "prefill knows where the turn is that it has not seen"
    await until(lambda: turns(stack, "small") == 1, "one turn is counted as small")
    assert turns(stack, "remote") == 2
    assert stack.metric("disagg_router_recomputed_turns_total") == 0


async def test_a_short_first_turn_goes_to_decode(make_stack: MakeStack) -> None:
    stack = await make_stack(local_prefill=FEW)
    assert (await stack.post(stack.chat("hi")))[0] == 200
    assert not stack.prefill.seen


async def test_without_the_setting_all_goes_to_prefill(stack: Stack) -> None:
    assert (await stack.post(stack.chat("hi")))[0] == 200
    assert len(stack.prefill.seen) == 1


async def test_a_conversation_whose_decode_is_gone_is_not_small_elsewhere(make_stack: MakeStack) -> None:
    stack = await make_stack(prefills=1, decodes=2, local_prefill=FEW)
    assert (await stack.post(history()))[0] == 200
    await until(stack.idle, "the first turn is over")
    kept = next(engine for engine in stack.decodes if engine.seen)
    kept.decode = hang_up
    assert (await stack.post(history("an answer", "go on")))[0] == 200
    await until(stack.idle, "the second turn is over")
    assert len(stack.prefill.seen) == 2, "the other decode engine has nothing of it: prefill computes"


@pytest.mark.parametrize("mode", ["Threshold", "Auto"])
async def test_a_conversation_whose_decode_is_leaving_is_not_small_elsewhere(
    make_stack: MakeStack, mode: Literal["Threshold", "Auto"]
) -> None:
    stack = await make_stack(prefills=1, decodes=2, local_prefill=LocalPrefill(mode=mode, max_tokens=200))
    assert (await stack.post(history()))[0] == 200
    await until(stack.idle, "the first turn is over")
    at = next(i for i, engine in enumerate(stack.decodes) if engine.seen)
    stack.publish(*(replace(b, leaving=b.name == f"decode-{at}") for b in stack.backends))
    assert (await stack.post(history("an answer", "go on")))[0] == 200
    await until(stack.idle, "the second turn is over")
    assert [len(stack.decodes[n].seen) for n in (at, 1 - at)] == [1, 1]
    first, second = (seen.body["kv_transfer_params"]["disagg"] for seen in stack.prefill.seen)
    assert ("decode" in first, second["decode"]["control_port"]) == (False, 5700 + at)
    assert (await stack.post(history("an answer", "go on", "gone", "and now?")))[0] == 200
    await until(stack.idle, "the third turn is over")
    assert len(stack.prefill.seen) == 2, "what is new to the engine that it went to is little"


async def test_turns_that_were_sent_to_prefill_are_counted_whatever_became_of_them(
    make_stack: MakeStack,
) -> None:
    stack = await make_stack(prefills=1, decodes=2, local_prefill=FEW)
    assert (await stack.post(history()))[0] == 200
    assert (await stack.post(history("an answer", "go on")))[0] == 200
    assert (await stack.post({**history(), "n": 2}))[0] == 200
    await until(stack.idle, "one turn was sent to prefill, one was small, one decode had to compute")

    def reached() -> int:
        return sum(seen.is_prefill for seen in stack.prefill.seen)

    async def break_off(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await until(lambda: reached() == 2, "prefill has its leg")
        return await hang_up(engine, request, seen)

    next(engine for engine in stack.decodes if engine.seen).decode = break_off
    assert (await stack.post(history("an answer", LONG)))[0] == 200
    stack.prefill.prefill = refuse(500, "Internal server error")
    assert (await stack.post(history("an answer", LONG, "another", LONG)))[0] == 200
    await until(stack.idle, "one was sent twice, and one more that prefill failed")
    sent = sum(
        sample.value
        for metric in stack.router.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "disagg_router_prefill_decisions_total" and sample.labels["placement"] == "prefill"
    )
    assert sent == reached() == 4
