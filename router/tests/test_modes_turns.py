"""Turns in the modes of vLLM's own connectors, on engines that keep KV as those do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from disagg_router.config import Deadlines
from router.tests.conftest import MODEL, SHORT, MakeStack, Stack, backend, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up, never, refuse, speak
from router.tests.fake_upstream import World

MODES = ["Pull", "Push", "BidirectionalPull"]


def world_of(mode: str) -> World:
    return World("push" if mode == "Push" else "pull", back=mode == "BidirectionalPull")


async def made(make_stack: MakeStack, mode: str, **changes: Any) -> tuple[Stack, World]:
    stack, world = await make_stack(mode=mode, **changes), world_of(mode)
    world.install(stack)
    return stack, world


async def converse(stack: Stack, turns: int, *, stream: bool = False, path: str = "chat") -> None:
    """Turns of one conversation, each of them answered well."""
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        body: dict[str, Any] = {"model": MODEL, "stream": stream}
        if path == "chat":
            status, answer = await stack.post({**body, "messages": messages})
        else:
            status, answer = await stack.post(
                {**body, "prompt": "".join(m["content"] for m in messages)}, "/v1/completions"
            )
        assert status == 200, answer
        messages.append({"role": "assistant", "content": " ".join(stack.decode.words)})


async def recomputed(stack: Stack, reason: str) -> None:
    """One turn was, for this reason."""
    name = "disagg_router_recomputed_turns_total"
    await until(lambda: stack.metric(name, reason=reason) == 1, f"a turn is counted as recomputed: {reason}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_turn_of_a_conversation_gets_its_own_kv(
    make_stack: MakeStack, mode: str, stream: bool
) -> None:
    stack, world = await made(make_stack, mode)
    await converse(stack, 4, stream=stream)
    assert (world.read, world.wrong, world.dead) == (4, [], [])
    await until(
        lambda: stack.metric("disagg_router_turns_total", prefill="remote") == 4, "four turns are counted"
    )
    await until(stack.idle, "no leg is left")
    for prefill, decode in zip(stack.prefill.seen, stack.decode.seen, strict=True):
        assert prefill.request_id == decode.request_id
        assert prefill.body["max_tokens"] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (refuse(400, "no such option"), "prefill_refused"),
        (refuse(500, "Internal server error"), "prefill_error"),
        (hang_up, "prefill_broke"),
        (never, "prefill_deadline"),
    ],
)
async def test_if_prefills_leg_fails_decode_computes_at_once(
    make_stack: MakeStack, mode: str, script: Any, reason: str
) -> None:
    stack, world = await made(make_stack, mode, deadlines=SHORT)
    stack.prefill.prefill = script
    await converse(stack, 1)
    await recomputed(stack, reason)
    assert [seen for seen in stack.decode.seen if "kv_transfer_params" in seen.body] == []
    await until(stack.idle, "no leg is left")
    assert (world.wrong, world.dead) == ([], [])


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_without_kv_is_never_passed_on(make_stack: MakeStack, mode: str) -> None:
    stack, world = await made(make_stack, mode)

    async def of_another_connector(engine: FakeEngine, request: web.Request, seen: Seen) -> Any:
        return web.json_response({"choices": [], "kv_transfer_params": {"do_remote_prefill": True}})

    stack.prefill.prefill = of_another_connector
    await converse(stack, 1)
    await recomputed(stack, "prefill_answer")
    assert world.dead == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_decode_refuses_is_refused_in_its_words(
    make_stack: MakeStack, mode: str, stream: bool
) -> None:
    stack, _ = await made(make_stack, mode)
    stack.decode.decode = refuse(422, "temperature must be non-negative")
    for _ in range(2):  # the second on the same connection
        status, answer = await stack.post(stack.chat(stream=stream))
        assert (status, answer["error"]["message"]) == (422, "temperature must be non-negative")
    await until(stack.idle, "no leg is left")


@pytest.mark.parametrize("mode", MODES)
async def test_several_prompts_in_one_request_are_computed_by_decode(
    make_stack: MakeStack, mode: str
) -> None:
    stack, _ = await made(make_stack, mode)
    for decode in stack.decodes:
        decode.decode = FakeEngine().decode
    await stack.post({"model": MODEL, "prompt": ["a", "b"]}, "/v1/completions")
    await recomputed(stack, "batched_prompts")
    assert stack.prefill.seen == []


@pytest.mark.parametrize("mode", MODES)
async def test_an_engines_own_mode_counts_before_the_configured_one(make_stack: MakeStack, mode: str) -> None:
    stack, world = await make_stack(), world_of(mode)
    world.install(stack)
    stack.publish(
        backend("prefill", 0, stack.prefill.port, mode=mode),
        backend("decode", 0, stack.decode.port, mode=mode),
    )
    await converse(stack, 2)
    assert (world.read, world.wrong, world.dead) == (2, [], [])


async def test_engines_of_an_unknown_mode_compute(make_stack: MakeStack) -> None:
    stack, _ = await made(make_stack, "Pull")
    stack.publish(
        *(
            backend(role, 0, e.port, mode="Beam")
            for role, e in (("prefill", stack.prefill), ("decode", stack.decode))
        )
    )
    await converse(stack, 1)
    await recomputed(stack, "unknown_mode")


# -- Push ----------------------------------------------------------------------------------------------------


async def test_once_prefill_is_known_both_legs_go_out_at_once(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "Push")
    await converse(stack, 1)
    answer = stack.prefill.prefill

    async def after_decode_has_registered(engine: FakeEngine, request: web.Request, seen: Seen) -> Any:
        await until(lambda: world.waiting == 1, "decode has registered")
        return await answer(engine, request, seen)

    stack.prefill.prefill = after_decode_has_registered
    await converse(stack, 3)
    assert (world.read, world.wrong, world.dead, world.waiting) == (4, [], [], 0)


async def test_a_prefill_that_has_started_anew_is_noticed_by_its_answer(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "Push")
    await converse(stack, 1)
    world.boot = 2
    await converse(stack, 1)
    await recomputed(stack, "prefill_answer")
    await converse(stack, 1)
    assert (world.read, world.dead) == (2, [])


async def test_a_prefill_that_was_away_is_asked_anew(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "Push")
    await converse(stack, 1)
    prefill, decode = stack.backends
    world.boot = 2
    stack.publish(backend("prefill", 0, stack.prefill.port, ready=False), decode)
    stack.publish(prefill, decode)
    await converse(stack, 2)
    assert (world.read, world.waiting, stack.metric("disagg_router_turns_total", prefill="local")) == (
        3,
        0,
        0,
    )


async def test_a_client_that_leaves_leaves_no_block_of_decode_behind(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "Push")
    await converse(stack, 1)
    answer, go = stack.prefill.prefill, asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, seen: Seen) -> Any:
        await go.wait()
        return await answer(engine, request, seen)

    stack.prefill.prefill = slow
    client = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: world.waiting == 1 and stack.prefill.active == 1, "both legs are under way")
    client.cancel()
    await until(lambda: stack.decode.active == 0, "decode's leg is closed")
    assert stack.prefill.active == 1
    go.set()
    await until(lambda: world.waiting == 0, "prefill has written, and decode has its blocks back")
    await until(stack.idle, "no leg is left")


async def test_decode_computes_when_prefill_takes_too_long_and_prefill_finishes(
    make_stack: MakeStack,
) -> None:
    deadlines = Deadlines(connect_seconds=60, first_byte_seconds=3, idle_seconds=60, answer_seconds=60)
    stack, world = await made(make_stack, "Push", deadlines=deadlines)
    await converse(stack, 1)
    answer, go = stack.prefill.prefill, asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, seen: Seen) -> Any:
        await go.wait()
        return await answer(engine, request, seen)

    stack.prefill.prefill = slow
    await converse(stack, 1)
    await recomputed(stack, "prefill_deadline")
    assert world.waiting == 1
    go.set()
    await until(lambda: world.waiting == 0, "prefill has written, and decode has its blocks back")
    await until(stack.idle, "no leg is left")


async def test_a_router_that_stops_does_not_wait_for_such_a_prefill(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "Push")
    await converse(stack, 1)
    stack.prefill.prefill = never
    client = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: world.waiting == 1 and stack.prefill.active == 1, "both legs are under way")
    client.cancel()
    await until(lambda: stack.decode.active == 0, "decode's leg is closed")
    await stack.router.stop()
    await until(lambda: stack.prefill.active == 0, "prefill's leg is closed")


# -- BidirectionalPull ---------------------------------------------------------------------------------------


def handles(stack: Stack, result: str) -> float:
    return stack.metric("disagg_router_handles_total", result=result)


async def test_prefill_reads_what_decode_made_in_the_turn_before(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    await converse(stack, 4)
    assert (world.read_back, handles(stack, "used"), handles(stack, "kept")) == (3, 3, 4)
    assert (world.wrong, world.dead) == ([], [])


async def test_prompts_of_tokens_are_compared_without_asking(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    stack.prefill.render = refuse(403, "disabled")
    prompt = [5, 6, 7]
    headers = {"X-Session-Id": "one"}
    for turn in range(3):
        body = {"model": MODEL, "prompt": prompt, "return_token_ids": True}
        status, answer = await stack.post(body, "/v1/completions", headers=headers)
        assert status == 200
        prompt = [*prompt, *answer["choices"][0]["token_ids"], 8 + turn]
    assert (world.read_back, world.wrong, handles(stack, "unread")) == (2, [], 0)


@pytest.mark.parametrize("asked", [True, False])
async def test_the_client_gets_what_it_asked_for_and_no_block_ids(make_stack: MakeStack, asked: bool) -> None:
    stack, _ = await made(make_stack, "BidirectionalPull")
    status, answer = await stack.post(stack.chat(**({"return_token_ids": True} if asked else {})))
    assert status == 200
    assert answer["kv_transfer_params"] is None
    assert (
        (answer["prompt_token_ids"] is not None) == (answer["choices"][0]["token_ids"] is not None) == asked
    )
    assert answer["choices"][0]["message"]["content"] == "one two three"


async def test_a_client_that_drops_reasoning_never_gets_other_kv(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    world.thinks = "hmm, "
    await converse(stack, 3)
    assert (world.read_back, world.wrong, handles(stack, "other_prompt")) == (0, [], 2)


async def test_engines_that_do_not_tell_tokens_make_prefill_compute(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    stack.prefill.render = refuse(403, "Scale-out endpoints are disabled.")
    await converse(stack, 2)
    assert (world.read_back, world.read, handles(stack, "unread")) == (0, 2, 1)


async def test_a_handle_is_used_once_also_by_turns_at_the_same_time(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    await converse(stack, 1)
    said = [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": " ".join(stack.decode.words)},
        {"role": "user", "content": "and?"},
    ]
    answers = await asyncio.gather(*(stack.post({"model": MODEL, "messages": said}) for _ in range(8)))
    assert {status for status, _ in answers} == {200}
    assert (world.read_back, world.wrong) == (1, [])


async def test_kv_of_an_engine_that_is_gone_is_not_asked_for(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull", decodes=2)
    await converse(stack, 1)
    used = next(i for i, engine in enumerate(stack.decodes) if engine.seen)
    stack.publish(*(b for b in stack.backends if b.name != f"decode-{used}"))
    status, _ = await stack.post(
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "question 0"},
                {"role": "assistant", "content": "one two three"},
                {"role": "user", "content": "and?"},
            ],
        }
    )
    assert status == 200
    assert (world.read_back, world.wrong, handles(stack, "gone")) == (0, [], 1)


async def test_kv_of_an_engine_that_is_leaving_is_read_and_once(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull", decodes=2)
    await converse(stack, 1)
    used = next(i for i, engine in enumerate(stack.decodes) if engine.seen)
    assert stack.metric("disagg_router_retained_kv_blocks") == world.blocks
    stack.publish(*(replace(b, leaving=b.name == f"decode-{used}") for b in stack.backends))
    said = [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "and?"},
    ]
    for turns in (1, 2):
        status, _ = await stack.post({"model": MODEL, "messages": said})
        assert status == 200
        assert (len(stack.decodes[used].seen), len(stack.decodes[1 - used].seen)) == (1, turns)
    assert (world.read_back, world.wrong, handles(stack, "used"), handles(stack, "gone")) == (1, [], 1, 0)
    assert stack.metric("disagg_router_retained_kv_blocks") == world.blocks, "of the last turn's handle alone"


@pytest.mark.parametrize("mode", ["Pull", "Push", "BidirectionalPush"])
async def test_in_other_modes_no_kv_is_retained(make_stack: MakeStack, mode: str) -> None:
    stack = await make_stack(mode=mode)
    assert b"disagg_router_retained_kv_blocks" not in stack.router.metrics.render()


async def test_streamed_turns_hand_nothing_back(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    await converse(stack, 3, stream=True)
    assert (world.read_back, world.read, handles(stack, "kept")) == (0, 3, 0)
    assert [seen for seen in stack.decode.seen if "return_token_ids" in seen.body] == []


async def test_a_handle_that_prefill_cannot_use_makes_decode_compute(make_stack: MakeStack) -> None:
    stack, world = await made(make_stack, "BidirectionalPull")
    await converse(stack, 1)
    well = stack.prefill.prefill

    async def read_fails(engine: FakeEngine, request: web.Request, seen: Seen) -> Any:
        failing = seen.body["kv_transfer_params"].get("remote_block_ids")
        return await (refuse(500, "Internal server error") if failing else well)(engine, request, seen)

    stack.prefill.prefill = read_fails
    await converse(stack, 2)
    await recomputed(stack, "prefill_error")
    assert world.wrong == []


async def test_an_answer_that_breaks_off_is_an_honest_error(make_stack: MakeStack) -> None:
    stack, _ = await made(make_stack, "BidirectionalPull")

    async def cut(engine: FakeEngine, request: web.Request, seen: Seen) -> Any:
        response = web.StreamResponse(headers={"content-length": "1000", "content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.close()
        return response

    stack.decode.decode = cut
    status, answer = await stack.post(stack.chat())
    assert status == 502
    assert "broke off" in answer["error"]["message"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [True, False])
async def test_responses_are_computed_by_decode(make_stack: MakeStack, mode: str, stream: bool) -> None:
    stack, world = await made(make_stack, mode)
    stack.decode.decode = speak
    body = {"model": MODEL, "input": "hi", "stream": stream}
    status, answer = await stack.post(body, "/v1/responses")
    assert status == 200
    assert "one two three" in str(answer)
    await recomputed(stack, "responses")
    assert not stack.prefill.seen
    assert world.read == 0


@pytest.mark.parametrize("mode", MODES)
async def test_what_decode_refuses_has_an_end_on_a_connection_that_stays(
    make_stack: MakeStack, mode: str
) -> None:
    stack, _ = await made(make_stack, mode)
    stack.decode.decode = refuse(400, "too long")
    for _ in range(2):
        status, answer = await stack.post(stack.chat())
        assert (status, answer["error"]["message"]) == (400, "too long")
