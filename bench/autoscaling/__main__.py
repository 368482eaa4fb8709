"""`make sim`: rules that size the pools, on simulated engines.

Prints a table, writes build/reports/sim.json and draws docs/autoscaling/*.png. A seed gives the same every time, but for what a decision costs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.autoscaling.compare import GOAL, OURS, Outcome, Run, best_peer, compare
from bench.autoscaling.cost import decision_seconds
from bench.autoscaling.picture import draw_comparison, draw_runs
from bench.autoscaling.traces import traces

_ROOT = Path(__file__).parents[2]
REPORT = _ROOT / "build" / "reports" / "sim.json"
PICTURES = _ROOT / "docs" / "autoscaling"
_SHOWN = ("burst", "diurnal", "reuse collapse")
_RULES_SHOWN = (OURS, "llm-d token-aware", "Dynamo, both rules")


def main(
    seed: Annotated[int, typer.Option(help="Of the clients' conversations.")] = 1,
    pictures: Annotated[Path, typer.Option(help="Where to draw.")] = PICTURES,
) -> None:
    """Compare rules that size the pools, in simulated time."""
    runs: list[Run] = []
    outcomes: list[Outcome] = []
    for trace in traces(seed):
        of_trace = compare(trace)
        outcomes += [run.outcome for run in of_trace]
        runs += [run for run in of_trace if trace.name in _SHOWN and run.rule in _RULES_SHOWN]
    seconds = decision_seconds()
    console = Console(width=140)
    console.print(_table(outcomes))
    console.print(f"a decision at 64 pods: {seconds * 1e6:.0f} us")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(_report(seed, outcomes, seconds), indent=1) + "\n")
    pictures.mkdir(parents=True, exist_ok=True)
    draw_comparison(outcomes, pictures / "comparison.png")
    draw_runs(runs, pictures / "sizes.png")
    console.print(f"written: {REPORT}, {pictures}", soft_wrap=True)


def _report(seed: int, outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    found = []
    for outcome in outcomes:
        fields = asdict(outcome)
        if outcome.recovery is not None and isinf(outcome.recovery):
            fields["recovery"] = "never"
        found.append({key: round(v, 4) if isinstance(v, float) else v for key, v in fields.items()})
    goals = []
    for ours in (o for o in outcomes if o.rule == OURS):
        peer = best_peer([o for o in outcomes if o.trace == ours.trace], ours.attained)
        goals.append(
            {
                "trace": ours.trace,
                "attained": round(ours.attained, 4),
                "best peer": peer and peer.rule,
                "fewer replica-hours": peer and round(1 - ours.hours / peer.hours, 3),
            }
        )
    return {
        "seed": seed,
        "decision_microseconds_at_64_pods": round(seconds * 1e6),
        "goals": goals,
        "outcomes": found,
    }


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        "trace",
        "rule",
        "turns",
        "reuse",
        "in time",
        "TTFT p50",
        "p99 (s)",
        "P hours",
        "D hours",
        "hours",
        "changes",
        "recovery (s)",
    )
    trace = None
    for outcome in outcomes:
        if trace not in (None, outcome.trace):
            table.add_section()
        table.add_row(
            "" if outcome.trace == trace else outcome.trace,
            outcome.rule,
            str(outcome.turns),
            f"{outcome.reuse:.2f}",
            f"{outcome.attained:.2%}",
            f"{outcome.ttft_p50:.2f}",
            f"{outcome.ttft_p99:.2f}",
            f"{outcome.prefill_hours:.1f}",
            f"{outcome.decode_hours:.1f}",
            f"{outcome.hours:.1f}",
            str(outcome.changes),
            "" if outcome.recovery is None else f"{outcome.recovery:.0f}",
            style="bold" if outcome.attained >= GOAL else None,
        )
        trace = outcome.trace
    return table


if __name__ == "__main__":
    typer.run(main)
