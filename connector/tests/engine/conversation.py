"""Holds conversations with a prefill and a decode engine, as the router does (docs/wire-contract.md)."""

from __future__ import annotations

import http.client
import json
import random
import re
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from connector.tests.engine.keyring import shared_keyring
from connector.tests.engine.ledger import FOLDER
from e2e.engines import Engine, EngineSpec, Ports
from e2e.ports import HOST

SOURCES = Path(__file__).resolve().parents[2] / "src"
ROOT = SOURCES.parents[1]
VOCABULARY = range(5, 95)
BLOCK = 32
# Between logarithms of probabilities. Rounding makes about 1e-5; another KV makes another order of tokens.
TIE = 1e-3


def spec(role: str, model: Path, *, kv_blocks: int = 512, **extra: Any) -> EngineSpec:
    """A prefill or decode engine with the connector; `extra` goes into its extra config."""
    extra = {"control_secret_dir": str(shared_keyring().folder), **extra}

    def transfer(ports: Ports) -> Mapping[str, Any]:
        return {
            "kv_connector": "BidirectionalPushConnector",
            "kv_connector_module_path": "disagg_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"role": role, "control_port": ports.control, **extra},
        }

    return EngineSpec(model=model, kv_transfer_config=transfer, kv_blocks=kv_blocks, python_path=(SOURCES,))


def watched(made: EngineSpec, ledger: Path, connector: str = "checking.CheckingConnector") -> EngineSpec:
    """The same engine with a connector of these tests, `MODULE.CLASS`, that writes a ledger into a folder."""
    module, _, name = connector.partition(".")
    render = made.kv_transfer_config

    def transfer(ports: Ports) -> Mapping[str, Any]:
        assert callable(render)
        path = f"connector.tests.engine.{module}"
        return {**render(ports), "kv_connector": name, "kv_connector_module_path": path}

    env = {**made.env, FOLDER: str(ledger)}
    return replace(made, kv_transfer_config=transfer, env=env, python_path=(SOURCES, ROOT))


def post(
    engine: Engine,
    body: Mapping[str, Any],
    request_id: str,
    timeout: float = 300,
    path: str = "/v1/completions",
) -> dict[str, Any]:
    """One request. Raises on any status but 200."""
    connection = http.client.HTTPConnection(HOST, engine.ports.http, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{engine.name} answered {answer.status}: {text[:500]}")
        return dict(json.loads(text))
    finally:
        connection.close()


def complete(
    engine: Engine, prompt: list[int], tokens: int, params: Mapping[str, Any] | None = None, **options: Any
) -> list[int]:
    """Greedy continuation of a prompt by one engine: token ids."""
    return tokens_of(post(engine, body(prompt, tokens, params), options.pop("request_id", uuid.uuid4().hex)))


def body(prompt: list[int], tokens: int, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": "test",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if params is not None:
        made["kv_transfer_params"] = dict(params)
    return made


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def differs(plain: Engine, prompt: list[int], answer: list[int]) -> str:
    """Whether a greedy answer is another than the plain engine's, in words; empty if it is the same.

    Sums come out a little different in other batches. Where two tokens are as good as equal, either is right, and the
    rest of the answer is compared with what the plain engine says after the one that was taken.
    """
    start = 0
    while start < len(answer):
        so_far = prompt + answer[:start]
        want = complete(plain, so_far, len(answer) - start)
        same = next(
            (i for i, pair in enumerate(zip(answer[start:], want, strict=True)) if len(set(pair)) > 1), None
        )
        if same is None:
            return ""
        at = start + same
        behind = _behind_the_best(plain, prompt + answer[:at], answer[at])
        if behind > TIE:
            return f"token {at} of {len(answer)} after a prompt of {len(prompt)}: {behind:g} less likely than the best"
        start = at + 1
    return ""


def _behind_the_best(plain: Engine, prompt: list[int], token: int) -> float:
    """How much less likely a token is than the plain engine's first choice, as a difference of logarithms."""
    asked = {**body(prompt, 1), "logprobs": 5, "return_tokens_as_token_ids": True}
    choice = post(plain, asked, uuid.uuid4().hex)["choices"][0]
    best: dict[str, float] = choice["logprobs"]["top_logprobs"][0]
    return max(best.values()) - best.get(f"token_id:{token}", float("-inf"))


def address(engine: Engine) -> dict[str, Any]:
    return {"host": HOST, "control_port": engine.ports.control}


def prefill_params(decode: Engine | None) -> dict[str, Any]:
    disagg: dict[str, Any] = {"version": 1}
    if decode is not None:
        disagg["decode"] = address(decode)
    return {"do_remote_decode": True, "do_remote_prefill": False, "disagg": disagg}


def decode_params(prefill: Engine) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "disagg": {"version": 1, "prefill": address(prefill)},
    }


def turn(
    prefill: Engine,
    decode: Engine,
    prompt: list[int],
    tokens: int,
    *,
    known_decode: bool = True,
    **options: Any,
) -> list[int]:
    """Both legs at once, with one id; what decode generated. `options` are more fields of decode's body."""
    request_id = uuid.uuid4().hex
    source = decode if known_decode else None
    with ThreadPoolExecutor(2) as legs:
        first = legs.submit(post, prefill, body(prompt, 1, prefill_params(source)), request_id)
        asked = {**body(prompt, tokens, decode_params(prefill)), **options}
        second = legs.submit(post, decode, asked, request_id)
        first.result()
        return tokens_of(second.result())


def hang_up(prefill: Engine, decode: Engine, prompt: list[int], tokens: int, after: int) -> None:
    """A turn whose client leaves after so many of the tokens that it is sent."""
    request_id = uuid.uuid4().hex
    connection = http.client.HTTPConnection(HOST, decode.ports.http, timeout=300)
    asked = {**body(prompt, tokens, decode_params(prefill)), "stream": True}
    with ThreadPoolExecutor(1) as leg:
        first = leg.submit(post, prefill, body(prompt, 1, prefill_params(decode)), request_id)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        seen = 0
        while seen < after and (line := answer.readline()):
            seen += line.startswith(b"data: {")
        connection.close()
        first.result()


@dataclass
class Conversation:
    """A client's side of a session: user parts are random, and the same for the same seed."""

    seed: int
    system_tokens: int = 200
    user_tokens: int = 37
    answer_tokens: int = 60
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.history = self._say(self.system_tokens)

    def ask(self, answer: Callable[[list[int], int], list[int]]) -> list[int]:
        """One turn: add the user's part, have it answered, remember the answer."""
        self.history = self.history + self._say(self.user_tokens)
        answered = answer(list(self.history), self.answer_tokens)
        self.history = self.history + answered
        return answered

    def _say(self, count: int) -> list[int]:
        return [self._random.choice(VOCABULARY) for _ in range(count)]


_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


def counter(engine: Engine, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return count(engine.metrics_text(), name, **labels)


def count(page: str, name: str, **labels: str) -> float:
    """The same on a page that has been read, for what must be of one moment."""
    total = 0.0
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match["name"] != name:
            continue
        found = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"] or ""))
        if all(found.get(key) == value for key, value in labels.items()):
            total += float(match["value"])
    return total


def becomes(holds: Callable[[], bool], limit: float = 60.0) -> bool:
    """Whether `holds` within so many seconds."""
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def wait_until(holds: Callable[[], bool], what: str, limit: float = 60.0) -> None:
    """Return when `holds`; fail after `limit`, saying what was waited for."""
    if not becomes(holds, limit):
        raise AssertionError(f"Not within {limit} s: {what}")


def within(turns: int, what: str, does: Callable[[], bool]) -> None:
    """Try turns until one `does`.

    On a crowded machine a write-back comes late, or is given up: the turns are right all the same and only cost more. So
    what a turn answers is asked of every turn, what it costs of one.
    """
    if not any(does() for _ in range(turns)):
        raise AssertionError(f"Not in any of {turns} turns: {what}")


def used_blocks(engine: Engine) -> float:
    """The share of KV blocks in use."""
    return counter(engine, "vllm:kv_cache_usage_perc")


def wait_until_free(engine: Engine, limit: float = 120) -> None:
    """No KV block is in use or held."""
    wait_until(
        lambda: used_blocks(engine) == 0 and counter(engine, "disagg_kv_blocks_quarantined") == 0,
        f"{engine.name} holds no blocks",
        limit,
    )


OFFERS = "disagg_kv_writeback_offers_total"
INSERTED = "disagg_kv_writeback_inserted_tokens_total"
ONDEMAND = "disagg_kv_ondemand_requests_total"
PUSHED = "disagg_kv_push_tokens_total"
RECOMPUTED = "disagg_kv_recomputed_requests_total"
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
# Turns in which something must happen once, see `within`.
MOST_TURNS = 6


def is_written_back(decode: Engine, one_turn: Callable[[], object], limit: float = 60) -> bool:
    """Have a turn, and wait for its end to enter prefill's cache: whether it does. Nothing of it is under way then.

    Of all write-backs only those of a turn's end are counted by how long they took, when prefill has published them.
    """
    written = "disagg_kv_writeback_seconds_count"
    before = counter(decode, written)
    one_turn()
    return becomes(lambda: counter(decode, written) > before, limit)
