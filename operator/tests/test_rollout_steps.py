"""The planner of rollouts alone: numbers in, a step out."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_operator.rollout import RevisionState, Step, next_step

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def state(revision: str, prefill: int, decode: int, *, age: int = 0, complete: bool = False) -> RevisionState:
    return RevisionState(revision, T0 - timedelta(minutes=age), prefill, decode, complete)


@pytest.mark.parametrize(
    ("case", "revisions", "expected"),
    [
        ("nothing exists yet", [], Step("b", None)),
        ("the first comes up", [state("b", 0, 1)], Step("b", None)),
        ("the old one serves on", [state("a", 2, 2, age=9), state("b", 0, 0)], Step("a", "a")),
        ("before the new one exists", [state("a", 2, 2)], Step("a", "a")),
        (
            "the new one is complete",
            [state("a", 2, 2, age=9), state("b", 2, 2, complete=True)],
            Step("b", None),
        ),
        (
            "a dead one between two is dropped",
            [state("a", 2, 2, age=9), state("dead", 0, 0, age=5), state("b", 0, 0)],
            Step("a", "a"),
        ),
        (
            "one whose prefill never came up is dropped when another serves better",
            [state("a", 2, 2, age=9), state("half", 0, 2, age=5), state("b", 0, 0)],
            Step("a", "a"),
        ),
        ("decode alone still answers", [state("a", 0, 1, age=9), state("b", 0, 0)], Step("a", "a")),
        ("prefill alone does not", [state("a", 2, 0, age=9), state("b", 0, 0)], Step("b", None)),
        (
            "of equals the older is kept",
            [state("young", 1, 1, age=1), state("old", 1, 1, age=9), state("b", 0, 0)],
            Step("old", "old"),
        ),
        (
            "the new one serves better before it is complete",
            [state("a", 1, 1, age=9), state("b", 3, 3)],
            Step("b", "a"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_step(case: str, revisions: list[RevisionState], expected: Step) -> None:
    assert next_step("b", revisions) == expected


def test_a_revision_whose_decode_is_away_for_a_moment_is_kept() -> None:
    seen = [state("a", 1, 0, age=9), state("b", 0, 0)]
    assert next_step("b", seen, served="a") == Step("a", "a")
    assert next_step("b", seen, served=None) == Step("b", None)


states = st.lists(
    st.builds(
        RevisionState,
        revision=st.sampled_from("abcdef"),
        created=st.integers(0, 99).map(lambda minutes: T0 + timedelta(minutes=minutes)),
        prefill_ready=st.integers(0, 4),
        decode_ready=st.integers(0, 4),
        complete=st.booleans(),
    ),
    unique_by=lambda state: state.revision,
)


@given(states, st.none() | st.sampled_from("abcdef"))
def test_a_step_is_safe_whatever_is_seen(revisions: list[RevisionState], served: str | None) -> None:
    step = next_step("a", revisions, served)
    present = {state.revision: state for state in revisions}
    left = {name: state.strength for name, state in present.items() if name in ("a", step.keep)}
    assert step.keep is None or step.keep in present
    if "a" in present and present["a"].complete:
        assert step == Step("a", None)
        return
    best = max((state.strength for state in revisions if state.decode_ready), default=None)
    if best is not None:
        assert best in left.values(), "the best that serves is not dropped before the target is complete"
    elif served in present:
        assert served in left, "what served a moment ago is not dropped before anything else serves"


@given(states)
def test_a_step_does_not_depend_on_the_order_of_what_is_seen(revisions: list[RevisionState]) -> None:
    assert next_step("a", revisions) == next_step("a", revisions[::-1])
