"""Paths, methods, health and errors of the clients' port, and the admin port."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pytest

from router.tests.conftest import MODEL, Stack
from router.tests.wire import connect

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nope", 404, "unknown_url"),
        ("POST", "/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", CHAT, 405, None),
        ("PUT", CHAT, 405, None),
        ("POST", "/health", 405, None),
        ("DELETE", "/v1/models", 405, None),
        ("HEAD", CHAT, 405, None),
        ("TRACE", "/health", 405, None),
        ("DELETE", "/v1/models/test/model", 405, None),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/modelsx", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 501, "unsupported_endpoint"),
        ("POST", "/v1/audio/speech", 501, "unsupported_endpoint"),
        ("GET", "/v1/responses/resp_1", 501, "unsupported_endpoint"),
        ("POST", "/v1/responses/resp_1/cancel", 501, "unsupported_endpoint"),
        ("GET", "/v1/responses", 405, None),
        ("POST", "/v1/batches", 501, "unsupported_endpoint"),
        ("POST", "/v1/messages", 501, "unsupported_endpoint"),
        ("POST", "/v1/load_lora_adapter", 501, "unsupported_endpoint"),
        ("POST", "/sleep", 404, "unknown_url"),
        ("POST", "/reset_prefix_cache", 404, "unknown_url"),
    ],
)
async def test_wrong_paths_and_methods(
    stack: Stack, method: str, path: str, status: int, code: str | None
) -> None:
    async with stack.client.request(method, stack.url + path) as response:
        assert response.status == status
        assert ("allow" in response.headers) == (status == 405)
        if method == "HEAD":
            return
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code


async def test_a_body_that_is_not_json_by_its_type_is_a_415(stack: Stack) -> None:
    for headers in (
        {"content-type": "text/plain"},
        {"content-encoding": "gzip", "content-type": "application/json"},
    ):
        async with stack.client.post(stack.url + CHAT, data=b"{}", headers=headers) as response:
            assert response.status == 415
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    data = json.dumps(stack.chat()).encode()
    async with stack.client.post(stack.url + CHAT, data=data, headers=headers) as response:
        assert response.status == 200


async def test_a_body_over_the_limit_is_a_413(stack: Stack) -> None:
    status, answer = await stack.post(stack.chat("x" * 5_000_000))
    assert status == 413
    assert "4194304 bytes" in answer["error"]["message"]
    assert stack.decode.seen == []


async def test_the_models_list_needs_no_engine(stack: Stack) -> None:
    await stack.decode.stop()
    async with stack.client.get(stack.url + "/v1/models") as response:
        answer = await response.json()
    assert answer["object"] == "list"
    assert [(m["id"], m["object"]) for m in answer["data"]] == [(MODEL, "model")]


@pytest.mark.parametrize(
    "path", ["/v1/models/test/model", "/v1/models/test%2Fmodel", "/v1/models/test%2fmodel"]
)
async def test_one_model_is_found_however_its_name_is_written(stack: Stack, path: str) -> None:
    async with connect(stack.router.port) as client:
        await client.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        status, _, body = await client.answer()
    assert status == 200
    assert json.loads(body)["id"] == MODEL


async def test_the_openai_client_finds_the_model(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")
        with pytest.raises(openai.APIStatusError) as caught:
            await client.embeddings.create(model=MODEL, input="hi")
        assert caught.value.status_code == 501
        assert "embedding" in caught.value.message


async def test_head_and_options_are_answered_without_a_body(stack: Stack) -> None:
    for method, path, allow in (
        ("HEAD", "/health", None),
        ("HEAD", "/v1/models", None),
        ("HEAD", "/v1/models/test/model", None),
        ("OPTIONS", "/v1/models", "GET, HEAD, OPTIONS"),
        ("OPTIONS", CHAT, "POST, OPTIONS"),
    ):
        async with stack.client.request(method, stack.url + path) as response:
            assert response.status == 200
            assert response.headers.get("allow") == allow
            assert await response.read() == b""
    assert not stack.decode.seen


async def test_health_needs_a_pair_and_says_what_is_missing(stack: Stack) -> None:
    async with stack.client.get(stack.url + "/health") as response:
        assert response.status == 200
    prefill, decode = stack.backends
    stack.publish(prefill, replace(decode, revision="other"))
    async with stack.client.get(stack.url + "/health") as response:
        assert response.status == 503
        assert "no revision has both" in (await response.json())["error"]["message"]
        assert "retry-after" in response.headers


async def test_metrics_are_on_both_ports_and_no_series_outlives_its_pod(stack: Stack) -> None:
    await stack.post(stack.chat())
    for url in (stack.url, f"http://127.0.0.1:{stack.router.admin.port}"):
        async with stack.client.get(url + "/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
        assert 'disagg_router_requests_total{code="200",endpoint="chat"} 1.0' in text
        assert 'pod="decode-0"' in text
    stack.publish(stack.backends[0])
    async with stack.client.get(stack.url + "/metrics") as response:
        assert "decode-0" not in await response.text()


async def test_the_admin_port_tells_alive_from_ready(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.router.admin.port}"

    async def status(path: str) -> int:
        async with stack.client.get(url + path) as response:
            return response.status

    assert (await status("/healthz"), await status("/readyz")) == (200, 200)
    stack.publish()  # no engines: still ready, the 503s come with a reason
    assert await status("/readyz") == 200
    stack.router.fleet.synced = False
    assert (await status("/healthz"), await status("/readyz")) == (200, 503)
    stack.router.fleet.synced = True
    stack.router.admin.draining = True
    assert (await status("/healthz"), await status("/readyz")) == (200, 503)


async def test_refusals_of_the_http_core_have_the_apis_shape(stack: Stack) -> None:
    async with connect(stack.router.port) as client:
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n")
        status, _, body = await client.answer()
    assert status == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert stack.metric("disagg_router_requests_total", endpoint="refused", code="400") == 1
