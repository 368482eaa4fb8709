"""What a placer makes of a turn, and of what became of it."""

from __future__ import annotations

import json

import pytest

from disagg_router.backends import Backend
from disagg_router.backlog import Backlog
from disagg_router.config import LocalPrefill
from disagg_router.cost import Decision, Reason
from disagg_router.learned import ENOUGH, PAUSE_SECONDS, SHARE
from disagg_router.legs import parse
from disagg_router.pick import Choice
from disagg_router.placer import LEAST_PIECES, Lacking, Placer, lacking
from disagg_router.retention import FADES_SECONDS
from disagg_router.session import Placement
from router.tests.conftest import backend

D, P = backend("decode", 0, 1), backend("prefill", 0, 2)
BODY = parse(
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": "x" * 3000},
                {"role": "assistant", "content": "y" * 3000},
                {"role": "user", "content": "go on"},
            ]
        }
    ).encode()
)
ALL, NEW = 2000, 20


def lacks(last: Placement | None, holder: Backend | None = None, asks: bool = False) -> tuple[bool, bool]:
    """Whether decode, and whether prefill, lacks all of it and not the new message only."""
    found = lacking(BODY, last, 5.0, Choice(D, P, holder, "session", "session"), asks)
    assert found is not None
    assert found.whole > ALL
    assert found.rested == (5.0 if found.decode < NEW else None)
    for tokens in (found.decode, found.prefill):
        assert tokens < NEW or tokens > ALL
    return found.decode > ALL, found.prefill > ALL


def test_engines_lack_what_is_new_to_them() -> None:
    assert lacks(None) == (True, True)
    assert lacks(Placement("rev1", D.name, P.name)) == (False, False)
    assert lacks(Placement("rev1", D.name, "prefill-9")) == (False, True)
    assert lacks(Placement("rev1", D.name, None)) == (False, True)
    assert lacks(Placement("rev1", "decode-9", P.name)) == (True, False)


def test_prefill_does_not_lack_what_it_can_ask_for() -> None:
    elsewhere = Placement("rev1", D.name, "prefill-9")
    assert lacks(elsewhere, holder=D, asks=True) == (False, False)
    assert lacks(elsewhere, holder=D, asks=False) == (False, True)
    assert lacks(elsewhere, holder=None, asks=True) == (False, True)


def test_what_has_images_cannot_be_told() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    body = parse(json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode())
    assert lacking(body, None, None, Choice(D, P, None, "home", "home"), False) is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def placer(clock: Clock, settings: LocalPrefill | None = LocalPrefill(512, "Auto")) -> Placer:  # noqa: B008 frozen
    return Placer(settings, Backlog(clock), clock)


def place(placer: Placer, tokens: int, running: int = 1) -> Decision:
    return placer.place(Lacking(tokens, tokens, tokens), D.name, P.name, running)


def place_next(placer: Placer, rested: float, pod: str = D.name) -> Decision:
    """A small turn of a long conversation whose last one was on decode."""
    return placer.place(Lacking(100, 100, 20_000, rested), pod, P.name, running=1)


def measured(clock: Clock) -> Placer:
    """Prefill takes 0.1 s and 0.1 ms a token, handing over 0.1 s."""
    found = placer(clock)
    while not found.costs().measured:
        decision = place(found, 2000)
        found.learn(decision, first_piece=0.4, prefill_leg=0.3)
    return found


def test_what_decode_has_been_given_counts_against_the_next_turn() -> None:
    clock = Clock()
    auto = measured(clock)
    taken = 0.0
    while (decision := place(auto, 300)).placement == "decode":
        taken += 300 * auto.costs().prefill.per_token
    assert decision.reason == Reason.GUARD
    assert 0 < taken <= PAUSE_SECONDS
    clock.now += PAUSE_SECONDS / SHARE
    assert place(auto, 300).placement == "decode"


def test_an_idle_engine_is_given_more_and_owes_nothing_for_it() -> None:
    auto = measured(Clock())
    assert place(auto, 2000, running=1).reason == Reason.GUARD
    assert place(auto, 2000, running=0).placement == "decode"
    assert place(auto, 500, running=1).placement == "decode"


def test_each_step_is_learned_from_the_turns_that_show_it() -> None:
    auto = measured(Clock())
    on_decode = place(auto, 100)
    assert on_decode.placement == "decode"
    auto.learn(on_decode, first_piece=0.2, prefill_leg=None)
    auto.learn(on_decode, first_piece=None, prefill_leg=None)
    on_prefill = place(auto, 9000)
    assert on_prefill.placement == "prefill"
    auto.learn(on_prefill, first_piece=2.0, prefill_leg=None)  # decode was first: prefill's leg tells nothing
    auto.learn(on_prefill, first_piece=None, prefill_leg=1.0)
    assert auto.counts == {"prefill": ENOUGH + 1, "hand_over": ENOUGH, "decode": 1}


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0])
def test_nonsense_is_counted_and_changes_nothing(seconds: float) -> None:
    auto = measured(Clock())
    before = auto.costs()
    auto.learn(place(auto, 9000), first_piece=seconds, prefill_leg=seconds)
    auto.learn(place(auto, 100), first_piece=seconds, prefill_leg=None)
    auto.learn_gap(100, seconds)
    assert auto.costs() == before
    assert auto.gap == 0
    assert set(auto.ignored) == {"prefill", "hand_over", "decode", "gap"}


def used(clock: Clock) -> Placer:
    """Measured, also on decode, which takes 0.1 s for small turns."""
    found = measured(clock)
    for _ in range(ENOUGH):
        clock.now += 10
        decision = place_next(found, rested=1.0)
        assert decision.placement == "decode"
        found.learn(decision, first_piece=0.1, prefill_leg=None)
    return found


LATE = 2.0
"""Seconds; a prompt of 20,000 tokens takes about as long."""


def test_a_conversation_that_decode_had_dropped_tells_of_those_that_rest_as_long() -> None:
    clock = Clock()
    auto = used(clock)
    clock.now += 10
    auto.learn(place_next(auto, rested=8.0), first_piece=LATE, prefill_leg=None)
    assert auto.gone == 1
    dropped = place_next(auto, rested=9.0)
    assert (dropped.placement, dropped.new_tokens) == ("prefill", 20_000)
    kept = place_next(auto, rested=2.0)
    assert (kept.placement, kept.new_tokens) == ("decode", 100)
    assert place_next(auto, rested=9.0, pod="decode-9").placement == "decode"


def test_it_is_tried_again_when_some_time_has_passed() -> None:
    clock = Clock()
    auto = used(clock)
    clock.now += 10
    auto.learn(place_next(auto, rested=8.0), first_piece=LATE, prefill_leg=None)
    clock.now += 2 * FADES_SECONDS
    assert place_next(auto, rested=9.0).placement == "decode"


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.5])
def test_a_first_token_that_is_a_little_late_tells_nothing(seconds: float) -> None:
    clock = Clock()
    auto = used(clock)
    clock.now += 10
    auto.learn(place_next(auto, rested=8.0), first_piece=seconds, prefill_leg=None)
    assert auto.gone == 0


def test_a_late_first_token_of_a_short_conversation_tells_nothing() -> None:
    clock = Clock()
    auto = used(clock)
    clock.now += 10
    decision = auto.place(Lacking(100, 100, 200, 8.0), D.name, P.name, running=1)
    auto.learn(decision, first_piece=LATE, prefill_leg=None)
    assert auto.gone == 0


def test_what_waits_behind_a_conversation_that_was_gone_is_not_gone_itself() -> None:
    clock = Clock()
    auto = used(clock)
    clock.now += 10
    first, behind = place_next(auto, rested=60.0), place_next(auto, rested=2.0)
    assert first.placement == behind.placement == "decode"
    before = auto.costs(), auto.counts
    clock.now += LATE
    auto.learn(first, first_piece=LATE, prefill_leg=None)
    first_counted = auto.costs(), auto.counts
    assert first_counted != before
    auto.learn(behind, first_piece=LATE, prefill_leg=None)
    assert auto.gone == 1
    assert (auto.costs(), auto.counts) == first_counted, "nor is it what so few tokens cost"
    clock.now += 10
    assert place_next(auto, rested=5.0).placement == "decode"
    assert place_next(auto, rested=60.0).placement == "prefill"


def test_many_that_were_gone_at_once_do_not_make_an_engine_slow() -> None:
    """As after a restart of its container: what was sent before the first answer says no more than that one."""
    clock = Clock()
    auto = used(clock)
    clock.now += 100
    sent = [place_next(auto, rested=60.0) for _ in range(10)]
    clock.now += LATE
    for decision in sent:
        auto.learn(decision, first_piece=LATE, prefill_leg=None)
    clock.now += 2 * FADES_SECONDS
    auto.learn(place_next(auto, rested=110.0), first_piece=LATE, prefill_leg=None)
    assert auto.gone == 2


def test_an_engine_that_has_become_slow_is_not_taken_for_a_forgetful_one_for_ever() -> None:
    clock = Clock()
    auto = used(clock)
    for _ in range(400):
        clock.now += 120
        decision = place_next(auto, rested=1.0)
        if decision.placement == "decode":
            auto.learn(decision, first_piece=LATE, prefill_leg=None)
        else:
            auto.learn(decision, first_piece=LATE, prefill_leg=LATE - 0.1)
    found = auto.gone
    for _ in range(50):
        clock.now += 120
        decision = place_next(auto, rested=1.0)
        auto.learn(
            decision, first_piece=LATE, prefill_leg=None if decision.placement == "decode" else LATE - 0.1
        )
    assert auto.gone == found


def test_a_short_stream_says_nothing_of_gaps() -> None:
    auto = placer(Clock())
    auto.learn_gap(LEAST_PIECES - 1, 1.0)
    assert auto.gap == 0
    auto.learn_gap(LEAST_PIECES, 0.4)
    assert auto.gap == 0.4 / LEAST_PIECES


@pytest.mark.parametrize(
    ("settings", "reason"),
    [(None, Reason.DISABLED), (LocalPrefill(512), Reason.SMALL), (LocalPrefill(5), Reason.LARGE)],
)
def test_other_modes_learn_nothing(settings: LocalPrefill | None, reason: Reason) -> None:
    plain = placer(Clock(), settings)
    decision = place(plain, 100)
    assert decision.reason == reason
    plain.learn(decision, 0.1, 0.05)
    plain.learn_gap(100, 1.0)
    assert not plain.learns
    assert plain.gap == 0
    assert set(plain.counts.values()) == {0}
