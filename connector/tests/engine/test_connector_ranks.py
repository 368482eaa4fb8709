"""Several ranks: each writes and waits for its own shard, and only all of them make a transfer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    BLOCK,
    COMPUTED,
    INSERTED,
    MOST_TURNS,
    ONDEMAND,
    PUSHED,
    SOURCES,
    Conversation,
    becomes,
    complete,
    count,
    counter,
    is_written_back,
    spec,
    turn,
    wait_until,
    watched,
    within,
)
from connector.tests.engine.evidence import Evidence
from e2e.engines import Engine, EngineSpec, Ports, running, running_all
from e2e.images.engine import ensure_model
from e2e.ports import HOST

pytestmark = pytest.mark.engine

# Workers on few cores need seconds for what takes milliseconds elsewhere, so that first attempts at meeting a
# peer may run into their limits.
PATIENCE: dict[str, dict[str, Any]] = {
    "prefill": {"kv_lease_duration": 60, "max_wait_milliseconds": 15_000},
    "decode": {"kv_lease_duration": 60},
}


def test_two_ranks_a_side(model: Path, tmp_path: Path, evidence: Evidence) -> None:
    # The plain engine has two ranks as well, since the sums of two halves round differently.
    converse(model, (2, 2), tmp_path, evidence, plain_ranks=2, copies=(1, 1))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_unequal_ranks_exchange_heads(
    model: Path, tmp_path: Path, evidence: Evidence, ranks: tuple[int, int]
) -> None:
    converse(model, ranks, tmp_path, evidence, copies=(1, 1))


@pytest.mark.thorough  # test_transport_ranks has these on NIXL alone
@pytest.mark.parametrize(("ranks", "copies"), [((1, 2), (2, 1)), ((2, 1), (1, 2))])
def test_a_head_that_several_ranks_hold_is_written_by_one_into_all(
    tmp_path: Path, evidence: Evidence, ranks: tuple[int, int], copies: tuple[int, int]
) -> None:
    converse(ensure_model("tiny-qwen3-mqa"), ranks, tmp_path, evidence, copies=copies)


def test_a_single_ranks_wrong_blocks_would_be_noticed(model: Path, tmp_path: Path) -> None:
    """The negative control of the tests above: half of the heads are right."""
    probe = 7
    with running(EngineSpec(model=model), "plain", tmp_path) as plain:
        reference = Conversation(5, answer_tokens=120)
        reference.ask(lambda prompt, n: complete(plain, prompt, n))
        want = complete(plain, [*reference.history, probe], 20)
    specs = {"prefill": sized("prefill", model, 1), "decode": corrupting(sized("decode", model, 2))}
    with running_all(specs, tmp_path) as engines:
        prefill, decode = engines["prefill"], engines["decode"]
        prompt, answer = reference.history[:-120], reference.history[-120:]

        def brings_blocks() -> bool:
            assert turn(prefill, decode, prompt, 120) == answer
            return becomes(lambda: counter(prefill, INSERTED) >= 3 * BLOCK)

        within(MOST_TURNS, "half wrong blocks are in prefill's cache", brings_blocks)
        # Decode's own cache would hide them: ask prefill alone.
        assert complete(prefill, [*prompt, *answer, probe], 20) != want


def converse(
    model: Path,
    ranks: tuple[int, int],
    folder: Path,
    evidence: Evidence,
    *,
    copies: tuple[int, int],
    plain_ranks: int = 1,
) -> None:
    """Turns until KV has moved both ways, then until one hits what was written back, then until one is served on demand.

    `ranks` and `copies` are prefill's and decode's: how many it has, and how often each of its heads goes to the other.
    """
    # One after the other: all workers at once are too much for a small machine.
    want = iter(answers_of_a_plain_engine(model, plain_ranks, folder))
    ledger = folder / "ledger"
    ledger.mkdir()
    specs = {
        role: watched(sized(role, model, count), ledger) for role, count in zip(ROLES, ranks, strict=True)
    }
    with running_all(specs, folder) as engines:
        prefill, decode = engines["prefill"], engines["decode"]
        mine = Conversation(3, answer_tokens=40)

        def one_turn() -> None:
            assert mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n)) == next(want)
            evidence.turns += 1

        def computes_little() -> bool:
            """And its write-back is over, which a reset of prefill's cache would else call off."""
            before = counter(prefill, COMPUTED)
            is_written_back(decode, one_turn)
            return counter(prefill, COMPUTED) - before <= mine.user_tokens + BLOCK + 1

        def moves_both_ways() -> bool:
            before = pushed(prefill)
            return is_written_back(decode, one_turn) and becomes(lambda: pushed(prefill) > before, 10)

        def hits_what_was_written_back() -> bool:
            before = counter(prefill, ONDEMAND, result="served")
            return computes_little() and counter(prefill, ONDEMAND, result="served") == before

        def is_served_on_demand() -> bool:
            reset_prefix_cache(prefill)
            before = counter(prefill, ONDEMAND, result="served")
            return computes_little() and counter(prefill, ONDEMAND, result="served") > before

        within(MOST_TURNS, "KV moves both ways", moves_both_ways)
        within(MOST_TURNS, "prefill hits what was written back", hits_what_was_written_back)
        within(MOST_TURNS, "prefill is brought on demand what it has lost", is_served_on_demand)
        for engine, direction, times in zip((prefill, decode), DIRECTIONS, copies, strict=True):
            assert bytes_a_block(engine, direction) == times * BLOCK * kv_bytes_a_token(model)
            evidence.nothing_is_held(engine)
        evidence.sessions += 1
        found = evidence.count_blocks(ledger)
        assert found.checked > found.published > 0, "blocks that went either way were compared, head by head"


ROLES = ("prefill", "decode")
DIRECTIONS = ("prefill_to_decode", "decode_to_prefill")


def sized(role: str, model: Path, ranks: int) -> EngineSpec:
    """An engine of so many ranks whose prefix cache can be reset from outside."""
    arguments = ("--tensor-parallel-size", str(ranks))
    return replace(
        spec(role, model, **PATIENCE[role]), extra_args=arguments, env={"VLLM_SERVER_DEV_MODE": "1"}
    )


def corrupting(right: EngineSpec) -> EngineSpec:
    """The same engine, whose last rank writes wrong blocks."""

    def transfer(ports: Ports) -> Mapping[str, Any]:
        assert callable(right.kv_transfer_config)
        return {
            **right.kv_transfer_config(ports),
            "kv_connector": "LastRankCorruptingConnector",
            "kv_connector_module_path": "connector.tests.engine.corrupting",
        }

    return replace(right, kv_transfer_config=transfer, python_path=(SOURCES, SOURCES.parents[1]))


def answers_of_a_plain_engine(model: Path, ranks: int, folder: Path) -> list[list[int]]:
    arguments = ("--tensor-parallel-size", str(ranks))
    with running(EngineSpec(model=model, extra_args=arguments), "plain", folder) as plain:
        reference = Conversation(3, answer_tokens=40)
        return [reference.ask(lambda prompt, n: complete(plain, prompt, n)) for _ in range(3 * MOST_TURNS)]


def pushed(prefill: Engine) -> float:
    """Tokens that prefill has pushed to decode."""
    return counter(prefill, PUSHED, direction="prefill_to_decode")


def bytes_a_block(engine: Engine, direction: str) -> float:
    """What an engine's ranks have written for each block of a transfer, all together."""
    page = engine.metrics_text()
    written = count(page, "disagg_kv_push_bytes_total", direction=direction)
    return written / count(page, "disagg_kv_push_blocks_total", direction=direction)


def kv_bytes_a_token(model: Path) -> int:
    """Of all layers and KV heads, in float32, each head once."""
    config = json.loads((model / "config.json").read_text())
    return 2 * 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def reset_prefix_cache(engine: Engine) -> None:
    def reset() -> bool:
        connection = http.client.HTTPConnection(HOST, engine.ports.http, timeout=120)
        try:
            connection.request("POST", "/reset_prefix_cache")
            return bool(json.load(connection.getresponse())["success"])
        finally:
            connection.close()

    # It fails while a block is held.
    wait_until(reset, f"{engine.name} has reset its prefix cache", 120)
