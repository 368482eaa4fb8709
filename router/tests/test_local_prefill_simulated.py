"""Auto against the other ways, on simulated engines (bench/local_prefill).

Colocated engines are none of the ways that a router could choose, so they are not compared with here.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from bench.local_prefill.compare import COLOCATED, POLICIES, Result, compare
from bench.local_prefill.mixes import LITTLE_MEMORY, MIXES, Mix
from disagg_router.cost import Reason

MARGIN = 1.1
"""Times the mean TTFT of the best of the others that keep the guard."""


OTHERS = [policy for policy in POLICIES if policy not in ("Auto", COLOCATED)]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return compare(seed=1)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_auto_keeps_the_guard_and_is_never_much_later_than_the_best_that_does(
    mix: Mix, results: list[Result]
) -> None:
    found = {result.policy: result for result in results if result.mix == mix.name}
    auto = found["Auto"]
    assert auto.keeps_guard
    best = min(found[policy].ttft_mean for policy in OTHERS if found[policy].keeps_guard)
    assert auto.ttft_mean <= best * MARGIN


def test_auto_is_sooner_on_the_whole_than_any_other_that_keeps_the_guard(results: list[Result]) -> None:
    """Where another one does not, it is given what prefill takes: nobody may choose it there."""
    took = {(result.mix, result.policy): result.ttft_mean for result in results}
    allowed = {
        (result.mix, result.policy): result.ttft_mean
        if result.keeps_guard
        else took[result.mix, "always prefill"]
        for result in results
    }
    for policy in OTHERS:
        ratio = prod(took[mix.name, "Auto"] / allowed[mix.name, policy] for mix in MIXES) ** (1 / len(MIXES))
        assert ratio < 1, policy


def test_the_others_show_what_the_guard_is_for(results: list[Result]) -> None:
    assert not any(result.keeps_guard for result in results if result.policy == "always decode")


def test_auto_is_past_learning_and_goes_by_cost(results: list[Result]) -> None:
    for result in results:
        if result.policy == "Auto":
            by_cost = sum(
                count
                for decision, count in result.decisions.items()
                if decision.split()[1] in (Reason.CHEAPER, Reason.GUARD)
            )
            assert by_cost >= 0.9 * result.turns, result.mix


def test_what_decode_drops_is_noticed() -> None:
    """With engines that cannot hold all conversations, which is where a threshold goes by what is no longer true."""
    found = {result.policy: result for result in compare(1, LITTLE_MEMORY[1:])}
    assert found["Auto"].pauses <= found["Threshold 512"].pauses / 2
    assert found["Auto"].ttft_mean <= found["Threshold 512"].ttft_mean * MARGIN
    assert found["Auto"].ttft_mean <= found["always prefill"].ttft_mean


def test_a_seed_gives_the_same_every_time() -> None:
    short = (replace(MIXES[0], seconds=120),)
    assert compare(3, short) == compare(3, short)
    assert compare(3, short) != compare(4, short)
