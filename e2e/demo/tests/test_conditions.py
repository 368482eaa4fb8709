"""Waiting for Ready: what is shown, and when the demo gives up."""

from typing import Any

import pytest
from rich.console import Console

from e2e.demo.conditions import LineView, LiveView, conditions_of, wait_until_ready
from e2e.demo.errors import DemoError


def _inference(*conditions: tuple[str, str, str], generation: int = 1, observed: int = 1) -> dict[str, Any]:
    listed = [{"type": t, "status": s, "reason": r, "message": f"about {t}"} for t, s, r in conditions]
    return {
        "metadata": {"generation": generation},
        "status": {"observedGeneration": observed, "conditions": listed},
    }


STARTING = _inference(("Ready", "False", "PodsStarting"), ("Reconciling", "True", "Progressing"))
READY = _inference(("Ready", "True", "Ready"))
STALLED = _inference(("Ready", "False", "CrashLoop"), ("Stalled", "True", "CrashLoop"))


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _wait(*readings: dict[str, Any], limit: float = 300, lines: list[str] | None = None) -> FakeClock:
    """Give the readings one after the other and the last for ever."""
    clock, left = FakeClock(), list(readings)

    def read() -> dict[str, Any]:
        return left.pop(0) if len(left) > 1 else left[0]

    said = lines if lines is not None else []
    wait_until_ready(read, LineView(said.append), limit, clock=clock, sleep=clock.sleep)
    return clock


def test_each_change_is_told_once() -> None:
    lines: list[str] = []
    _wait(STARTING, STARTING, READY, lines=lines)
    assert [line.split("s  ", 1)[1] for line in lines] == [
        "Ready=False PodsStarting: about Ready",
        "Reconciling=True Progressing: about Reconciling",
        "Ready=True Ready: about Ready",
        "Reconciling is gone",
    ]


def test_conditions_of_an_older_spec_do_not_count() -> None:
    assert conditions_of(_inference(("Ready", "True", "Ready"), generation=2, observed=1)) == ()


def test_an_object_without_status_is_waited_for_and_the_operator_suspected() -> None:
    with pytest.raises(DemoError, match="is the operator running"):
        _wait({"metadata": {"generation": 1}}, limit=5)


def test_the_limit_is_kept_and_what_is_missing_is_told() -> None:
    with pytest.raises(DemoError, match=r"(?s)not ready after 5 s.*Ready=False PodsStarting: about Ready"):
        _wait(STARTING, limit=5)


@pytest.mark.parametrize("trouble", [STALLED, _inference(("Ready", "False", "ImagePullFailed"))])
def test_lasting_trouble_ends_the_wait_before_the_limit(trouble: dict[str, Any]) -> None:
    with pytest.raises(DemoError, match=r"(?s)in trouble for 60 s.*(CrashLoop|ImagePullFailed)"):
        _wait(trouble, limit=3600)


def test_trouble_that_passes_is_forgiven() -> None:
    half_a_stall = [STALLED] * 100
    assert _wait(*half_a_stall, STARTING, *half_a_stall, READY).now > 60


def test_the_live_table_shows_status_and_message() -> None:
    console = Console(width=120, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with LiveView("smollm2", console) as view:
        view.update(conditions_of(STALLED), 12)
    text = console.export_text()
    assert "smollm2" in text
    assert "CrashLoop" in text
    assert "about Stalled" in text
