"""The work queue, on a clock of our own."""

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_operator.queue import Backoff, WorkQueue


class Handle:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due, self.callback, self.cancelled = due, callback, False

    def cancel(self) -> None:
        self.cancelled = True

    def when(self) -> float:
        return self.due


class Clock:
    """Timers that go off when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Handle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Handle:
        handle = Handle(self.now + delay, callback)
        heapq.heappush(self._heap, (handle.due, next(self._order), handle))
        return handle

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, handle = heapq.heappop(self._heap)
            if not handle.cancelled:
                handle.callback()
        self.now = end


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock, Backoff(first=1, longest=60, jitter=0))


async def test_a_key_waits_once_however_often_it_is_named(queue: WorkQueue[str]) -> None:
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert len(queue) == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]


async def test_a_key_is_not_handed_out_twice_at_a_time(queue: WorkQueue[str]) -> None:
    queue.add("a")
    key = await queue.get()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0, "it waits until its worker is done"
    queue.done(key)
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_delayed_key_comes_when_it_is_due(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add("a", after=5)
    clock.advance(4.9)
    assert len(queue) == 0
    clock.advance(0.2)
    assert await queue.get() == "a"


async def test_the_earliest_of_several_wishes_counts(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add("a", after=300)
    queue.add("a", after=5)
    queue.add("a", after=100)
    clock.advance(5)
    assert await queue.get() == "a"
    queue.done("a")
    clock.advance(1000)
    assert len(queue) == 0, "the other wishes are fulfilled by this pass"


async def test_a_pass_that_begins_fulfils_earlier_wishes(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add("a", after=5)
    queue.add("a")
    await queue.get()
    queue.done("a")
    clock.advance(1000)
    assert len(queue) == 0


async def test_a_wish_of_the_running_pass_is_kept(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add("a")
    await queue.get()
    queue.add("a", after=5)
    queue.done("a")
    clock.advance(5)
    assert len(queue) == 1


async def test_failures_wait_longer_and_longer_until_a_success(queue: WorkQueue[str]) -> None:
    assert [queue.retry("a") for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    queue.succeeded("a")
    assert queue.retry("a") == 1


async def test_a_failed_key_is_tried_at_once_if_an_event_names_it(
    queue: WorkQueue[str], clock: Clock
) -> None:
    for _ in range(7):
        queue.retry("a")
    queue.add("a")
    assert await queue.get() == "a"


def test_backoff_is_spread() -> None:
    waits = {Backoff(first=10, jitter=0.1).seconds(1) for _ in range(20)}
    assert len(waits) > 1
    assert all(9 <= wait <= 11 for wait in waits)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from([0.0, 1.0, 5.0])),
        st.tuples(st.just("work"), st.just(""), st.just(0.0)),
        st.tuples(st.just("done"), st.sampled_from("abc"), st.just(0.0)),
        st.tuples(st.just("advance"), st.just(""), st.sampled_from([0.5, 2.0, 10.0])),
    ),
    max_size=40,
)


@given(actions)
async def test_no_wish_is_lost_and_no_key_is_worked_on_twice(history: list[tuple[str, str, float]]) -> None:
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    working: set[str] = set()
    unfulfilled: set[str] = set()
    for what, key, number in history:
        if what == "add":
            queue.add(key, number)
            unfulfilled.add(key)
        elif what == "work" and len(queue):
            got = await queue.get()
            assert got not in working
            working.add(got)
            unfulfilled.discard(got)
        elif what == "done" and key in working:
            working.discard(key)
            queue.done(key)
        elif what == "advance":
            clock.advance(number)
    for key in working:
        queue.done(key)
    clock.advance(100)
    left = set()
    while len(queue):
        left.add(await queue.get())
    assert unfulfilled <= left
