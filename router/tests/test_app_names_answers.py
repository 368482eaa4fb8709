"""Every answer on the clients' port carries an X-Request-Id, whoever made it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from disagg_router.config import Auth
from router.tests.conftest import MODEL, MakeStack, Stack
from router.tests.wire import connect


def post(path: str, body: bytes, fields: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
    return head + fields + b"ID" + b"Content-Length: %d\r\n\r\n" % len(body) + body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: a\r\nID\r\n".encode()


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


CHAT = "/v1/chat/completions"
# By the status that they are answered with. ID stands where the client's own id may be.
REQUESTS = {
    "a turn": (200, post(CHAT, chat())),
    "tokens": (200, post("/tokenize", b'{"prompt": "hi"}')),
    "health": (200, get("/health")),
    "models": (200, get("/v1/models")),
    "a model": (200, get(f"/v1/models/{MODEL}")),
    "metrics": (200, get("/metrics")),
    "options": (200, get(CHAT, "OPTIONS")),
    "no JSON": (400, post(CHAT, b"nonsense")),
    "an option that cannot work": (400, post("/v1/responses", b'{"input": "hi", "background": true}')),
    "no Host": (400, b"GET /health HTTP/1.1\r\nID\r\n"),
    "no HTTP": (400, b"GET /health HTTP/1.1\r\nHost: a\r\nIDX-A: b\r\ncontent length: 5\r\n\r\n"),
    "another model": (404, post(CHAT, chat(model="nope"))),
    "another model's card": (404, get("/v1/models/nope")),
    "an unknown path": (404, get("/v1/nope")),
    "a wrong method": (405, get("/health", "DELETE")),
    "a large body": (413, post(CHAT, b"").replace(b"Content-Length: 0", b"Content-Length: 99999999")),
    "another kind of body": (415, post(CHAT, chat()).replace(b"application/json", b"text/plain")),
    "an expectation": (417, post(CHAT, chat(), b"Expect: miracles\r\n")),
    "a large head": (431, b"GET /health HTTP/1.1\r\nHost: a\r\nIDX-Large: " + b"x" * 20000 + b"\r\n\r\n"),
    "what is not served": (501, post("/v1/embeddings", b"{}")),
}


async def ids(port: int, request: bytes, status: int) -> list[bytes]:
    async with connect(port) as client:
        await client.send(request)
        answered, head, _ = await client.answer()
    assert answered == status
    return re.findall(rb"(?mi)^x-request-id: (.*)\r$", head)


@pytest.mark.parametrize(("status", "request_"), REQUESTS.values(), ids=REQUESTS.keys())
async def test_an_answer_carries_the_clients_id_or_a_new_one(
    stack: Stack, status: int, request_: bytes
) -> None:
    assert await ids(stack.router.port, request_.replace(b"ID", b"X-Request-Id: mine\r\n", 1), status) == [
        b"mine"
    ]
    new = []
    for replacement in (b"", b"X-Request-Id: not to be\trepeated\r\n"):
        new += await ids(stack.router.port, request_.replace(b"ID", replacement, 1), status)
    assert len(set(new)) == 2
    assert all(re.fullmatch(rb"[0-9a-f]{32}", found) for found in new)


async def test_so_does_one_to_who_has_no_key(make_stack: MakeStack, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key")
    stack = await make_stack(auth=Auth(api_keys_file=str(tmp_path / "keys")))
    request = get("/v1/models").replace(b"ID", b"X-Request-Id: mine\r\n")
    assert await ids(stack.router.port, request, 401) == [b"mine"]


async def test_so_does_one_that_no_engine_can_give(stack: Stack) -> None:
    stack.publish()
    for request in (get("/health"), post(CHAT, chat()), post("/tokenize", b"{}")):
        named = request.replace(b"ID", b"X-Request-Id: mine\r\n")
        assert await ids(stack.router.port, named, 503) == [b"mine"]
