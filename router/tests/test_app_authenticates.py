"""A router with API keys: who gets in, and where the key goes no further."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import openai
import pytest

from disagg_router.config import Auth
from router.tests.conftest import MODEL, MakeStack, Stack
from router.tests.wire import connect

KEY = "a-very-secret-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def guarded(make_stack: MakeStack, tmp_path: Path) -> Stack:
    file = tmp_path / "api-keys"
    file.write_text(f"another-key\n{KEY}\n")
    return await make_stack(auth=Auth(api_keys_file=str(file)))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/metrics"),
        ("GET", "/v1/nope"),
        ("PUT", "/v1/chat/completions"),
        ("OPTIONS", "/v1/models"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/%68ealth"),
        ("POST", "/v1/embeddings"),
    ],
)
async def test_without_a_key_nothing_is_told(
    make_stack: MakeStack, tmp_path: Path, method: str, path: str
) -> None:
    stack = await guarded(make_stack, tmp_path)
    for authorization in (b"", b"Authorization: Bearer nope\r\n"):
        async with connect(stack.router.port) as client:
            await client.send(
                f"{method} {path} HTTP/1.1\r\nHost: a\r\n".encode()
                + authorization
                + b"Content-Length: 0\r\n\r\n"
            )
            status, head, body = await client.answer()
        assert status == 401
        assert b"www-authenticate: bearer" in head.lower()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
    assert not stack.decode.seen
    assert stack.metric("disagg_router_requests_total", endpoint="refused", code="401") == 2


async def test_a_key_opens_the_door_and_goes_no_further(
    make_stack: MakeStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stack = await guarded(make_stack, tmp_path)
    for path in ("/v1/chat/completions", "/tokenize"):
        status, _ = await stack.post(stack.chat(), path, headers=HEADERS)
        assert status == 200
    for seen in (*stack.prefill.seen, *stack.decode.seen):
        assert "authorization" not in seen.headers
        assert KEY not in json.dumps([seen.headers, seen.body])
    assert caplog.records
    assert KEY not in caplog.text + repr([vars(record) for record in caplog.records])


async def test_health_and_the_admin_port_need_none(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path)
    admin = f"http://127.0.0.1:{stack.router.admin.port}"
    for url in (stack.url + "/health", *(admin + path for path in ("/healthz", "/readyz", "/metrics"))):
        async with stack.client.get(url) as response:
            assert response.status == 200


async def test_a_body_is_not_read_from_who_has_no_key(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path)
    async with connect(stack.router.port) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        status, _, _ = await client.answer()
    assert status == 401


async def test_the_openai_client_gets_in_with_its_key(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path)
    said = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=said)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "one two three"
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="nope", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
    assert caught.value.code == "invalid_api_key"
