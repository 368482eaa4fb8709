"""`make bench-router`: what a router costs on the way of a stream, beside PyPI's vllm-router and beside none.

Engines are fakes that play a recorded stream four times as fast; every router has the same core to itself, engines and client share another.
One round after the other takes all contenders in turn, so that a noisy moment of the machine hits none alone; medians are
told. CPU is the router's user and system time, its children's included. Prints a table and writes
build/reports/router.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.router.contenders import NAMES, TITLES, Contender, Name, allow_many_files, contender, pin
from bench.router.peers import Load, Play
from e2e.images.engine_cache import say

REPORT = Path(__file__).parents[2] / "build" / "reports" / "router.json"
_PLAY = Play(chunks=256, pace=4.0)
_SHORT = Play(chunks=4, pace=4.0)
_SLOW = Play(chunks=300, pace=0.02)
"""One chunk in two seconds or so: streams that are open and hardly move."""
_SUSTAINED = 0.97
_RAMP = range(10_000, 90_001, 5_000)


@dataclass(frozen=True)
class Result:
    """One run at a given rate."""

    offered_chunks_per_s: float
    chunks_per_s: float
    requests: int
    chunks: int
    lost: int
    cpu_seconds: float
    cpu_share: float
    """Of one core, while requests came in."""
    ttft_p50_ms: float
    ttft_p99_ms: float

    @property
    def us_per_chunk(self) -> float:
        """All that the router did, divided by the chunks."""
        return self.cpu_seconds / max(self.chunks, 1) * 1e6


def run(to: Contender, play: Play, chunks_per_s: float, seconds: float) -> Result:
    """Requests at the rate that makes so many chunks a second; the rates are read once streams have filled up."""
    rate = chunks_per_s / play.chunks
    return uvloop.run(_run(to, play, rate, seconds))


async def _run(to: Contender, play: Play, rate: float, seconds: float) -> Result:
    load = Load(to.port)
    before = to.cpu_seconds()
    await load.ask(max(int(rate * play.seconds), 1), rate)  # until as many streams end as begin
    filled, chunks, cpu = time.perf_counter(), load.tally.chunks, to.cpu_seconds()
    await load.ask(max(int(rate * seconds), 1), rate)
    took = time.perf_counter() - filled
    rated, share = (load.tally.chunks - chunks) / took, (to.cpu_seconds() - cpu) / took
    await load.drain(10 + 3 * play.seconds)
    load.close()
    delays = sorted(load.tally.first_chunk)

    def quantile(q: float) -> float:
        return round(delays[int(q * (len(delays) - 1))] * 1e3, 3)

    return Result(
        offered_chunks_per_s=rate * play.chunks,
        chunks_per_s=round(rated),
        requests=load.tally.finished,
        chunks=load.tally.chunks,
        lost=load.tally.lost,
        cpu_seconds=round(to.cpu_seconds() - before, 3),
        cpu_share=round(share, 3),
        ttft_p50_ms=quantile(0.5),
        ttft_p99_ms=quantile(0.99),
    )


def saturation(name: Name, core: int, seconds: float) -> list[Result]:
    """Faster and faster until a router falls behind."""
    results = []
    for chunks_per_s in _RAMP:
        with contender(name, _PLAY, core) as to:
            result = run(to, _PLAY, chunks_per_s, seconds)
        results.append(result)
        say(
            f"{name}: {chunks_per_s} chunks/s offered, {result.chunks_per_s} came, {result.cpu_share:.0%} of a core, "
            f"first chunk p99 {result.ttft_p99_ms} ms, {result.lost} lost"
        )
        if result.lost or result.chunks_per_s < _SUSTAINED * result.offered_chunks_per_s:
            break
    return results


def sustained(results: list[Result]) -> float:
    """The highest rate that a router kept up with, in chunks a second."""
    kept = [r.chunks_per_s for r in results if r.chunks_per_s >= _SUSTAINED * r.offered_chunks_per_s]
    return max(kept, default=0.0)


def kib_per_stream(name: Name, core: int, streams: int) -> float:
    """Memory of streams that are open at the same time."""

    async def opened(to: Contender) -> float:
        load = Load(to.port)
        await load.ask(50, 200.0)  # what is allocated once
        before = to.rss_kib()
        await load.ask(streams, 1_000.0)
        deadline = time.monotonic() + 60
        while len(load.tally.first_chunk) < streams + 50:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{name}: {len(load.tally.first_chunk)} of {streams} streams had begun after a minute."
                )
            await asyncio.sleep(0.1)
        held = to.rss_kib() - before
        load.close()
        return held / streams

    with contender(name, _SLOW, core) as to:
        return uvloop.run(opened(to))


def main(rounds: int = 3, seconds: float = 6.0, streams: int = 5_000, only: str = "") -> None:
    """Measure all, or some (`--only ours,vllm_router`)."""
    names = [name for name in NAMES if not only or name in (*only.split(","), "direct")]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Two cores are needed: one for the router, one for engines and client.")
    router_core, own_core = cores[0], cores[1]
    pin(own_core)
    allow_many_files()
    routers: list[Name] = [name for name in names if name != "direct"]
    ramps: dict[Name, list[Result]] = {name: saturation(name, router_core, seconds) for name in routers}
    half = sustained(ramps["ours"]) / 2
    at_half: dict[Name, list[Result]] = {name: [] for name in names}
    short: dict[Name, list[Result]] = {name: [] for name in routers}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}, {half:.0f} chunks/s")
        for name in names:
            with contender(name, _PLAY, router_core) as to:
                at_half[name].append(run(to, _PLAY, half, seconds))
        for name in routers:
            with contender(name, _SHORT, router_core) as to:
                short[name].append(run(to, _SHORT, 100.0 * _SHORT.chunks, seconds))
    memory: dict[Name, float] = {name: kib_per_stream(name, router_core, streams) for name in routers}
    report: dict[str, Any] = {"taken": datetime.now(UTC).isoformat(timespec="seconds"), "streams": streams}
    for name in names:
        report[name] = _summary(at_half[name], short.get(name, []), ramps.get(name, []), memory.get(name))
    report["runs"] = {
        "ramp": {name: [asdict(r) for r in results] for name, results in ramps.items()},
        "half": {name: [asdict(r) for r in results] for name, results in at_half.items()},
        "short": {name: [asdict(r) for r in results] for name, results in short.items()},
    }
    show(report, names, half)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(f"report: {REPORT}")


def _summary(
    at_half: list[Result], short: list[Result], ramp: list[Result], memory: float | None
) -> dict[str, float]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    summary = {
        "ttft_p50_ms": median([r.ttft_p50_ms for r in at_half]),
        "ttft_p99_ms": median([r.ttft_p99_ms for r in at_half]),
        "lost": float(sum(r.lost for r in (*at_half, *short))),
    }
    if memory is None:
        return summary
    return {
        "us_per_chunk": round(median([r.us_per_chunk for r in at_half]), 1),
        "us_per_request": round(median([r.cpu_seconds / r.requests * 1e6 for r in short])),
        "chunks_per_s_core": sustained(ramp),
        "kb_per_stream": round(memory * 1.024, 1),
        **summary,
    }


def show(report: dict[str, Any], names: list[Name], half: float) -> None:
    table = Table("", "us a chunk", "us a request of 4 chunks", "chunks/s on a core", "kB an open stream", "first chunk p50", "p99 (ms)", "lost")  # fmt: skip
    for name in names:
        row = report[name]
        cells = [
            str(row.get(key, ""))
            for key in ("us_per_chunk", "us_per_request", "chunks_per_s_core", "kb_per_stream")
        ]
        table.add_row(
            TITLES[name], *cells, str(row["ttft_p50_ms"]), str(row["ttft_p99_ms"]), str(int(row["lost"]))
        )
    console = Console()
    console.print(table)
    console.print(
        f"us a chunk and the first chunk's delay at {half:.0f} chunks/s, half of what ours keeps up with"
    )


if __name__ == "__main__":
    typer.run(main)
