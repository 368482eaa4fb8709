"""What a router tells of the conversations that it remembers, and whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg_router.config import Auth
from disagg_router.session import Memory, Placement
from router.tests.conftest import MakeStack, Stack, until
from router.tests.fake_engine import refuse
from router.tests.fake_upstream import World

KEY = "a-very-secret-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def guarded(make_stack: MakeStack, tmp_path: Path, **changes: Any) -> Stack:
    file = tmp_path / "api-keys"
    file.write_text(KEY)
    return await make_stack(auth=Auth(api_keys_file=str(file)), **changes)


async def ask(stack: Stack, query: str = "", headers: Any = HEADERS) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{stack.router.admin.port}/debug/sessions{query}"
    async with stack.client.get(url, headers=headers) as response:
        return response.status, await response.json()


async def turn(stack: Stack, session: str, text: str = "hello") -> None:
    headers = {**HEADERS, "X-Session-Id": session}
    status, _ = await stack.post(stack.chat(text), headers=headers)
    assert status == 200
    await until(stack.idle, "the turn is over")


async def test_conversations_are_listed_with_their_pods(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path)
    await turn(stack, "alice", "a prompt that nobody else may read")
    stack.ahead = 7.0
    await turn(stack, "bob")
    status, told = await ask(stack)
    assert status == 200
    assert told["remembered"] == 2
    bob, alice = told["sessions"]
    assert bob["age_seconds"] == 0
    assert alice == {
        "session": alice["session"],
        "revision": "rev1",
        "decode": "decode-0",
        "prefill": "prefill-0",
        "age_seconds": 7.0,
        "handle": False,
        "leaving": False,
    }
    assert len(bytes.fromhex(alice["session"])) == 16
    assert alice["session"] != bob["session"]
    for secret in (KEY, "alice", "nobody else"):
        assert secret not in str(told)


async def test_a_turn_that_engines_refuse_does_not_make_a_conversation_younger(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    stack = await guarded(make_stack, tmp_path)
    await turn(stack, "alice")
    stack.ahead = 30.0
    stack.decode.decode = stack.prefill.prefill = refuse(400, "too long")
    headers = {**HEADERS, "X-Session-Id": "alice"}
    assert (await stack.post(stack.chat("hello"), headers=headers))[0] == 400
    await until(stack.idle, "the turn is over")
    (alice,) = (await ask(stack))[1]["sessions"]
    assert alice["age_seconds"] == 30.0


@pytest.mark.parametrize("pod", ["decode-0", "prefill-0"])
async def test_a_conversation_that_has_to_move_says_so(
    make_stack: MakeStack, tmp_path: Path, pod: str
) -> None:
    stack = await guarded(make_stack, tmp_path)
    await turn(stack, "alice")
    stack.publish(*(replace(b, leaving=b.name == pod) for b in stack.backends))
    (alice,) = (await ask(stack))[1]["sessions"]
    assert (alice["decode"], alice["prefill"], alice["leaving"]) == ("decode-0", "prefill-0", True)


async def test_a_conversation_whose_kv_decode_keeps_says_so(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path, mode="BidirectionalPull", decode_retention_seconds=100)
    World("pull", back=True).install(stack)
    await turn(stack, "alice")
    (alice,) = (await ask(stack))[1]["sessions"]
    assert alice["handle"] is True
    stack.ahead = 100.0  # decode lets go of it
    (alice,) = (await ask(stack))[1]["sessions"]
    assert alice["handle"] is False


async def test_the_list_is_bounded_and_begins_with_the_latest(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path)
    for number in range(103):
        stack.ahead = float(number)
        await turn(stack, f"session-{number}")
    _, told = await ask(stack)
    assert told["remembered"] == 103
    assert [session["age_seconds"] for session in told["sessions"]] == list(range(100))
    _, told = await ask(stack, "?limit=2")
    assert [session["age_seconds"] for session in told["sessions"]] == [0, 1]
    _, told = await ask(stack, "?limit=10000")
    assert len(told["sessions"]) == 103


@pytest.mark.parametrize(
    "limit", ["0", "-1", "10001", "99999999999999999999999", "many", "", "1e3", "%D9%A3"]
)
async def test_another_limit_is_refused(make_stack: MakeStack, tmp_path: Path, limit: str) -> None:
    stack = await guarded(make_stack, tmp_path)
    status, told = await ask(stack, f"?limit={limit}")
    assert (status, told["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer nope"}, {"Authorization": KEY}])
async def test_without_a_key_nothing_is_told(make_stack: MakeStack, tmp_path: Path, headers: Any) -> None:
    stack = await guarded(make_stack, tmp_path)
    await turn(stack, "alice")
    status, told = await ask(stack, headers=headers)
    assert (status, told["error"]["code"]) == (401, "invalid_api_key")


async def test_a_router_without_keys_tells_nobody_and_says_what_to_do(stack: Stack) -> None:
    status, told = await ask(stack)
    assert (status, told["error"]["code"]) == (403, "api_keys_not_configured")
    assert "apiKeySecretRef" in told["error"]["message"]


async def test_clients_do_not_find_it_on_their_port(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = await guarded(make_stack, tmp_path)
    async with stack.client.get(stack.url + "/debug/sessions", headers=HEADERS) as response:
        assert response.status == 404


def test_what_is_over_is_not_listed() -> None:
    now = 0.0
    memory = Memory(lambda: now, ttl_seconds=10)
    memory.remember(b"old", Placement("r", "d", None))
    now = 5.0
    memory.remember(b"new", Placement("r", "d", None))
    assert [key for key, _, _ in memory.newest(10)] == [b"new", b"old"]
    now = 12.0
    assert memory.newest(10) == [(b"new", 7.0, Placement("r", "d", None))]
