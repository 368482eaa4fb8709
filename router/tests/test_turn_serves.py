"""A turn that goes well: what the engines get, and what the client gets."""

from __future__ import annotations

import json
import re

import openai
import pytest

from router.tests.conftest import MODEL, MakeStack, Stack, until

PATHS = ["/v1/chat/completions", "/v1/completions"]


def request(path: str, **fields: object) -> dict[str, object]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi there"}
    return {"model": MODEL, **prompt, **fields}


async def recomputed(stack: Stack, reason: str) -> None:
    name = "disagg_router_recomputed_turns_total"
    await until(
        lambda: stack.metric(name, reason=reason) == 1, f"one turn is counted as recomputed: {reason}"
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_both_legs_go_to_the_same_endpoint_with_one_fresh_id(
    stack: Stack, path: str, stream: bool
) -> None:
    status, _ = await stack.post(
        request(path, stream=stream, max_tokens=50), path, headers={"X-Request-Id": "mine"}
    )
    assert status == 200
    await until(stack.idle, "both legs are over")
    [prefill], [decode] = stack.prefill.seen, stack.decode.seen
    assert prefill.path == decode.path == path
    assert prefill.request_id == decode.request_id
    assert re.fullmatch("[0-9a-f]{32}", decode.request_id)
    assert prefill.body["max_tokens"] == 1
    assert prefill.body["stream"] is False
    assert decode.body["max_tokens"] == 50
    assert decode.body["kv_transfer_params"]["disagg"]["prefill"] == {
        "host": "127.0.0.1",
        "control_port": 5700,
    }


async def test_every_turn_has_its_own_id(stack: Stack) -> None:
    for _ in range(3):
        await stack.post(stack.chat())
    assert len({seen.request_id for seen in stack.decode.seen}) == 3


async def test_a_stream_reaches_the_client_as_decode_sent_it(stack: Stack) -> None:
    stack.decode.words = ["Grüße", "aus", "", "Köln", "x" * 100_000]
    status, text = await stack.post(stack.chat(stream=True))
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert [json.loads(e)["choices"][0]["delta"]["content"] for e in events[:-1]] == stack.decode.words


async def test_the_answer_carries_the_clients_id_and_decodes_content_type(stack: Stack) -> None:
    body = stack.chat(stream=True)
    async with stack.client.post(
        stack.url + PATHS[0], json=body, headers={"X-Request-Id": "mine-7"}
    ) as response:
        assert response.headers["x-request-id"] == "mine-7"
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    async with stack.client.post(stack.url + PATHS[0], json=body) as response:
        assert response.headers["x-request-id"] == stack.decode.seen[-1].request_id


async def test_an_id_that_cannot_be_echoed_is_replaced(stack: Stack) -> None:
    headers = {"X-Request-Id": "a" * 129}
    async with stack.client.post(stack.url + PATHS[0], json=stack.chat(), headers=headers) as response:
        assert response.headers["x-request-id"] == stack.decode.seen[-1].request_id


async def test_only_listed_headers_reach_an_engine(stack: Stack) -> None:
    headers = {
        "Authorization": "Bearer secret",
        "X-data-parallel-rank": "1",
        "Cookie": "a=b",
        "Traceparent": "00-ab-cd-01",
    }
    await stack.post(stack.chat(), headers=headers)
    for seen in (*stack.prefill.seen, *stack.decode.seen):
        names = set(seen.headers)
        assert names == {"host", "content-type", "content-length", "x-request-id", "traceparent"}
        assert seen.headers["traceparent"] == "00-ab-cd-01"


async def test_client_sent_transfer_params_reach_no_engine(stack: Stack) -> None:
    evil = {"do_remote_prefill": True, "marker": "evil"}
    body = stack.chat(
        kv_transfer_params=evil, ec_transfer_params=evil, vllm_xargs={"kv_transfer_params": "evil", "a": 1}
    )
    status, _ = await stack.post(body)
    assert status == 200
    for seen in (*stack.prefill.seen, *stack.decode.seen):
        assert "evil" not in json.dumps(seen.body)
        assert seen.body["vllm_xargs"] == {"a": 1}


async def test_prefill_learns_where_the_kv_is_from_the_second_turn_on(stack: Stack) -> None:
    await stack.post(stack.chat("first"))
    history = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    await stack.post({"model": MODEL, "messages": history})
    first, second = stack.prefill.seen
    assert "decode" not in first.body["kv_transfer_params"]["disagg"]
    assert second.body["kv_transfer_params"]["disagg"]["decode"] == {
        "host": "127.0.0.1",
        "control_port": 5700,
    }


async def test_turns_of_one_conversation_stay_on_their_engines(make_stack: MakeStack) -> None:
    stack = await make_stack(prefills=3, decodes=3)
    for conversation in range(6):
        messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
        before = [len(e.seen) for e in stack.prefills], [len(e.seen) for e in stack.decodes]
        for turn in range(3):
            messages.append({"role": "user", "content": f"question {conversation} {turn}"})
            status, answer = await stack.post({"model": MODEL, "messages": messages})
            assert status == 200
            messages.append(answer["choices"][0]["message"])
        for engines, counts in zip((stack.prefills, stack.decodes), before, strict=True):
            assert sorted(len(e.seen) - n for e, n in zip(engines, counts, strict=True)) == [0, 0, 3]


async def test_counts_are_given_back_and_turns_are_counted(stack: Stack) -> None:
    await stack.post(stack.chat(stream=True))
    await stack.post(stack.chat())
    await until(stack.idle, "both turns are over")
    assert stack.metric("disagg_router_requests_total", endpoint="chat", code="200") == 2
    assert stack.metric("disagg_router_turns_total", prefill="remote") == 2
    assert stack.metric("disagg_router_prompt_tokens_total") == 14
    assert (
        stack.metric("disagg_router_time_to_first_byte_seconds_count", endpoint="chat", streamed="true") == 1
    )
    assert stack.metric("disagg_router_inflight_legs", role="decode", pod="decode-0") == 0


async def test_options_that_prefill_cannot_serve_go_to_decode_alone(stack: Stack) -> None:
    status, _ = await stack.post(stack.chat(n=2))
    assert status == 200
    assert stack.prefill.seen == []
    assert "kv_transfer_params" not in stack.decode.seen[0].body
    await recomputed(stack, "parallel_sampling")


async def test_without_prefill_engines_decode_serves_alone(make_stack: MakeStack) -> None:
    stack = await make_stack(prefills=0)
    status, _ = await stack.post(stack.chat())
    assert status == 200
    await recomputed(stack, "no_prefill")


async def test_the_openai_client_works_streamed_and_not(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert whole.choices[0].message.content == "one two three"
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert [c.choices[0].delta.content async for c in stream] == ["one", "two", "three"]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.code == "model_not_found"


async def test_round_robin_takes_one_engine_after_the_other(make_stack: MakeStack) -> None:
    stack = await make_stack(prefills=2, decodes=2, policy="RoundRobin")
    messages: list[dict[str, str]] = []
    for _ in range(4):
        messages.append({"role": "user", "content": "hi"})
        assert (await stack.post({"model": MODEL, "messages": messages}))[0] == 200
        messages.append({"role": "assistant", "content": "one two three"})
    await until(stack.idle, "the turns are over")
    assert [len(engine.seen) for engine in stack.decodes + stack.prefills] == [2, 2, 2, 2]
    # From the second turn on prefill is told who has the conversation: the decode engine of the turn before.
    asked = [
        [seen.body["kv_transfer_params"]["disagg"].get("decode", {}).get("control_port") for seen in p.seen]
        for p in stack.prefills
    ]
    assert asked == [[None, 5701], [5700, 5700]]
