"""Runs in an engine's interpreter: measures the scheduler's side and prints JSON. See `__main__`.

Times are the thread's CPU time, so that other processes on the machine do not count; leases and status questions
are driven by a simulated clock that runs 20 ms a step.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.connector_step.engines import STEP_HOOKS, TURN_HOOKS, Engine, Pair, blocks_class

PROMPT = 200


def generating(turns: int, mode: str) -> Iterator[Pair]:
    """Decode generates for all turns at once."""
    pair = _pair(turns, mode)
    for _ in range(turns):
        pair.turn(PROMPT, 1_000_000)
    yield from _rounds(pair, lambda: len(pair.decode.running) == turns)


def loading(turns: int, mode: str) -> Iterator[Pair]:
    """Every turn on decode waits for its KV; on prefill each is registered and not computed."""
    pair = _pair(turns, mode)
    for _ in range(turns):
        pair.turn(PROMPT, 10, prefill_tokens=1_000_000)
    yield from _rounds(pair, lambda: len(pair.prefill.running) == turns)


def churning(turns: int, mode: str) -> Iterator[Pair]:
    """As many turns as that, each of 64 tokens: some begin and end in every step."""
    pair = _pair(turns, mode)
    missing = turns
    while True:
        for _ in range(min(missing, 8)):
            pair.turn(PROMPT, 64)
        pair.round()
        missing = turns - len(pair.decode.requests)
        if missing <= 8:
            yield pair


def writing_back(turns: int, mode: str) -> Iterator[Pair]:
    """Every turn has ended, and its write-back has been granted and does not get on."""
    pair = _pair(turns, mode)
    for _ in range(turns):
        pair.turn(PROMPT, 24)
    # Decode holds its writes; prefill's have to go through.
    pair.decode.writes_held_back = True
    yield from _rounds(pair, lambda: not pair.decode.requests)


SCENARIOS: dict[str, Callable[[int, str], Iterator[Pair]]] = {
    "generating": generating,
    "churning": churning,
    "loading": loading,
    "writing back": writing_back,
}
MODE_MATTERS = {"generating", "churning"}


def _pair(turns: int, mode: str) -> Pair:
    config = {"writeback_mode": mode, "kv_lease_duration": 100_000.0, "load_timeout_seconds": 100_000.0}
    return Pair(turns * 160 + 1000, **config)


def _rounds(pair: Pair, is_ready: Callable[[], bool]) -> Iterator[Pair]:
    for _ in range(2000):
        if is_ready():
            break
        pair.round()
    else:
        raise RuntimeError("the turns never came to where they are measured")
    for _ in range(10):
        pair.round()
    while True:
        yield pair
        pair.round()


def measure(scenario: str, turns: int, mode: str, steps: int) -> dict[str, Any]:
    """Microseconds per step on either engine, and per turn of the request's hooks."""
    rounds = SCENARIOS[scenario](turns, mode)
    pair = next(rounds)
    for engine in pair.engines:
        engine.spent.clear()
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        next(rounds)
    gc.unfreeze()
    return {
        "scenario": scenario,
        "turns": turns,
        "writeback": mode,
        "prefill": _summary(pair.prefill),
        "decode": _summary(pair.decode),
    }


def _summary(engine: Engine) -> dict[str, Any]:
    spent = {hook: [nanoseconds / 1000 for nanoseconds in engine.spent[hook]] for hook in engine.spent}
    steps = [sum(hooks) for hooks in zip(*(spent[hook] for hook in STEP_HOOKS), strict=False)]
    return {
        "step_us": _spread(steps),
        "hooks_us": {hook: _spread(spent[hook]) for hook in (*STEP_HOOKS, *TURN_HOOKS) if spent.get(hook)},
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "mean": round(statistics.fmean(ordered), 2),
        "p99": round(ordered[int(len(ordered) * 0.99)], 2),
        "count": len(ordered),
    }


def overhead() -> float:
    """What the clock itself adds to a hook's figure, in microseconds."""
    values = []
    for _ in range(2000):
        start = time.thread_time_ns()
        values.append(time.thread_time_ns() - start)
    return round(statistics.median(values) / 1000, 2)


def main() -> None:
    plan = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    runs = [
        measure(scenario, turns, mode, plan["steps"])
        for scenario in SCENARIOS
        for mode in (plan["modes"] if scenario in MODE_MATTERS else ["on_finish"])
        for turns in plan["turns"]
    ]
    print(json.dumps({"pool": blocks_class().name, "clock_us": overhead(), "runs": runs}))


if __name__ == "__main__":
    main()
