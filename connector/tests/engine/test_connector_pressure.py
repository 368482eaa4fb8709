"""Many conversations over engines that are too small for them: evictions, denials, preemptions, clients that leave.

Every answer is compared with a plain engine's, and every block that moves with what its writer had.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    BLOCK,
    INSERTED,
    MOST_TURNS,
    OFFERS,
    ONDEMAND,
    PUSHED,
    RECOMPUTED,
    Conversation,
    becomes,
    body,
    counter,
    differs,
    hang_up,
    post,
    prefill_params,
    spec,
    tokens_of,
    turn,
    used_blocks,
    wait_until,
    wait_until_free,
    watched,
    within,
)
from connector.tests.engine.evidence import Evidence
from connector.tests.engine.ledger import read
from connector.tests.engine.routed import routed
from disagg_router import legs
from e2e.engines import Engine, running_all
from e2e.ports import HOST

pytestmark = pytest.mark.engine

SESSIONS, TURNS, AT_ONCE = 16, 13, 4
# A conversation ends with 24 blocks, so that all of them together want five times what either engine has.
PREFILL_BLOCKS, DECODE_BLOCKS, LONGEST = 96, 72, 1024
# Of prefill's 95 usable blocks 57 may be in use while a write-back is taken in.
MIN_FREE_PERCENT = 40
LEASE = 20

Engines = dict[str, Engine]
Ask = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def small(
    model: Path, ledger: Path, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """A small `prefill`, a small `decode` and the `plain` engine that has room."""
    prefill = spec(
        "prefill",
        model,
        kv_blocks=PREFILL_BLOCKS,
        kv_lease_duration=LEASE,
        writeback_min_free_percent=MIN_FREE_PERCENT,
    )
    specs = {
        "prefill": watched(prefill, ledger),
        "decode": watched(spec("decode", model, kv_blocks=DECODE_BLOCKS), ledger),
    }
    short = {name: replace(made, max_model_len=LONGEST) for name, made in specs.items()}
    with running_all(short, tmp_path_factory.mktemp("engines")) as running:
        yield {**running, "plain": plain}


@dataclass
class Talk:
    """What all clients have said and heard; compared afterwards, so that nobody waits between turns for that."""

    engines: Engines
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    left: int = 0
    stopped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def one_turn(self, client: Conversation, chance: random.Random) -> None:
        """The client's next turn; some clients leave first and ask again, some stop at a string."""
        prefill, decode = self.engines["prefill"], self.engines["decode"]
        leaves, stops = chance.random() < 0.12, chance.random() < 0.12

        def ask(prompt: list[int], tokens: int) -> list[int]:
            if leaves:
                hang_up(prefill, decode, prompt, tokens, after=chance.randrange(tokens))
            options: dict[str, Any] = {"stop": list("abcd")} if stops else {}
            answer = turn(prefill, decode, prompt, tokens, **options)
            with self._lock:
                self.left += leaves
                self.stopped += len(answer) < tokens
            return answer

        self.say(client, ask)

    def say(self, client: Conversation, ask: Ask) -> None:
        """One turn of a client, remembered."""

        def remember(prompt: list[int], tokens: int) -> list[int]:
            answer = ask(prompt, tokens)
            with self._lock:
                self.answers.append((prompt, answer))
            return answer

        client.ask(remember)

    def judge(self, evidence: Evidence, sessions: int) -> None:
        """Compare all that was heard with the plain engine."""
        plain = self.engines["plain"]
        with ThreadPoolExecutor(AT_ONCE) as judges:
            wrong = [text for text in judges.map(lambda said: differs(plain, *said), self.answers) if text]
        evidence.turns += len(self.answers)
        evidence.sessions += sessions
        evidence.mismatches += len(wrong)
        assert not wrong, wrong


def hold_all(talk: Talk, clients: list[Conversation]) -> None:
    """All turns of all conversations, some at once, in bursts of up to three without a pause."""
    waiting = deque((client, TURNS) for client in clients)
    lock = threading.Lock()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while True:
            with lock:
                if not waiting:
                    return
                client, left = waiting.popleft()
            burst = min(left, chance.randint(1, 3))
            for _ in range(burst):
                talk.one_turn(client, chance)
            if left > burst:
                with lock:
                    waiting.append((client, left - burst))

    with ThreadPoolExecutor(AT_ONCE) as workers:
        for done in [workers.submit(work, seed) for seed in range(AT_ONCE)]:
            done.result()


def test_two_hundred_turns_under_pressure_are_right(small: Engines, ledger: Path, evidence: Evidence) -> None:
    prefill, decode = small["prefill"], small["decode"]
    talk = Talk(small)
    clients = [Conversation(seed, 60, 24, 30) for seed in range(100, 100 + SESSIONS)]
    hold_all(talk, clients)
    talk.judge(evidence, SESSIONS)
    assert len(talk.answers) == SESSIONS * TURNS
    assert talk.left > 0, "a client has left in the middle of an answer"
    assert talk.stopped > 0, "an answer has ended at a stop string"
    assert counter(prefill, ONDEMAND, result="served") > 0, "prefill has evicted what it needs again"
    for reason in ("params", "fingerprint", "prompt"):
        assert counter(decode, RECOMPUTED, reason=reason) == 0
    for engine in (prefill, decode):
        evidence.nothing_is_held(engine)
    wait_until(
        lambda: counter(prefill, INSERTED) == read(ledger).published * BLOCK,
        "all blocks that prefill has published were compared",
    )
    found = evidence.count_blocks(ledger)
    called_off = talk.left + counter(decode, RECOMPUTED) + counter(prefill, ABORTED)
    assert found.unseen <= called_off, "a transfer that was not called off was not compared"


def test_requests_that_decode_preempts_go_on_rightly(small: Engines, evidence: Evidence) -> None:
    """They fit into decode's blocks when they begin, and do not when they end."""
    prefill, decode = small["prefill"], small["decode"]
    seeds = count(200)

    def are_preempted() -> bool:
        """Unless their prompts come so slowly that the first is done when the last begins."""
        talk = Talk(small)
        before = counter(decode, PREEMPTED)
        clients = [Conversation(next(seeds), 240, 30, 400) for _ in range(6)]
        with ThreadPoolExecutor(len(clients)) as sessions:
            for client in clients:
                sessions.submit(talk.say, client, lambda prompt, n: turn(prefill, decode, prompt, n))
        assert len(talk.answers) == len(clients)
        talk.judge(evidence, len(clients))
        return counter(decode, PREEMPTED) > before

    within(3, "decode preempts requests", are_preempted)
    for engine in (prefill, decode):
        evidence.nothing_is_held(engine)


def test_a_prefill_without_room_takes_no_write_back(small: Engines, evidence: Evidence) -> None:
    prefill, decode = small["prefill"], small["decode"]
    talk, client = Talk(small), Conversation(310, 60, 24, 40)

    def is_denied() -> bool:
        """Unless the lease is over before."""
        before = counter(decode, OFFERS, result="no_blocks")
        # Nobody comes for these: prefill keeps them for their lease, and is nearly full meanwhile.
        kept = {uuid.uuid4().hex: Conversation(seed, 640).history for seed in range(300, 303)}
        for request_id, prompt in kept.items():
            post(prefill, body(prompt, 1, prefill_params(None)), request_id)
        talk.one_turn(client, random.Random(3))
        denied = becomes(lambda: counter(decode, OFFERS, result="no_blocks") > before, LEASE)
        talk.one_turn(client, random.Random(3))
        for request_id in kept:
            dismiss(prefill, request_id)
        return denied

    within(MOST_TURNS, "prefill denies a write-back for want of blocks", is_denied)
    talk.judge(evidence, 1)
    for engine in (prefill, decode):
        evidence.nothing_is_held(engine)


def test_what_decode_refuses_costs_prefill_nothing(small: Engines, evidence: Evidence) -> None:
    """Decode's front end says no to what prefill accepts; its engine, which could tell prefill, never hears of it."""
    prefill, decode = small["prefill"], small["decode"]
    expired = leases_that_ended(prefill)
    asked = body(Conversation(320, 400).history, 30)
    # Prefill's leg has neither. The one is refused when decode's server has read the body, the other before.
    wrong = ({"temperature": -1}, {"stop": list("too many")})
    with routed(prefill, decode) as port:
        for number in range(20):
            option = wrong[number % 2]
            status, answer = ask_router(port, {**asked, **option})
            assert (status, next(iter(option)) in answer) == (400, True), answer
        wait_until_free(prefill)
        assert leases_that_ended(prefill) == expired
        talk, seeds = Talk(small), count(321)

        def is_pushed() -> bool:
            moved = counter(prefill, PUSHED)
            prompt = Conversation(next(seeds), 300).history
            status, answer = ask_router(port, body(prompt, 20))
            assert status == 200, answer
            talk.answers.append((prompt, tokens_of(json.loads(answer))))
            return becomes(lambda: counter(prefill, PUSHED) >= moved + 300, 10)

        within(MOST_TURNS, "a turn after them is pushed", is_pushed)
    talk.judge(evidence, 1)


def test_a_prompt_that_was_computed_for_nobody_is_dismissed(small: Engines) -> None:
    """The same when decode's refusal comes only after prefill is done."""
    prefill = small["prefill"]
    expired = leases_that_ended(prefill)
    request_id = uuid.uuid4().hex
    post(prefill, body(Conversation(340, 400).history, 1, prefill_params(None)), request_id)
    assert used_blocks(prefill) > 0
    dismiss(prefill, request_id)
    wait_until_free(prefill)
    assert leases_that_ended(prefill) == expired


def dismiss(prefill: Engine, request_id: str) -> None:
    """As the router does it."""
    post(prefill, json.loads(legs.BidirectionalPush().dismissal(request_id)), uuid.uuid4().hex)


ABORTED = "disagg_kv_writeback_aborted_total"
PREEMPTED = "vllm:num_preemptions_total"


def ask_router(port: int, asked: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def leases_that_ended(prefill: Engine) -> int:
    return prefill.log.read_text().count("Nobody loaded the prompt of")


def test_corrupted_blocks_are_caught(small: Engines, ledger: Path, evidence: Evidence) -> None:
    """The negative control of the checksums, the last test because it leaves wrong blocks in the caches."""
    prefill, decode = small["prefill"], small["decode"]
    faults = ("flip-decode-0", "flip-prefill-0", "substitute-decode-0", "substitute-prefill-0")
    seeds = count(400)

    def is_caught(fault: str) -> bool:
        """Not if a crowded machine computes the turn alone, or gives its write-back up."""
        caught = read(ledger).caught
        (ledger / fault).touch()
        # Not compared: a wrong block may change the answer or not.
        turn(prefill, decode, Conversation(next(seeds), 200).history, 70)
        return becomes(lambda: read(ledger).caught > caught)

    for fault in faults:
        within(MOST_TURNS, f"{fault} is caught", partial(is_caught, fault))
    for engine in (prefill, decode):
        evidence.nothing_is_held(engine)
    found = evidence.count_blocks(ledger)
    assert found.caught >= len(faults)
    assert not found.missed
