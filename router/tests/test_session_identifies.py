"""How a conversation is recognised from one turn to the next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg_router import legs
from disagg_router.http1 import Headers
from disagg_router.session import Memory, Placement, Session, identify

SYSTEM = {"role": "system", "content": "You are terse."}
FIRST = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris."}
SECOND = {"role": "user", "content": "And its river?"}


def find(body: dict[str, Any], by: tuple[str, ...] = ("session_id",), **headers: str) -> Session:
    fields = Headers((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    return identify(fields, ("X-Session-Id", "X-Chat"), by, legs.parse(json.dumps(body).encode()))


def test_later_turns_have_the_root_of_the_first() -> None:
    first = find({"messages": [SYSTEM, FIRST]})
    later = find({"messages": [SYSTEM, FIRST, ANSWER, SECOND]})
    assert first.key == later.key
    assert (first.earlier_turn, later.earlier_turn) == (False, True)


def test_stripped_reasoning_and_changed_answers_do_not_move_a_conversation() -> None:
    told = find({"messages": [SYSTEM, FIRST, {**ANSWER, "reasoning": "let me think"}, SECOND]})
    stripped = find(
        {"messages": [SYSTEM, FIRST, {**ANSWER, "content": "It is Paris."}, SECOND], "temperature": 0}
    )
    assert told.key == stripped.key


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [FIRST]},
        {"messages": [{**SYSTEM, "content": "You are verbose."}, FIRST]},
        {"messages": [SYSTEM, SECOND]},
        {"messages": [{"role": "developer", "content": "You are terse."}, FIRST]},
        {"prompt": "What is the capital of France?"},
    ],
)
def test_other_roots_are_other_conversations(other: dict[str, Any]) -> None:
    assert find(other).key != find({"messages": [SYSTEM, FIRST]}).key


def test_a_configured_header_names_the_conversation_whatever_the_body() -> None:
    one = find({"messages": [FIRST]}, x_session_id="abc")
    two = find({"messages": [SECOND]}, X_Session_Id="abc", x_chat="other")
    assert one == two
    assert one.origin == "header"
    assert find({"messages": [FIRST]}, x_session_id="abd").key != one.key
    assert find({"messages": [FIRST]}, x_chat="abc").key != one.key


def test_an_empty_header_names_nothing() -> None:
    assert find({"messages": [FIRST]}, x_session_id="").origin == "root"


def test_fields_of_the_body_name_the_conversation_too() -> None:
    one = find({"messages": [FIRST], "session_id": "abc"})
    assert one.origin == "body"
    assert one.key == find({"messages": [SECOND], "session_id": "abc"}).key
    # A cache key may be shared by many conversations: it only adds to the root.
    shared = find({"messages": [FIRST], "prompt_cache_key": "abc"})
    assert shared.key != find({"messages": [SECOND], "prompt_cache_key": "abc"}).key
    assert shared.key != find({"messages": [FIRST]}).key


def test_the_user_field_does_not_gather_all_of_a_users_conversations() -> None:
    assert find({"messages": [FIRST], "user": "u"}).key == find({"messages": [FIRST]}).key


@pytest.mark.parametrize("field", ["user", "prompt_cache_key", "conversation"])
def test_a_configured_field_alone_names_the_conversation(field: str) -> None:
    by = ("session_id", field)
    one, two = [find({"messages": [said], field: "abc"}, by) for said in (FIRST, SECOND)]
    assert one == two
    assert one.origin == "body"
    assert find({"messages": [FIRST], field: "abd"}, by).key != one.key
    both = {"messages": [FIRST], field: "abc", "session_id": "s"}
    assert find(both, by).key == find({"messages": [SECOND], "session_id": "s"}).key, (
        "the first in order counts"
    )
    assert find(both, by, x_session_id="h").origin == "header"
    assert find({"messages": [FIRST], field: ""}, by).origin == "root"


def test_a_field_that_is_not_configured_names_nothing() -> None:
    said = {"messages": [FIRST], "session_id": "abc"}
    assert find(said, ()).key == find({"messages": [FIRST]}).key


def test_a_growing_prompt_keeps_its_name() -> None:
    prompt = "x" * 600
    assert find({"prompt": prompt}).key == find({"prompt": prompt + " and more"}).key
    assert find({"prompt": prompt}).key != find({"prompt": "y" + prompt}).key


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "a string"},
        {"messages": [1]},
        {"messages": [{"content": "no role"}]},
        {"messages": []},
        {"session_id": 7},
    ],
)
def test_bodies_that_decode_will_refuse_still_get_a_name(body: dict[str, Any]) -> None:
    assert len(find(body).key) == 16


def test_images_and_tool_results_are_part_of_the_root() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "what?"},
    ]
    one = find({"messages": [{"role": "user", "content": parts}]})
    parts[0] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    assert find({"messages": [{"role": "user", "content": parts}]}).key != one.key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def placement(n: int) -> Placement:
    return Placement("rev1", f"d-{n}", f"p-{n}")


def test_memory_recalls_the_last_placement_until_it_is_old() -> None:
    clock = Clock()
    memory = Memory(clock, ttl_seconds=10)
    memory.remember(b"a", placement(1))
    memory.remember(b"a", placement(2))
    clock.now = 10
    assert memory.recall(b"a") == placement(2)
    clock.now = 10.1
    assert memory.recall(b"a") is None
    assert len(memory) == 0


def test_memory_forgets_the_conversation_that_was_silent_longest() -> None:
    memory = Memory(Clock(), max_entries=3)
    for n, key in enumerate((b"a", b"b", b"c")):
        memory.remember(key, placement(n))
    memory.remember(b"a", placement(9))
    memory.remember(b"d", placement(4))
    assert memory.recall(b"b") is None
    assert [memory.recall(key) is not None for key in (b"a", b"c", b"d")] == [True] * 3


def test_a_conversation_rests_from_the_end_of_its_turn() -> None:
    clock = Clock()
    memory = Memory(clock)
    assert memory.rested(b"a") is None
    memory.remember(b"a", placement(1))
    clock.now = 30
    memory.ended(b"a")
    clock.now = 35
    assert memory.rested(b"a") == 5
    assert memory.recall(b"a") == placement(1)


def test_a_turn_of_an_unknown_conversation_may_end() -> None:
    memory = Memory(Clock())
    memory.ended(b"a")
    assert memory.recall(b"a") is None
