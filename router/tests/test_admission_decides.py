"""Who runs, who waits and who is next: the queue by itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router.admission import Admission, Refusal, Ticket


def arrive(queue: Admission, session: str, limit: int | None) -> Ticket:
    ticket = queue.arrive(session.encode(), limit)
    assert isinstance(ticket, Ticket)
    return ticket


def test_turns_start_at_once_up_to_the_limit_and_in_their_order_after_it() -> None:
    queue = Admission(10, 10)
    tickets = [arrive(queue, "s", 2) for _ in range(5)]
    assert [t.started for t in tickets] == [True, True, False, False, False]
    queue.leave(tickets[0])
    assert queue.start(2) == [tickets[2]]
    queue.leave(tickets[1])
    queue.leave(tickets[2])
    assert queue.start(2) == tickets[3:]


def test_five_hundred_turns_of_one_session_cost_another_one_place() -> None:
    queue = Admission(1000, 500)
    running = arrive(queue, "greedy", 1)
    for _ in range(500):
        arrive(queue, "greedy", 1)
    modest = [arrive(queue, "modest", 1) for _ in range(3)]
    order = []
    for _ in range(6):
        queue.leave(running)
        [running] = queue.start(1)
        order.append(running.session)
    assert order == [b"greedy", b"modest"] * 3
    assert all(ticket.started for ticket in modest)


def test_a_session_gains_nothing_by_leaving_and_coming_back() -> None:
    queue = Admission(100, 100)
    running = arrive(queue, "x", 1)
    waiting = {name: arrive(queue, name, 1) for name in "abc"}
    queue.leave(waiting["b"])
    arrive(queue, "b", 1)
    order = []
    for _ in range(3):
        queue.leave(running)
        [running] = queue.start(1)
        order.append(running.session)
    assert order == [b"a", b"c", b"b"]


def test_waiting_is_bounded_for_a_session_and_for_all() -> None:
    queue = Admission(5, 3)
    arrive(queue, "a", 1)
    for _ in range(3):
        arrive(queue, "a", 1)
    assert queue.arrive(b"a", 1) is Refusal.SESSION_QUEUE_FULL
    first = arrive(queue, "b", 1)
    arrive(queue, "c", 1)
    assert queue.arrive(b"d", 1) is Refusal.QUEUE_FULL
    queue.leave(first)
    arrive(queue, "d", 1)


def test_without_a_limit_all_start_and_a_lower_one_stops_nobody() -> None:
    queue = Admission(5, 5)
    running = [arrive(queue, "a", None) for _ in range(4)]
    assert all(t.started for t in running)
    waiting = arrive(queue, "b", 2)
    for ticket in running[:2]:
        queue.leave(ticket)
        assert queue.start(2) == []
    queue.leave(running[2])
    assert queue.start(2) == [waiting]


def test_no_queue_at_all_is_possible() -> None:
    queue = Admission(0, 1)
    arrive(queue, "a", 1)
    assert queue.arrive(b"b", 1) is Refusal.QUEUE_FULL


def test_leaving_twice_is_leaving_once() -> None:
    queue = Admission(5, 5)
    running, waiting = arrive(queue, "a", 1), arrive(queue, "a", 1)
    for ticket in (waiting, waiting, running, running):
        queue.leave(ticket)
    assert (queue.running, queue.waiting) == (0, 0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 4)),
        st.tuples(st.just("leave"), st.integers(0, 60)),
        st.tuples(st.just("limit"), st.integers(0, 5)),
    ),
    max_size=120,
)


@given(EVENTS)
def test_the_books_are_kept_whatever_happens(events: list[tuple[str, int]]) -> None:
    queue, limit, tickets = Admission(12, 4), 2, list[Ticket]()
    for event, number in events:
        if event == "arrive":
            outcome = queue.arrive(b"%d" % number, limit)
            if isinstance(outcome, Ticket):
                tickets.append(outcome)
        elif event == "leave" and tickets:
            queue.leave(tickets.pop(number % len(tickets)))
        elif event == "limit":
            limit = number
        before = queue.running
        started = queue.start(limit)
        running = [t for t in tickets if t.started]
        waiting = [t for t in tickets if not t.started]
        assert (queue.running, queue.waiting) == (len(running), len(waiting))
        assert queue.running <= max(limit, before), "more started than may run"
        assert not (waiting and queue.running < limit), "somebody waits beside a free place"
        assert len(waiting) <= 12
        assert max(Counter(t.session for t in waiting).values(), default=0) <= 4
        for ticket in started:
            older = [t for t in waiting if t.session == ticket.session]
            assert all(tickets.index(ticket) < tickets.index(t) for t in older), (
                "a session's turns keep order"
            )


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_session_waits_for_the_others_once_each(sessions: int) -> None:
    queue = Admission(1000, 100)
    running = arrive(queue, "x", 1)
    for name in range(sessions):
        for _ in range(50):
            arrive(queue, f"greedy {name}", 1)
    mine, waited = arrive(queue, "mine", 1), 0
    while not mine.started:
        queue.leave(running)
        [running] = queue.start(1)
        waited += 1
    assert waited == sessions + 1
