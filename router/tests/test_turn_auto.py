"""Turns are placed by what the router has measured of others, and tell where and why if they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from disagg_router.config import LocalPrefill
from disagg_router.cost import MEASURE_INTERVAL
from disagg_router.learned import ENOUGH
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up, never, refuse, speak, sse, start_stream

AUTO = LocalPrefill(max_tokens=200, mode="Auto")
LONG = "word " * 10_000  # more than decode may compute at a time, at the pace below
HEADER = "X-Disagg-Decision"


@dataclass
class Times:
    """What engines take, in seconds of the router's clock."""

    prefill: float = 1.5
    hand_over: float = 0.1
    decode: float = 0.05


def timed(stack: Stack, times: Times) -> None:
    """Let engines take their time, and decode wait for prefill where that computes."""

    async def prefill(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        stack.ahead += times.prefill
        return await speak(engine, request, seen)

    async def decode(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        if "kv_transfer_params" in seen.body:
            await until(lambda: "prefill-0" not in stack.router.loads.inflight, "prefill's leg is over")
            stack.ahead += times.hand_over
        else:
            stack.ahead += times.decode
        return await speak(engine, request, seen)

    stack.prefill.prefill, stack.decode.decode = prefill, decode


async def ask(stack: Stack, text: str, stream: bool = True) -> dict[str, str]:
    """A conversation's only turn; the fields of its decision."""
    return await decided(stack, stack.chat(text, stream=stream))


async def ask_next(stack: Stack, first: str, *later: str) -> dict[str, str]:
    """The next turn of a conversation."""
    body = stack.chat(first, stream=True)
    for text in later:
        body["messages"] += [{"role": "assistant", "content": "well"}, {"role": "user", "content": text}]
    return await decided(stack, body)


async def decided(stack: Stack, body: dict[str, Any]) -> dict[str, str]:
    async with stack.client.post(
        stack.url + "/v1/chat/completions", json=body, headers={HEADER: "1"}
    ) as response:
        assert response.status == 200
        await response.read()
        told = response.headers[HEADER]
    await until(stack.idle, "the turn is over")
    return dict(part.split("=") for part in told.split("; "))


async def learned(make_stack: MakeStack, times: Times) -> Stack:
    """A router that has seen enough long prompts."""
    stack = await make_stack(local_prefill=AUTO)
    timed(stack, times)
    for n in range(ENOUGH):
        told = await ask(stack, f"{n} {LONG}")
        assert (told["placement"], told["reason"]) == ("prefill", "learning")
    assert stack.router.placer.costs().measured
    return stack


async def test_the_threshold_decides_until_enough_is_measured(make_stack: MakeStack) -> None:
    stack = await make_stack(local_prefill=AUTO)
    assert (await ask(stack, "hi"))["placement"] == "decode"
    assert (await ask(stack, LONG))["placement"] == "prefill"
    assert len(stack.prefill.seen) == 1


async def test_then_the_way_that_is_sooner_is_taken(make_stack: MakeStack) -> None:
    times = Times()
    stack = await learned(make_stack, times)
    told = await ask(stack, "hi")
    assert (told["placement"], told["reason"]) == ("decode", "cheaper")
    assert int(told["decode_ms"]) < int(told["prefill_ms"])
    assert 0 < int(told["new_tokens"]) < 100
    assert len(stack.prefill.seen) == ENOUGH
    times.decode = 3.0
    for n in range(MEASURE_INTERVAL):
        if (told := await ask(stack, f"hi {n}"))["placement"] == "prefill":
            break
    assert told["reason"] == "cheaper", "decode has become slow, and that was learned"
    count = stack.metric("disagg_router_prefill_decisions_total", placement="prefill", reason="cheaper")
    assert count == 1


async def test_a_conversation_that_decode_has_dropped_is_not_small_there_for_a_while(
    make_stack: MakeStack,
) -> None:
    times = Times()
    stack = await learned(make_stack, times)
    for n in range(ENOUGH):
        stack.ahead += 10
        assert (await ask(stack, f"hi {n}"))["placement"] == "decode"
    for name in ("one", "two"):
        assert (await ask_next(stack, name + LONG))["placement"] == "prefill"
    stack.ahead += 20
    times.decode = 1.6  # as long as for all of it
    told = await ask_next(stack, "one" + LONG, "go on")
    assert (told["placement"], int(told["new_tokens"]) < 100) == ("decode", True)
    assert stack.metric("disagg_router_dropped_conversations_total") == 1
    times.decode = 0.05
    told = await ask_next(stack, "two" + LONG, "go on")
    assert (told["placement"], int(told["new_tokens"]) > 10_000) == ("prefill", True)
    told = await ask_next(stack, "one" + LONG, "go on", "and on")
    assert (told["placement"], int(told["new_tokens"]) < 100) == ("decode", True), "it was there just now"


async def test_what_is_learned_can_be_scraped(make_stack: MakeStack) -> None:
    stack = await learned(make_stack, Times(prefill=4.0))
    assert stack.metric("disagg_router_cost_measurements_total", step="prefill") == ENOUGH
    assert stack.metric("disagg_router_cost_measurements_total", step="hand_over") == ENOUGH
    assert stack.metric("disagg_router_cost_measurements_total", step="decode") == 0
    costs = stack.router.placer.costs()
    assert stack.metric("disagg_router_cost_fixed_seconds", step="prefill") == costs.prefill.fixed
    assert stack.metric("disagg_router_cost_seconds_per_token", step="decode") == costs.decode.per_token
    assert b"disagg_router_stream_gap_seconds" in stack.router.metrics.render()


async def test_without_auto_there_is_nothing_to_scrape(stack: Stack) -> None:
    assert b"disagg_router_cost" not in stack.router.metrics.render()


async def test_an_answer_that_comes_as_a_whole_says_nothing_of_its_first_token(
    make_stack: MakeStack,
) -> None:
    stack = await learned(make_stack, Times())
    assert (await ask(stack, "hi", stream=False))["placement"] == "decode"
    assert (await ask(stack, LONG, stream=False))["placement"] == "prefill"
    assert stack.router.placer.counts == {"prefill": ENOUGH + 1, "hand_over": ENOUGH, "decode": 0}


async def client_leaves(stack: Stack, text: str) -> None:
    stack.decode.decode = never
    before = len(stack.decode.seen)
    turn = asyncio.create_task(stack.post(stack.chat(text, stream=True)))
    await until(lambda: len(stack.decode.seen) > before, "decode has the turn")
    stack.ahead += 50.0
    turn.cancel()


async def decode_fails(stack: Stack, text: str) -> None:
    stack.decode.decode = refuse(500, "Internal server error")
    stack.ahead += 1.0
    await stack.post(stack.chat(text, stream=True))


async def decode_refuses(stack: Stack, text: str) -> None:
    async def late(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        stack.ahead += 50.0
        return await refuse(400, "no")(engine, request, seen)

    stack.decode.decode = late
    await stack.post(stack.chat(text, stream=True))


async def prefill_fails(stack: Stack, text: str) -> None:
    """And decode computes what was meant for prefill."""

    async def late(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        stack.ahead += 50.0
        return await speak(engine, request, seen)

    async def joined(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (never if "kv_transfer_params" in seen.body else late)(engine, request, seen)

    stack.prefill.prefill, stack.decode.decode = hang_up, joined
    assert (await stack.post(stack.chat(text, stream=True)))[0] == 200


async def cannot_be_split(stack: Stack, text: str) -> None:
    stack.ahead += 50.0
    assert (await stack.post(stack.chat(text, stream=True, n=2)))[0] == 200


@pytest.mark.parametrize(
    ("happens", "text"),
    [
        *(
            (happens, text)
            for happens in (client_leaves, decode_fails, decode_refuses)
            for text in ("hi", LONG)
        ),
        (prefill_fails, LONG),
        (cannot_be_split, LONG),
    ],
)
async def test_turns_that_do_not_go_as_planned_teach_nothing_of_what_they_took(
    make_stack: MakeStack, happens: Callable[[Stack, str], Any], text: str
) -> None:
    stack = await learned(make_stack, Times())
    before = stack.router.placer.costs(), stack.router.placer.counts
    await happens(stack, text)
    await until(stack.idle, "nothing is left of the turn")
    assert (stack.router.placer.costs(), stack.router.placer.counts) == before
    for pod in ("prefill-0", "decode-0"):
        assert stack.router.loads.backlog.ahead(pod, 1e-4) == 0


async def test_what_an_engine_has_yet_to_compute_counts_until_it_has(make_stack: MakeStack) -> None:
    stack = await learned(make_stack, Times())
    backlog, release = stack.router.loads.backlog, asyncio.Event()

    async def prefill(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await release.wait()
        return await speak(engine, request, seen)

    async def decode(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await release.wait()
        response = await start_stream(request)
        await response.write(sse("one"))
        await over.wait()
        await response.write_eof()
        return response

    over = asyncio.Event()
    stack.prefill.prefill, stack.decode.decode = prefill, decode
    turns = [asyncio.create_task(stack.post(stack.chat(text, stream=True))) for text in (LONG, "hi")]
    await until(lambda: stack.prefill.active == 1 and stack.decode.active == 2, "engines have both")
    assert backlog.ahead("prefill-0", 1e-4) > 10_000
    assert 0 < backlog.ahead("decode-0", 1e-4) < 100
    release.set()
    await until(lambda: backlog.ahead("decode-0", 1e-4) == 0, "decode has begun to answer")
    await until(lambda: backlog.ahead("prefill-0", 1e-4) == 0, "prefill is done")
    assert not any(turn.done() for turn in turns)
    over.set()
    assert [status for status, _ in await asyncio.gather(*turns)] == [200, 200]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (None, "placement=prefill; reason=disabled"),
        (LocalPrefill(max_tokens=200), "placement=decode; reason=small; new_tokens=13"),
        (LocalPrefill(max_tokens=10), "placement=prefill; reason=large; new_tokens=13"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_is_told_in_every_mode(
    make_stack: MakeStack, settings: LocalPrefill | None, told: str, stream: bool
) -> None:
    stack = await make_stack(local_prefill=settings)
    body = {"messages": [{"role": "user", "content": "h"}], "stream": stream}  # 38 bytes or 39
    url = stack.url + "/v1/chat/completions"
    async with stack.client.post(url, json=body, headers={HEADER: "yes"}) as response:
        assert response.headers[HEADER] == told
        await response.read()
    async with stack.client.post(url, json=body) as response:
        assert HEADER not in response.headers
        await response.read()
    seen = stack.decode.seen + stack.prefill.seen
    assert seen
    assert not any(HEADER.lower() in leg.headers for leg in seen), "engines hear nothing of it"


async def test_why_decode_has_to_compute_a_prompt_is_told_too(stack: Stack) -> None:
    async def decode(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (never if "kv_transfer_params" in seen.body else speak)(engine, request, seen)

    stack.prefill.prefill, stack.decode.decode = refuse(500, "Internal server error"), decode
    assert await ask(stack, "hi") == {"placement": "decode", "reason": "prefill_error"}
    stack.publish(*(b for b in stack.backends if b.role == "decode"))
    assert await ask(stack, "hi") == {"placement": "decode", "reason": "no_prefill"}


async def test_an_error_of_decode_is_told_with_the_decision(stack: Stack) -> None:
    stack.decode.decode = refuse(400, "no")
    url = stack.url + "/v1/chat/completions"
    async with stack.client.post(url, json=stack.chat(), headers={HEADER: ""}) as response:
        assert response.status == 400
        assert response.headers[HEADER] == "placement=prefill; reason=disabled"


async def test_an_engines_own_word_of_a_decision_is_not_passed_on(stack: Stack) -> None:
    async def decode(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await speak(engine, request, seen)
        response.headers[HEADER] = "placement=moon"
        return response

    stack.decode.decode = decode
    url = stack.url + "/v1/chat/completions"
    async with stack.client.post(url, json=stack.chat()) as response:
        assert HEADER not in response.headers
    async with stack.client.post(url, json=stack.chat(), headers={HEADER: "1"}) as response:
        assert response.headers.getall(HEADER) == ["placement=prefill; reason=disabled"]
