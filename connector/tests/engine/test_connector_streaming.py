"""Streaming write-back between real engines: answers as a plain engine's, and blocks at prefill before a turn ends."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    BLOCK,
    COMPUTED,
    INSERTED,
    OFFERS,
    ONDEMAND,
    RECOMPUTED,
    Conversation,
    becomes,
    body,
    counter,
    decode_params,
    differs,
    post,
    prefill_params,
    spec,
    turn,
    wait_until,
    wait_until_free,
    within,
)
from e2e.engines import Engine, running_all
from e2e.ports import HOST

pytestmark = pytest.mark.engine

# So long that it is still being generated when prefill's metrics have shown what has arrived.
LONG_ANSWER = 1700
MOST_TURNS = 8


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Prefill and decode that stream every block."""
    extra: dict[str, Any] = {
        "writeback_mode": "streaming",
        "writeback_batch_blocks": 1,
        "max_wait_milliseconds": 15_000,
    }
    specs = {role: spec(role, model, kv_lease_duration=20, **extra) for role in ("prefill", "decode")}
    with running_all(specs, folder=tmp_path_factory.mktemp("streaming")) as running:
        yield running


def test_answers_are_the_plain_engines_and_prefill_computes_only_what_is_new(
    pair: dict[str, Engine], plain: Engine
) -> None:
    prefill, decode = pair["prefill"], pair["decode"]
    conversation = Conversation(1, answer_tokens=150)

    def moves_in_batches() -> bool:
        """Not on a crowded machine, where a turn may be over before its first batch is offered."""
        granted = counter(decode, OFFERS, result="granted")
        on_demand = counter(prefill, ONDEMAND, result="served")
        recomputed, computed = counter(decode, RECOMPUTED), counter(prefill, COMPUTED)
        got = conversation.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert not differs(plain, conversation.history[: -len(got)], got)
        several = becomes(lambda: counter(decode, OFFERS, result="granted") >= granted + 2, 10)
        wait_until_free(prefill)
        is_new = counter(prefill, COMPUTED) - computed <= conversation.user_tokens + BLOCK + 1
        brought = counter(prefill, ONDEMAND, result="served") - on_demand
        return several and is_new and brought == 0 and counter(decode, RECOMPUTED) == recomputed

    within(MOST_TURNS, "prefill computes what is new and gets several batches", moves_in_batches)


def test_a_turn_that_is_aborted_has_left_its_blocks_at_prefill_long_before(
    pair: dict[str, Engine], plain: Engine
) -> None:
    prefill, decode = pair["prefill"], pair["decode"]
    seeds = iter(range(2, 2 + MOST_TURNS))

    def leaves_its_blocks() -> bool:
        prompt = Conversation(next(seeds)).history
        said = _leave_when_blocks_are_at_prefill(prefill, decode, prompt)
        if not said:
            return False
        wait_until(lambda: counter(decode, "vllm:num_requests_running") == 0, "decode stops")
        wait_until_free(decode)
        wait_until_free(prefill)
        before = counter(prefill, COMPUTED)
        prompt = prompt + said + [7] * 37
        assert not differs(plain, prompt, turn(prefill, decode, prompt, 40))
        return counter(prefill, COMPUTED) - before <= 37 + BLOCK + 1

    within(MOST_TURNS, "a turn has left its blocks at prefill before its end", leaves_its_blocks)


def _leave_when_blocks_are_at_prefill(prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
    """Begin a turn and hang up when all blocks of what it has said are at prefill; the tokens read so far.
    None of them if it was over before: decode may be quicker than what a crowded machine moves."""
    wait_until_free(decode)
    before = counter(prefill, INSERTED)
    request_id = uuid.uuid4().hex
    connection = http.client.HTTPConnection(HOST, decode.ports.http, timeout=300)
    with ThreadPoolExecutor(1) as leg:
        leg.submit(post, prefill, body(prompt, 1, prefill_params(decode)), request_id)
        asked = {**body(prompt, LONG_ANSWER, decode_params(prefill)), "stream": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        said = _read_tokens(answer, 5 * BLOCK)
        are_there = becomes(lambda: counter(prefill, INSERTED) >= before + 5 * BLOCK)
        still_runs = counter(decode, "vllm:num_requests_running") == 1
        connection.close()
    return said if are_there and still_runs else []


def _read_tokens(answer: http.client.HTTPResponse, count: int) -> list[int]:
    """The first so many tokens of an answer that is streamed."""
    tokens: list[int] = []
    while len(tokens) < count:
        line = answer.readline().decode().strip()
        if line.startswith("data: {"):
            tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
        elif line or answer.isclosed():
            raise AssertionError(f"{line!r} after {len(tokens)} tokens")
    return tokens[:count]
