"""Where prompts are computed (`router.localPrefill`), with the real router before real engines.

The clients' turns are those of the simulation (`bench.local_prefill.mixes`), the same for every policy. Conversations of
one policy share no text with those of another, so nothing is found in a cache that another has filled. Colocated are two
plain engines, each for half of the conversations.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import aiohttp

from bench.gpu import chat
from bench.gpu.engines import Held, Place, Size, log_facts, started
from bench.gpu.measure import counters, settled
from bench.gpu.modes import MODES, Role
from bench.local_prefill.compare import COLOCATED, POLICIES
from bench.local_prefill.mixes import Mix
from e2e.contract.harness import running_router
from e2e.engines import Engine
from e2e.images.engine_cache import say

_MODEL = "test"  # as EngineSpec's
_DECISION = "X-Disagg-Decision"
_TURN_SECONDS = 180.0
_CONNECTOR = ("disagg_connector.connector", "BidirectionalPushConnector")
_PUSH = next(mode for mode in MODES if mode.name == "on_finish")
_PLAIN = next(mode for mode in MODES if mode.name == "colocated")


@dataclass(frozen=True)
class Taken:
    """One turn as its client saw it. Seconds; `at` is when it was asked, from the run's begin."""

    at: float
    session: int
    new: int
    ttft: float
    gaps: list[float]
    decision: str
    """The router's word; empty where there is none."""


@dataclass(frozen=True)
class Summary:
    """Of the turns after the warm-up; milliseconds."""

    turns: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    gap_mean: float
    gap_p99: float
    gap_max: float
    on_decode: float
    """Share of the turns."""


def summary(turns: list[Taken], warm_up: float) -> Summary:
    """Raises `ValueError` if there are no turns after the warm-up."""
    counted = [turn for turn in turns if turn.at >= warm_up]
    ttft = sorted(turn.ttft for turn in counted)
    gaps = sorted(gap for turn in counted for gap in turn.gaps)
    if not gaps:
        raise ValueError(f"No turn was asked after the first {warm_up:g} s.")

    def ms(seconds: float) -> float:
        return round(seconds * 1e3, 1)

    return Summary(
        turns=len(counted),
        ttft_mean=ms(fmean(ttft)),
        ttft_p50=ms(ttft[len(ttft) // 2]),
        ttft_p95=ms(ttft[int(len(ttft) * 0.95)]),
        gap_mean=ms(fmean(gaps)),
        gap_p99=ms(gaps[int(len(gaps) * 0.99)]),
        gap_max=ms(gaps[-1]),
        on_decode=round(sum("placement=decode" in turn.decision for turn in counted) / len(counted), 3),
    )


def measure(
    place: Place, size: Size, mix: Mix, policies: list[str], seconds: float, warm_up: float
) -> dict[str, Any]:
    """All policies one after another, on one pair of engines but for colocated; ready for JSON."""
    held = {
        colocated: _hold(place, size, colocated) for colocated in {policy == COLOCATED for policy in policies}
    }
    results: dict[str, Any] = {}
    try:
        for policy in sorted(policies, key=lambda policy: policy == COLOCATED):
            if policy == COLOCATED and False in held:
                _stop(held.pop(False))
            engines, took = started(held[policy == COLOCATED])
            say(f"{policy}: engines ready after {took:.0f} s")
            before = {name: counters(engine) for name, engine in engines.items()}
            turns = _run_policy(policy, engines, mix, place.folder, seconds)
            after = settled(engines)
            found = summary(turns, warm_up)
            results[policy] = {
                **asdict(found),
                "decisions": _decisions(turns, warm_up),
                "counters": {name: _grown(before[name], after[name]) for name in engines},
                "taken": [_row(turn) for turn in turns],
                "logs": {name: log_facts(engine) for name, engine in engines.items()},
            }
            say(f"{policy}: {found}")
    finally:
        for some in held.values():
            _stop(some)
    return {"mix": asdict(mix), "seconds": seconds, "warm_up": warm_up, "policies": results}


def _hold(place: Place, size: Size, colocated: bool) -> dict[str, Held]:
    mode = _PLAIN if colocated else _PUSH
    roles: tuple[Role, ...] = ("prefill", "decode")
    return {
        role: place.hold(f"{mode.name}-{role}", role, size, mode.transfer(role, _CONNECTOR)) for role in roles
    }


def _stop(held: Mapping[str, Held]) -> None:
    for one in held.values():
        one.engine.stop(grace_seconds=5)


def _run_policy(
    policy: str, engines: Mapping[str, Engine], mix: Mix, folder: Path, seconds: float
) -> list[Taken]:
    with ExitStack() as stack:
        if policy == COLOCATED:
            urls = [engine.url for engine in engines.values()]
        else:
            (scratch := folder / f"router-{policy.replace(' ', '-')}").mkdir()
            urls = [stack.enter_context(running_router(scratch, engines, _config(policy))).url]
        return asyncio.run(_converse_all(policy, urls, mix, seconds))


def _config(policy: str) -> dict[str, Any]:
    settings = POLICIES[policy]
    config: dict[str, Any] = {"version": 1, "namespace": "bench", "name": "bench", "model": {"name": _MODEL}}
    if settings is not None:
        config["localPrefill"] = {"maxTokens": settings.max_tokens, "mode": settings.mode}
    return config


async def _converse_all(policy: str, urls: list[str], mix: Mix, seconds: float) -> list[Taken]:
    taken: list[Taken] = []
    begun = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as http,
        asyncio.TaskGroup() as clients,
    ):
        for number in range(mix.sessions):
            client = _Client(http, urls[number % len(urls)], policy, number)
            clients.create_task(client.run(mix, begun, seconds, taken))
    return sorted(taken, key=lambda turn: turn.at)


class _Client:
    """Holds one conversation after another until the time is over."""

    def __init__(self, http: aiohttp.ClientSession, url: str, policy: str, number: int) -> None:
        self._http = http
        self._url = url
        self._number = number
        self._random = Random(f"{policy} {number}")

    async def run(self, mix: Mix, begun: float, seconds: float, taken: list[Taken]) -> None:
        messages: list[dict[str, str]] = []
        conversation = 0
        for turn in mix.session(1, self._number):
            if turn.first:
                messages, conversation = [], conversation + 1
            await asyncio.sleep(turn.pause)
            asked = time.perf_counter()
            if asked - begun > seconds:
                return
            messages.append({"role": "user", "content": chat.text(self._random, turn.new)})
            async with asyncio.timeout(_TURN_SECONDS):
                decision, answer, times = await self._ask(messages, turn.answer, conversation)
            messages.append({"role": "assistant", "content": answer})
            gaps = [round(late - early, 5) for early, late in pairwise(times)]
            ttft = round(times[0] - asked, 5)
            taken.append(Taken(round(asked - begun, 3), self._number, turn.new, ttft, gaps, decision))

    async def _ask(
        self, messages: list[dict[str, str]], tokens: int, conversation: int
    ) -> tuple[str, str, list[float]]:
        headers = {"X-Session-Id": f"{self._number}-{conversation}", _DECISION: "1"}
        pieces: list[str] = []
        times: list[float] = []
        async with self._http.post(
            f"{self._url}/v1/chat/completions", json=chat.body(_MODEL, messages, tokens), headers=headers
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.url} answered {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"The answer broke off: {chunk['error']}")
                content = [choice["delta"].get("content") for choice in chunk["choices"]]
                if any(content):
                    pieces += filter(None, content)
                    times.append(time.perf_counter())
            return answer.headers.get(_DECISION, ""), "".join(pieces), times


def _row(turn: Taken) -> dict[str, Any]:
    """A turn as it is kept: of its gaps only how many there were and the longest."""
    row = asdict(turn)
    gaps = row.pop("gaps")
    return {**row, "pieces": len(gaps) + 1, "longest_gap": max(gaps, default=0.0)}


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name)}


def _decisions(turns: list[Taken], warm_up: float) -> dict[str, int]:
    words = (turn.decision.split("; new_tokens")[0] for turn in turns if turn.at >= warm_up)
    return dict(Counter(words))


def for_cpu(mix: Mix) -> Mix:
    """A rehearsal of it with the tiny model."""
    return replace(mix, sessions=2, turns=(3, 4), first=(40, 60), new=((1.0, (5, 20)),), answer=(10, 30))
