"""What is learned of engines from measurements, good and bad, and how much of decode's time may be used."""

from __future__ import annotations

from random import Random

import pytest

from disagg_router.backlog import Backlog
from disagg_router.cost import Cost
from disagg_router.learned import (
    DECODE_FIXED_PRIOR,
    ENOUGH,
    IDLE_SECONDS,
    PAUSE_SECONDS,
    PREFILL_PRIOR,
    SHARE,
    Guard,
    Learned,
    Line,
    Mean,
)

NONSENSE = [float("nan"), float("inf"), float("-inf"), 0.0, -0.5]


def taught(truth: Cost, count: int = 100, noise: float = 0.0, seed: int = 1, longest: int = 4000) -> Line:
    random, line = Random(seed), Line(PREFILL_PRIOR)
    for _ in range(count):
        tokens = random.randint(50, longest)
        line.learn(tokens, truth.of(tokens) * random.lognormvariate(0, noise) if noise else truth.of(tokens))
    return line


@pytest.mark.parametrize("truth", [Cost(0.02, 2e-5), Cost(0.09, 1.3e-4), Cost(0.5, 5e-3)])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_is_measured_is_learned(truth: Cost, noise: float) -> None:
    line = taught(truth, noise=noise)
    for tokens in (200, 1000, 4000):
        assert line.cost().of(tokens) == pytest.approx(truth.of(tokens), rel=0.1 + noise)


def test_an_engine_that_has_become_faster_is_noticed() -> None:
    line = taught(Cost(0.5, 1e-3))
    for n in range(150):
        line.learn(100 + 20 * (n % 50), Cost(0.05, 1e-4).of(100 + 20 * (n % 50)))
    assert line.cost().of(500) == pytest.approx(0.1, rel=0.2)


def test_before_there_are_measurements_the_prior_holds() -> None:
    assert Line(PREFILL_PRIOR).cost().of(700) == pytest.approx(PREFILL_PRIOR.of(700))


@pytest.mark.parametrize("seconds", NONSENSE)
def test_what_is_no_measurement_is_ignored(seconds: float) -> None:
    line = taught(Cost(0.05, 1e-4))
    before = line.cost()
    assert not line.learn(100, seconds)
    assert (line.cost(), line.count) == (before, 100)
    mean = Mean()
    mean.learn(0.03)
    assert not mean.learn(seconds)
    assert mean.value == 0.03


@pytest.mark.parametrize("tokens", [float("nan"), float("inf"), -1.0])
def test_nor_is_a_number_of_tokens_that_cannot_be(tokens: float) -> None:
    line = Line(PREFILL_PRIOR)
    assert not line.learn(tokens, 0.1)
    assert line.count == 0


@pytest.mark.parametrize("seconds", [1e9, 1e-9])
def test_one_measurement_cannot_upset_the_rest(seconds: float) -> None:
    line = taught(Cost(0.05, 1e-4))
    before = line.cost().of(300)
    line.learn(300, seconds)
    assert line.cost().of(300) == pytest.approx(before, rel=0.4)
    mean = Mean()
    mean.learn(0.03)
    mean.learn(seconds)
    assert mean.value == pytest.approx(0.03, rel=0.07)


def test_costs_are_never_negative() -> None:
    falling = Line(PREFILL_PRIOR)
    for n in range(60):
        falling.learn(100 + n * 50, 1.0 - n * 0.015)
    through_zero = taught(Cost(0.0, 1e-3))
    for line in (falling, through_zero):
        cost = line.cost()
        assert cost.fixed >= 0
        assert cost.per_token > 0
        assert cost.of(1) > 0


def test_until_decode_is_known_a_token_costs_there_what_it_costs_on_prefill() -> None:
    learned = Learned()
    for n in range(60):
        learned.prefill.learn(100 * n, Cost(0.1, 2e-3).of(100 * n))
    costs = learned.costs()
    assert costs.decode.fixed == pytest.approx(DECODE_FIXED_PRIOR)
    assert costs.decode.per_token == pytest.approx(costs.prefill.per_token)
    for n in range(100):
        learned.learn_decode(10 * n, Cost(0.2, 5e-4).of(10 * n))
    assert learned.costs().decode.of(500) == pytest.approx(0.45, rel=0.1)


def test_enough_is_measured_when_prefill_and_its_hand_over_are() -> None:
    learned = Learned()
    for _ in range(ENOUGH):
        assert not learned.costs().measured
        learned.prefill.learn(100, 0.1)
        learned.learn_decode(100, 0.1)
    assert not learned.costs().measured
    for _ in range(ENOUGH):
        learned.hand_over.learn(100, 0.1)
    assert learned.costs().measured


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_decode_spends_what_it_has_saved_and_no_more() -> None:
    clock = Clock()
    guard = Guard(clock)
    assert guard.spare("d", 3, 0.03) == PAUSE_SECONDS
    guard.spend("d", PAUSE_SECONDS)
    assert guard.spare("d", 3, 0.03) == 0
    assert guard.spare("other", 3, 0.03) == PAUSE_SECONDS
    clock.now += 0.5
    assert guard.spare("d", 3, 0.03) == pytest.approx(0.5 * SHARE)
    clock.now += 3600
    assert guard.spare("d", 3, 0.03) == PAUSE_SECONDS


def test_a_pause_may_be_as_long_as_a_gap_that_is_there_anyhow() -> None:
    assert Guard(Clock()).spare("d", 1, 0.3) == 0.3


def test_an_engine_that_generates_for_nobody_has_more_time() -> None:
    guard = Guard(Clock())
    guard.spend("d", PAUSE_SECONDS)
    assert guard.spare("d", 0, 0.03) == IDLE_SECONDS


def test_a_backlog_is_what_came_before_less_what_is_done_of_it() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    assert backlog.ahead("p", 1e-3) == 0
    first, second = backlog.add("p", 1000), backlog.add("p", 500)
    assert backlog.ahead("p", 1e-3) == 1500
    assert backlog.ahead("other", 1e-3) == 0
    clock.now += 0.4
    assert backlog.ahead("p", 1e-3) == pytest.approx(1100)
    clock.now += 9
    assert backlog.ahead("p", 1e-3) == 500, "a slow first one hides none of the second"
    backlog.done(first)
    backlog.done(first)
    assert backlog.ahead("p", 1e-3) == 500
    clock.now += 0.1
    assert backlog.ahead("p", 1e-3) == pytest.approx(400)
    third = backlog.add("p", 100)
    backlog.done(third)
    backlog.done(second)
    assert backlog.ahead("p", 1e-3) == 0
    clock.now += 5
    backlog.add("p", 100)
    assert backlog.ahead("p", 1e-3) == 100, "an engine that was idle has done nothing of it beforehand"
