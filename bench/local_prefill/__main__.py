"""`make bench-local-prefill`: all policies of `router.localPrefill` on simulated engines, by the router's own code.

Prints a table, writes build/reports/local-prefill.json and draws docs/benchmarks/local-prefill.png. A seed gives the same every time.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.local_prefill.compare import Result, compare
from bench.local_prefill.mixes import LITTLE_MEMORY, MIXES
from bench.local_prefill.picture import draw

_ROOT = Path(__file__).parents[2]
REPORT = _ROOT / "build" / "reports" / "local-prefill.json"
PICTURE = _ROOT / "docs" / "benchmarks" / "local-prefill.png"


def main(
    seed: Annotated[int, typer.Option(help="Of the clients' turns.")] = 1,
    picture: Annotated[Path, typer.Option(help="Where to draw.")] = PICTURE,
) -> None:
    """Compare where prompts are computed, in simulated time."""
    mixes = MIXES + LITTLE_MEMORY
    results = compare(seed, mixes)
    Console(width=130).print(_table(results))
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "seed": seed,
        "mixes": [asdict(mix) for mix in mixes],
        "results": [asdict(result) for result in results],
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    drawn = {mix.name for mix in MIXES}
    draw([result for result in results if result.mix in drawn], picture)
    Console().print(f"written: {REPORT}, {picture}", soft_wrap=True)


def _table(results: list[Result]) -> Table:
    table = Table(
        "mix",
        "policy",
        "turns",
        "TTFT mean",
        "p50",
        "p95",
        "gap mean",
        "p99",
        "max (ms)",
        "pauses",
        "on decode",
        "guard",
    )
    mix = None
    for result in results:
        if mix not in (None, result.mix):
            table.add_section()
        table.add_row(
            "" if result.mix == mix else result.mix,
            result.policy,
            str(result.turns),
            *(f"{value:.0f}" for value in (result.ttft_mean, result.ttft_p50, result.ttft_p95)),
            *(f"{value:.1f}" for value in (result.gap_mean, result.gap_p99, result.gap_max)),
            f"{result.pauses:.2f}",
            f"{result.on_decode:.0%}",
            "kept" if result.keeps_guard else "broken",
        )
        mix = result.mix
    return table


if __name__ == "__main__":
    typer.run(main)
