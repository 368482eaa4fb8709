"""What follows a failed attempt."""

from __future__ import annotations

import pytest

from disagg_router.breaker import Blame
from disagg_router.recovery import Action, Attempt, Failure, RetryBudget, blame, next_action

F, A = Failure, Action

TABLE = [
    # failure, with prefill, decode failures, other decode, budget -> action
    (F.PREFILL_UNREACHABLE, True, 0, True, True, A.LOCAL_SAME),
    (F.PREFILL_REFUSED, True, 0, True, True, A.LOCAL_SAME),
    (F.PREFILL_BROKE, True, 1, False, False, A.LOCAL_SAME),
    (F.PREFILL_DEADLINE, True, 0, True, False, A.LOCAL_SAME),
    (F.DECODE_UNREACHABLE, True, 1, True, True, A.PAIR_OTHER),
    (F.DECODE_UNREACHABLE, True, 1, False, True, A.GIVE_UP),
    (F.DECODE_BROKE, True, 1, True, True, A.PAIR_OTHER),
    (F.DECODE_BROKE, True, 1, False, True, A.LOCAL_SAME),
    (F.DECODE_BROKE, False, 1, False, True, A.GIVE_UP),
    (F.DECODE_ERROR, True, 1, True, True, A.PAIR_OTHER),
    (F.DECODE_ERROR, True, 1, False, True, A.LOCAL_SAME),
    (F.DECODE_ERROR, True, 1, True, False, A.GIVE_UP),
    (F.DECODE_ERROR, True, 2, True, True, A.GIVE_UP),
    (F.DECODE_DEADLINE, True, 1, True, True, A.LOCAL_OTHER),
    (F.DECODE_DEADLINE, True, 1, False, True, A.LOCAL_SAME),
    (F.DECODE_DEADLINE, False, 1, True, True, A.GIVE_UP),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda c: f"{c[0].value}-{c[1:5]}")
def test_the_table(case: tuple[Failure, bool, int, bool, bool, Action]) -> None:
    failure, *facts, action = case
    assert next_action(failure, Attempt(*facts)) is action  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("other", [True, False])
def test_every_turn_ends(failure: Failure, other: bool) -> None:
    """Whatever fails again and again, a turn has few attempts."""
    with_prefill, decode_failures = True, 0
    for _attempt in range(4):
        decode_failures += not failure.of_prefill
        if failure.of_prefill and not with_prefill:
            return  # there is no prefill leg left that could fail
        action = next_action(failure, Attempt(with_prefill, decode_failures, other, True))
        if action is Action.GIVE_UP:
            return
        with_prefill = action is Action.PAIR_OTHER
    pytest.fail("the turn goes on for ever")


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_client_can_cause_is_not_held_against_an_engine(streamed: bool) -> None:
    assert blame(F.PREFILL_REFUSED, streamed=streamed) is Blame.NONE
    # A long answer that comes as a whole is late, and nothing is wrong with the engine.
    assert (blame(F.DECODE_DEADLINE, streamed=streamed) is Blame.NONE) == (not streamed)
    for failure in (F.PREFILL_UNREACHABLE, F.PREFILL_BROKE, F.DECODE_UNREACHABLE, F.DECODE_BROKE):
        assert blame(failure, streamed=streamed) is Blame.FULL
    for failure in (F.PREFILL_ERROR, F.DECODE_ERROR, F.PREFILL_DEADLINE):
        assert blame(failure, streamed=streamed) is Blame.SOME


def test_the_budget_is_a_share_of_turns_beyond_its_reserve() -> None:
    budget = RetryBudget(ratio=0.5, reserve=2)
    spent = 0
    for _ in range(100):
        budget.earn()
        if budget.left:
            budget.spend()
            spent += 1
    assert 50 <= spent <= 52


def test_quiet_times_do_not_save_up_retries() -> None:
    budget = RetryBudget(ratio=1, reserve=3)
    for _ in range(1000):
        budget.earn()
    spent = 0
    while budget.left:
        budget.spend()
        spent += 1
    assert spent == 3
