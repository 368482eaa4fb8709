"""The conditions of a DisaggInference, shown while they change."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from disagg_operator.api.conditions import Reason
from e2e.demo.errors import DemoError

_TROUBLE_SECONDS = 60.0
"""How long trouble may last before the demo gives up: causes that pass, such as a pod that starts again, pass sooner."""
_ON_THE_WAY = frozenset(
    {Reason.PROGRESSING, Reason.PODS_STARTING, Reason.PODS_NOT_READY, Reason.ROLLOUT_IN_PROGRESS}
)
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Shown:
    """A condition as it is shown."""

    type: str
    status: str
    reason: str
    message: str


def conditions_of(inference: dict[str, Any]) -> tuple[Shown, ...]:
    """In the order of the object. Empty while the operator has not seen the object's present spec."""
    status = inference.get("status") or {}
    if status.get("observedGeneration") != inference["metadata"]["generation"]:
        return ()
    return tuple(
        Shown(c["type"], c["status"], c.get("reason", ""), c.get("message", ""))
        for c in status.get("conditions") or []
    )


def is_true(conditions: tuple[Shown, ...], type_: str) -> bool:
    """Whether the condition of that type is there and true."""
    return any(shown.type == type_ and shown.status == "True" for shown in conditions)


def in_trouble(conditions: tuple[Shown, ...]) -> bool:
    """Whether waiting alone will hardly help: it is stalled, or not ready for another reason than that it starts."""
    if is_true(conditions, "Stalled"):
        return True
    return any(c.type == "Ready" and c.status != "True" and c.reason not in _ON_THE_WAY for c in conditions)


class View(Protocol):
    """Shows conditions whenever they are read."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, conditions: tuple[Shown, ...], seconds: float) -> None:
        """Show `conditions`, `seconds` after the wait began."""


class LiveView:
    """A table that is redrawn in place, for terminals."""

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._live = Live(console=console, transient=False, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def update(self, conditions: tuple[Shown, ...], seconds: float) -> None:
        """Redraw the table."""
        table = Table(title=f"DisaggInference {self._name}, {seconds:.0f} s", title_justify="left")
        for heading in ("condition", "status", "reason", "message"):
            table.add_column(heading)
        if not conditions:
            table.caption = "the operator has not reported yet"
        colors = {"True": "green", "False": "yellow"}
        for shown in conditions:
            color = "red" if shown.type == "Stalled" else colors.get(shown.status, "default")
            table.add_row(shown.type, f"[{color}]{shown.status}[/]", shown.reason, shown.message)
        self._live.update(table, refresh=True)


class LineView:
    """A line for each change, for logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: tuple[Shown, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, conditions: tuple[Shown, ...], seconds: float) -> None:
        """Print what is new, and what is gone."""
        for shown in conditions:
            if shown not in self._before:
                said = f"{shown.type}={shown.status} {shown.reason}: {shown.message}".rstrip(": ")
                self._say(f"  {seconds:5.1f} s  {said}")
        now = {shown.type for shown in conditions}
        for shown in self._before:
            if shown.type not in now:
                self._say(f"  {seconds:5.1f} s  {shown.type} is gone")
        self._before = conditions


def wait_until_ready(
    read: Callable[[], dict[str, Any]],
    view: View,
    limit_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the object's conditions until `Ready` is true.

    Raises:
        DemoError: it stays in trouble, or the limit has passed; the text carries the conditions that are not true.
    """
    began = clock()
    trouble_since: float | None = None
    with view:
        while True:
            conditions, now = conditions_of(read()), clock()
            view.update(conditions, now - began)
            if is_true(conditions, "Ready"):
                return
            trouble_since = (trouble_since or now) if in_trouble(conditions) else None
            if trouble_since is not None and now - trouble_since >= _TROUBLE_SECONDS:
                raise DemoError(f"It has been in trouble for {_TROUBLE_SECONDS:.0f} s.\n{_told(conditions)}")
            if now - began >= limit_seconds:
                raise DemoError(f"It is not ready after {limit_seconds:.0f} s.\n{_told(conditions)}")
            sleep(_POLL_SECONDS)


def _told(conditions: tuple[Shown, ...]) -> str:
    if not conditions:
        return "  The operator has not reported anything about it: is the operator running?"
    wrong = [c for c in conditions if c.status != "True" or c.type in ("Stalled", "Reconciling")]
    return "\n".join(f"  {c.type}={c.status} {c.reason}: {c.message}" for c in wrong)
