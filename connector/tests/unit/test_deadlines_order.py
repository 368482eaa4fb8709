from __future__ import annotations

import random

from disagg_connector.deadlines import Deadlines


def test_keys_come_when_their_time_has_come_the_earliest_first() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("late", 9.0)
    deadlines.set("early", 3.0)
    deadlines.set("middle", 5.0)
    assert deadlines.next() == 3.0
    assert deadlines.take(2.9) == []
    assert deadlines.take(5.0) == ["early", "middle"]
    assert deadlines.next() == 9.0
    assert len(deadlines) == 1


def test_a_later_wish_replaces_an_earlier_one() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 4.0)
    assert deadlines.take(3.0) == []
    assert deadlines.take(4.0) == ["a"]
    assert deadlines.next() is None


def test_what_is_dropped_does_not_come_and_may_come_back() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.drop("a")
    deadlines.drop("never there")
    assert deadlines.next() is None
    deadlines.set("a", 1.0)
    assert deadlines.take(1.0) == ["a"]
    assert deadlines.take(1.0) == []


def test_what_is_out_of_date_does_not_pile_up() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set("a", float(number % 7))
        if number % 3 == 0:
            deadlines.drop("a")
    assert len(deadlines._heap) < 200


def test_it_agrees_with_a_plain_dictionary() -> None:
    random_ = random.Random(7)
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    for now in range(3000):
        key, when = random_.randrange(40), now + random_.choice([0.0, 1.0, 5.0, 90.0])
        if random_.random() < 0.3:
            deadlines.drop(key)
            plain.pop(key, None)
        else:
            deadlines.set(key, when)
            plain[key] = when
        if random_.random() < 0.2:
            due = sorted(key for key, when in plain.items() if when <= now)
            assert sorted(deadlines.take(now)) == due
            for key in due:
                del plain[key]
        assert deadlines.next() == min(plain.values(), default=None)
