"""/v1/responses: the same turn by another name. Its request id is in the body, and its stream begins too early."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from aiohttp import web

from router.tests.conftest import MODEL, SHORT, MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, begin_response, hang_up, never, speak

PATH = "/v1/responses"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "max_output_tokens": 50, **fields}


@pytest.mark.parametrize("stream", [True, False])
async def test_both_legs_are_one_request_for_the_engines(stack: Stack, stream: bool) -> None:
    sent = body(stream=stream, request_id="resp_mine", store=True, tools=[], include=[], temperature=0.5)
    status, answer = await stack.post(sent, PATH)
    assert status == 200
    await until(stack.idle, "both legs are over")
    [prefill], [decode] = stack.prefill.seen, stack.decode.seen
    assert prefill.path == decode.path == PATH
    assert prefill.engine_id == decode.engine_id
    assert re.fullmatch("resp_[0-9a-f]{32}_0", decode.engine_id)
    assert decode.request_id in decode.engine_id
    assert prefill.body["max_output_tokens"] == 1
    assert (prefill.body["stream"], prefill.body["store"]) == (False, False)
    assert "max_tokens" not in prefill.body
    assert not {"include", "temperature"} & prefill.body.keys()
    assert prefill.body["tools"] == []
    assert decode.body["kv_transfer_params"]["do_remote_prefill"] is True
    changed = {"request_id", "kv_transfer_params"}
    assert {k: v for k, v in decode.body.items() if k not in changed} == {
        k: v for k, v in sent.items() if k not in changed
    }
    assert decode.body["request_id"] in (answer if stream else answer["id"])
    assert stack.metric("disagg_router_turns_total", prefill="remote") == 1
    assert stack.metric("disagg_router_prompt_tokens_total") == 7


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search_preview"}]}, "builtin_tools"),
        (
            {"tools": [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "x"}]},
            "builtin_tools",
        ),
        ({"tools": "nonsense"}, "builtin_tools"),
    ],
)
async def test_what_cannot_be_joined_goes_to_decode_alone(
    stack: Stack, fields: dict[str, Any], reason: str
) -> None:
    status, _ = await stack.post(body(**fields), PATH)
    assert status == 200
    assert stack.prefill.seen == []
    name = "disagg_router_recomputed_turns_total"
    await until(lambda: stack.metric(name, reason=reason) == 1, f"the turn is counted: {reason}")


@pytest.mark.parametrize(
    "fields", [{"truncation": "disabled"}, {"tools": [{"type": "function", "name": "f"}]}, {"tools": None}]
)
async def test_what_can_be_joined_is(stack: Stack, fields: dict[str, Any]) -> None:
    status, _ = await stack.post(body(**fields), PATH)
    assert status == 200
    await until(stack.idle, "both legs are over")
    assert len(stack.prefill.seen) == 1


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_1"}, {"background": True}])
async def test_what_needs_stored_responses_is_refused(stack: Stack, fields: dict[str, Any]) -> None:
    status, answer = await stack.post(body(**fields), PATH)
    assert status == 400
    assert answer["error"]["param"] == next(iter(fields))
    assert answer["error"]["code"] == "unsupported_parameter"
    assert not stack.decode.seen


async def test_the_events_before_the_first_token_are_no_answer(make_stack: MakeStack) -> None:
    """Decode takes the request and waits for KV that never comes: another engine computes, and the client sees one stream."""

    async def taken(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        if "kv_transfer_params" not in seen.body:
            return await speak(engine, request, seen)
        await begin_response(engine, request, seen)
        return await never(engine, request, seen)

    stack = await make_stack(decodes=2, deadlines=SHORT)
    for engine in stack.decodes:
        engine.decode = taken
    # Large enough for its first event to come in many pieces.
    status, text = await stack.post(body(stream=True, instructions="x" * 50_000), PATH)
    assert status == 200
    names = re.findall(r"event: (\S+)", text)
    assert names == ["response.created", "response.in_progress"] + ["response.output_text.delta"] * 3 + [
        "response.completed"
    ]
    assert stack.metric("disagg_router_retries_total", reason="decode_deadline") == 1


async def test_a_stream_that_breaks_before_its_first_token_is_another_engines(make_stack: MakeStack) -> None:
    broken: list[FakeEngine] = []

    async def script(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        if broken:
            return await speak(engine, request, seen)
        broken.append(engine)
        await begin_response(engine, request, seen)
        return await hang_up(engine, request, seen)

    stack = await make_stack(decodes=2)
    for engine in stack.decodes:
        engine.decode = script
    status, text = await stack.post(body(stream=True), PATH)
    assert status == 200
    assert text.count("event: response.created") == 1
    assert stack.metric("disagg_router_retries_total", reason="decode_broke") == 1


async def test_turns_of_a_conversation_stay_together_whatever_form_the_first_input_had(
    make_stack: MakeStack,
) -> None:
    stack = await make_stack(prefills=3, decodes=3)
    for n in range(4):
        said = f"question {n}"
        history: list[dict[str, Any]] = [{"role": "user", "content": said}]
        before = [len(e.seen) for e in stack.decodes]
        first, _ = await stack.post(body(input=said, instructions="be brief"), PATH)
        history += [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"role": "assistant", "content": "an answer"},
            {"role": "user", "content": "more"},
        ]
        second, _ = await stack.post(body(input=history, instructions="be brief"), PATH)
        assert (first, second) == (200, 200)
        taken = [len(e.seen) - count for e, count in zip(stack.decodes, before, strict=True)]
        assert sorted(taken) == [0, 0, 2]
    holders = [s.body["kv_transfer_params"]["disagg"].get("decode") for e in stack.prefills for s in e.seen]
    assert sum(holder is not None for holder in holders) == 4


async def test_the_openai_client_works_streamed_and_not(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(model=MODEL, input="hi")
        assert whole.output_text == "one two three"
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert deltas == ["one", "two", "three"]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=whole.id)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.APIStatusError) as fetched:
            await client.responses.retrieve(whole.id)
        assert fetched.value.status_code == 501


async def test_client_sent_transfer_params_reach_no_engine(stack: Stack) -> None:
    sent = body(kv_transfer_params={"x": "evil"}, vllm_xargs={"kv_transfer_params": "evil"})
    status, _ = await stack.post(sent, PATH)
    assert status == 200
    for seen in (*stack.prefill.seen, *stack.decode.seen):
        assert "evil" not in json.dumps(seen.body)
