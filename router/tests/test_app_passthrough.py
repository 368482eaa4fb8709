"""/tokenize and /detokenize: any engine answers, another if it cannot be reached."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from disagg_router.config import Deadlines
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import never, refuse, speak

PATHS = ["/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
async def test_the_body_reaches_one_engine_as_it_is(stack: Stack, path: str) -> None:
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine", "Traceparent": "00-ab-cd-01"}
    async with stack.client.post(stack.url + path, json={"prompt": "hi"}, headers=headers) as response:
        assert response.status == 200
        assert response.headers["x-request-id"] == "mine"
        assert (await response.json())["tokens"] == [1, 2]
    [seen] = stack.prefill.seen + stack.decode.seen
    assert (seen.path, seen.body) == (path, {"prompt": "hi"})
    names = {"host", "content-type", "content-length", "x-request-id", "traceparent"}
    assert set(seen.headers) == names
    name = "disagg_router_requests_total"
    await until(lambda: stack.metric(name, endpoint=path[1:], code="200") == 1, "the request is counted")
    assert stack.metric("disagg_router_turns_total", prefill="local") == 0


async def test_what_the_engine_says_is_passed_on(stack: Stack) -> None:
    for engine in (stack.prefill, stack.decode):
        engine.decode = refuse(400, "no such model")
    status, answer = await stack.post({"prompt": "hi", "model": "nope"}, "/tokenize")
    assert (status, answer["error"]["message"]) == (400, "no such model")


async def test_either_role_will_do(make_stack: MakeStack) -> None:
    for prefills, decodes in ((1, 0), (0, 1)):
        stack = await make_stack(prefills=prefills, decodes=decodes)
        status, _ = await stack.post({"prompt": "hi"}, "/tokenize")
        assert status == 200


async def test_an_engine_that_is_gone_is_replaced_by_another(stack: Stack) -> None:
    await stack.decode.stop()
    for _ in range(3):
        status, _ = await stack.post({"prompt": "hi"}, "/tokenize")
        assert status == 200
    assert len(stack.prefill.seen) == 3


async def test_no_engine_is_a_503_and_none_that_answers_a_502(stack: Stack) -> None:
    await stack.decode.stop()
    await stack.prefill.stop()
    status, answer = await stack.post({"prompt": "hi"}, "/tokenize")
    assert status == 502
    assert "decode-0" in answer["error"]["message"]
    assert "prefill-0" in answer["error"]["message"]
    stack.publish()
    status, answer = await stack.post({"prompt": "hi"}, "/tokenize")
    assert (status, answer["error"]["code"]) == (503, "no_engine_ready")


async def test_engines_that_are_too_slow_are_a_504(make_stack: MakeStack) -> None:
    stack = await make_stack(deadlines=Deadlines(first_byte_seconds=0.2))
    for engine in (stack.prefill, stack.decode):
        engine.decode = never
    status, answer = await stack.post({"prompt": "hi"}, "/tokenize")
    assert (status, answer["error"]["type"]) == (504, "timeout_error")
    assert "did not answer in 0.2 s" in answer["error"]["message"]
    await until(stack.idle, "nothing is under way")


async def test_a_client_that_leaves_frees_the_engine(stack: Stack) -> None:
    for engine in (stack.prefill, stack.decode):
        engine.decode = never
    task: asyncio.Task[tuple[int, Any]] = asyncio.create_task(stack.post({"prompt": "hi"}, "/tokenize"))
    await until(lambda: bool(stack.prefill.active + stack.decode.active), "an engine has the request")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(stack.idle, "nothing is under way")
    assert stack.metric("disagg_router_requests_total", endpoint="tokenize", code="499") == 1


async def test_tokenizing_goes_on_while_turns_have_to_wait(make_stack: MakeStack) -> None:
    from disagg_router.config import Overload

    stack = await make_stack(overload=Overload(turns_per_engine=1, waiting_turns=0))
    stack.decode.decode = never
    turn = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: stack.decode.active == 1, "the turn is under way")
    stack.decode.decode = speak
    status, _ = await stack.post({"prompt": "hi"}, "/tokenize")
    assert status == 200
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
