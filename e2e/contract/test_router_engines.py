"""The router in front of real engines on CPU: its answers are those of one plain engine, and KV really moves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from e2e.contract.harness import (
    CHAT,
    CONNECTOR,
    MODEL,
    RESPONSES,
    TEXT,
    Asker,
    RouterPorts,
    Running,
    alike,
    becomes,
    prompt,
    read_stream,
    read_whole,
    request,
    running_router,
    transfer,
    until,
)
from e2e.engines import Engine, EngineSpec, running_all
from e2e.images.engine import ensure_model

pytestmark = pytest.mark.engine

# A crowded machine may compute a turn where its KV was to go, or give its write-back up: the next one shows it.
MOST_TURNS = 6


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = ensure_model("tiny-qwen3")
    folder = tmp_path_factory.mktemp("router-engines")
    specs = {
        role: EngineSpec(model, transfer(role), python_path=(CONNECTOR,)) for role in ("prefill", "decode")
    }
    specs["plain"] = EngineSpec(model, kv_blocks=1024)
    with running_all(specs, folder=folder) as engines, routed(folder, engines) as router:
        yield Running(router.url, router.admin_url, **engines)


def routed(
    folder: Path, engines: Mapping[str, Engine], **settings: Any
) -> AbstractContextManager[RouterPorts]:
    """A router in front of them, with these settings beside what it needs."""
    config = {"version": 1, "namespace": "default", "name": "demo", "model": {"name": MODEL}, **settings}
    return running_router(folder, engines, config)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    # Engines close a connection after 5 s of silence, and a turn that is on its way by then is lost.
    connector, limit = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        yield session


@pytest.fixture
def asker(running: Running, client: aiohttp.ClientSession) -> Asker:
    return Asker(running, client)


# Of a turn's end alone; its value is the number of turns that prefill has published.
WRITTEN_BACK = "disagg_kv_writeback_seconds_count"
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_are_those_of_a_plain_engine(asker: Asker, stream: bool) -> None:
    messages = [{"role": "system", "content": prompt(1 + stream, 60)}]
    both_ways = False
    for turn in range(MOST_TURNS):
        messages.append({"role": "user", "content": prompt(100 + 10 * stream + turn, 20)})
        before, written = await asker.moved(), await asker.metric(asker.running.decode.url, WRITTEN_BACK)
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 70, "ignore_eos": True}
        routed, plain = await asker.both(CHAT, {**body, "stream": stream})
        assert routed == plain

        async def written_back(written: float = written) -> bool:
            return await asker.metric(asker.running.decode.url, WRITTEN_BACK) > written

        both_ways = await becomes(written_back, 60) and await asker.moved() > before
        messages.append({"role": "assistant", "content": routed["text"]})
        if both_ways and turn >= 3:
            break
    assert both_ways, "KV never moved both ways in the last turns"
    recomputed = "disagg_router_recomputed_turns_total"
    assert await asker.metric(asker.running.admin, recomputed) == 0


async def test_small_turns_are_right_and_cost_prefill_nothing(
    asker: Asker, tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    """And prefill is brought what it has missed when it is needed again."""
    engines = {"prefill": asker.running.prefill, "decode": asker.running.decode}
    with routed(tmp_path, engines, localPrefill={"maxTokens": 100}) as router:
        admin = router.admin_url
        mine = replace(asker, running=replace(asker.running, router=router.url, admin=admin))
        messages: list[dict[str, str]] = []
        for number, (words, where) in enumerate([(90, "remote"), (5, "small"), (8, "small"), (90, "remote")]):
            messages.append({"role": "user", "content": prompt(700 + number, words)})
            await until(mine.idle, "the turn before is over on both engines")
            computed = await mine.metric(mine.running.prefill.url, COMPUTED)
            taken = await mine.metric(admin, "disagg_router_turns_total", where)
            body = {
                "model": MODEL,
                "messages": messages,
                "temperature": 0,
                "max_tokens": 40,
                "ignore_eos": True,
            }
            routed_answer, plain = await mine.both(CHAT, body)
            assert routed_answer == plain
            messages.append({"role": "assistant", "content": routed_answer["text"]})

            async def counted(where: str = where, taken: float = taken) -> bool:
                return await mine.metric(admin, "disagg_router_turns_total", where) > taken

            await until(counted, f"turn {number} is counted as {where}")
            if where == "small":
                assert await mine.metric(mine.running.prefill.url, COMPUTED) == computed
        assert await mine.metric(admin, "disagg_router_recomputed_turns_total") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_those_of_a_plain_engine_and_kv_moves(asker: Asker, stream: bool) -> None:
    said: list[dict[str, Any]] = []
    both_ways = False
    for turn in range(MOST_TURNS):
        said.append({"role": "user", "content": prompt(300 + 10 * stream + turn, 60)})
        before, written = await asker.moved(), await asker.metric(asker.running.decode.url, WRITTEN_BACK)
        body = {"model": MODEL, "instructions": prompt(298 + stream, 20), "input": said, "stream": stream}
        body |= {"temperature": 0, "max_output_tokens": 50, "ignore_eos": True}
        routed, plain = await asker.both(RESPONSES, body)
        assert routed == plain
        assert routed["usage"]["output_tokens"] == 50

        async def written_back(written: float = written) -> bool:
            return await asker.metric(asker.running.decode.url, WRITTEN_BACK) > written

        both_ways = await becomes(written_back, 60) and await asker.moved() > before
        said.append({"role": "assistant", "content": routed["text"]})
        if both_ways and turn >= 2:
            break
    assert both_ways, "KV never moved both ways in the last turns"
    assert await asker.metric(asker.running.admin, "disagg_router_recomputed_turns_total") == 0


async def test_a_refused_response_is_dismissed_on_prefill(asker: Asker) -> None:
    """Prefill takes what decode refuses, since it makes one token only."""
    running = asker.running
    for number in range(10):
        body = {"model": MODEL, "input": prompt(900 + number, 200), "max_output_tokens": 50, "top_p": -1}
        status, kind, _ = await asker.post(running.router, RESPONSES, body)
        assert (status, kind) == (400, "application/json")

    async def nothing_is_kept() -> bool:
        return await asker.metric(running.prefill.url, "vllm:kv_cache_usage_perc") == 0

    await until(nothing_is_kept, "prefill keeps no prompt for a turn that decode refused")


async def test_the_openai_client_holds_a_response_conversation(running: Running) -> None:
    async with openai.AsyncOpenAI(base_url=running.router + "/v1", api_key="none", max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input=prompt(950), max_output_tokens=16)
        assert re.fullmatch("resp_[0-9a-f]{32}", first.id)
        assert first.output_text
        stream = await client.responses.create(
            model=MODEL,
            input=[{"role": "user", "content": prompt(950)}, {"role": "assistant", "content": "so"}],
            max_output_tokens=16,
            stream=True,
        )
        assert [event.type async for event in stream][-1] == "response.completed"
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_text_is_tokenized_and_back_as_by_a_plain_engine(asker: Asker) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt(960)}
    routed, plain = [
        json.loads((await asker.post(url, "/tokenize", body))[2])
        for url in (asker.running.router, asker.running.plain.url)
    ]
    assert routed["tokens"] == plain["tokens"]
    body = {"model": MODEL, "tokens": routed["tokens"]}
    status, _, content = await asker.post(asker.running.router, "/detokenize", body)
    assert (status, json.loads(content)["prompt"]) == (200, prompt(960))


OPTIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "usage in the stream": (None, {"stream": True, "stream_options": {"include_usage": True}}),
    "lower bound": (None, {"min_tokens": 32, "max_tokens": 64, "ignore_eos": True}),
    "completion limit": (CHAT, {"max_tokens": None, "max_completion_tokens": 64}),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 3}),
    "text logprobs": (TEXT, {"logprobs": 3}),
    "grammar": (CHAT, {"response_format": {"type": "json_object"}}),
    "sampling": (None, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 7, "n": 1}),
    "penalties": (None, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "stops": (None, {"stop": ["zzzz"], "stop_token_ids": [3], "include_stop_str_in_output": True}),
    "token choice": (None, {"logit_bias": {"9": 2.0}, "bad_words": ["lamp"]}),
    "extras": (None, {"skip_special_tokens": False, "user": "u", "metadata": {"a": "b"}, "priority": 0}),
    "client's own params": (None, {"kv_transfer_params": {"do_remote_prefill": True}}),
}


CASES = [(case, path) for case, (only, _) in OPTIONS.items() for path in (CHAT, TEXT) if only in (None, path)]


@pytest.mark.parametrize(("case", "path"), CASES)
async def test_every_option_is_honoured_and_kv_still_moves(asker: Asker, case: str, path: str) -> None:
    first = hash_of(case + path)
    for number in range(first, first + MOST_TURNS):
        before = await asker.moved()
        await honours(asker, path, number, OPTIONS[case][1])
        if await asker.moved() > before:
            return
    pytest.fail(f"KV has not moved in any of {MOST_TURNS} turns")


async def honours(asker: Asker, path: str, number: int, fields: dict[str, Any]) -> None:
    """One turn through the router is as the plain engine's."""
    await until(asker.idle, "the turn before is over on both engines")
    body = {k: v for k, v in request(path, number, **fields).items() if v is not None}
    made = await asker.metric(asker.running.prefill.url, "vllm:generation_tokens_total")
    plain_body = {k: v for k, v in body.items() if k != "kv_transfer_params"}
    status, _, content = await asker.post(asker.running.router, path, body)
    assert status == 200, content
    read = read_stream if body.get("stream") else read_whole
    routed = read(content)
    status, _, content = await asker.post(asker.running.plain.url, path, plain_body)
    assert status == 200, content
    plain = read(content)
    assert alike(routed, plain), (routed, plain)
    # One token at most; none if decode was done before prefill's front end had answered, which ends prefill's leg.
    assert await asker.metric(asker.running.prefill.url, "vllm:generation_tokens_total") - made in (0, 1)
    if "min_tokens" in fields:
        assert 32 <= routed["tokens"] <= 64
    if "stream_options" in fields:
        assert routed["usage"]["completion_tokens"] == 40


def hash_of(text: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 10_000 + 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40_000},
        {"messages": "a string"},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"temperature": -1},
        {"messages": []},
        {"tools": []},
    ],
    ids=lambda fields: next(iter(fields)) + "=" + str(next(iter(fields.values())))[:12],
)
async def test_what_decode_refuses_is_refused_in_its_words(
    asker: Asker, fields: dict[str, Any], stream: bool
) -> None:
    body = request(CHAT, 77, stream=stream, **fields)
    routed = await asker.post(asker.running.router, CHAT, body)
    plain = await asker.post(asker.running.plain.url, CHAT, body)
    assert (routed[0], routed[1]) == (plain[0], plain[1])
    if routed[0] == 200:  # this engine takes it
        read = read_stream if stream else read_whole
        assert read(routed[2]) == read(plain[2])
    else:
        assert routed[1] == "application/json"
        assert json.loads(routed[2])["error"] == json.loads(plain[2])["error"]


async def test_half_an_emoji_is_no_accident(asker: Asker) -> None:
    for text in (b"half \\ud83d here", b"\\ud83d"):
        body = b'{"model": "test", "max_tokens": 4, "messages": [{"role": "user", "content": "%s"}]}' % text
        headers = {"content-type": "application/json"}
        async with asker.client.post(asker.running.router + CHAT, data=body, headers=headers) as response:
            assert response.status in (200, 400)
            assert response.content_type == "application/json"


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_hang_up_leave_nothing_running(asker: Asker, stream: bool) -> None:
    running = asker.running

    async def hang_up(seed: int) -> None:
        body = request(CHAT, seed, stream=stream, max_tokens=1500)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await asker.post(running.router, CHAT, body)

    await asyncio.gather(*(hang_up(500 + 20 * stream + n) for n in range(6)))

    await until(asker.idle, "nothing runs or waits on either engine, and the router counts nothing")
    routed, plain = await asker.both(CHAT, request(CHAT, 600 + stream))
    assert routed == plain
