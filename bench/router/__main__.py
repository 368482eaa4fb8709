"""`python -m bench.router`: the router's own CPU and the delay it adds, against a direct connection.

Engines are fakes that stream chunks of about 160 bytes at a fixed pace; the router is a process of its own, with a prefill
and a decode engine. Prints a table and writes build/reports/router-overhead.json. CPU is the router process's user and
system time; the price of a request and of a chunk are told apart by streams of two lengths. Figures of a shared
machine are good for ratios.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.router.peers import Tally, load, serve

REPORT = Path(__file__).parents[2] / "build" / "reports" / "router-overhead.json"
_INTERVAL_SECONDS = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Result:
    """One run. Delays in milliseconds from a request to its first chunk."""

    path: str
    chunks_a_stream: int
    requests: int
    chunks: int
    lost: int
    first_chunk_p50: float
    first_chunk_p95: float
    first_chunk_p99: float
    cpu_seconds: float


@contextmanager
def engine(chunks: int) -> Iterator[int]:
    """A fake engine in a process of its own; its port."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(chunks, _INTERVAL_SECONDS, there)
    )
    process.start()
    try:
        if not here.poll(30):
            raise RuntimeError("the fake engine did not start within 30 s")
        yield here.recv()
    finally:
        process.terminate()
        process.join()


@contextmanager
def router(prefill: int, decode: int) -> Iterator[tuple[int, int]]:
    """A router process; its port and its process id."""
    config = {
        "version": 1,
        "namespace": "bench",
        "name": "bench",
        "model": {"name": "m"},
        "ports": {"http": 0, "admin": 0},
    }
    with tempfile.TemporaryDirectory() as folder, Path(folder, "router.log").open("w+") as log:
        Path(folder, "router.json").write_text(json.dumps(config))
        command = [
            sys.executable,
            "-m",
            "disagg_router",
            "--host",
            "127.0.0.1",
            "--drain-delay",
            "0",
            "--grace",
            "1",
        ]
        command += ["--config", f"{folder}/router.json"]
        command += ["--engines", f"prefill=http://127.0.0.1:{prefill},decode=http://127.0.0.1:{decode}"]
        reader, writer = os.pipe()
        with subprocess.Popen(command, stderr=writer) as process:
            os.close(writer)
            with os.fdopen(reader) as lines:
                serving = json.loads(lines.readline())
                # The log goes on being read, or a full pipe would stop the router.
                drain = subprocess.Popen(["cat"], stdin=lines, stdout=log)
            urllib.request.urlopen(f"http://127.0.0.1:{serving['admin_port']}/readyz", timeout=10).close()
            try:
                yield serving["port"], process.pid
            finally:
                process.terminate()
                process.wait()
                drain.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure(path: str, port: int, pid: int | None, chunks: int, requests: int, rate: float) -> Result:
    before = cpu_seconds(pid) if pid else 0.0
    drain = 10 + 3 * chunks * _INTERVAL_SECONDS
    tally: Tally = uvloop.run(load(port, requests, rate, drain))
    used = cpu_seconds(pid) - before if pid else 0.0
    delays = sorted(tally.first_chunk)

    def quantile(q: float) -> float:
        return round(delays[int(q * (len(delays) - 1))] * 1e3, 2)

    return Result(
        path=path,
        chunks_a_stream=chunks,
        requests=tally.finished,
        chunks=tally.chunks,
        lost=requests - tally.finished,
        first_chunk_p50=quantile(0.5),
        first_chunk_p95=quantile(0.95),
        first_chunk_p99=quantile(0.99),
        cpu_seconds=round(used, 3),
    )


def main(seconds: float = 8.0, streams: int = 40) -> None:
    """Measure with `streams` open at a time, `seconds` for each run."""
    results = []
    for chunks in (4, 512):
        length = chunks * _INTERVAL_SECONDS
        rate = min(200.0, streams / length)
        requests = max(streams, int(rate * seconds))
        with engine(chunks) as prefill, engine(chunks) as decode, router(prefill, decode) as (port, pid):
            results.append(measure("direct", decode, None, chunks, requests, rate))
            results.append(measure("router", port, pid, chunks, requests, rate))
    short, long = (result for result in results if result.path == "router")
    chunk, request = prices(short, long)
    show(results, chunk, request)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_us_a_chunk": round(chunk * 1e6, 1),
        "cpu_us_a_request": round(request * 1e6, 1),
        "runs": [asdict(result) for result in results],
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")


def prices(short: Result, long: Result) -> tuple[float, float]:
    """CPU seconds of one chunk and of one request, from runs with short and with long streams."""
    per_short, per_long = short.cpu_seconds / short.requests, long.cpu_seconds / long.requests
    chunk = (per_long - per_short) / (long.chunks_a_stream - short.chunks_a_stream)
    return chunk, per_short - chunk * short.chunks_a_stream


def show(results: list[Result], chunk: float, request: float) -> None:
    table = Table(
        "path", "chunks a stream", "requests", "lost", "first chunk p50", "p95", "p99 (ms)", "CPU (s)"
    )
    for r in results:
        delays = (f"{r.first_chunk_p50:.2f}", f"{r.first_chunk_p95:.2f}", f"{r.first_chunk_p99:.2f}")
        cpu = f"{r.cpu_seconds:.2f}" if r.path == "router" else ""
        table.add_row(r.path, str(r.chunks_a_stream), str(r.requests), str(r.lost), *delays, cpu)
    console = Console()
    console.print(table)
    console.print(
        f"router CPU: {chunk * 1e6:.1f} us a chunk, {request * 1e6:.0f} us a request; report: {REPORT}"
    )


if __name__ == "__main__":
    typer.run(main)
