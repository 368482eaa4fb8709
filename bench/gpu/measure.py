"""One mode on the common workload: sessions of several turns against fresh engines."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.gpu import TRACE_FILE
from bench.gpu.client import Turns
from bench.gpu.engines import Held, Place, Size, log_facts, started
from bench.gpu.modes import TRACED, Mode
from e2e.engines import Engine
from e2e.images.engine_bundle import EngineError
from e2e.images.engine_cache import say

_METRIC = re.compile(
    r"^(?P<name>vllm:nixl_(?:xfer_time_seconds|post_time_seconds|bytes_transferred|num_descriptors)_(?:sum|count)|"
    r"vllm:nixl_num_\w+_total|disagg_kv_\w+_(?:total|sum|count)|disagg_kv_blocks_quarantined|"
    r"vllm:request_prefill_kv_computed_tokens_sum|vllm:prefix_cache_hits_total|vllm:num_preemptions_total)"
    r"\{(?P<labels>[^}]*)\} (?P<value>\S+)$"
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_WARM_UP_TOKENS = 64
_QUIET_SECONDS = 1.5  # an idle engine's metrics are out within a second
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Workload:
    """Conversations that all modes are measured on; the same prompts for the same seed."""

    sessions: int = 2
    turns: int = 6
    first_prompt: int = 16_384
    user_tokens: int = 150
    answer_tokens: int = 300
    seed: int = 20_240_607


@dataclass(frozen=True)
class Turn:
    """What one turn took. Times in seconds but for the gaps between tokens, in milliseconds."""

    session: int
    number: int
    prompt_tokens: int
    started: float
    ended: float
    """Both by the host's wall clock."""
    ttft: float
    gaps: list[float]
    tokens: list[int]
    prefill_token: int | None


class Running:
    """A mode's engines from their gates to their end."""

    def __init__(
        self,
        mode: Mode,
        place: Place,
        size: Size,
        connector: tuple[str, str] = TRACED,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.mode = mode
        self._trace = place.folder / f"trace-{mode.name}-{size.model}"
        env = {TRACE_FILE: str(self._trace), **(env or {})}
        self._held: dict[str, Held] = {
            role: place.hold(
                f"{mode.name}-{role}",
                role,
                size,
                mode.transfer(role, connector),
                prefix_caching=mode.caches_prefixes(role),
                graphs=mode.graphs,
                env=env,
            )
            for role in mode.roles
        }

    def start(self) -> tuple[dict[str, Engine], float]:
        return started(self._held)

    def stop(self) -> None:
        for held in self._held.values():
            try:
                held.engine.stop(grace_seconds=5)
            except EngineError as error:
                say(f"{error} The next mode is measured all the same.")

    def log_tails(self) -> str:
        return "\n".join(held.engine.log_tail(40) for held in self._held.values())

    def trace(self) -> list[dict[str, Any]]:
        """All events that the connector wrote down, in order of time."""
        events: list[dict[str, Any]] = []
        for path in self._trace.parent.glob(f"{self._trace.name}.*"):
            events += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return sorted(events, key=lambda event: float(event["t"]))


def measure(mode: Running, workload: Workload, vocabulary: range) -> dict[str, Any]:
    """Run the workload; everything that is worth keeping, ready for JSON. Raises if an engine or a turn fails."""
    engines, seconds = mode.start()
    begun = time.monotonic()
    turns, snapshots = asyncio.run(_run(engines, mode.mode, workload, vocabulary))
    snapshots["end"] = settled(engines)
    return {
        "mode": mode.mode.name,
        "title": mode.mode.title,
        "workload": asdict(workload),
        "start_seconds": round(seconds, 1),
        "run_seconds": round(time.monotonic() - begun, 1),
        "turns": [asdict(turn) for turn in turns],
        "counters": snapshots,
        "trace": mode.trace(),
        "logs": {name: log_facts(engine) for name, engine in engines.items()},
    }


async def _run(
    engines: Mapping[str, Engine], mode: Mode, workload: Workload, vocabulary: range
) -> tuple[list[Turn], dict[str, Any]]:
    snapshots: dict[str, Any] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as http:
        await _warm_up(http, engines, mode, vocabulary)
        snapshots["start"] = {name: counters(engine) for name, engine in engines.items()}

        def after_first_turn() -> None:
            # The first session to be through with its first turn: all cold transfers are over, no warm one has begun.
            snapshots.setdefault("cold", {name: counters(engine) for name, engine in engines.items()})

        runs = [
            _converse(Turns(http, engines, mode.protocol), number, workload, vocabulary, after_first_turn)
            for number in range(workload.sessions)
        ]
        turns = [turn for session in await asyncio.gather(*runs) for turn in session]
    return sorted(turns, key=lambda turn: (turn.session, turn.number)), snapshots


async def _warm_up(
    http: aiohttp.ClientSession, engines: Mapping[str, Engine], mode: Mode, vocabulary: range
) -> None:
    """Handshakes and first kernels, so that they are in no mode's first turn: two short turns."""
    chance, turns = random.Random(1), Turns(http, engines, mode.protocol)
    prompt = [chance.choice(vocabulary) for _ in range(_WARM_UP_TOKENS)]
    for _ in range(2):
        answer = await turns.take(prompt, _WARM_UP_TOKENS)
        prompt = prompt + answer.tokens + [chance.choice(vocabulary) for _ in range(_WARM_UP_TOKENS)]


async def _converse(
    turns: Turns, session: int, workload: Workload, vocabulary: range, after_first_turn: Any
) -> list[Turn]:
    chance = random.Random(workload.seed + session)

    def say(count: int) -> list[int]:
        return [chance.choice(vocabulary) for _ in range(count)]

    history, done = say(workload.first_prompt), []
    for number in range(1, workload.turns + 1):
        started = time.time()
        answer = await turns.take(history, workload.answer_tokens)
        gaps = [
            round((late - early) * 1000, 3)
            for early, late in zip(answer.times, answer.times[1:], strict=False)
        ]
        ttft = round(answer.ttft, 6)
        timed = (started, time.time(), ttft, gaps)
        done.append(Turn(session, number, len(history), *timed, answer.tokens, answer.prefill_token))
        if number == 1:
            await asyncio.to_thread(after_first_turn)
        history = history + answer.tokens + say(workload.user_tokens)
    return done


def counters(engine: Engine) -> dict[str, float]:
    """What matters of an engine's /metrics, by name and the label that tells values apart."""
    found: dict[str, float] = defaultdict(float)
    for line in engine.metrics_text().splitlines():
        match = _METRIC.match(line)
        if match is None:
            continue
        labels = [
            value for name, value in _LABEL.findall(match["labels"]) if name not in ("engine", "model_name")
        ]
        found[" ".join([match["name"].removeprefix("vllm:"), *labels])] += float(match["value"])
    return {name: value for name, value in found.items() if value}


def settled(engines: Mapping[str, Engine]) -> dict[str, dict[str, float]]:
    """The counters of engines whose work is over, once they have not moved for longer than metrics take to come out.

    Raises:
        EngineError: they still move after the limit: something is still being transferred or computed.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    seen = {name: counters(engine) for name, engine in engines.items()}
    since = time.monotonic()
    while time.monotonic() - since < _QUIET_SECONDS:
        if time.monotonic() > deadline:
            raise EngineError(
                f"The counters of {', '.join(engines)} still move after {_SETTLE_SECONDS:.0f} s."
            )
        time.sleep(0.1)
        now = {name: counters(engine) for name, engine in engines.items()}
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


def write(result: Mapping[str, Any], folder: Path, name: str) -> None:
    """Keep a result at once: a later mode may not come to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"{name}.json")
