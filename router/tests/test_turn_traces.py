"""What OpenTelemetry is told of a turn, and that a turn does not depend on who listens."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from disagg_router.config import Overload, Tls, Tracing
from router.tests.certificates import Authority
from router.tests.collector import Collector
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import FakeEngine, Seen, hang_up_after, never, refuse, speak

TURN = "POST /v1/chat/completions"
CLIENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = await Collector().start()
    yield collector
    await collector.stop()


async def traced(make_stack: MakeStack, collector: Collector, **changes: Any) -> Stack:
    return await make_stack(tracing=Tracing(collector.url), **changes)


async def test_a_turn_is_a_span_with_its_legs_below(collector: Collector, make_stack: MakeStack) -> None:
    stack = await traced(make_stack, collector)
    headers = {**CLIENT, "X-Request-Id": "mine", "X-Session-Id": "s", "User-Agent": "agent/1"}
    status, _ = await stack.post(stack.chat(stream=True), headers=headers)
    assert status == 200
    turn, prefill, decode = await collector.named(TURN, "prefill", "decode")

    assert {span.trace_id for span in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert turn.parent_id == "b7ad6b7169203331"
    assert {prefill.parent_id, decode.parent_id} == {turn.span_id}
    assert (turn.kind, prefill.kind, decode.kind) == ("server", "client", "client")
    assert (turn.status, prefill.status, decode.status) == ("unset", "unset", "unset")
    assert turn.events == ["admitted", "first byte"]
    request_id = stack.decode.seen[0].request_id
    conversation = turn.attributes.pop("gen_ai.conversation.id")
    assert re.fullmatch("[0-9a-f]{32}", conversation)
    assert turn.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "user_agent.original": "agent/1",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "test/model",
        "gen_ai.request.stream": True,
        "disagg.request_id": request_id,
        "disagg.client_request_id": "mine",
        "disagg.session_by": "header",
        "disagg.mode": "BidirectionalPush",
        "disagg.revision": "rev1",
        "disagg.decode.pod": "decode-0",
        "disagg.decode.placement": "home",
        "disagg.prefill.pod": "prefill-0",
        "disagg.prefill.placement": "home",
        "disagg.attempts": 1,
    }
    assert decode.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.full": stack.decode.url + "/v1/chat/completions",
        "server.address": "127.0.0.1",
        "server.port": stack.decode.port,
        "disagg.role": "decode",
        "disagg.pod": "decode-0",
        "disagg.revision": "rev1",
        "disagg.request_id": request_id,
    }
    # Each engine is told of its own leg.
    for engine, leg in ((stack.prefill, prefill), (stack.decode, decode)):
        [seen] = engine.seen
        assert seen.headers["traceparent"] == leg.traceparent
        assert seen.headers["tracestate"] == "a=1"


async def test_without_a_trace_of_the_clients_a_turn_begins_one(
    collector: Collector, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20token")
    stack = await traced(make_stack, collector)
    headers = {"traceparent": "00-ab-cd-01", "User-Agent": "a" * 5000}  # not a trace, and a lot to say
    for _ in range(2):
        await stack.post(stack.chat(), headers=headers)
    spans = await collector.named(*(TURN, "prefill", "decode") * 2)
    assert len({span.trace_id for span in spans}) == 2
    assert [span.parent_id for span in spans if span.name == TURN] == ["", ""]
    assert spans[0].attributes["user_agent.original"] == "a" * 256
    told = spans[0].resource
    assert (told["service.name"], told["service.namespace"]) == ("test-router", "default")
    assert told["deployment.environment.name"] == "staging"
    assert collector.headers[0]["authorization"] == "Bearer token"


@pytest.mark.parametrize("headers", [{"tracestate": "a=1,secret " + "b" * 5000}, {"traceparent": "0" * 600}])
async def test_what_is_wrong_with_a_clients_trace_is_not_logged(
    collector: Collector, make_stack: MakeStack, caplog: pytest.LogCaptureFixture, headers: dict[str, str]
) -> None:
    stack = await traced(make_stack, collector)
    assert (await stack.post(stack.chat(), headers={**CLIENT, **headers}))[0] == 200
    [_, _, decode] = await collector.named(TURN, "prefill", "decode")
    assert decode.span_id in stack.decode.seen[0].headers["traceparent"]
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def test_a_mistake_in_the_collectors_headers_is_said_without_them(
    collector: Collector,
    make_stack: MakeStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization: Bearer hidden, x=%ff hidden hidden")
    await traced(make_stack, collector)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
    assert said
    assert "hidden" not in repr([vars(record) for record in caplog.records])


async def test_a_failed_prefill_leg_and_the_attempt_after_it(
    collector: Collector, make_stack: MakeStack
) -> None:
    stack = await traced(make_stack, collector)

    async def fails(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await until(lambda: bool(stack.decode.seen), "the first attempt's leg is at decode")
        stack.decode.decode = speak
        return await refuse(500, "out of order")(engine, request, seen)

    stack.prefill.prefill, stack.decode.decode = fails, never
    assert (await stack.post(stack.chat()))[0] == 200

    turn, prefill, *decodes = await collector.named(TURN, "prefill", "decode", "decode")
    assert (prefill.status, prefill.attributes["error.type"]) == ("error", "prefill_error")
    assert prefill.attributes["http.response.status_code"] == 500
    given_up, answered = sorted(decodes, key=lambda span: "disagg.cancelled" not in span.attributes)
    assert given_up.attributes["disagg.request_id"] == prefill.attributes["disagg.request_id"]
    assert "disagg.cancelled" not in answered.attributes
    assert answered.attributes["disagg.request_id"] == turn.attributes["disagg.request_id"]
    assert {span.parent_id for span in (prefill, given_up, answered)} == {turn.span_id}
    assert turn.status == "unset"
    assert turn.attributes["disagg.attempts"] == 2
    assert turn.attributes["disagg.recompute.reason"] == "prefill_error"


async def test_a_client_that_leaves(collector: Collector, make_stack: MakeStack) -> None:
    stack = await traced(make_stack, collector)
    stack.prefill.prefill = stack.decode.decode = never
    asked = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: bool(stack.decode.seen and stack.prefill.seen), "both legs are out")
    asked.cancel()
    turn, prefill, decode = await collector.named(TURN, "prefill", "decode")
    assert turn.attributes["disagg.client_left"] is True
    assert "http.response.status_code" not in turn.attributes
    assert prefill.attributes["disagg.cancelled"] is decode.attributes["disagg.cancelled"] is True
    assert {span.status for span in (turn, prefill, decode)} == {"unset"}


async def test_an_answer_that_breaks_off(collector: Collector, make_stack: MakeStack) -> None:
    stack = await traced(make_stack, collector)
    stack.decode.decode = hang_up_after(1)
    with pytest.raises(Exception, match="payload"):
        await stack.post(stack.chat(stream=True))
    turn, _, decode = await collector.named(TURN, "prefill", "decode")
    for span in (turn, decode):
        assert (span.status, span.attributes["error.type"]) == ("error", "broken_answer")


async def test_turns_that_wait_and_turns_that_may_not(collector: Collector, make_stack: MakeStack) -> None:
    stack = await traced(make_stack, collector, overload=Overload(turns_per_engine=1, waiting_turns=1))
    speaks, stack.decode.decode = stack.decode.decode, never
    stack.prefill.prefill = never
    first = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: bool(stack.decode.seen), "a turn runs")
    second = asyncio.create_task(stack.post(stack.chat()))
    await until(lambda: stack.router.gate.waiting == 1, "a turn waits")

    assert (await stack.post(stack.chat()))[0] == 429
    [refused] = await collector.named(TURN)
    assert (refused.events, refused.status) == ([], "unset")
    assert refused.attributes["disagg.refused"] == "queue_full"
    assert refused.attributes["http.response.status_code"] == 429

    collector.spans.clear()
    stack.ahead = 2.5
    stack.decode.decode = speaks
    first.cancel()
    assert (await second)[0] == 200
    spans = await collector.named(*(TURN, "prefill", "decode") * 2)
    [turn] = [span for span in spans if span.attributes.get("disagg.queue.wait_seconds") == 2.5]
    assert turn.events == ["admitted", "first byte"]


async def test_refusals_by_decode_and_at_the_door(collector: Collector, make_stack: MakeStack) -> None:
    stack = await traced(make_stack, collector)
    stack.decode.decode = refuse(400, "not like this")
    assert (await stack.post(stack.chat()))[0] == 400
    turn, _, decode = await collector.named(TURN, "prefill", "decode")
    # As the conventions have it: the client's mistake, and no success for who asked for it.
    assert (turn.status, turn.attributes["http.response.status_code"]) == ("unset", 400)
    assert (decode.status, decode.attributes["error.type"]) == ("error", "400")

    collector.spans.clear()
    assert (await stack.post({"model": "another"}))[0] == 404
    [refused] = await collector.named(TURN)
    assert refused.attributes["http.response.status_code"] == 404


async def test_what_the_client_does_not_sample_is_not_sent(
    collector: Collector, make_stack: MakeStack
) -> None:
    stack = await traced(make_stack, collector)
    trace, _, _ = CLIENT["traceparent"].rpartition("-")
    await stack.post(stack.chat(), headers={"traceparent": trace + "-00"})
    _, trace_id, _, flags = stack.decode.seen[0].headers["traceparent"].split("-")
    assert (trace_id, flags) == ("0af7651916cd43dd8448eb211c80319c", "00")
    await stack.post(stack.chat(), headers=CLIENT)
    await collector.named(TURN, "prefill", "decode")


async def test_a_turn_over_tls_says_so(collector: Collector, make_stack: MakeStack, tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.pair().write(tmp_path)
    tls = Tls(certificate_file=str(certificate), key_file=str(key))
    stack = await traced(make_stack, collector, tls=tls)
    url = f"https://127.0.0.1:{stack.router.port}/v1/chat/completions"
    async with stack.client.post(url, json=stack.chat(), ssl=authority.client()) as response:
        assert response.status == 200
    turn, _, decode = await collector.named(TURN, "prefill", "decode")
    assert turn.attributes["url.scheme"] == "https"
    assert decode.attributes["url.full"] == stack.decode.url + "/v1/chat/completions"


async def test_a_collector_that_hangs_holds_nothing_up(
    collector: Collector, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither turns nor the router's end; and what does not fit into the queue is dropped."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.answers.clear()
    stack = await traced(make_stack, collector)
    await stack.post(stack.chat())
    await collector.asked.wait()
    for _ in range(10):
        assert (await stack.post(stack.chat()))[0] == 200
    await stack.router.stop()
    assert not collector.answers.is_set()
    assert len(collector.headers) == 1


async def test_a_collector_that_is_down_holds_nothing_up(collector: Collector, make_stack: MakeStack) -> None:
    stack = await traced(make_stack, collector)
    await collector.stop()
    for _ in range(3):
        assert (await stack.post(stack.chat()))[0] == 200
    await stack.router.stop()
    assert collector.spans == []


async def test_the_last_spans_are_sent_before_the_end(
    collector: Collector, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1000000")
    stack = await traced(make_stack, collector)
    await stack.post(stack.chat())
    await until(stack.idle, "the turn is over")
    assert collector.spans == []
    await stack.router.stop()
    await collector.named(TURN, "prefill", "decode")


def test_a_router_without_tracing_does_not_import_opentelemetry() -> None:
    script = "import sys, disagg_router.__main__; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
