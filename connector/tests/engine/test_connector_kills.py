"""SIGKILL of either engine at every phase of a transfer: the other serves on, rightly, and holds nothing for ever.

Phases are hit exactly: a connector of these tests kills when it passes one (`mortal`). A replacement starts at another
address, as a pod that is made anew does; it boots beforehand, since that takes longer than all the rest.
"""

from __future__ import annotations

import http.client
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    MOST_TURNS,
    Conversation,
    becomes,
    body,
    complete,
    decode_params,
    differs,
    post,
    prefill_params,
    spec,
    tokens_of,
    turn,
    wait_until,
    watched,
)
from connector.tests.engine.evidence import Evidence
from e2e.engines import Engine

pytestmark = pytest.mark.engine

PREFILL, DECODE = "prefill", "decode"
_KILLED = (ConnectionError, http.client.HTTPException, RuntimeError, TimeoutError)


@dataclass(frozen=True)
class Kill:
    """When the engine of `seen_by` passes `phase` (see `mortal`), the engine of role `victim` dies."""

    name: str
    phase: str
    seen_by: str
    victim: str
    wanted: bool = False
    """Prefill must lack what decode has."""
    thorough: bool = False
    """Left out where time is short."""

    def param(self) -> Any:
        marks = [pytest.mark.thorough] if self.thorough else []
        return pytest.param(self, id=f"{self.name}-{self.victim}", marks=marks)


KILLS = (
    Kill("load-registered", "answered.Load", DECODE, DECODE, thorough=True),
    Kill("load-registered", "received.Load", PREFILL, PREFILL, thorough=True),
    Kill("load-writing", "posted", PREFILL, DECODE),
    Kill("load-writing", "posted", PREFILL, PREFILL, thorough=True),
    Kill("load-done", "arrived", DECODE, DECODE, thorough=True),
    Kill("load-done", "arrived", DECODE, PREFILL),
    Kill("offer-sent", "sent.Offer", DECODE, DECODE, thorough=True),
    Kill("offer-sent", "received.Offer", PREFILL, PREFILL, thorough=True),
    Kill("grant-received", "answered.Offer", DECODE, DECODE, thorough=True),
    Kill("grant-received", "replied.Grant", PREFILL, PREFILL),
    Kill("write-running", "posted", DECODE, DECODE),
    Kill("write-running", "posted", DECODE, PREFILL, thorough=True),
    Kill("write-done", "sending.Commit", DECODE, DECODE, thorough=True),
    Kill("write-done", "arrived", PREFILL, PREFILL),
    Kill("committed", "answered.Commit", DECODE, DECODE),
    Kill("committed", "replied.Committed", PREFILL, PREFILL, thorough=True),
    Kill("want-sent", "received.Want", DECODE, DECODE, wanted=True, thorough=True),
    Kill("want-sent", "sent.Want", PREFILL, PREFILL, wanted=True, thorough=True),
)


class Pair:
    """A prefill and a decode engine, and the one that will take the place of each."""

    def __init__(self, stack: ExitStack, model: Path, folder: Path, deaths: Counter[str]) -> None:
        self._stack = stack
        self._model = model
        self._folder = folder
        self._left = deaths
        self._made: Counter[str] = Counter()
        self.ledger = folder / "ledger"
        self.ledger.mkdir()
        self._now = {role: self._start(role) for role in (PREFILL, DECODE)}
        for engine in self._now.values():
            engine.wait_ready()
        self._next = {role: self._start(role) for role in (PREFILL, DECODE) if deaths[role]}

    def __getitem__(self, role: str) -> Engine:
        return self._now[role]

    def replace(self, role: str) -> None:
        """The waiting engine takes over; another starts if one will be needed."""
        self._left[role] -= 1
        self._now[role] = self._next.pop(role)
        self._now[role].wait_ready()
        if self._left[role]:
            self._next[role] = self._start(role)

    def _start(self, role: str) -> Engine:
        self._made[role] += 1
        made = spec(role, self._model, kv_lease_duration=8, load_timeout_seconds=20)
        mortal = watched(made, self.ledger, "mortal.MortalConnector")
        return self._stack.enter_context(Engine(mortal, f"{role}-{self._made[role]}", self._folder))


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    chosen = [item.callspec.params.get("kill") for item in request.session.items if hasattr(item, "callspec")]
    deaths = Counter(kill.victim for kill in chosen if isinstance(kill, Kill))
    with ExitStack() as stack:
        yield Pair(stack, model, tmp_path_factory.mktemp("kills"), deaths)


@pytest.mark.parametrize("kill", [kill.param() for kill in KILLS])
def test_the_survivor_serves_on(kill: Kill, pair: Pair, plain: Engine, evidence: Evidence) -> None:
    victim = pair[kill.victim]
    survivor = pair[DECODE if kill.victim == PREFILL else PREFILL]
    client = Conversation(KILLS.index(kill), system_tokens=100, user_tokens=40, answer_tokens=70)

    def is_right(prompt: list[int], answer: list[int]) -> None:
        evidence.turns += 1
        wrong = differs(plain, prompt, answer)
        evidence.mismatches += bool(wrong)
        assert not wrong, wrong

    def until_the_kill() -> None:
        trigger = pair.ledger / f"kill-{kill.phase}-{kill.seen_by}"
        trigger.write_text(str(victim.pid))
        for _ in range(MOST_TURNS):
            if kill.wanted:
                client.ask(lambda prompt, n: complete(pair[DECODE], prompt, n))
            client.ask(lambda prompt, n: one_turn(prompt, n, is_right))
            # A write-back comes after its turn's end. A crowded machine may miss a phase: the next turn comes by again.
            if becomes(lambda: not trigger.exists(), 10):
                break
        wait_until(lambda: victim.process.poll() is not None, f"{victim.name} dies at {kill.phase}")
        victim.kill()
        evidence.kills += 1

    def one_turn(prompt: list[int], tokens: int, judge: Any) -> list[int]:
        """Both legs, either of which may meet a dead engine; the answer, or nothing if decode has died."""
        request_id = uuid.uuid4().hex
        with ThreadPoolExecutor(2) as legs:
            first = legs.submit(
                post, pair[PREFILL], body(prompt, 1, prefill_params(pair[DECODE])), request_id
            )
            asked = body(prompt, tokens, decode_params(pair[PREFILL]))
            second = legs.submit(post, pair[DECODE], asked, request_id)
            first_error, second_error = first.exception(), second.exception()
        for role, error in ((PREFILL, first_error), (DECODE, second_error)):
            assert error is None or (role == kill.victim and isinstance(error, _KILLED)), error
        if second_error is not None:
            return []
        answer = tokens_of(second.result())
        judge(prompt, answer)
        return answer

    until_the_kill()
    # With the dead one's address, as long as the router has not heard.
    prompt = [*client.history, 7]
    if kill.victim == PREFILL:
        is_right(prompt, complete(survivor, prompt, 20, decode_params(victim)))
    else:
        is_right(prompt, complete(survivor, prompt, 1, prefill_params(victim)))
    pair.replace(kill.victim)
    for _ in range(2):
        client.ask(lambda prompt, n: told(prompt, turn(pair[PREFILL], pair[DECODE], prompt, n), is_right))
    evidence.sessions += 1
    for role in (PREFILL, DECODE):
        evidence.nothing_is_held(pair[role])
    evidence.count_blocks(pair.ledger)


def told(prompt: list[int], answer: list[int], judge: Any) -> list[int]:
    """The answer, judged."""
    judge(prompt, answer)
    return answer
