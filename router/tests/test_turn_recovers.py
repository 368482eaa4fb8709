"""Turns in which an engine fails: the client gets a right answer or an honest error, and both engines are freed."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from router.tests.conftest import LONG, MODEL, SHORT, MakeStack, Stack, backend, until
from router.tests.fake_engine import (
    FakeEngine,
    Seen,
    hang_up,
    hang_up_after,
    never,
    refuse,
    sse,
    start_stream,
)


async def whole(stack: Stack, **fields: Any) -> str:
    """The text of a turn that has to succeed."""
    status, answer = await stack.post(stack.chat(**fields))
    assert status == 200, answer
    if isinstance(answer, str):
        assert answer.endswith("data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in answer.split("\n\n")[:-2]]
        return " ".join(event["choices"][0]["delta"]["content"] for event in events)
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


async def recomputed(stack: Stack, reason: str, count: int = 1) -> None:
    name = "disagg_router_recomputed_turns_total"
    await until(lambda: stack.metric(name, reason=reason) == count, f"{count} turns are recomputed: {reason}")
    await until(stack.idle, "no leg is left")


def waits_for_kv(engine: FakeEngine) -> None:
    """Decode as a real one: with transfer params it waits for KV that never comes; without, it computes."""
    speak = engine.decode

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (never if "kv_transfer_params" in seen.body else speak)(engine, request, seen)

    engine.decode = script


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (refuse(400, "min_tokens must be less than or equal to max_tokens"), "prefill_refused"),
        (refuse(500, "Internal server error"), "prefill_error"),
        (hang_up, "prefill_broke"),
    ],
)
async def test_a_failed_prefill_leg_makes_decode_compute(
    stack: Stack, script: Any, reason: str, stream: bool
) -> None:
    waits_for_kv(stack.decode)

    async def fail(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await until(lambda: stack.decode.active == 1, "decode has its leg")
        failed: web.StreamResponse = await script(engine, request, seen)
        return failed

    stack.prefill.prefill = fail
    assert await whole(stack, stream=stream) == "one two three"
    first, second = stack.decode.seen
    assert "kv_transfer_params" in first.body
    assert "kv_transfer_params" not in second.body
    assert first.request_id != second.request_id
    await recomputed(stack, reason)
    assert stack.decode.abandoned == 1


async def test_prefill_that_is_gone_costs_one_try_and_is_then_left_alone(stack: Stack) -> None:
    waits_for_kv(stack.decode)
    await stack.prefill.stop()
    assert await whole(stack) == "one two three"
    await recomputed(stack, "prefill_unreachable")
    assert await whole(stack) == "one two three"
    await recomputed(stack, "no_prefill")
    assert stack.metric("disagg_router_retries_total", reason="prefill_unreachable") == 1


async def test_prefill_that_does_not_finish_in_time_is_given_up(make_stack: MakeStack) -> None:
    stack = await make_stack(deadlines=SHORT)
    waits_for_kv(stack.decode)
    stack.prefill.prefill = never
    assert await whole(stack, stream=True) == "one two three"
    await recomputed(stack, "prefill_deadline")
    assert stack.prefill.abandoned == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_kv_that_never_arrives_is_recomputed_after_the_deadline(
    make_stack: MakeStack, stream: bool
) -> None:
    stack = await make_stack(deadlines=SHORT)
    waits_for_kv(stack.decode)
    assert await whole(stack, stream=stream) == "one two three"
    await recomputed(stack, "decode_deadline")
    assert stack.decode.abandoned == 1


async def test_a_head_without_a_token_is_not_an_answer(make_stack: MakeStack) -> None:
    """vLLM sends the head of a stream at once, long before the KV is there."""

    async def head_only(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await start_stream(request)
        return await never(engine, request, seen)

    stack = await make_stack(decodes=2, deadlines=SHORT)
    for engine in stack.decodes:
        speak = engine.decode

        async def script(
            engine: FakeEngine, request: web.Request, seen: Seen, speak: Any = speak
        ) -> web.StreamResponse:
            return await (head_only if "kv_transfer_params" in seen.body else speak)(engine, request, seen)

        engine.decode = script
    assert await whole(stack, stream=True) == "one two three"
    await recomputed(stack, "decode_deadline")
    assert sorted(len(e.seen) for e in stack.decodes) == [1, 1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [refuse(500, "Internal server error"), refuse(503, "not now"), hang_up])
async def test_a_failing_decode_engine_is_replaced_by_another(
    make_stack: MakeStack, script: Any, stream: bool
) -> None:
    stack = await make_stack(decodes=2)
    healthy = [e.decode for e in stack.decodes]
    failed: list[FakeEngine] = []

    async def fail_once(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        if not failed:
            failed.append(engine)
            return await script(engine, request, seen)
        assert engine is not failed[0]
        return await healthy[0](engine, request, seen)

    for engine in stack.decodes:
        engine.decode = fail_once
    assert await whole(stack, stream=stream) == "one two three"
    # The prompt is in prefill's cache by now: the other engine gets it from there.
    legs = [seen for engine in stack.decodes for seen in engine.seen]
    assert all("kv_transfer_params" in seen.body for seen in legs)
    assert len({seen.request_id for seen in legs}) == 2
    await until(stack.idle, "no leg is left")
    assert stack.metric("disagg_router_turns_total", prefill="remote") == 1


async def test_a_decode_engine_that_is_gone_is_replaced_and_then_left_alone(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    await stack.decodes[0].stop()
    for n in range(30):  # half of them have their home on the engine that is gone
        status, _ = await stack.post(stack.chat(f"conversation {n}"))
        assert status == 200
    assert len(stack.decodes[1].seen) == 30
    assert stack.metric("disagg_router_retries_total", reason="decode_unreachable") == 1


async def test_a_stream_that_begins_with_an_engine_error_is_not_begun_for_the_client(
    make_stack: MakeStack,
) -> None:
    async def broken_engine(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        error = {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    stack = await make_stack()
    speak = stack.decode.decode

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (broken_engine if "kv_transfer_params" in seen.body else speak)(engine, request, seen)

    stack.decode.decode = script
    assert await whole(stack, stream=True) == "one two three"
    await recomputed(stack, "decode_error")


async def test_no_reachable_decode_engine_is_a_503_that_says_so(stack: Stack) -> None:
    await stack.decode.stop()
    async with stack.client.post(stack.url + "/v1/chat/completions", json=stack.chat()) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        error = (await response.json())["error"]
    assert error["code"] == "no_engine_ready"
    assert "decode-0" in error["message"]
    await until(stack.idle, "no leg is left")


async def test_a_prefill_failure_that_nobody_waited_for_is_counted_too(stack: Stack) -> None:
    refused = asyncio.Event()

    async def late(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await refused.wait()
        return await refuse(400, "too late to matter")(engine, request, seen)

    async def slow(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        refused.set()
        name = "disagg_router_prefill_failures_total"
        await until(lambda: stack.metric(name, reason="prefill_refused") == 1, "the failure is counted")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    stack.prefill.prefill = late
    stack.decode.decode = slow
    assert await whole(stack, stream=True) == "one"
    await until(stack.idle, "no leg is left")
    assert stack.metric("disagg_router_turns_total", prefill="remote") == 1


async def test_engines_that_all_fail_end_in_decodes_own_error(stack: Stack) -> None:
    stack.decode.decode = refuse(500, "EngineCore encountered an issue", "InternalServerError")
    status, answer = await stack.post(stack.chat(stream=True))
    assert status == 500
    assert answer["error"]["message"] == "EngineCore encountered an issue"
    assert len(stack.decode.seen) == 2
    await until(stack.idle, "no leg is left")


async def test_a_sick_pool_is_not_hit_twice_as_hard(make_stack: MakeStack) -> None:
    stack = await make_stack(decodes=2)
    for engine in stack.decodes:
        engine.decode = refuse(500, "Internal server error")
    for n in range(60):
        status, _ = await stack.post(stack.chat(f"conversation {n}"))
        assert status == 500
    # Twenty in reserve, and one for every five turns.
    assert 20 <= stack.metric("disagg_router_retries_total", reason="decode_error") <= 32


async def test_decode_that_is_slow_by_itself_is_a_504(make_stack: MakeStack) -> None:
    # Nothing has to come in this time.
    stack = await make_stack(deadlines=msgspec.structs.replace(LONG, answer_seconds=0.5))
    stack.decode.decode = never
    status, answer = await stack.post(stack.chat())
    assert status == 504
    assert answer["error"]["type"] == "timeout_error"
    await until(stack.idle, "no leg is left")
    assert stack.decode.abandoned == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_what_decode_refuses_is_passed_on_as_it_is(stack: Stack, stream: bool) -> None:
    """Oversized requests: decode's own status and body, no stream, prefill freed, nobody blamed."""
    message = "'max_tokens' or 'max_completion_tokens' is too large: 4000."

    async def late(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await until(lambda: stack.prefill.active == 1, "prefill has its leg")
        return await refuse(400, message)(engine, request, seen)

    stack.decode.decode = late
    stack.prefill.prefill = never
    for _ in range(20):
        async with stack.client.post(
            stack.url + "/v1/chat/completions", json=stack.chat(max_tokens=4000, stream=stream)
        ) as response:
            assert response.status == 400
            assert response.content_type == "application/json"
            assert (await response.json())["error"]["message"] == message
    await until(stack.idle, "no leg is left")
    assert len(stack.decode.seen) == 20
    assert stack.prefill.abandoned == 20
    assert stack.metric("disagg_router_retries_total", reason="decode_error") == 0
    assert stack.metric("disagg_router_turns_total", prefill="remote") == 0


async def test_a_refusal_by_both_engines_is_decodes_and_counts_as_no_recompute(stack: Stack) -> None:
    stack.prefill.prefill = refuse(400, "prefill's message")
    release = asyncio.Event()

    async def late(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        if "kv_transfer_params" in seen.body:
            await release.wait()
        return await refuse(400, "decode's message")(engine, request, seen)

    stack.decode.decode = late
    status, answer = await stack.post(stack.chat())
    assert (status, answer["error"]["message"]) == (400, "decode's message")
    await until(stack.idle, "no leg is left")
    assert stack.metric("disagg_router_recomputed_turns_total", reason="prefill_refused") == 0


async def test_what_an_engine_quotes_of_a_prompt_is_not_logged(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for status in (400, 500):
        stack.prefill.prefill = refuse(status, "1 validation error: {'input': 'a secret'}")
        waits_for_kv(stack.decode)
        assert (await stack.post(stack.chat("a secret")))[0] == 200
    await until(stack.idle, "no leg is left")
    logged = [vars(record) for record in caplog.records]
    assert [fields["fields"]["reason"] for fields in logged if fields["msg"] == "attempt failed"] == [
        "prefill_refused",
        "prefill_error",
    ]
    assert "a secret" not in repr(logged)


async def test_a_stream_that_breaks_is_seen_to_break(stack: Stack) -> None:
    stack.decode.decode = hang_up_after(2)
    async with stack.client.post(
        stack.url + "/v1/chat/completions", json=stack.chat(stream=True)
    ) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await until(stack.idle, "no leg is left")
    assert stack.metric("disagg_router_broken_answers_total") == 1
    assert len(stack.decode.seen) == 1


async def test_a_stream_that_falls_silent_is_broken_off(make_stack: MakeStack) -> None:
    async def fall_silent(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        return await never(engine, request, seen)

    stack = await make_stack(deadlines=msgspec.structs.replace(LONG, idle_seconds=0.5))
    stack.decode.decode = fall_silent
    async with stack.client.post(
        stack.url + "/v1/chat/completions", json=stack.chat(stream=True)
    ) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await until(stack.idle, "no leg is left")
    assert stack.decode.abandoned == 1


async def test_a_slow_but_steady_stream_outlives_every_deadline(make_stack: MakeStack) -> None:
    async def steady(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        for _ in range(8):
            await response.write(sse("word"))
            await asyncio.sleep(0.5)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    stack = await make_stack(deadlines=SHORT)
    stack.decode.decode = steady
    assert await whole(stack, stream=True) == " ".join(["word"] * 8)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill computes", "decode computes"])
async def test_a_client_that_hangs_up_frees_both_engines(stack: Stack, stream: bool, phase: str) -> None:
    stack.decode.decode = never
    if phase == "prefill computes":
        stack.prefill.prefill = never
    tasks = [asyncio.create_task(stack.post(stack.chat(f"{n}", stream=stream))) for n in range(10)]
    computing = 10 if phase == "prefill computes" else 0
    await until(
        lambda: stack.decode.active == 10 and stack.prefill.active == computing,
        "all legs are where they wait",
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(stack.idle, "no leg is left")
    assert stack.decode.abandoned == 10
    assert stack.prefill.abandoned == computing
    assert stack.metric("disagg_router_requests_total", endpoint="chat", code="499") == 10


async def test_a_client_that_hangs_up_in_mid_stream_frees_decode(stack: Stack) -> None:
    async def forever(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        while True:
            await response.write(sse("word"))
            await asyncio.sleep(0.005)

    stack.decode.decode = forever
    async with stack.client.post(
        stack.url + "/v1/chat/completions", json=stack.chat(stream=True)
    ) as response:
        await response.content.readany()
        response.close()
    await until(stack.idle, "no leg is left")


async def test_http10_clients_get_the_plain_body(stack: Stack) -> None:
    body = json.dumps(stack.chat(stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    writer.write((head % len(body)).encode() + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head_bytes.lower()
    assert content == b"".join(sse(word) for word in stack.decode.words) + b"data: [DONE]\n\n"


async def test_engines_that_come_and_go_are_followed(stack: Stack) -> None:
    other = await FakeEngine().start()
    stack.decodes.append(other)
    stack.publish(stack.backends[0], backend("decode", 9, other.port))
    await whole(stack)
    assert len(other.seen) == 1
    stack.publish(stack.backends[0])
    status, answer = await stack.post(stack.chat())
    assert status == 503
    assert "no decode engine is ready" in answer["error"]["message"]


async def test_unknown_models_and_broken_json_reach_no_engine(stack: Stack) -> None:
    status, answer = await stack.post({**stack.chat(), "model": "nope"})
    assert status == 404
    assert answer["error"] == {
        "message": "The model `nope` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    headers = {"content-type": "application/json"}
    async with stack.client.post(
        stack.url + "/v1/chat/completions", data=b'{"messages":', headers=headers
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert not stack.decode.seen
    assert not stack.prefill.seen


@pytest.mark.parametrize(
    "text",
    [
        b'{"model": "half \\ud83d", "messages": []}',
        b'{"model": "\xff", "messages": []}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "half \\ud83d an emoji"}], "session_id": "\\ud83d x"}',
        b'{"messages": [{"role": "\xff", "content": "x"}]}',
    ],
)
async def test_broken_text_is_never_the_routers_accident(stack: Stack, text: bytes) -> None:
    async def lenient(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"choices": []})

    stack.decode.decode = stack.prefill.prefill = lenient
    headers = {"content-type": "application/json"}
    async with stack.client.post(stack.url + "/v1/chat/completions", data=text, headers=headers) as response:
        assert response.status in (200, 400)


async def test_a_turn_that_decode_computed_does_not_forget_the_conversations_prefill(
    make_stack: MakeStack,
) -> None:
    stack = await make_stack(prefills=4)
    headers = {"X-Session-Id": "s"}
    for fields in ({}, {"n": 2}, {}):
        status, _ = await stack.post(stack.chat(**fields), headers=headers)
        assert status == 200
    await until(stack.idle, "no leg is left")
    assert sorted(len(e.seen) for e in stack.prefills) == [0, 0, 0, 2]
    assert stack.metric("disagg_router_picks_total", role="prefill", reason="session") == 2


async def test_a_request_without_a_model_is_the_engines_to_judge(stack: Stack) -> None:
    status, _ = await stack.post({"messages": [{"role": "user", "content": "hi"}]})
    assert status == 200
    status, _ = await stack.post({"model": ["not", "a", "name"], "messages": []})
    assert status == 200  # this fake judges leniently
    assert stack.decode.seen[-1].body["model"] == ["not", "a", "name"]
    assert MODEL not in json.dumps(stack.decode.seen[-1].body)
