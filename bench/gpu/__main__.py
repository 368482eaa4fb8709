"""Runs on a host with two GPUs and, for a rehearsal, on CPU with the tiny model."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.gpu.engines import Place, Size
from bench.gpu.measure import Running, Workload, measure, write
from bench.gpu.modes import MODES, Mode
from bench.gpu.placement import for_cpu
from bench.gpu.placement import measure as measure_placement
from bench.gpu.report import render
from bench.gpu.soak import Load, soak
from bench.gpu.transfers import Layout, compare
from bench.local_prefill.compare import POLICIES
from bench.local_prefill.mixes import MIXES
from e2e.images.engine_cache import say

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Out = Annotated[Path, typer.Option(help="Where results go, one JSON file each.")]
Scratch = Annotated[Path, typer.Option(help="Logs, models and caches.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Rehearse on CPU with the tiny model.")]

_BIG = Size("qwen3-32b", kv_blocks=4_096, max_model_len=20_480)
_SMALL = Size("qwen3-0.6b", kv_blocks=640, max_model_len=4_096, weights="sharp")
_CHATS = Size("qwen3-32b", kv_blocks=15_000, max_model_len=40_960, max_sequences=64, chats=True)
_TINY = Size("tiny-qwen3", kv_blocks=512, max_model_len=2_048)
_TINY_WORKLOAD = Workload(turns=4, first_prompt=500, user_tokens=40, answer_tokens=60)


@app.command()
def table(
    out: Out,
    scratch: Scratch,
    modes: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(m.name for m in MODES),
    ahead: Annotated[int, typer.Option(help="Modes whose engines import while another is measured.")] = 20,
    cpu: Cpu = False,
) -> None:
    """Measure all modes one after another."""
    place = Place(not cpu, _fresh(scratch))
    size, workload = (_TINY, _TINY_WORKLOAD) if cpu else (_BIG, Workload())
    wanted = [_mode(name) for name in modes.split(",")]
    waiting: list[Running] = []
    try:
        for position, mode in enumerate(wanted):
            coming = wanted[len(waiting) : position + ahead + 1]
            waiting += [Running(each, place, size) for each in coming]
            _measure_one(waiting[position], mode, workload, place, out)
    finally:
        for running in waiting:
            running.stop()
    print(render(out))


def _measure_one(running: Running, mode: Mode, workload: Workload, place: Place, out: Path) -> None:
    say(f"{mode.name}: starting")
    try:
        result = measure(running, workload, place.vocabulary)
    except Exception:
        say(f"{mode.name} failed:\n{traceback.format_exc()}\n{running.log_tails()}")
        write({"mode": mode.name, "failed": traceback.format_exc(), "trace": running.trace()}, out, mode.name)
    else:
        write({**result, "at": datetime.now(UTC).isoformat(timespec="seconds")}, out, mode.name)
        warm = sorted(turn["ttft"] for turn in result["turns"] if turn["number"] > 1)
        cold = sorted(turn["ttft"] for turn in result["turns"] if turn["number"] == 1)
        say(
            f"{mode.name}: ready after {result['start_seconds']} s, ran {result['run_seconds']} s; TTFT "
            f"cold {[round(t, 3) for t in cold]}, warm {[round(t, 3) for t in warm]}"
        )
    finally:
        running.stop()


@app.command("soak")
def soak_command(
    out: Out,
    scratch: Scratch,
    mode: str = "on_finish",
    turns: int = Load.turns,
    sessions: int = Load.sessions,
    seconds: float = Load.seconds,
    cpu: Cpu = False,
) -> None:
    """Many turns with little memory, checksums of every block."""
    place = Place(not cpu, _fresh(scratch))
    load = replace(Load(), turns=turns, sessions=sessions, seconds=seconds)
    result = soak(_mode(mode), place, _TINY if cpu else _SMALL, load)
    write(result, out, f"soak-{mode}")
    shown = ("run_seconds", "tally", "leaked_blocks", "checksums", "faults", "started")
    say(json.dumps({key: result[key] for key in shown}))


@app.command()
def placement(
    out: Out,
    scratch: Scratch,
    mix: Annotated[str, typer.Option(help="Of bench/local_prefill/mixes.py.")] = "mixed",
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(POLICIES),
    sessions: Annotated[int, typer.Option(help="At a time; 0 is as the mix has it.")] = 0,
    seconds: float = 110.0,
    warm_up: float = 30.0,
    cpu: Cpu = False,
) -> None:
    """Where prompts are computed: the policies of router.localPrefill, with the router before the engines."""
    place = Place(not cpu, _fresh(scratch))
    turns = next(each for each in MIXES if each.name == mix)
    turns = replace(turns, sessions=sessions or turns.sessions)
    size, turns = (_TINY, for_cpu(turns)) if cpu else (_CHATS, turns)
    result = measure_placement(place, size, turns, policies.split(","), seconds, warm_up)
    write(result, out, f"placement-{mix.replace(' ', '-')}-{turns.sessions}")


@app.command()
def transfers(out: Out, repeats: int = 4) -> None:
    """READ against WRITE of the same bytes, NIXL alone."""
    samples = compare(Layout(), repeats)
    write(
        {"samples": samples, "ucx": {k: v for k, v in os.environ.items() if k.startswith("UCX_")}},
        out,
        "transfers",
    )
    best: dict[Any, list[float]] = {}
    for sample in samples:
        key = (
            sample["blocks"],
            sample["scattered"],
            sample["poll_ms"],
            sample["operation"],
            sample["descriptors"],
        )
        best.setdefault(key, []).append(sample["total"])
    for key, totals in best.items():
        say(f"{key}: {totals} ms")


@app.command()
def report(folder: Path) -> None:
    """Print the tables of a run's results."""
    print(render(folder))


def _mode(name: str) -> Mode:
    for mode in MODES:
        if mode.name == name:
            return mode
    raise typer.BadParameter(
        f"There is no mode {name!r}; there are {', '.join(mode.name for mode in MODES)}."
    )


def _fresh(scratch: Path) -> Path:
    folder = scratch / datetime.now(UTC).strftime("%H%M%S")
    folder.mkdir(parents=True)
    return folder.resolve()


if __name__ == "__main__":
    app()
