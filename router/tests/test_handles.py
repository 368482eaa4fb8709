"""What decode keeps for the next turn: given out once, in time, and for the very tokens it was made of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.handles import Handle, Handles
from disagg_router.http1 import Address
from disagg_router.legs import handback

PREFILL = Backend("p-0", "prefill", "rev1", Address("10.0.0.1", 8000), 5700)
DECODE = Backend("d-0", "decode", "rev1", Address("10.0.0.2", 8000), 5700)
TOKENS = st.lists(st.integers(0, 5), max_size=12)


def handle(number: int = 0, tokens: list[int] | None = None) -> Handle:
    made = tokens if tokens is not None else [number]
    return Handle(DECODE, handback.Handback(msgspec.Raw(b"{}"), len(made), handback.digest(made)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# -- the store -----------------------------------------------------------------------------------------------

KEYS = st.sampled_from([b"a", b"b", b"c"])
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS),
    st.tuples(st.just("take"), KEYS),
    st.tuples(st.just("wait"), st.floats(0, 50)),
)


@given(steps=st.lists(STEPS, max_size=60), retention=st.floats(1, 100), room=st.integers(1, 3))
def test_handles_are_given_out_once_and_in_time_and_the_newest_only(
    steps: list[tuple[str, Any]], retention: float, room: int
) -> None:
    clock = Clock()
    store = Handles(clock, retention, max_entries=room)
    put: dict[bytes, tuple[float, Handle]] = {}
    made, given_out = 0, []
    for step, value in steps:
        if step == "wait":
            clock.now += value
        elif step == "put":
            made += 1
            put[value] = (clock.now, handle(made, [made]))
            store.put(value, put[value][1])
            assert len(store) <= room
        else:
            taken = store.take(value)
            newest = put.pop(value, None)
            if taken is not None:
                assert newest is not None
                assert taken is newest[1], "the conversation's newest, and never one of another"
                assert clock.now - newest[0] < retention, "decode still keeps it"
                given_out.append(taken.kv.digest)
    assert len(given_out) == len(set(given_out)), "once"


def test_a_handle_lives_shorter_than_decodes_retention() -> None:
    clock = Clock()
    store = Handles(clock, 480)
    for age, there in ((359.9, True), (360.0, False)):
        store.put(b"a", handle())
        clock.now += age
        assert (store.take(b"a") is not None) == there


def test_large_handles_push_older_ones_out() -> None:
    store = Handles(Clock(), 100, max_bytes=100)

    def large(number: int) -> Handle:
        params = msgspec.Raw(b'"%s"' % (b"x" * 38))
        return Handle(DECODE, handback.Handback(params, 1, handback.digest([number])))

    for number, key in enumerate((b"a", b"b", b"b", b"c")):
        store.put(key, large(number))
    assert store.take(b"a") is None
    assert store.take(b"b") == large(2)
    store.put(b"d", large(4))
    assert (store.take(b"c"), store.take(b"d")) == (large(3), large(4)), "what was taken has made room"


def test_what_is_over_is_dropped_when_something_new_comes() -> None:
    clock = Clock()
    store = Handles(clock, 100)
    for key in (b"a", b"b"):
        store.put(key, handle())
    clock.now = 75
    store.put(b"c", handle())
    assert len(store) == 1


@pytest.mark.parametrize(
    ("backends", "readable"),
    [
        ((DECODE,), True),
        ((), False),
        ((replace(DECODE, ready=False),), False),
        ((replace(DECODE, terminating=True),), False),
        ((replace(DECODE, leaving=True),), True),
        ((replace(DECODE, address=Address("10.0.0.3", 8000)),), False),
    ],
)
def test_it_is_readable_while_its_engine_is_there(backends: tuple[Backend, ...], readable: bool) -> None:
    assert handle().readable(backends, PREFILL) == readable


def test_another_revision_does_not_read_it() -> None:
    assert not handle().readable((DECODE,), replace(PREFILL, revision="rev2"))


def test_the_blocks_of_handles_that_could_be_used_are_counted() -> None:
    clock = Clock()
    store = Handles(clock, 100)
    assert store.blocks() == 0
    for key, blocks in ((b"a", 3), (b"b", 5), (b"b", 7)):
        store.put(key, Handle(DECODE, replace(handle().kv, blocks=blocks)))
        clock.now += 20
    assert store.blocks() == 3 + 7
    clock.now = 75
    assert store.blocks() == 7
    store.take(b"b")
    assert store.blocks() == 0


# -- the guard -----------------------------------------------------------------------------------------------


@given(kept=TOKENS.filter(bool), prompt=TOKENS)
def test_only_a_prompt_that_begins_with_the_very_tokens_continues(kept: list[int], prompt: list[int]) -> None:
    found = handback.continues(handle(0, kept).kv, prompt)
    assert found == (len(prompt) > len(kept) and prompt[: len(kept)] == kept)


@given(kept=TOKENS.filter(bool), more=TOKENS.filter(bool))
def test_the_prompt_that_goes_on_continues(kept: list[int], more: list[int]) -> None:
    assert handback.continues(handle(0, kept).kv, kept + more)


# -- decode's answer -----------------------------------------------------------------------------------------

LOCATED: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[5, 6]],
    "remote_engine_id": "92e2",
    "remote_request_id": "chatcmpl-abc-9deb0424",
    "remote_host": "10.0.0.2",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 4,
    "remote_blocks_expiry_time": 123.5,
    "transfer_mode": "pull",
}


def answered(params: Any = LOCATED, *, chat: bool = True, choices: int = 1, **changes: Any) -> bytes:
    prompt, output = changes.pop("prompt", [1, 2]), changes.pop("output", [3, 4, 5])
    choice: dict[str, Any] = {"index": 0, "text": "1.50", "token_ids": output}
    answer = {"id": "x", "choices": [choice] * choices, "kv_transfer_params": params, "usage": {"n": 1.50}}
    (answer if chat else choice)["prompt_token_ids"] = prompt
    return json.dumps({**answer, **changes}).encode()


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_says_which_tokens_its_kv_is_of(chat: bool) -> None:
    text, found = handback.split(legs.parse(b"{}"), answered(chat=chat))
    assert found is not None
    assert json.loads(bytes(found.params)) == LOCATED
    assert handback.continues(found, [1, 2, 3, 4, 9])
    assert not handback.continues(found, [1, 2, 3, 5, 9])
    assert not handback.continues(found, [1, 2, 3, 4])
    said = json.loads(text)
    assert said["kv_transfer_params"] is None
    assert said["usage"] == {"n": 1.5}
    assert said["choices"][0]["token_ids"] is None
    assert (said if chat else said["choices"][0])["prompt_token_ids"] is None


def test_the_client_keeps_the_tokens_that_it_asked_for() -> None:
    text, found = handback.split(legs.parse(b'{"return_token_ids": true}'), answered())
    assert found is not None
    assert json.loads(text)["choices"][0]["token_ids"] == [3, 4, 5]


@pytest.mark.parametrize(
    "content",
    [
        answered(None),
        answered({**LOCATED, "do_remote_decode": False}),
        answered({**LOCATED, "transfer_mode": "push"}),
        answered({**LOCATED, "remote_block_ids": [[]]}),
        answered({**LOCATED, "remote_num_tokens": 0}),
        answered({**LOCATED, "remote_num_tokens": 6}),
        answered({**LOCATED, "remote_request_id": None}),
        answered(prompt=None),
        answered(output=None),
        answered(output=["a"]),
        answered(output=[2**70]),
        answered(choices=2),
        answered(choices=0),
    ],
)
def test_answers_that_name_no_kv_are_passed_on_alone(content: bytes) -> None:
    text, found = handback.split(legs.parse(b"{}"), content)
    assert found is None
    assert json.loads(text)["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("named", "blocks"), [([[5, 6]], 2), ([[5], [6, 7]], 3), ([[5, 6], [6, 5]], 2), ([[5], []], 1)]
)
def test_an_answer_says_how_many_blocks_are_kept(named: list[list[int]], blocks: int) -> None:
    _, found = handback.split(legs.parse(b"{}"), answered({**LOCATED, "remote_block_ids": named}))
    assert found is not None
    assert found.blocks == blocks


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"choices": 1}', b"not json"])
def test_what_is_no_answer_is_passed_on_as_it_is(content: bytes) -> None:
    assert handback.split(legs.parse(b"{}"), content) == (content, None)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"token_ids": [1, 2], "features": None, "sampling_params": {}}, [1, 2]),
        ([{"token_ids": [1, 2]}], [1, 2]),
        ([{"token_ids": [1]}, {"token_ids": [2]}], None),
        ([], None),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, None),
        ({"token_ids": "1"}, None),
        ({}, None),
        (7, None),
    ],
)
def test_rendered_prompts_are_read(answer: Any, tokens: list[int] | None) -> None:
    assert handback.rendered(json.dumps(answer).encode()) == tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ('{"prompt": [1, 2]}', [1, 2]),
        ('{"prompt": "hi"}', None),
        ('{"prompt": [[1]]}', None),
        ('{"prompt": [18446744073709551616]}', None),
        ('{"prompt": [-1]}', None),
        ('{"messages": [], "prompt": [1]}', None),
        ("{}", None),
    ],
)
def test_prompts_of_tokens_need_no_rendering(body: str, tokens: list[int] | None) -> None:
    assert handback.prompt_in(legs.parse(body.encode())) == tokens


def test_what_an_engine_kept_is_gone_when_it_was_away() -> None:
    store = Handles(Clock(), 100.0)
    store.put(b"a", handle())
    assert store.engines([PREFILL, DECODE]) == 0
    assert store.engines([PREFILL, replace(DECODE, leaving=True)]) == 0
    assert store.engines([PREFILL, replace(DECODE, ready=False)]) == 1
    assert store.engines([PREFILL, DECODE]) == 0
    assert store.take(b"a") is None
