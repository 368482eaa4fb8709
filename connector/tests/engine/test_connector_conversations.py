"""Conversations over a real prefill and a real decode engine, compared with a plain one, bit for bit."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import gt
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from connector.tests.engine.conversation import (
    BLOCK,
    COMPUTED,
    INSERTED,
    MOST_TURNS,
    PUSHED,
    RECOMPUTED,
    Conversation,
    becomes,
    body,
    complete,
    counter,
    decode_params,
    is_written_back,
    post,
    prefill_params,
    tokens_of,
    turn,
    used_blocks,
    wait_until,
    wait_until_free,
    within,
)
from connector.tests.engine.keyring import shared_keyring
from disagg_connector.counters import DEFINITIONS
from disagg_connector.protocol import Hello, encode
from e2e.engines import Engine, live_members
from e2e.ports import HOST

pytestmark = pytest.mark.engine

Engines = dict[str, Engine]


def hold(engines: Engines, seed: int, turns: int, between: Callable[[], None] = lambda: None) -> None:
    """A conversation whose every answer must be the plain engine's."""
    mine, plain = Conversation(seed), Conversation(seed)
    for number in range(turns):
        got = mine.ask(lambda prompt, n: turn(engines["prefill"], engines["decode"], prompt, n))
        want = plain.ask(lambda prompt, n: complete(engines["reference"], prompt, n))
        assert got == want, f"seed {seed}, turn {number + 1}: other tokens than the plain engine's"
        between()


def test_prefill_computes_only_what_is_new(engines: Engines) -> None:
    prefill, decode = engines["prefill"], engines["decode"]
    mine, plain = Conversation(1), Conversation(1)

    def one_turn() -> None:
        got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert got == plain.ask(lambda prompt, n: complete(engines["reference"], prompt, n))

    def moved() -> tuple[float, ...]:
        """Tokens pushed either way as their writer counts them, and written back as prefill does."""
        return (
            counter(prefill, PUSHED, direction="prefill_to_decode"),
            counter(decode, PUSHED, direction="decode_to_prefill"),
            counter(prefill, INSERTED),
        )

    def costs_little() -> bool:
        before, computed = moved(), counter(prefill, COMPUTED)
        recomputed = counter(decode, RECOMPUTED)
        if not is_written_back(decode, one_turn):
            return False
        is_counted = becomes(lambda: all(map(gt, moved(), before)), 10)
        is_new = counter(prefill, COMPUTED) - computed <= mine.user_tokens + BLOCK + 1
        return is_counted and is_new and counter(decode, RECOMPUTED) == recomputed

    is_written_back(decode, one_turn)
    for _ in range(2):
        within(MOST_TURNS, "prefill computes what is new, decode nothing of the prompt", costs_little)


def test_exactly_the_documented_metrics_are_scraped(engines: Engines) -> None:
    documented = {name: definition.kind for name, definition in DEFINITIONS.items()}
    for role in ("prefill", "decode"):
        families = text_string_to_metric_families(engines[role].metrics_text())
        ours = {family.name: family.type for family in families if family.name.startswith("disagg_")}
        # The client library tells of each when it was created.
        assert {name: kind for name, kind in ours.items() if not name.endswith("_created")} == documented


def test_many_sessions_at_once_stay_apart(engines: Engines) -> None:
    with ThreadPoolExecutor(6) as sessions:
        for done in [sessions.submit(hold, engines, seed, 4) for seed in range(10, 16)]:
            done.result()


def test_a_chat_is_the_same_as_with_one_engine(engines: Engines) -> None:
    messages = [{"role": "user", "content": "a story about a prefix " * 12}]
    for _ in range(2):
        request_id, asked = uuid.uuid4().hex, {"model": "test", "messages": messages, "temperature": 0}
        chat = "/v1/chat/completions"
        with ThreadPoolExecutor(2) as legs:
            first = {**asked, "max_tokens": 1, "kv_transfer_params": prefill_params(engines["decode"])}
            legs.submit(post, engines["prefill"], first, request_id, path=chat)
            second = {**asked, "max_tokens": 40, "kv_transfer_params": decode_params(engines["prefill"])}
            answer = legs.submit(post, engines["decode"], second, request_id, path=chat).result()
        plain = post(engines["reference"], {**asked, "max_tokens": 40}, uuid.uuid4().hex, path=chat)
        said = answer["choices"][0]["message"]["content"]
        assert said == plain["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    assert counter(engines["decode"], RECOMPUTED, reason="prompt") == 0


def test_blocks_are_free_when_nothing_runs(engines: Engines) -> None:
    hold(engines, 20, 2)
    wait_until_free(engines["prefill"])
    wait_until_free(engines["decode"])


def test_a_turn_without_its_prefill_leg_is_computed_by_decode(engines: Engines) -> None:
    decode = engines["decode"]
    before = counter(decode, RECOMPUTED, reason="unknown")
    prompt = Conversation(30).history
    answer = tokens_of(post(decode, body(prompt, 8, decode_params(engines["prefill"])), uuid.uuid4().hex))
    assert answer == complete(engines["reference"], prompt, 8)
    wait_until(
        lambda: counter(decode, RECOMPUTED, reason="unknown") > before, "the turn is counted as recomputed"
    )
    wait_until_free(decode)


def test_a_turn_without_its_decode_leg_is_let_go_by_prefill(engines: Engines) -> None:
    prefill = engines["prefill"]
    post(prefill, body(Conversation(31).history, 1, prefill_params(None)), uuid.uuid4().hex)
    assert used_blocks(prefill) > 0
    wait_until(lambda: used_blocks(prefill) == 0, "the lease of 20 s ends")


def test_different_prompts_on_the_two_legs_give_decodes_own_answer(engines: Engines) -> None:
    request_id, one, other = uuid.uuid4().hex, Conversation(40).history, Conversation(41).history
    with ThreadPoolExecutor(2) as legs:
        legs.submit(post, engines["prefill"], body(one, 1, prefill_params(None)), request_id)
        second = legs.submit(
            post, engines["decode"], body(other, 8, decode_params(engines["prefill"])), request_id
        )
        assert tokens_of(second.result()) == complete(engines["reference"], other, 8)


def test_clients_that_leave_cost_nothing(engines: Engines) -> None:
    prefill, decode = engines["prefill"], engines["decode"]
    for seed, seconds in ((50, 0.0), (51, 0.05), (52, 0.4)):
        request_id, prompt = uuid.uuid4().hex, Conversation(seed).history
        connection = http.client.HTTPConnection(HOST, decode.ports.http, timeout=120)
        stream = {**body(prompt, 400, decode_params(prefill)), "stream": True}
        with ThreadPoolExecutor(1) as leg:
            leg.submit(post, prefill, body(prompt, 1, prefill_params(decode)), request_id)
            headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
            connection.request("POST", "/v1/completions", json.dumps(stream), headers)
            time.sleep(seconds)  # at different moments of the turn
            connection.close()
    wait_until_free(prefill)
    wait_until_free(decode)
    hold(engines, 53, 2)


MALFORMED: list[dict[str, Any]] = [
    {"do_remote_prefill": True},
    {"do_remote_decode": True},
    {"do_remote_prefill": True, "do_remote_decode": True, "disagg": {"version": 1}},
    {"do_remote_prefill": "yes", "disagg": {"version": 1}},
    {"do_remote_prefill": True, "disagg": {"version": 2, "prefill": {"host": "x", "control_port": 1}}},
    {"do_remote_prefill": True, "disagg": {"version": 1, "prefill": {"host": "", "control_port": 1}}},
    {"do_remote_prefill": True, "disagg": {"version": 1, "prefill": {"host": "h", "control_port": "1"}}},
    {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "h", "remote_port": 1, "tp_size": 1},
    {"do_remote_decode": True, "disagg": ["a"]},
]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_malformed_params_are_as_if_absent(engines: Engines, role: str) -> None:
    prompt = Conversation(60).history
    want = complete(engines["reference"], prompt, 4)
    for params in MALFORMED:
        assert complete(engines[role], prompt, 4, params) == want
    assert engines[role].process.poll() is None


def test_an_address_where_nobody_listens_costs_a_moment(engines: Engines) -> None:
    params = decode_params(engines["prefill"])
    params["disagg"]["prefill"]["control_port"] = 9  # discard: nobody is there
    prompt = Conversation(61).history
    before = counter(engines["decode"], RECOMPUTED, reason="peer")
    assert complete(engines["decode"], prompt, 4, params) == complete(engines["reference"], prompt, 4)
    wait_until(lambda: counter(engines["decode"], RECOMPUTED, reason="peer") > before, "the turn is counted")


def test_garbage_on_the_control_port_is_dropped(engines: Engines) -> None:
    port = engines["prefill"].ports.control
    with socket.create_connection((HOST, port), timeout=60) as raw:
        raw.sendall(os.urandom(4096))
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(f"tcp://{HOST}:{port}")
    codec = shared_keyring().codec()
    sealed = codec.write_request(1, Hello(1))
    for junk in (b"", b"\x00", os.urandom(100), b"\x93" * 50_000, encode(1, Hello(1)), sealed[:-1]):
        client.send(junk)
    client.send_multipart([b"a", b"b", b"c"])
    client.send(codec.write_request(7, Hello(1)))
    assert client.poll(60_000), "the channel answers after garbage"
    assert codec.read_reply(client.recv())[0] == 7
    client.close()
    context.term()
    hold(engines, 62, 2)


def test_idle_engines_leave_the_cpu_alone(engines: Engines) -> None:
    post(engines["prefill"], body(Conversation(70).history, 1, prefill_params(None)), uuid.uuid4().hex)
    assert used_blocks(engines["prefill"]) > 0, "prefill waits for decode meanwhile"
    # The least of several looks: other work on the machine can only add.
    least = {name: min(cpu_share(engines[name], 2.0) for _ in range(4)) for name in engines}
    for name in ("prefill", "decode"):
        # How much a core does in a tick differs between machines, so an engine without the connector is the measure.
        assert least[name] < least["reference"] + 0.1, least


def cpu_share(engine: Engine, seconds: float) -> float:
    """The share of a core that an engine's processes use."""

    def used() -> float:
        ticks = 0
        for pid in live_members(engine.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds
