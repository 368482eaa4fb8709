"""What a stream may begin with before it is an answer, however the network cuts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router.http1.upstream import COMMENTS, Prelude, _payload

EARLY = Prelude(b"response.created", b"response.in_progress")
CREATED = b'event: response.created\ndata: {"response":{"instructions":"a\\nb"}}\n\n'
PROGRESS = b'event: response.in_progress\ndata: {"response":{}}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'


def chunked(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)


def test_it_ends_with_the_first_byte_that_can_be_nothing_else() -> None:
    stream = CREATED + b": alive\n\n" + PROGRESS + DELTA
    early = len(stream) - len(DELTA)
    # The next event's name tells it apart only where it differs.
    shared = len(b"event: response.")
    for cut in range(len(stream) + 1):
        assert EARLY.covers(stream[:cut]) == (cut <= early + shared), stream[:cut]


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {}\n\n",
        b"event: response.created_later\ndata: {}\n\n",
        b"event: response.failed\ndata: {}\n\n",
        CREATED + b"data: [DONE]\n\n",
    ],
)
def test_other_events_are_answers(stream: bytes) -> None:
    assert not EARLY.covers(stream)


def test_without_names_only_comments_are_none() -> None:
    assert COMMENTS.covers(b": a\n\n: b")
    assert not COMMENTS.covers(CREATED)
    assert not COMMENTS.covers(b": a\n\nd")


@given(st.lists(st.sampled_from([CREATED, PROGRESS, DELTA, b": x\n\n", b"y" * 300]), max_size=6), st.data())
def test_chunks_are_taken_off_wherever_they_are_cut(events: list[bytes], data: st.DataObject) -> None:
    whole, payload = chunked(*events), b"".join(events)
    cut = data.draw(st.integers(0, len(whole)))
    assert payload.startswith(_payload(whole[:cut]))
    assert _payload(whole + b"0\r\n\r\n") == payload


def test_an_event_may_come_in_several_chunks_with_extensions() -> None:
    body = b"8;a=b\r\nevent: r\r\n%x\r\n%s\r\n" % (len(CREATED) - 8, CREATED[8:])
    assert _payload(body) == CREATED
