"""How much of a prompt is new to decode, as the router reckons it."""

from __future__ import annotations

import json

import pytest

from disagg_router.legs import parse
from disagg_router.local_prefill import new_tokens

SYSTEM = {"role": "system", "content": "rules " * 500}
ASKED = {"role": "user", "content": "a question"}
SAID = {"role": "assistant", "content": "an answer " * 300}
SHORT = {"role": "user", "content": "go on"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "found " * 400}


def chat(*messages: object, decode_has_it: bool) -> int | None:
    return new_tokens(parse(json.dumps({"messages": messages}).encode()), decode_has_it)


def size(*messages: object) -> int:
    return -(-sum(len(json.dumps(message)) for message in messages) // 3)


def test_what_comes_after_the_last_answer_is_new() -> None:
    assert chat(SYSTEM, ASKED, SAID, SHORT, decode_has_it=True) == size(SHORT)
    assert chat(SYSTEM, ASKED, SAID, TOOL, SHORT, decode_has_it=True) == size(TOOL, SHORT)
    assert chat(SYSTEM, ASKED, SAID, SHORT, SAID, SHORT, decode_has_it=True) == size(SHORT)
    assert chat(SYSTEM, ASKED, SAID, decode_has_it=True) == 0, "a message of the assistant's to go on with"


def test_all_is_new_to_an_engine_that_has_not_the_conversation() -> None:
    found = chat(SYSTEM, ASKED, SAID, SHORT, decode_has_it=False)
    assert found is not None
    assert found >= size(SYSTEM, ASKED, SAID, SHORT)
    first = chat(SYSTEM, ASKED, decode_has_it=True)
    assert first == size(SYSTEM, ASKED), "nor is anything of a first turn known"


def test_tools_of_a_first_turn_count() -> None:
    body = {"messages": [ASKED], "tools": [{"type": "function", "function": {"name": "f" * 3000}}]}
    found = new_tokens(parse(json.dumps(body).encode()), decode_has_it=False)
    assert found is not None
    assert found > 1000


def test_a_text_counts_as_a_whole() -> None:
    body = parse(json.dumps({"prompt": "x" * 3000}).encode(), "completions")
    for known in (True, False):
        found = new_tokens(body, decode_has_it=known)
        assert found is not None
        assert 1000 <= found < 1010


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]}],
        "no list",
        [1, 2],
    ],
)
def test_what_is_not_text_cannot_be_told(messages: object) -> None:
    assert new_tokens(parse(json.dumps({"messages": messages}).encode()), decode_has_it=True) is None


def test_a_stored_response_cannot_be_told() -> None:
    body = parse(b'{"input": "go on", "previous_response_id": "resp_1"}', "responses")
    assert new_tokens(body, decode_has_it=True) is None


def test_a_message_without_a_role_is_the_engines_to_judge() -> None:
    assert chat({"content": "a"}, decode_has_it=True) == size({"content": "a"})


@pytest.mark.parametrize("role", [b"5", b"null", b'["assistant"]', b'"\xff"'])
def test_a_role_that_is_none_is_the_engines_to_judge(role: bytes) -> None:
    message = b'{"role": %s, "content": "a"}' % role
    body = parse(b'{"messages": [%s]}' % message)
    assert new_tokens(body, decode_has_it=True) == -(-len(message) // 3)
