"""Many turns at once with little memory: every block that is exchanged is checked where it has landed.

In bfloat16 with batches that change all the time, no two engines give the same tokens bit for bit, so the proof is in
the blocks themselves: checksums of what was written, of what arrived and of what entered the prefix cache
(`connector/tests/engine/ledger.py`). Tokens are compared too, but where they differ it may be rounding: the first of an
answer as prefill and decode made it, and at the end prefill's with all it has in its cache against prefill's with an
empty one.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.gpu.client import Turns
from bench.gpu.engines import Place, Size, log_facts
from bench.gpu.measure import Running, settled
from bench.gpu.modes import Mode
from connector.tests.engine.conversation import body, post, tokens_of, used_blocks
from connector.tests.engine.ledger import FOLDER, read
from e2e.engines import Engine

_FREE_SECONDS = 60.0
CHECKED = ("bench.gpu.checked", "CheckedConnector")
FAULTS = ("flip-prefill-0", "flip-decode-0", "substitute-prefill-0", "substitute-decode-0")
"""What `connector.tests.engine.checking` can be asked for: a flipped bit on arrival, wrong blocks sent."""


@dataclass(frozen=True)
class Load:
    """What the soak asks of the engines."""

    turns: int = 1_200
    sessions: int = 12
    longest_conversation: int = 9
    system_tokens: int = 300
    user_tokens: int = 45
    answer_tokens: int = 60
    aborted_percent: int = 4
    rechecked: int = 24
    seconds: float = 240.0
    """No turn is begun after this."""
    seed: int = 7


@dataclass
class Tally:
    """What came of it."""

    turns: int = 0
    aborted: int = 0
    conversations: int = 0
    failures: list[str] = field(default_factory=list)
    same_first_token: int = 0
    """Turns whose first token was the same on prefill and decode."""
    rechecked: int = 0
    same_as_recomputed: int = 0
    """Of the rechecked prompts, those whose next token is the same with prefill's cache and without."""
    histories: list[list[int]] = field(default_factory=list)


def soak(mode: Mode, place: Place, size: Size, load: Load) -> dict[str, Any]:
    """Run the load, then put faults in that must be caught; what was found, ready for JSON."""
    ledger = place.folder / "ledger"
    ledger.mkdir()
    running = Running(mode, place, size, CHECKED, {FOLDER: str(ledger)})
    try:
        engines, seconds = running.start()
        begun = time.monotonic()
        tally = asyncio.run(_run(engines, mode, load, place.vocabulary))
        took = time.monotonic() - begun
        leaked = _leaked(engines, size)
        _recheck(engines["prefill"], tally, load)
        caught = _put_faults_in(engines, mode, load, place.vocabulary, ledger)
        last = settled(engines)
        return {
            "mode": mode.name,
            "model": size.model,
            "load": asdict(load),
            "kv_blocks": size.kv_blocks,
            "start_seconds": round(seconds, 1),
            "run_seconds": round(took, 1),
            "tally": {name: value for name, value in asdict(tally).items() if name != "histories"},
            "leaked_blocks": leaked,
            "checksums": _findings(ledger),
            "faults": caught,
            "counters": last,
            "logs": {name: log_facts(engine) for name, engine in engines.items()},
            "started": [event for event in running.trace() if event["event"] == "started"],
        }
    finally:
        running.stop()


def _findings(ledger: Path) -> dict[str, Any]:
    found = read(ledger)
    return {
        "transfers": found.transfers,
        "blocks_checked_on_arrival": found.checked,
        "blocks_checked_when_published": found.published,
        "mismatches": len(found.unexplained),
        "first_mismatches": found.unexplained[:10],
        "faults_put_in": len(found.corrupted),
        "faults_caught": found.caught,
    }


def _put_faults_in(
    engines: Mapping[str, Engine], mode: Mode, load: Load, vocabulary: range, ledger: Path
) -> list[str]:
    """Wish for one fault after another, each with a short conversation that has it; those that were put in."""
    done = []
    for number, fault in enumerate(FAULTS):
        wish = ledger / fault
        wish.touch()
        few = replace(load, turns=3, sessions=1, aborted_percent=0, seed=load.seed + 100 + number, seconds=30)
        asyncio.run(_run(engines, mode, few, vocabulary))
        if wish.exists():
            wish.unlink()
        else:
            done.append(fault)
    return done


async def _run(engines: Mapping[str, Engine], mode: Mode, load: Load, vocabulary: range) -> Tally:
    tally, until = Tally(), time.monotonic() + load.seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20) as http:
        turns = Turns(http, engines, mode.protocol)
        await turns.take([vocabulary[0]] * 40, 4)  # the handshake
        async with asyncio.TaskGroup() as sessions:
            for number in range(load.sessions):
                sessions.create_task(_session(number, turns, load, vocabulary, tally, until))
    return tally


async def _session(
    number: int, turns: Turns, load: Load, vocabulary: range, tally: Tally, until: float
) -> None:
    chance = random.Random(load.seed * 1000 + number)

    def say(count: int) -> list[int]:
        return [chance.choice(vocabulary) for _ in range(count)]

    while tally.turns < load.turns and time.monotonic() < until:
        tally.conversations += 1
        history = say(load.system_tokens)
        for _ in range(chance.randint(2, load.longest_conversation)):
            history = history + say(load.user_tokens)
            if chance.randrange(100) < load.aborted_percent:
                await _abort(turns, history, load, chance, tally)
            try:
                answer = await turns.take(history, load.answer_tokens)
            except Exception as error:
                tally.failures.append(f"session {number}: {error!r}"[:300])
                if len(tally.failures) > 20:
                    raise
                break
            tally.turns += 1
            tally.same_first_token += answer.prefill_token == answer.tokens[0]
            history = history + answer.tokens
            if tally.turns >= load.turns or time.monotonic() >= until:
                break
        tally.histories.append(history)


async def _abort(turns: Turns, prompt: list[int], load: Load, chance: random.Random, tally: Tally) -> None:
    """A client that leaves before its answer is there."""
    task = asyncio.create_task(turns.take(prompt, load.answer_tokens))
    await asyncio.wait({task}, timeout=chance.uniform(0.0, 0.4))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    tally.aborted += 1


def _leaked(engines: Mapping[str, Engine], size: Size) -> dict[str, int]:
    """Blocks still in use when nothing runs any more."""
    until = time.monotonic() + _FREE_SECONDS
    while any(used_blocks(engine) for engine in engines.values()) and time.monotonic() < until:
        time.sleep(0.25)
    return {name: round(used_blocks(engine) * size.kv_blocks) for name, engine in engines.items()}


def _recheck(prefill: Engine, tally: Tally, load: Load) -> None:
    """Ask prefill for the next token of the latest conversations, out of its cache and computed anew."""
    for history in tally.histories[-load.rechecked :]:
        cached = tokens_of(post(prefill, body(history, 1), uuid.uuid4().hex))
        salted = {**body(history, 1), "cache_salt": uuid.uuid4().hex}
        tally.rechecked += 1
        tally.same_as_recomputed += cached == tokens_of(post(prefill, salted, uuid.uuid4().hex))
