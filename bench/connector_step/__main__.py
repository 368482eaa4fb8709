"""`make bench-connector`: what the connector's scheduler side costs an engine, and how soon its control port answers.

Measures in the engine bundle's interpreter, against vLLM's real block pool, if the bundle is there, else against the
pool of the connector's tests. Prints tables and writes build/reports/connector_step.json. `--before FOLDER` measures
another checkout's connector/src too, in the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from e2e.images.engine_bundle import current_bundle_name, find_interpreter
from e2e.images.engine_cache import cache_root

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "connector" / "src"
REPORT = ROOT / "build" / "reports" / "connector_step.json"
GOAL_US = 50.0
"""What a step may cost with 256 running requests, at the median."""


def interpreter() -> Path:
    """The engine bundle's, or this one."""
    bundle = cache_root() / current_bundle_name(find_interpreter()) / "bin" / "python3"
    return bundle if bundle.exists() else Path(sys.executable)


def run(module: str, argument: str, sources: Path) -> dict[str, Any]:
    """A measuring module's JSON, with the connector of `sources`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(sources), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [str(interpreter()), "-m", module, argument]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def step_table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="CPU time of the connector's hooks in an engine step, microseconds")
    for column in ("scenario", "write-back", "turns", "engine"):
        table.add_column(column)
    for name in results:
        table.add_column(f"{name} median", justify="right")
        table.add_column(f"{name} p99", justify="right")
    runs = [result["runs"] for result in results.values()]
    for same in zip(*runs, strict=True):
        for engine in ("prefill", "decode"):
            figures = [f"{one[engine]['step_us'][key]:.1f}" for one in same for key in ("median", "p99")]
            first = same[0]
            table.add_row(first["scenario"], first["writeback"], str(first["turns"]), engine, *figures)
    return table


def turn_table(result: dict[str, Any]) -> Table:
    table = Table(title="Hooks of a turn's beginning and end while as many others run, microseconds")
    for column in ("write-back", "turns", "engine", "hook", "median", "p99"):
        table.add_column(column, justify="right" if column in ("median", "p99") else "left")
    for one in result["runs"]:
        if one["scenario"] != "churning":
            continue
        for engine in ("prefill", "decode"):
            for hook, spread in one[engine]["hooks_us"].items():
                if hook in ("arrived", "allocated", "finished"):
                    median, p99 = f"{spread['median']:.1f}", f"{spread['p99']:.1f}"
                    table.add_row(one["writeback"], str(one["turns"]), engine, hook, median, p99)
    return table


def answer_table(answers: dict[str, Any]) -> Table:
    table = Table(title="From a question on the control port to its answer, milliseconds")
    for column in ("the engine thread", "median", "p99", "most"):
        table.add_column(column, justify="left" if column == "the engine thread" else "right")
    for run_ in answers["runs"]:
        table.add_row(run_["load"], *(f"{run_[key]:.2f}" for key in ("median_ms", "p99_ms", "max_ms")))
    return table


def main(
    steps: Annotated[int, typer.Option(help="Steps measured in each scenario.")] = 500,
    turns: Annotated[int, typer.Option(help="Turns under way, beside one alone.")] = 256,
    modes: Annotated[str, typer.Option(help="Write-back modes, by commas.")] = "off,on_finish,streaming",
    before: Annotated[Path | None, typer.Option(help="connector/src of another checkout.")] = None,
) -> None:
    """Measure, print, write the report; fails if a step with that many running turns costs too much."""
    plan = json.dumps({"steps": steps, "turns": [1, turns], "modes": modes.split(",")})
    sources = {"before": before} if before else {}
    results = {
        name: run("bench.connector_step.measure", plan, folder.resolve())
        for name, folder in {**sources, "now": SOURCES}.items()
    }
    answers = run("bench.connector_step.answers", "{}", SOURCES)
    console = Console(width=140)
    for table in (step_table(results), turn_table(results["now"]), answer_table(answers)):
        console.print(table)
    now = results["now"]
    console.print(
        f"{now['pool']} block pool; reading the clock adds {now['clock_us']} us to each of four hooks"
    )
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"measured_at": when, "goal_us": GOAL_US, "steps": results, "answers": answers}
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"Written to {REPORT.relative_to(ROOT)}")
    worst = max(
        one[engine]["step_us"]["median"]
        for one in now["runs"]
        # The goal is for what running turns cost. Where they come and go, the work for that is in it too.
        if one["scenario"] != "churning"
        for engine in ("prefill", "decode")
    )
    if worst > GOAL_US:
        console.print(f"[red]A step costs {worst:.1f} us at the median, more than {GOAL_US:.0f}[/red]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
